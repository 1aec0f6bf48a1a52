"""Launches on a lab in a forked process, see `tests.warm`, as are the ranks. The rest is as for users."""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from foretrain.parent_death import end_with_parent
from tests import warm
from tests.live import forked

T = TypeVar("T")


def launching(call: Callable[[], T]) -> T:
    """Return what ``call`` returns, in a process that forks the ranks of `foretrain.lab.launch`."""
    return warm.call(_launching, call)


def _launching(call: Callable[[], T]) -> T:
    _fork_ranks()
    return call()


def foretrain(arguments: Sequence[str]) -> None:
    """Any command; it ends as ``python -m foretrain`` does."""
    _fork_ranks()
    forked.foretrain(arguments)


def _fork_ranks() -> None:
    module: Any = importlib.import_module("foretrain.lab.launch")
    module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Rank})


class _Rank:
    """What `foretrain.lab.launch` asks of the process of a rank."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        namespace, words = command[3], command[command.index("-c") + 3 :]  # behind the guard, which knows the parent
        reader, writer = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _live(namespace, words, env, writer)
        os.close(writer)
        self.stdout = open(reader, "rb")  # noqa: SIM115

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _live(namespace: str, words: Sequence[str], environment: Mapping[str, str], output: int) -> None:
    """Do in a host what ``python WORDS`` does."""
    status = 1
    try:
        os.setsid()
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        space = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(space, 0) == 0
        for number in (1, 2):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(environment)
        if words[1] == "-m":
            sys.argv = list(words[2:])
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words[1:])
            runpy.run_path(words[1], run_name="__main__")
        status = 0
    except SystemExit as left:
        status = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
