"""``foretrain simulate`` in a forked process, see `tests.warm`, as is its fork server. The rest is as for users."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def simulate(arguments: Sequence[str]) -> None:
    """The command; it ends as ``python -m foretrain simulate`` does."""
    from foretrain.cli import main
    from foretrain.live import rank_processes

    rank_processes.subprocess = SimpleNamespace(Popen=_ForkServer, TimeoutExpired=subprocess.TimeoutExpired)
    sys.argv = ["foretrain", "simulate", *arguments]
    main()


class _ForkServer:
    """What `foretrain.live.rank_processes` asks of the process of a fork_server."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _live(int(command[-1]), pass_fds, env)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, of a fork_server that has ended or is ending, so that ``timeout`` is not needed."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _live(descriptor: int, kept: Sequence[int], environment: Mapping[str, str]) -> None:
    status = 1
    try:
        os.setsid()
        (low,) = kept
        os.closerange(3, low)
        os.closerange(low + 1, 1 << 16)
        os.environ.clear()
        os.environ.update(environment)
        for finalizer in list(weakref.finalize._registry):  # pyright: ignore
            finalizer.detach()  # else ranks, which end as interpreters do, would remove the command's folders
        from foretrain.live.device.fork_server import main

        main(descriptor)
        status = 0
    finally:
        os._exit(status)
