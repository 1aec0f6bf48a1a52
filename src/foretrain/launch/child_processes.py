"""Child processes of ``foretrain run``: servers, restarted when they die; ranks, where torchrun is not installed."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretrain.comm.ps import EVERY
from foretrain.comm.rendezvous import free_port
from foretrain.errors import ConfigError, ForetrainError, PeerLost

_MOST_SERVERS = 64
_END_TIMEOUT = 5.0
"""Seconds for a server to exit."""
_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL for ranks that must end."""
_OPTIONS = {"nproc-per-node": "1", "nnodes": "1", "node-rank": "0", "master-addr": "", "master-port": "0"}
"""Options of torchrun's that hold without it, and their defaults."""


def server_command(address: str, workers: int, shard: int, shards: int, timeout: float) -> list[str]:
    """Return the command of a server that ends with this process; port 0 in ``address`` takes a free port."""
    where = ["--address", address, "--workers", str(workers), "--shard", str(shard), "--shards", str(shards)]
    return [sys.executable, "-m", "foretrain", "server", *where, "--timeout", f"{timeout}s", "--with-parent"]


class ServerProcess(subprocess.Popen[bytes]):
    """Process of a server, whose first line of output names its address.

    Args:
        command: see `server_command`.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, stdout=subprocess.PIPE, **options)
        assert self.stdout is not None
        self.output = self.stdout

    def address(self) -> str | None:
        """Wait until it listens; return its address, or None if it has ended instead."""
        if line := self.output.readline():
            return line.decode().split()[-1]
        self.wait()
        return None


def end_servers(servers: Sequence[ServerProcess], timeout: float = _END_TIMEOUT) -> None:
    """Ask all ``servers`` to end, and kill those that do not within ``timeout`` seconds each."""
    for server in servers:
        server.terminate()
    for server in servers:
        try:
            server.wait(timeout)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.output.close()


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Servers to start on this node.

    Attributes:
        count: how many.
        workers: of the job.
        timeout: seconds that a worker may be silent.
        restarts: how often all of them together may die and be restarted.
        updates: whether optimizers run on them.
        snapshots: folder for their state where optimizers run on them; None loses it with them.
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
        """Return the command line of one server; port 0 takes a free port."""
        command = server_command(f"127.0.0.1:{port}", self.workers, shard, self.count, self.timeout)
        if self.snapshots is not None:
            command += ["--snapshot-dir", str(self.snapshots), "--snapshot-every", str(self.every)]
        return [*command, *["--updates"] * self.updates]


class Servers:
    """Servers on the loopback device. Use as a context manager; they end with the block, and with this process.

    Their secret is FORETRAIN_SECRET's.

    Args:
        spec: their number and options.
        on_failure: called from another thread when one has died and is not restarted; `failure` names it.

    Attributes:
        addresses: of each, ``"127.0.0.1:5555"``.
        failure: the error that ended them; None while they live.
    """

    def __init__(self, spec: ServerSpec, on_failure: Callable[[], None]) -> None:
        if not 1 <= spec.count <= _MOST_SERVERS:
            raise ConfigError("servers", spec.count, "is no number of servers to start", f"write 1 to {_MOST_SERVERS}")
        self._spec, self._on_failure = spec, on_failure
        self._deaths = 0
        self.failure: PeerLost | None = None
        self.addresses: list[str] = []
        self._processes: list[ServerProcess] = []
        self._stop, self._stopped = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="foretrain-servers", daemon=True)

    def __enter__(self) -> Servers:
        try:
            for shard in range(self._spec.count):
                self._processes.append(self._start(shard, 0))
            for shard, process in enumerate(self._processes):
                address = process.address()
                if address is None:
                    raise ForetrainError(f"server {shard} has ended with {process.returncode}; what it wrote says why")
                self.addresses.append(address)
            self._watcher.start()
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._watcher.join()
        self._stop_all()

    def _start(self, shard: int, port: int) -> ServerProcess:
        # In a process group of its own: after Ctrl-C the command stops its servers when the ranks have ended.
        return ServerProcess(self._spec.command(shard, port), process_group=0)

    def _watch(self) -> None:
        """Restart servers whose output pipe closes."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ, None)
            for shard, process in enumerate(self._processes):
                selector.register(process.output, selectors.EVENT_READ, shard)
            while True:
                dead = [key.data for key, _ in selector.select()]
                if None in dead:
                    return
                for shard in dead:
                    selector.unregister(self._processes[shard].output)
                    if not self._restart(shard):
                        self._on_failure()
                        return
                    selector.register(self._processes[shard].output, selectors.EVENT_READ, shard)

    def _restart(self, shard: int) -> bool:
        """Restart a server at its address; return False if it may not be restarted."""
        process, most = self._processes[shard], self._spec.restarts
        code = process.wait()
        process.output.close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with {code}"
        said = f"server {shard} at {self.addresses[shard]} {how}"
        if self._deaths == most:
            self.failure = PeerLost(f"{said}, and --server-restarts {most} allows no more")
            return False
        self._deaths += 1
        sys.stderr.write(f"foretrain: {said}; it is started again ({self._deaths} of {most} times)\n")
        sys.stderr.flush()
        self._processes[shard] = self._start(shard, int(self.addresses[shard].rpartition(":")[2]))
        self._processes[shard].address()
        return True

    def _stop_all(self) -> None:
        self._stop.close()
        self._stopped.close()
        end_servers(self._processes)


