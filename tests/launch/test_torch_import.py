"""PyTorch is patched when the script imports it, and not loaded for a script that does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from foretrain.launch.worker import PatchOnImport

SCRIPT = """
import importlib.util, sys
print(sorted({"torch", "numba", "numpy"} & sys.modules.keys()))
if sys.argv[1:] == ["session"]:
    import foretrain
    foretrain.Session(rank=0, ranks=1, address="127.0.0.1:0").close()
if sys.argv[1:] == ["torch"]:
    found = importlib.util.find_spec("torch")  # as packages do that support several frameworks
    print(found.name, "torch" in sys.modules)
    from torch.nn.parallel import DistributedDataParallel
    print(DistributedDataParallel.__mro__[1].__module__, DistributedDataParallel.__module__)
    print(type(sys.modules["torch"].__loader__).__name__, type(sys.meta_path[0]).__name__)
"""


@pytest.fixture
def worker(tmp_path):
    """Runs the script as a rank does."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        script = str(tmp_path / "script.py")
        command = [sys.executable, "-m", "foretrain.launch.worker", *options, script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)

    return run


@pytest.mark.smoke
def test_a_script_without_torch_runs_without_it(worker):
    ended = worker()
    assert ended.stdout == "[]\n"
    assert ended.stderr.startswith("foretrain: nothing was taken over: the script did not import torch")


def test_a_session_that_is_not_observed_says_so(worker):
    assert worker("session", options=["--advise"]).stderr.startswith(
        "foretrain: no advice: --advise observes Distributed"
    )


def test_torch_is_patched_before_the_script_sees_it(worker):
    ended = worker("torch")
    empty, found, parallel, loader = ended.stdout.splitlines()
    assert (empty, found) == ("[]", "torch False")
    assert parallel == "foretrain.launch.scheduled_ddp torch.nn.parallel.distributed"
    kept, first = loader.split()
    assert kept == "SourceFileLoader"
    assert first != PatchOnImport.__name__
    assert "the script made no DistributedDataParallel" in ended.stderr
