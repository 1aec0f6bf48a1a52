"""Servers beside the ranks of one node: started, started again when they die, and ended with the job."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from foretrain.comm.ps import EVERY
from foretrain.errors import ConfigError, ForetrainError, PeerLost

_MOST_SERVERS = 64
_FAREWELL = 5.0
"""Seconds that a server has to end."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Servers to start on this node.

    Attributes:
        count: how many.
        workers: of the job.
        timeout: seconds that a worker may be silent.
        restarts: how often all of them together may die and be started again.
        updates: whether optimizers run on them.
        snapshots: a folder for what they keep where optimizers run on them; None loses it with them.
        every: rounds between two snapshots.
    """

    count: int
    workers: int
    timeout: float
    restarts: int
    updates: bool = False
    snapshots: Path | None = None
    every: int = EVERY

    def command(self, shard: int, port: int) -> list[str]:
        """Return the command that starts one server; port 0 takes a free port."""
        command = [sys.executable, "-m", "foretrain", "server", "--address", f"127.0.0.1:{port}"]
        command += ["--workers", str(self.workers), "--shard", str(shard), "--shards", str(self.count)]
        if self.snapshots is not None:
            command += ["--snapshot-dir", str(self.snapshots), "--snapshot-every", str(self.every)]
        return [*command, "--timeout", f"{self.timeout}s", "--with-parent", *["--updates"] * self.updates]


class Servers:
    """Servers on the loopback device. Use as a context manager; they end with the block, and with this process.

    Their secret is FORETRAIN_SECRET's.

    Args:
        spec: which.
        given_up: called from another thread when one has died that is not started again; `failure` says which.

    Attributes:
        addresses: of each, ``"127.0.0.1:5555"``.
        failure: what ended them; None while they live.
    """

    def __init__(self, spec: ServerSpec, given_up: Callable[[], None]) -> None:
        if not 1 <= spec.count <= _MOST_SERVERS:
            raise ConfigError("servers", spec.count, "is no number of servers to start", f"write 1 to {_MOST_SERVERS}")
        self._spec, self._given_up = spec, given_up
        self._deaths = 0
        self.failure: PeerLost | None = None
        self.addresses: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bell, self._ear = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="foretrain-servers", daemon=True)

    def __enter__(self) -> Servers:
        try:
            for shard in range(self._spec.count):
                self._processes.append(self._start(shard, 0))
            for shard, process in enumerate(self._processes):
                line = _line(process)
                if not line:
                    raise ForetrainError(f"server {shard} has ended with {process.wait()}; what it wrote says why")
                self.addresses.append(line.split()[-1])
            self._watcher.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._bell.close()
        self._watcher.join()
        self._end()

    def _start(self, shard: int, port: int) -> subprocess.Popen[bytes]:
        # In a group of its own: a Ctrl-C is for the command, which ends its servers when the ranks have ended.
        return subprocess.Popen(self._spec.command(shard, port), stdout=subprocess.PIPE, process_group=0)

    def _watch(self) -> None:
        """Restart servers that end: the pipe of their output ends when they do."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ, None)
            for shard, process in enumerate(self._processes):
                selector.register(_output(process), selectors.EVENT_READ, shard)
            while True:
                dead = [key.data for key, _ in selector.select()]
                if None in dead:
                    return
                for shard in dead:
                    selector.unregister(_output(self._processes[shard]))
                    if not self._revive(shard):
                        self._given_up()
                        return
                    selector.register(_output(self._processes[shard]), selectors.EVENT_READ, shard)

    def _revive(self, shard: int) -> bool:
        """Starts a server again where it was; whether it may be."""
        process, most = self._processes[shard], self._spec.restarts
        code = process.wait()
        _output(process).close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with {code}"
        said = f"server {shard} at {self.addresses[shard]} {how}"
        if self._deaths == most:
            self.failure = PeerLost(f"{said}, and --server-restarts {most} allows no more")
            return False
        self._deaths += 1
        sys.stderr.write(f"foretrain: {said}; it is started again ({self._deaths} of {most} times)\n")
        sys.stderr.flush()
        self._processes[shard] = self._start(shard, int(self.addresses[shard].rpartition(":")[2]))
        _line(self._processes[shard])
        return True

    def _end(self) -> None:
        """Ask all servers to end, and kill those that do not."""
        self._bell.close()
        self._ear.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_FAREWELL)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _output(process).close()


def check_every(rounds: int) -> None:
    """ConfigError for what is no number of rounds between two snapshots."""
    if rounds < 1:
        raise ConfigError("snapshot-every", rounds, "is no number of rounds", "write 1 or more")


def _line(process: subprocess.Popen[bytes]) -> str:
    """Return its first line, which says where it listens; empty if it ends instead."""
    return _output(process).readline().decode()


def _output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout
