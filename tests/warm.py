"""Runs functions in processes that are forked with everything imported, as commands of which output and status count.

Importing PyTorch and loading compiled kernels takes most of a short simulation or job. A server, one of a test process,
has done both, and forks them all. Tests of how processes end, of their environments and of what is missing start
interpreters of their own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from tests.processes import descendants, stack_of

_IMPORTED = (
    *("torch._dynamo.trace_rules", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "foretrain.cli", "foretrain.live.simulate", "foretrain.live.rank_processes"),
    *("foretrain.network.deployment_notation", "foretrain.network.routing.kernels", "foretrain.live.device.rank"),
    *("foretrain.live.device.fork_server", "tests.live.forked", "tests.examples.torchrun", "torch.distributed.run"),
    *("foretrain.launch.command", "foretrain.launch.ddp_patch", "tests.launch.forked", "foretrain.report.simulation"),
)
_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
"""What has to be there before an interpreter starts, as `foretrain.live.rank_processes` sees to for zygotes; and no
line that a test looks for is broken."""

Function = Callable[[Sequence[str]], None]


def run(
    function: Function, arguments: Sequence[str], folder: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """How ``function(arguments)``, of a module, ended that ran in ``folder``, for ``timeout`` seconds at most.

    Where it hangs, it is ended, and the error has the stacks of all its processes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        channel = _server()
        channel.send((function, [*arguments], folder or Path.cwd(), {**os.environ}, (out, err)))
        pid = channel.recv()
        stacks = []
        if late := not channel.poll(timeout):
            stacks = [stack_of(each) for each in (pid, *descendants(pid))]
            os.kill(pid, signal.SIGTERM)
            if not channel.poll(30):
                os.kill(pid, signal.SIGKILL)
        status = channel.recv()
        if late:
            told = f"{arguments} has not ended after {timeout} s"
            raise AssertionError("\n\n".join([told, out.read_text(), err.read_text(), *stacks]))
        return subprocess.CompletedProcess([*arguments], status, out.read_text(), err.read_text())


@cache
def _server() -> Connection:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.warm import serve; serve({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
    )
    theirs.close()
    channel = Connection(ours.detach())

    @atexit.register
    def _end() -> None:
        channel.close()
        process.wait()

    return channel


def serve(descriptor: int) -> None:
    """The server's body, until its parent closes the channel, and that of all it forks, which end as scripts do."""
    channel = Connection(descriptor)
    for name in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        importlib.import_module("tests.live.forked").prepare()
    gc.freeze()  # else a process that ends collects, and so copies, all of it
    while True:
        try:
            function, arguments, folder, environment, files = channel.recv()
        except EOFError:
            return
        if not (pid := os.fork()):
            break
        channel.send(pid)
        channel.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    channel.close()
    for number, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**environment, "COLUMNS": _ENVIRONMENT["COLUMNS"]})
    function(arguments)
