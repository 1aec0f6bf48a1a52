"""Launcher of one process per host of a lab, which ends all of them together.

    def show(rank: int, line: str) -> None:
        print(f"[{rank}] {line}")

    with Lab.up("mine", hosts=4, rate="1Gbps") as lab:
        launch(lab, [sys.executable, "train.py"], timeout=60, on_line=show)

Note [No orphan]: children of a rank die with the launch, by four means. A rank leads its own session, and signals go
to its whole group. Processes that left that group, such as workers of torchrun, have the launch's secret in their
environment. Ctrl-C and exceptions take the same path. And a rank asks the kernel to be killed with the thread that
started it (PR_SET_PDEATHSIG), even when that gets SIGKILL; only the rank's own children then survive, for ``foretrain
lab status`` to show and ``foretrain lab down --kill`` to end.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.errors import ConfigError
from foretrain.lab.host import LabHost, Process, end, on_core, uninterrupted
from foretrain.lab.iproute import LabError
from foretrain.lab.network import Lab, processes

END_TIMEOUT = 3.0
"""Seconds from SIGTERM to SIGKILL."""
_TAIL = 20
_LONGEST_LINE = 2**16

# A program in between, not preexec_fn: Python code between fork and exec may deadlock when threads run, as torch's do.
_UNTIL_PARENT_DIES = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_BIND = """
import socket, sys
for port in sys.argv[2:]:
    try: socket.create_server((sys.argv[1], int(port))).close()
    except OSError: continue
    print(port)
    break
"""


class LaunchError(LabError):
    """Error about ranks that failed or took too long.

    Attributes:
        rank: the first that failed, or the first that was not done in time.
        status: its exit status, minus the number of the signal that killed it, or None when it was not done in time.
        lines: its last lines of output.
    """

    def __init__(self, what: str, rank: int, status: int | None, lines: Sequence[str]) -> None:
        self.rank, self.status, self.lines = rank, status, tuple(lines)
        text = [f"{what}; rank {rank} wrote {'last:' if lines else 'nothing'}", *(f"  | {line}" for line in lines)]
        super().__init__("\n".join(text))


def launch(
    lab: Lab,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_line: Callable[[int, str], None] | None = None,
    grace: float = 5.0,
    ranks: int | None = None,
    secret: str | None = None,
    cores: int | None = None,
) -> int:
    """Run ``command`` on every host of ``lab`` at the same time; return 0 when all ranks have ended with 0.

    A rank sees this process's environment, then ``environment``, then RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME and a fresh FORETRAIN_SECRET.
    Unless ``environment`` says otherwise, it computes with one thread and writes without a buffer.

    Args:
        lab: where to run.
        command: a program on the PATH, or its path, and its arguments.
        environment: variables beside those of this process.
        timeout: seconds until all ranks are ended; None never.
        on_line: gets (rank, line) for every line of standard output and error, in this thread. An exception of it
            ends all ranks.
        grace: seconds for the other ranks to end by themselves after one has failed.
        ranks: how many, on the first hosts; None is one on every host.
        secret: of the job, in hexadecimal; None makes one.
        cores: how many of this thread's cores the hosts use, each host one, in turn; None leaves all to all.

    Raises:
        LaunchError: a rank failed, or time ran out. All ranks have ended.
        LabError: the lab is gone or only half there.
        ConfigError: there is no such program.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(
        environment or {}
    )
    if not command or shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ConfigError("command", " ".join(command), "is not a program that can be run", "give its path")
    Lab.find(lab.name)
    hosts = lab.hosts if ranks is None else lab.hosts[:ranks]
    with _Run(lab, hosts, on_line or (lambda rank, line: None), secret or secrets.token_hex(32)) as run:
        run.start(command, environment, cores)
        run.follow(timeout, grace)
    return 0


