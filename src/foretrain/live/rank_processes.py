"""Processes of a live simulation: a fork server, the ranks that it forks, and why a rank failed.

The fork server is `foretrain.live.device.fork_server`. What fails a simulation is the rank whose script failed first,
or a GPU with too little memory.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, PeerLost, StallError
from foretrain.live.collectives import who
from foretrain.live.device.settings import RankSettings
from foretrain.live.executor import RankLost
from foretrain.live.rank_trace import RankTrace, SimulationTrace

_LINE = 1 << 16
_END_WITHIN = 3.0
"""Seconds that ranks have to end when the simulation has."""

Building = Callable[[int, int], None]
"""Called with the seconds since compilation began, and with those that it will take, by estimate."""


def _fork_server(control: socket.socket, *options: str) -> subprocess.Popen[bytes]:
    # A fixed order of sets, for equal forecasts; and one thread per rank, as torchrun has by default.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "foretrain.live.device.fork_server", *options, str(control.fileno())],
        pass_fds=[control.fileno()],
        env=environment,
        start_new_session=True,
    )


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes that run, and of their children that they have waited for."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # After the name, which may hold spaces: utime, stime, cutime, cstime are the fields 14 to 17 of all.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class WarmForkServers:
    """Process that has imported PyTorch, and forks fork servers: many short simulations save its import.

    A context manager; the process, and every fork server with its ranks, ends with the block or its owner.

    Args:
        output: file descriptor that scripts write to, on both stdout and stderr.

    Attributes:
        cpu: seconds that ranks of simulations that are over have computed, their start included.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self.cpu = 0.0

    def __enter__(self) -> WarmForkServers:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _fork_server(theirs, "--warm")
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.wait()

    def fork(self, control: socket.socket, settings: RankSettings) -> _ForkedServer:
        """Fork a fork server that serves ``control``, and will be told ``settings``."""
        asked = json.dumps({"settings": settings.to_json()}).encode()
        socket.send_fds(self._control, [asked], [control.fileno(), self._output])
        told = self._control.recv(_LINE)
        if not told:
            raise ForetrainError("the process that starts simulations has ended; what it wrote says why")
        answer = json.loads(told)
        self.cpu += answer["cpu"]
        return _ForkedServer(answer["forked"])


