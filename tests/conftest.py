import gc
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import settings

from foretrain.lab import remove
from tests.markers import PROCESSES, mark

# A deadline would make a test depend on how busy the machine is; new draws each time would make it depend on chance.
settings.register_profile("foretrain", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("foretrain")

# A shell starts background jobs with SIGINT ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what is collected, which lasts as long as the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, before ``-m`` selects, and put first those that use processes.

    The first of several workers gets them then, and the others take what it has not begun from the end: so only one
    starts the servers that fork simulations and ranks, which import for ten seconds.
    """
    for item in items:
        mark(item)
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in PROCESSES))


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restores the environment: Lightning, for one, leaves OMP_NUM_THREADS in it for the tests that come after."""
    before = dict(os.environ)
    yield
    for changed in {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}:
        if changed in before:
            os.environ[changed] = before[changed]
        else:
            del os.environ[changed]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with status 2, or another, and returns its message."""

    def run(arguments: Sequence[str], status: int = 2) -> str:
        from foretrain.cli import main

        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        assert left.value.code == status
        message = capsys.readouterr().err
        assert not message.startswith("Traceback")
        return message

    return run


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a lab of one's own, which is gone after the test whatever happens."""
    if os.geteuid() != 0:
        pytest.skip("a lab needs root")
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("a lab needs iproute2: apt install iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make network namespaces")
    name = f"t{secrets.token_hex(5)}"
    yield name
    remove(name, kill=True)