def guarded(command: Sequence[str]) -> list[str]:
    """Return ``command`` in a wrapper that is killed when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_DIES, str(os.getpid()), *command]


class _Rank:
    """Started process, its output, and its exit `status`, as in `subprocess.Popen.returncode`."""

    def __init__(self, index: int, host: LabHost, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.index, self.host, self.process, self.output = index, host, process, process.stdout
        self.ending = os.pidfd_open(process.pid)
        self.rest, self.ended = b"", False
        self.tail: deque[str] = deque(maxlen=_TAIL)
        os.set_blocking(self.output.fileno(), False)

    @property
    def status(self) -> int | None:
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        # Only while the leader is not reaped: afterwards the system may reuse the number of its group.
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def read(self) -> list[str] | None:
        """Return the complete new lines; None if there is no new output, and at its end."""
        try:
            data = os.read(self.output.fileno(), 2**16)
        except BlockingIOError:
            return None
        if not data:
            self.ended = True
            return None
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            whole.append(self.rest)
            self.rest = b""
        return self._lines(whole)

    def last(self) -> list[str]:
        """Return the incomplete last line."""
        rest, self.rest = self.rest, b""
        return self._lines([rest] if rest else [])

    def _lines(self, whole: Sequence[bytes]) -> list[str]:
        lines = [line.rstrip(b"\r").decode(errors="replace") for line in whole]
        self.tail.extend(lines)
        return lines

    def close(self) -> None:
        self.output.close()
        os.close(self.ending)


class _Run:
    """Ranks of one launch; one thread waits for their outputs and ends together."""

    def __init__(self, lab: Lab, hosts: Sequence[LabHost], on_line: Callable[[int, str], None], secret: str) -> None:
        self.lab, self.hosts, self.on_line, self.secret = lab, hosts, on_line, secret
        self.ranks: list[_Rank] = []
        self.failed: _Rank | None = None
        self.selector = selectors.DefaultSelector()

    def start(self, command: Sequence[str], environment: dict[str, str], cores: int | None) -> None:
        """Start one process per host and add each to ``ranks``, also if a later one fails."""
        leader, size = self.hosts[0], str(len(self.hosts))
        common = {
            "WORLD_SIZE": size,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": leader.address,
            "MASTER_PORT": str(_free_port(self.lab)),
            SECRET: self.secret,
        }
        for host in self.hosts:
            own = {"RANK": str(host.index), "GLOO_SOCKET_IFNAME": host.interface, "TP_SOCKET_IFNAME": host.interface}
            with uninterrupted(), on_core(host.index, cores):
                process = subprocess.Popen(
                    self.lab.command(host.index, guarded(command)),
                    env=environment | common | own,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                rank = _Rank(host.index, host, process)
                self.ranks.append(rank)
            self.selector.register(rank.output, selectors.EVENT_READ, rank)
            self.selector.register(rank.ending, selectors.EVENT_READ, rank)

    def follow(self, timeout: float | None, grace: float) -> None:
        """Pass lines on until all have ended; raise LaunchError if one fails or time runs out."""
        until = None if timeout is None else time.monotonic() + timeout
        self._turn(lambda: self.failed is not None, until)
        # Fixed now: ranks that are ended from here on did not fail by themselves.
        failed, late = self.failed, self._running()
        if failed:
            deadline = time.monotonic() + grace
            self._turn(lambda: False, deadline if until is None else min(until, deadline))
        self._signal(signal.SIGTERM)
        self._turn(lambda: False, time.monotonic() + END_TIMEOUT)
        self._kill()
        self._drain()
        if failed:
            raise self._failure(failed)
        if late:
            names = ", ".join(str(rank.index) for rank in late)
            what = f"rank{'s' if len(late) > 1 else ''} {names} of {len(self.ranks)} not done after {timeout:g} s"
            raise LaunchError(what, late[0].index, None, late[0].tail)

    def _failure(self, rank: _Rank) -> LaunchError:
        status = rank.status
        assert status is not None
        signals = {number.value: number.name for number in signal.Signals}
        killed = f"was killed by {signals.get(-status, f'signal {-status}')}"
        ended = killed if status < 0 else f"ended with exit status {status}"
        return LaunchError(f"rank {rank.index}, on {rank.host.namespace}, {ended}", rank.index, status, rank.tail)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _turn(self, enough: Callable[[], bool], until: float | None) -> None:
        """Handle outputs and ends until all have ended, ``enough`` returns True, or the clock shows ``until``."""
        while self._running() and not enough():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self.selector.select(left):
                rank: _Rank = key.data
                if key.fileobj is rank.output:
                    self._pass_on(rank, rank.read())
                    if rank.ended:
                        self.selector.unregister(rank.output)
                else:
                    self.selector.unregister(rank.ending)
                    if rank.process.wait() and self.failed is None:
                        self.failed = rank

    def _pass_on(self, rank: _Rank, lines: list[str] | None) -> None:
        for line in lines or ():
            self.on_line(rank.index, line)

    def _drain(self) -> None:
        """Pass on the rest of the output, without waiting for its end: another process may hold it open."""
        for rank in self.ranks:
            while not rank.ended and (lines := rank.read()) is not None:
                self._pass_on(rank, lines)
            self._pass_on(rank, rank.last())

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for rank in self._running():
            rank.process.wait()
        end(self._strays, END_TIMEOUT)

    def _strays(self) -> list[Process]:
        """Find processes that inherited this launch's secret and live inside the lab; see Note [No orphan]."""
        mark, found = f"{SECRET}={self.secret}".encode(), []
        for process in processes(self.lab.name):
            with contextlib.suppress(OSError):
                if mark in environment_of(process.pid):
                    found.append(process)
        return found

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks that still run, and drop their output: an error was raised already."""
        with uninterrupted():
            self.on_line = lambda rank, line: None
            if self._running():
                self._signal(signal.SIGTERM)
                self._turn(lambda: False, time.monotonic() + END_TIMEOUT)
            self._kill()
            self.selector.close()
            for rank in self.ranks:
                rank.close()


def environment_of(pid: int) -> list[bytes]:
    """Return the variables of a process, NAME=value; wait while it is inside execve, where it shows none.

    Raises:
        OSError: it has ended.
    """
    while not (found := Path(f"/proc/{pid}/environ").read_bytes()):
        # proc(5): field 3 is the state, 50 and 51 where the environment begins and ends, 26 where the code begins.
        # Execve fills in the last of all: until then an environment may look empty that it is about to lay out.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX" or (fields[23] != "0" and fields[47] == fields[48]):
            break
        time.sleep(0.001)
    return found.split(b"\0")


def _free_port(lab: Lab) -> int:
    """Return a free port of host 0, below those that the kernel gives to outgoing connections."""
    ports = [str(port) for port in random.SystemRandom().sample(range(20000, 30000), 20)]
    probe = lab.command(0, [sys.executable, "-I", "-S", "-c", _BIND, lab.hosts[0].address, *ports])
    done = subprocess.run(probe, capture_output=True, text=True, check=False, process_group=0)
    if not done.stdout.strip():
        raise LabError(
            f"host 0 of lab {lab.name!r} has no free port: {' '.join(done.stderr.split()) or 'all are taken'}"
        )
    return int(done.stdout)
