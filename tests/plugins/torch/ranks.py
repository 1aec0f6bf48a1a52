"""Real processes for the tests of the runtime: ranks on the loopback device, joined by gloo or by a `Session`.

Importing a framework takes seconds, so that no test may start an interpreter. One process, the *nursery*, imports it
once and forks every rank: a fresh job of two ranks costs a tenth of a second. Ranks die with the nursery, and the
nursery with the process that made it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
"""Environment of a rank: one thread per process, and only the loopback device."""
KEY = bytes(range(32))
"""Secret of jobs that a `Session` joins, and of servers."""
# torch._dynamo because the first optimizer imports it, which takes as long as all of torch.
_TORCH = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "pytest", "tests.plugins.torch.models")
_GRACE = 10.0
"""Seconds that the other ranks get, once one has failed, to say what they saw."""
_PR_SET_PDEATHSIG = 1
_forkers: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended in one rank.

    Attributes:
        value: what the function returned; None if it did not return.
        error: empty if it did; else its traceback, or how the process died, and what it wrote last.
    """

    value: Any = None
    error: str = ""


Function = Callable[..., Any] | str


class RanksFailed(AssertionError):
    """Some rank did not return."""

    def __init__(self, function: str, outcomes: Sequence[Outcome]) -> None:
        shown = [f"--- rank {rank}\n{outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        super().__init__("\n".join([f"{function} failed in {len(shown)} of {len(outcomes)} ranks", *shown]))


class Nursery:
    """The process that forks ranks. Use as a context manager.

    Args:
        imported: modules that it imports before the first fork; those of PyTorch let gloo join the ranks.
        python: interpreter.
        environment: its environment.
    """

    def __init__(
        self,
        *imported: str,
        python: str = sys.executable,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        ours, theirs = socket.socketpair()
        told = f"{theirs.fileno()}, {imported or _TORCH}"
        code = f"from tests.plugins.torch.ranks import raise_ranks; raise_ranks({told})"
        path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [python, "-c", code], pass_fds=[theirs.fileno()], env={**environment, **QUIET, "PYTHONPATH": path}
        )
        theirs.close()
        self._channel = Connection(ours.detach())

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, rank: int, size: int, log: Path) -> tuple[int, Connection]:
        """A new process that is ``rank`` of ``size`` and writes to ``log``: its id, and what to talk to it through."""
        ours, theirs = socket.socketpair()
        self._channel.send(("fork", rank, size, str(log)))
        reduction.send_handle(self._channel, theirs.fileno(), self._process.pid)
        theirs.close()
        return self._channel.recv(), Connection(ours.detach())

    def exit_of(self, pid: int) -> int | None:
        """The exit code of a rank that ended, negative if a signal killed it; None while it lives."""
        self._channel.send(("exit", pid))
        return self._channel.recv()


# Values go by plain pickle: a Connection's own would hand tensors over as shared memory.


class Ranks:
    """A job of ``size`` ranks that runs module-level functions, each rank the same one at the same time.

    A function is named ``"module:function"`` where only ranks can import it. The job starts with its first call and
    lives until a rank fails; the next call then starts a new one.
    """

    def __init__(self, nursery: Nursery, size: int) -> None:
        self.size = size
        self.pids: list[int] = []
        self._nursery = nursery
        self._links: list[Connection] = []
        self._folder: TemporaryDirectory[str] | None = None
        self._spent = False  # a rank has failed, or is still at something

    def __call__(self, function: Function, *args: Any, timeout: float = 300, **options: Any) -> list[Any]:
        """What ``function(*args, **options)`` returned in each rank; RanksFailed if it did not in all of them."""
        outcomes = self.outcomes(function, *args, timeout=timeout, grace=_GRACE, **options)
        if self._spent:
            self.close()
            raise RanksFailed(str(function), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Function,
        *args: Any,
        timeout: float = 300,
        grace: float = 1e9,
        without: Container[int] = (),
        **options: Any,
    ) -> list[Outcome]:
        """How it ended in each rank, at most ``timeout`` seconds later and ``grace`` seconds after the first failure.

        Ranks ``without`` which it must end are not waited for. Failed ranks end as a script would; those that have not
        answered in time go on. `close` ends all, and so does the next call once a rank has failed.
        """
        if self._spent:
            self.close()
        self._start()
        for link in self._links:
            link.send_bytes(pickle.dumps((function, args, options)))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        waiting = {link: rank for rank, link in enumerate(self._links)}
        while set(waiting.values()) - set(without) and (left := deadline - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                rank = waiting.pop(link)
                outcomes[rank] = self._outcome(rank)
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting.values():
            outcomes[rank] = Outcome(error=f"has not returned after {timeout:g} s; {self._stacks(rank)}")
        self._spent = any(outcome.error for outcome in outcomes.values())
        return [outcomes[rank] for rank in range(self.size)]

    def exits(self, timeout: float, without: Container[int] = ()) -> list[int | None]:
        """The ranks' exit codes, once all but those in ``without`` have ended; None for who lives after ``timeout``."""
        deadline = time.monotonic() + timeout
        while True:
            codes = [self._nursery.exit_of(pid) for pid in self.pids]
            living = {rank for rank, code in enumerate(codes) if code is None and rank not in without}
            if not living or time.monotonic() > deadline:
                return codes
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the job by force, which is much faster than letting interpreters shut down."""
        folder, self._folder = self._folder, None
        try:
            for link in self._links:
                link.close()
            for pid, code in zip(self.pids, self.exits(0), strict=True):
                if code is None:
                    with contextlib.suppress(ProcessLookupError):  # it has ended since
                        os.kill(pid, signal.SIGKILL)
            self.exits(30)
        finally:
            self._links, self.pids, self._spent = [], [], False
            if folder:
                folder.cleanup()

    def _start(self) -> None:
        if self._links:
            return
        self._folder = TemporaryDirectory(prefix="foretrain-ranks-")
        born = [self._nursery.fork(rank, self.size, self._log(rank)) for rank in range(self.size)]
        self.pids, self._links = [pid for pid, _ in born], [link for _, link in born]
        port = self._links[0].recv()
        for link in self._links[1:]:
            link.send(port)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{rank}.txt"

    def _outcome(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self.exits(1, without=set(range(self.size)) - {rank})[rank]
            return Outcome(error=f"died with exit code {code}; it wrote:\n{self.wrote(rank)}")

    def wrote(self, rank: int) -> str:
        """The end of what a rank wrote to its standard output and error; nothing before it has begun."""
        with contextlib.suppress(FileNotFoundError):  # pids are known before ranks open their logs
            return self._log(rank).read_text(errors="replace")[-6000:]
        return ""

    def _stacks(self, rank: int) -> str:
        """What every thread of a rank is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.3)
        return f"its threads:\n{self.wrote(rank)}"