class _ForkedServer:
    """Fork server that is another process's child, with what `Ranks` needs of `subprocess.Popen`."""

    returncode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, for ``timeout`` seconds at the most."""
        with suppress(ProcessLookupError):  # it has ended, and its parent knows
            descriptor = os.pidfd_open(self.pid)
            try:
                with selectors.DefaultSelector() as ready:
                    ready.register(descriptor, selectors.EVENT_READ)
                    ready.select(timeout)
            finally:
                os.close(descriptor)


class Ranks:
    """Context manager of a fork server and its ranks, which end with it.

    Args:
        settings: of all ranks.
        building: called with the progress of compiling the simulated device, if it must be compiled.
        warm: what forks the fork server; None starts one.

    Raises:
        ForetrainError: from `start`, if the device cannot be compiled or PyTorch is another release.
    """

    def __init__(
        self, settings: RankSettings, building: Building | None = None, warm: WarmForkServers | None = None
    ) -> None:
        self._settings = settings
        self._building = building or (lambda done, every: None)
        self._warm = warm
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | _ForkedServer | None = None
        self.sockets: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def __enter__(self) -> Ranks:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, ranks: Iterable[int]) -> None:
        """Start ``ranks``; the executor's ends of their sockets are in ``sockets``."""
        assert self._control is not None
        for rank in ranks:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [json.dumps({"fork": rank}).encode()], [theirs.fileno()])
            self.sockets[rank] = ours
        while len(self.pids) < len(self.sockets):
            self._take(self._receive())

    def status(self, rank: int, timeout: float = _END_WITHIN) -> int | None:
        """Return the exit status of ``rank``, negative for a signal; None if it does not end within ``timeout`` s."""
        assert self._control is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._control, selectors.EVENT_READ)
            while rank not in self.ended and ready.select(timeout):
                self._take(self._receive())
        return self.ended.get(rank)

    def dismiss(self, timeout: float = _END_WITHIN) -> None:
        """Close the ranks' sockets, and wait ``timeout`` s for the ranks to print the lines they were at."""
        for end in self.sockets.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + timeout
        for rank in self.sockets:
            with suppress(ForetrainError):
                self.status(rank, max(until - time.monotonic(), 0.0))

    def close(self) -> None:
        """Kill the fork server, all ranks and their children; wait for the fork server to end."""
        if self._process is not None:
            if self._warm is not None:
                self._warm.cpu += cpu_seconds([self._process.pid, *self.pids.values()])
            # It leads a group, which may outlive it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for end in self.sockets.values():
            end.close()
        if self._control is not None:
            self._control.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        with theirs:
            self._process = _fork_server(theirs) if self._warm is None else self._warm.fork(theirs, self._settings)
        ours.sendall(json.dumps({"settings": self._settings.to_json()}).encode())
        while not (message := self._receive()).get("ready"):
            if "failed" in message:
                raise ForetrainError(message["failed"])
            if "building" in message:
                self._building(*message["building"])

    def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        try:
            data = self._control.recv(_LINE)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ForetrainError(f"the process that starts the simulated ranks {self._end_status()}")
        return json.loads(data)

    def _end_status(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return "has ended; what it wrote says why"

    def _take(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            self.pids[message["forked"]] = message["pid"]
        elif "ended" in message:
            self.ended[message["ended"]] = message["status"]


class ScriptFailed(PeerLost):
    """The script failed on a rank; ``status`` is that rank's exit status, 128 and more for a signal, as of a shell."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def script_failure(trace: SimulationTrace, waits: Sequence[str] = ()) -> ScriptFailed | None:
    """Return the error of the first rank whose script failed, with the ``waits`` for it; None if none did."""
    for rank, rank_trace in trace.rank_traces.items():
        if rank_trace.status:
            text = f"the script failed on rank {rank} with exit status {rank_trace.status}"
            return ScriptFailed(rank_trace.status, "\n  - ".join([text + "; then" * bool(waits), *waits[:12]]))
    return None


def while_folded(failed: ScriptFailed, live: int, world: int, trace: SimulationTrace) -> ScriptFailed:
    """Return ``failed`` with the hint that only ``live`` of ``world`` ranks ran, and of a file that is not there.

    Without one where all ranks would have failed alike: for lack of code.
    """
    if any(one.lacks_code for one in trace.rank_traces.values()):
        return failed
    folded = f"{live} of {world} ranks were live and stood for the others"
    hint = (
        f"{folded}, whose objects are copies of theirs; if the script failed by what another rank would have gathered"
        " or saved, run all with --live all"
    )
    if missing := next((one.missing_file for one in trace.rank_traces.values() if one.missing_file), None):
        hint = (
            f"there is no file {missing!r}, and the rank that would write it may be folded into another one: {folded},"
            " which write none; run all with --live all"
        )
    return ScriptFailed(failed.status, f"{failed}\n{hint}")


def stalled_while_folded(stall: StallError, live: int, world: int) -> StallError:
    """Return ``stall`` with the hint that only ``live`` of ``world`` ranks ran."""
    what = str(stall).partition("\n")[0]
    hint = f"{live} of {world} ranks were live and stood for the others, which may be why: run all with --live all"
    return StallError(f"{hint}\n{what}", stall.waits)


def after_restarts(failed: ScriptFailed, before: int) -> ScriptFailed:
    """Return ``failed`` with the hint that an earlier start of the script may have caused it."""
    times = "once" if before == 1 else f"{before} times"
    return ScriptFailed(
        failed.status,
        f"{failed}\nthe script had been started {times} before, to find out which ranks must be live; if it failed by"
        f" what it had left behind, e.g. a folder that it makes, --live all starts it once",
    )


_NO_HOST_MEMORY = (
    "\nif nobody killed it, this machine's memory ran out, where all that a script builds on the CPU is real; build the"
    ' model on the GPU, in a block `with torch.device("cuda"):`'
)


def cause_of(error: ForetrainError, ranks: Ranks, trace: SimulationTrace) -> ForetrainError:
    """Return the cause of ``error``: the exit of a rank that others only noticed."""
    if isinstance(error, StallError):
        return script_failure(trace, error.waits) or error
    if isinstance(error, RankLost) and (status := ranks.status(error.rank)) is not None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        how += " (os._exit?)" if status >= 0 else ""
        hint = _NO_HOST_MEMORY if status == -signal.SIGKILL else ""
        return ScriptFailed(128 - status if status < 0 else status or 1, f"rank {error.rank} {how}: {error}{hint}")
    return error


_TRIED = re.compile(r"Tried to allocate (.+?)\. ")


class OutOfMemory(ForetrainError):
    """A rank needs more memory than its GPU has.

    Attributes:
        ranks: the live ranks that failed so.
        tried: the size that the first of them requested, as PyTorch writes it.
        status: the exit status of a script that does not handle it.
    """

    status = 1

    def __init__(self, rank_traces: tuple[RankTrace, ...]) -> None:
        first = rank_traces[0]
        self.ranks = tuple(rank_trace.rank for rank_trace in rank_traces)
        found = _TRIED.search(first.memory["out_of_memory"])
        self.tried = found[1] if found else "more than there is"
        others = f", as did {who(self.ranks[1:])}" if len(self.ranks) > 1 else ""
        super().__init__(
            f"rank {first.rank} ran out of memory in step {len(first.steps) + 1}{others}: it tried to allocate "
            f"{self.tried} when {gibibytes(first.memory['reserved'])} were reserved. Of them were allocated "
            f"{_breakdown(first)}. Try a smaller batch, activation checkpointing, or sharding over more GPUs"
        )


def check_memory(trace: SimulationTrace) -> None:
    """Raise OutOfMemory if any rank ran out of memory."""
    failed = tuple(rank_trace for rank_trace in trace.rank_traces.values() if rank_trace.memory.get("out_of_memory"))
    if failed:
        raise OutOfMemory(failed)


def gibibytes(size: float) -> str:
    """Format a size of memory as PyTorch does: ``"45.08 GiB"``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _breakdown(rank_trace: RankTrace) -> str:
    parts = {name: size for name, size in rank_trace.memory["breakdown"].items() if size}
    shown = (f"{gibibytes(size)} for {name}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    return ", ".join(shown) or "none"
