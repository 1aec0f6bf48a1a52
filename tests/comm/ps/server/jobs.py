"""A real service on loopback, workers that push to it, and a way between them that can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from foretrain.comm.ps.client.connection import Connection, client_wire
from foretrain.comm.ps.frames import ABSENT, FrameKind, Header, pack, unbundle
from foretrain.comm.ps.placement import Declaration, Declared, Placement
from foretrain.comm.ps.server.job import ServerConfig
from foretrain.comm.ps.server.service import Service
from foretrain.comm.ps.wire import Payload
from foretrain.errors import ForetrainError
from foretrain.plugins.torch.ps.server import make_optimizer_shard

SECRET = bytes(range(32))


def declaration(*sizes: int, limit: int = 1 << 16, workers: int = 2) -> Declaration:
    tasks = tuple(Declared(f"layer{place}", 4 * size, "float32", place) for place, size in enumerate(sizes))
    return Declaration(tasks, workers, limit=limit)


@contextlib.contextmanager
def serving(workers: int, port: int = 0, *, lives_on: bool = False, **options) -> Iterator[Service]:
    """A service whose loop runs on a thread of its own; it ends with the block."""
    terms = ServerConfig(workers, optimizer_shard=make_optimizer_shard, **options)
    with Service("127.0.0.1", SECRET, terms, port) as service:

        def loop() -> None:
            with contextlib.suppress(ForetrainError):  # `Service.failure` has it
                service.run(lives_on=lives_on)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield service
        finally:
            service.stop()
            thread.join()  # sockets are closed behind this, which a thread that uses them does not survive


class Prompt(Connection):
    """Sends at once, as nobody may poll it for a while."""

    def send(self, header: Header, payload: Payload = b"") -> bool:
        sent = super().send(header, payload)
        self._wire.flush()
        return sent


class Worker:
    """Pushes gradients to one service and keeps what comes back."""

    def __init__(self, service_address, rank: int, secret: bytes = SECRET, shard: int = 0, job: str = "") -> None:
        self.wire, self.rank = client_wire(), rank
        self.connection = Prompt(self.wire, service_address, secret, job, rank, shard)
        self.heard: list[tuple[Header, bytes]] = []
        self.acknowledges = True

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def until(self, ready: Callable[[], bool], timeout: float = 300.0) -> None:
        """Reads until ``ready``."""
        deadline = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < deadline, f"heard {[header.kind.name for header, _ in self.heard]}"
            self.connection.wait(0.01)
            self.read()

    def read(self) -> None:
        for header, payload in self.connection.read():
            if header.kind is not FrameKind.VALUE:
                self.heard.append((header, bytes(payload)))
                continue
            for part, offset, size, data in unbundle(header, payload):
                each = header._replace(part=part, offset=offset, size=size)
                self.heard.append((each, bytes(data)))
                if self.acknowledges:
                    self.acknowledge(data)

    def acknowledge(self, payload: bytes | memoryview) -> None:
        self.connection.send(Header(FrameKind.RECEIVED, size=len(payload)))

    def join(self, what: Declaration) -> None:
        self.until(lambda: self.connection.established)
        self.declare(what)

    def declare(self, what: Declaration, rounds: int = 0) -> None:
        self.connection.send(Header(FrameKind.DECLARE, offset=rounds), what.encode())

    def headers(self, kind: FrameKind) -> list[Header]:
        return [header for header, _ in self.heard if header.kind is kind]

    def wanted(self) -> None:
        """Wait for the answer to a declaration."""
        self.until(lambda: bool(self.headers(FrameKind.WANTED)))

    def push(self, part: int, step: int, data: np.ndarray | None, offset: int = 0, size: int | None = None) -> None:
        raw = b"" if data is None else data.tobytes()
        length = len(raw) if size is None else size
        flag = ABSENT if data is None else 0
        self.connection.send(Header(FrameKind.PUSH, flag, part=part, step=step, offset=offset, size=length), raw)

    def push_all(self, what: Declaration, step: int, values: list[np.ndarray]) -> None:
        for part in Placement(what, 1).parts:
            start = part.offset // 4
            self.push(part.number, step, values[part.task][start : start + part.size // 4])

    def told(self, what: Declaration, step: int) -> list[np.ndarray] | None:
        """The sums of round ``step``; None while some are missing."""
        found = [np.full(task.size // 4, np.nan, np.float32) for task in what.tasks]
        parts = Placement(what, 1).parts
        for header, payload in self.heard:
            if header.kind is FrameKind.VALUE and header.step == step:
                part = parts[header.part]
                low = (part.offset + header.offset) // 4
                found[part.task][low : low + header.size // 4] = np.frombuffer(payload, np.float32) if payload else 0
        return None if any(np.isnan(each).any() for each in found) else found

    def kinds(self, kind: FrameKind) -> list[bytes]:
        return [payload for header, payload in self.heard if header.kind is kind]


def message(header: Header, payload: bytes = b"", *, length: int | None = None, tag: bytes = bytes(16)) -> bytes:
    """A message as it is on the wire."""
    return struct.pack("<I", len(payload) if length is None else length) + pack(header) + tag + payload


def received(raw: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes, fewer where the connection ends before."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < size and (more := raw.recv(size - len(found))):
            found += more
    return found


@contextlib.contextmanager
def stranger(service: Service) -> Iterator[socket.socket]:
    """A connection to ``service`` of somebody who knows nothing."""
    with socket.create_connection(service.address, timeout=60) as made:
        yield made


class Way:
    """Forwards TCP to ``target``; can be cut, and keeps what went through it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.said: list[bytes] = []
        """What went to the target, by connection."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._closed:
                near.close()
                return
            far = socket.create_connection(self._target)
            self._pairs.append((near, far))
            self.said.append(b"")
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(one, other, len(self.said) - 1, one is near)).start()

    def _forward(self, one: socket.socket, other: socket.socket, place: int, away: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if away:
                    self.said[place] += data
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self, which: int | None = None) -> None:
        """Ends all connections, or one; new ones may be made."""
        pairs = self._pairs[:] if which is None else [self._pairs[which]]
        for pair in pairs:
            self._pairs.remove(pair)
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.address).close()
        self._thread.join()
        self._listener.close()
        self.cut()
