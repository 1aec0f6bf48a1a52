"""Runs functions in processes that are forked with everything imported, as commands of which output and status count.

Importing PyTorch and loading compiled kernels takes most of a short simulation or job. A server, one of a test process,
has done both, and forks them all. They end when all that was registered for their end is done, without taking their
copy of PyTorch apart, which would take longer than many of them. Tests of how processes end, of their environments and
of what is missing start interpreters of their own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from foretrain.parent_death import end_with_parent
from tests.processes import descendants, stack_of

_IMPORTED = (
    *("torch._dynamo.trace_rules", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "foretrain.cli", "foretrain.live.simulate", "foretrain.live.rank_processes"),
    *("foretrain.network.deployment_notation", "foretrain.network.routing.kernels", "foretrain.live.device.rank"),
    *("foretrain.live.device.fork_server", "tests.live.forked", "tests.examples.torchrun", "torch.distributed.run"),
    *("foretrain.launch.command", "foretrain.launch.ddp_patch", "tests.launch.forked", "foretrain.report.simulation"),
    *("foretrain.lab.training", "foretrain.lab.servers", "foretrain.plugins.torch.attached", "foretrain.doctor"),
)
_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
"""Not that of a test. What has to be there before an interpreter starts, as `foretrain.live.rank_processes` sees to for
zygotes; and no line that a test looks for is broken."""

T = TypeVar("T")
Function = Callable[[Sequence[str]], None]


class Started:
    """A function under way in a process of its own.

    Attributes:
        pid: of the process.
        out: file of its standard output.
        err: file of its standard error.
    """

    def __init__(
        self, function: Function, arguments: Sequence[str], folder: Path, scratch: Path, shutdown: bool
    ) -> None:
        self.out, self.err = scratch / "out", scratch / "err"
        for file in (self.out, self.err):
            file.touch()
        self._arguments, self._channel, self._status = arguments, _server(), None
        self._channel.send((function, [*arguments], folder, {**os.environ}, (self.out, self.err), shutdown))
        self.pid: int = self._channel.recv()

    def ended(self, timeout: float = 0) -> bool:
        """Wait for its end, for ``timeout`` seconds at most."""
        if self._status is None and self._channel.poll(timeout):
            self._status = self._channel.recv()
        return self._status is not None

    def finished(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """How it ended; where it hangs, it is ended, and the error has the stacks of all its processes."""
        if not self.ended(timeout):
            stacks = [stack_of(each) for each in (self.pid, *descendants(self.pid))]
            self.end()
            told = f"{self._arguments} has not ended after {timeout} s"
            raise AssertionError("\n\n".join([told, self.out.read_text(), self.err.read_text(), *stacks]))
        return subprocess.CompletedProcess([*self._arguments], self._status, self.out.read_text(), self.err.read_text())

    def end(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGTERM)
        if not self.ended(30):
            os.kill(self.pid, signal.SIGKILL)
            self.ended(300)


@contextmanager
def started(
    function: Function, arguments: Sequence[str], folder: Path | None = None, shutdown: bool = False
) -> Iterator[Started]:
    """``function(arguments)``, of a module, under way in ``folder``; it ends with the block.

    With ``shutdown`` it ends through that of the interpreter: what would hang or crash there shows.
    """
    with tempfile.TemporaryDirectory() as scratch:
        process = Started(function, arguments, folder or Path.cwd(), Path(scratch), shutdown)
        try:
            yield process
        finally:
            process.end()


def run(
    function: Function,
    arguments: Sequence[str],
    folder: Path | None = None,
    timeout: float = 600,
    shutdown: bool = False,
) -> subprocess.CompletedProcess[str]:
    """How ``function(arguments)`` ended; see `started`."""
    with started(function, arguments, folder, shutdown) as process:
        return process.finished(timeout)


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Return what ``function(*arguments)`` returns in a process of its own; fail as it fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder, "asked"), Path(folder, "found")
        asked.write_bytes(cloudpickle.dumps((function, arguments)))
        ended = run(_call, [str(asked), str(found)])
        assert ended.returncode == 0, ended.stderr
        return pickle.loads(found.read_bytes())


def _call(files: Sequence[str]) -> None:
    asked, found = map(Path, files)
    function, arguments = pickle.loads(asked.read_bytes())
    found.write_bytes(cloudpickle.dumps(function(*arguments)))


@cache
def _server() -> Connection:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.warm import serve; serve({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        env={**_ENVIRONMENT, "PYTHONPATH": path},
    )
    theirs.close()
    channel = Connection(ours.detach())

    @atexit.register
    def _end() -> None:
        channel.close()
        process.wait()

    return channel


def serve(descriptor: int) -> None:
    """The server's body, until its parent closes the channel, and that of all it forks."""
    end_with_parent()  # which may be killed while a function runs
    channel = Connection(descriptor)
    for name in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        importlib.import_module("tests.live.forked").prepare()
    gc.freeze()  # else a process that ends collects, and so copies, all of it
    while True:
        try:
            asked = channel.recv_bytes()
        except EOFError:
            return
        if not (pid := os.fork()):
            break
        channel.send(pid)
        channel.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    end_with_parent()
    channel.close()
    # Here, and not in the server: a function's module may start CUDA where it is imported, and forks of that have none.
    function, arguments, folder, environment, files, shutdown = pickle.loads(asked)
    for number, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    tempfile.tempdir = None  # it is read from the environment
    os.environ.clear()
    os.environ.update({**environment, "COLUMNS": _ENVIRONMENT["COLUMNS"]})
    status = 0
    try:
        function(arguments)
    except SystemExit as left:
        if shutdown or isinstance(left.code, str):
            raise
        status = int(left.code or 0)
    if not shutdown:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
