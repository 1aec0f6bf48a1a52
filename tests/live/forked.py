"""Simulations in a forked process, see `tests.warm`, as is their fork server. The rest is as for users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from tests import warm

if TYPE_CHECKING:
    from foretrain.live.simulate import Simulated
    from foretrain.network.deployment import Deployment

T = TypeVar("T")


def prepare() -> None:
    """Read, before all forks, what every simulation reads: times of an H100, and PyTorch's list of operators."""
    from foretrain.device import preset
    from foretrain.live.device import operator_cost, operators

    operator_cost.share(preset("H100"))
    operators.checked_operators()


def call(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what ``function`` returns in a forked process; fail as it fails. Define it in a test, or in foretrain."""
    return warm.call(_call, function, arguments, options)


def _call(function: Callable[..., T], arguments: Sequence[Any], options: Mapping[str, Any]) -> T:
    _fork_fork_servers()
    return function(*arguments, **options)


def simulated(script: Sequence[str], where: Deployment, **options: Any) -> Simulated:
    """Return what `foretrain.live.simulate.simulate` does, from a forked process."""
    from foretrain.live.simulate import simulate

    return call(simulate, script, where, **options)


def foretrain(arguments: Sequence[str]) -> None:
    """Any command; it ends as ``python -m foretrain`` does."""
    from foretrain.cli import main

    _fork_fork_servers()
    sys.argv = ["foretrain", *arguments]
    main()


def simulate(arguments: Sequence[str]) -> None:
    """The command; it ends as ``python -m foretrain simulate`` does."""
    foretrain(["simulate", *arguments])


def simulate_for_a_reader(arguments: Sequence[str]) -> None:
    """The command; who reads what it prints is gone after as many lines as the first of ``arguments`` says."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)

    def read() -> None:
        with open(reader, "rb") as lines:
            for _ in range(int(arguments[0])):
                lines.readline()

    threading.Thread(target=read, daemon=True).start()
    simulate(arguments[1:])


def _fork_fork_servers() -> None:
    from foretrain.live import rank_processes

    rank_processes.subprocess = SimpleNamespace(Popen=_ForkServer, TimeoutExpired=subprocess.TimeoutExpired)


class _ForkServer:
    """What `foretrain.live.rank_processes` asks of the process of a fork_server."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _live("--warm" in command, int(command[-1]), pass_fds, env)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, of a fork_server that has ended or is ending, so that ``timeout`` is not needed."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _live(warms: bool, descriptor: int, kept: Sequence[int], environment: Mapping[str, str]) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as an interpreter begins
        (low,) = kept
        os.closerange(3, low)
        os.closerange(low + 1, 1 << 16)
        os.environ.clear()
        os.environ.update(environment)
        for finalizer in list(weakref.finalize._registry):  # pyright: ignore
            finalizer.detach()  # else ranks, which end as interpreters do, would remove the command's folders
        from foretrain.live.device import fork_server

        (fork_server.serve_warm if warms else fork_server.main)(descriptor)
        status = 0
    finally:
        os._exit(status)