def check_every(rounds: int) -> None:
    """Raise ConfigError if ``rounds`` is no number of rounds between two snapshots."""
    if rounds < 1:
        raise ConfigError("snapshot-every", rounds, "is no number of rounds", "write 1 or more")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks of a job without torchrun.

    Attributes:
        local: ranks on this node, as many as on any other.
        count: nodes.
        number: this node's, from 0.
        address, port: where rank 0 is, at ``port`` and the next; a port of 0 takes a free one, on one node.
    """

    local: int = 1
    count: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def run_ranks(command: Sequence[str], nodes: Nodes) -> int:
    """Run ``command`` as this node's ranks and return 0, or the exit status of the first that failed; then all end.

    Each finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under
    torchrun, and OMP_NUM_THREADS of 1 unless that is set. SIGTERM ends them, and then this process, as Ctrl-C does.
    """
    shared = {"WORLD_SIZE": str(nodes.count * nodes.local), "LOCAL_WORLD_SIZE": str(nodes.local)}
    shared |= {"MASTER_ADDR": nodes.address, "MASTER_PORT": str(nodes.port or free_port())}
    ranks: list[subprocess.Popen[bytes]] = []
    with _terminable():
        try:
            for local in range(nodes.local):
                numbers = {"RANK": str(nodes.number * nodes.local + local), "LOCAL_RANK": str(local)}
                # Ranks that share cores and each compute with a thread for every core take many times as long.
                own = {"OMP_NUM_THREADS": "1", **os.environ, **shared, **numbers}
                ranks.append(subprocess.Popen(command, env=own))
            return _first_failure(ranks, nodes.number * nodes.local)
        finally:
            _end(ranks)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], first: int) -> int:
    """Wait until all ranks have ended well, or one has not; return its exit status, as a shell gives it.

    Args:
        ranks: of this node.
        first: number of the first.
    """
    changed, codes = threading.Condition(), dict[int, int]()

    def watch(rank: int) -> None:
        code = ranks[rank].wait()
        with changed:
            codes[rank] = code
            changed.notify()

    for rank in range(len(ranks)):
        threading.Thread(target=watch, args=(rank,), name=f"foretrain-rank-{rank}", daemon=True).start()
    with changed:
        while len(codes) < len(ranks) and not any(codes.values()):
            changed.wait(1.0)  # signal handlers run in between
        for rank, code in codes.items():
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                pid = ranks[rank].pid
                sys.stderr.write(
                    f"foretrain: rank {first + rank} (process {pid}) {how} first; what it wrote says why\n"
                )
                return code if code > 0 else 128 - code
    return 0


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in ranks:
        if each.poll() is None:
            each.terminate()
    for each in ranks:
        try:
            each.wait(_GRACE)
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that what was started is ended."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.getsignal(signal.SIGTERM)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def nodes_of(options: Sequence[str]) -> Nodes:
    """Return the ranks that torchrun's ``options`` ask for; ConfigError for what needs torchrun."""
    parser = ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for name, default in _OPTIONS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", dest=name, default=default)
    try:
        given, others = parser.parse_known_args(options)
    except ArgumentError as error:
        raise ConfigError("options", " ".join(options), str(error), "write a value behind each") from None
    if others:
        remedy = f"install torch, start the ranks with mpirun or srun, or write only --{', --'.join(_OPTIONS)}"
        raise ConfigError("options", " ".join(others), "are not foretrain's, and torchrun's come with PyTorch", remedy)
    words: dict[str, str] = vars(given)

    def number(name: str, least: int) -> int:
        text = words[name]
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(name, text, "is no such number", f"write {least} or more")
        return int(text)

    every = words["nproc-per-node"] in ("auto", "cpu")
    local = os.cpu_count() or 1 if every else number("nproc-per-node", 1)
    found = Nodes(local, number("nnodes", 1), number("node-rank", 0), words["master-addr"], number("master-port", 0))
    if found.number >= found.count:
        raise ConfigError("node-rank", found.number, f"is none of {found.count} nodes", f"write 0 to {found.count - 1}")
    if found.count > 1 and not (found.address and found.port):
        where = "the address of node 0, and a port there that is free, as is the next"
        raise ConfigError(
            "master-addr",
            found.address,
            "does not say where ranks meet",
            f"write --master-addr and --master-port: {where}",
        )
    return found if found.count > 1 else replace(found, address="127.0.0.1", port=0)