def run_script(path: str) -> None:
    """Run a script as its author does, in a rank."""
    runpy.run_path(path, run_name="__main__")


def raise_ranks(descriptor: int, imported: Sequence[str]) -> None:
    """The nursery's body: forks, and reports exits, until its parent closes the channel. Also the body of every rank.

    Rank 0 returns from here when its work is done, and so ends as a script does, through the interpreter's own
    shutdown: what would hang or crash there shows. To take a copy of PyTorch apart takes a third of a second: the
    others only wait for threads, and do what is registered for the end.
    """
    channel = Connection(descriptor)
    die_with_parent()
    for module in imported:
        importlib.import_module(module)
    gc.freeze()  # else a rank that ends collects, and so copies, all of torch: half a second
    by_gloo = "torch.distributed" in imported
    join = _join_by_gloo if by_gloo else _join_by_session
    if by_gloo:
        _fork_forker(channel)
    exits: dict[int, int] = {}
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        _reap(exits)
        if message[0] == "exit":
            channel.send(exits.get(message[1]))
            continue
        _, rank, size, log = message
        theirs = reduction.recv_handle(channel)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            channel.close()
            _live(Connection(theirs), rank, size, log, join)
            if rank:
                _end()
            return
        os.close(theirs)
        channel.send(pid)


def _fork_forker(channel: Connection) -> None:
    """Fork what forks servers for the ranks; see `tests.plugins.torch.bounded.forked_servers`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _forkers.append(ours)
        return
    try:
        die_with_parent()
        channel.close()
        ours.close()
        from tests.plugins.torch.bounded.forked_servers import serve_forks

        serve_forks(theirs)
    finally:
        os._exit(0)


def forker() -> socket.socket:
    """Return what a rank asks for servers."""
    return _forkers[0]


def _live(link: Connection, rank: int, size: int, log: str, join: Callable[[Connection, int, int], None]) -> None:
    """A rank's life: joins, runs what it is told, and ends with the link or its first failure."""
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    join(link, rank, size)
    while True:
        try:
            function, args, options = pickle.loads(link.recv_bytes())
            if isinstance(function, str):
                module, name = function.split(":")
                function = getattr(importlib.import_module(module), name)
        except EOFError:
            break
        except Exception:
            link.send_bytes(pickle.dumps(Outcome(error=traceback.format_exc())))
            break
        try:
            link.send_bytes(pickle.dumps(Outcome(function(*args, **options))))
        except BaseException:
            link.send_bytes(pickle.dumps(Outcome(error=traceback.format_exc())))
            break


def _end() -> None:
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join_by_gloo(link: Connection, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0 if rank == 0 else link.recv(), size, rank == 0, limit, wait_for_workers=False)
    if rank == 0:
        link.send(store.port)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _join_by_session(link: Connection, rank: int, size: int) -> None:
    """Tell sessions where to join; what they say is in the rank's log."""
    from foretrain.comm.rendezvous import ADDRESS, SECRET, free_port

    logging.basicConfig(level=logging.INFO)
    port = link.recv() if rank else free_port()
    if not rank:
        link.send(port)
    os.environ |= {ADDRESS: f"127.0.0.1:{port}", SECRET: KEY.hex()}


def die_with_parent() -> None:
    """Ask the system for SIGKILL when the parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(exits: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            exits[pid] = os.waitstatus_to_exitcode(status)
