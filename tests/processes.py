"""Processes that tests start, and files outside of packages that they import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def need(package: str, extra: str) -> None:
    """Skip a test or a module whose processes need ``package``; it takes seconds to import, and is not."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'foretrain[{extra}]'", allow_module_level=True)


def own_environment() -> dict[str, str]:
    """Return what a process of another environment may know of this one's."""
    return {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}


def python_of_mxnet() -> str:
    """Return the interpreter of an environment with MXNet; skip a test where its packages are not to be had."""
    command = [sys.executable, str(Path(__file__).parents[1] / "tools" / "mxnet.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(made.stderr.strip())
    return made.stdout.strip()


def foretrain(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return how the command ended that a user types, with its output."""
    environment = os.environ | {"COLUMNS": "160", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "foretrain", *map(str, arguments)]
    return finished(command, env=environment, timeout=900, **options)


def finished(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return how ``command`` ended, with its output; where it hangs, fail with the stacks of all its processes."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            dumps = [stack_of(pid) for pid in (process.pid, *descendants(process.pid))]
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError("\n\n".join([str(error), *dumps])) from error
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = list(parents.get(pid, ()))
    for child in found:
        found += parents.get(child, ())
    return found


def stack_of(pid: int) -> str:
    """Return the stacks of a Python process, if py-spy is installed."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        return f"process {pid}: install py-spy to see where it is"
    return subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, check=False).stdout


def module_at(path: Path) -> ModuleType:
    """Import the file at ``path``, which is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ``command`` starts, waited for at the end of the block; where the block fails, killed at once.

    Popen's own context manager would wait without an end for a process that the block was to end, and so hide what
    failed.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
