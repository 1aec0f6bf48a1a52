"""Messages over TCP, carried by wire.cpp: whoever owns a `Wire` polls it, and Python looks once at each batch.

The library is that of the collectives, see `foretrain.comm.collectives.runners`: a wheel has it, and elsewhere it is
compiled on first use. One thread of C++ receives, without the interpreter's lock. Payloads go into slabs, of which each
message is a view; a slab is used again when its views are gone.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from foretrain.comm.collectives import runners
from foretrain.comm.ps.frames import HEADER, KINDS, MAGIC, FrameKind, Header
from foretrain.errors import ForetrainError
from foretrain.network.switch_cluster import MESSAGE

Buffer: TypeAlias = bytes | memoryview
Payload: TypeAlias = Buffer | Sequence[Buffer]
"""Bytes of a message, in one piece or several."""
STRANGERS_TIMEOUT: Final = 5.0
"""Seconds that a connection may be without a key."""
SERVED: Final = frozenset((FrameKind.PUSH, FrameKind.PULL, FrameKind.RECEIVED))
"""Messages of a worker that a wire takes itself where it serves that worker."""
SPAN: Final = struct.Struct("<4q")
"""Range in `Wire.push`."""
_EVENT: Final = struct.Struct("<qqqqq" + HEADER.format.removeprefix("<") + "4x")
_BATCH: Final = 128
"""Most events of one turn."""
_SLAB: Final = 1 << 20
"""Bytes of a slab; a larger message gets one of its own."""
_SLABS: Final = 4
"""Slabs that may be received into before the owner polls."""
_SLABS_KEPT: Final = 64
_COPIED: Final = 4 << 10
"""Most bytes of a payload that is copied, so that it keeps no slab."""
_STRANGE: Final = -2
_UNSENT: Final = 128 << 10
"""Bytes that may wait for the next `Wire.poll`."""
_EMPTY: Final = memoryview(b"")


class _What(IntEnum):
    OPENED, MESSAGE, CLOSED, SENT, SLAB, WANTED, WATCHED, FINISHED, LANDED = range(9)


class Why(IntEnum):
    """Reason why a connection was closed here, below 0; the peer's, or errno, from 0 on."""

    HUNG_UP = 0
    NO_MESSAGE = -1
    """Received bytes are no message."""
    TOO_LARGE = -2
    FORGED = -3
    """A tag, or the place of a message, is wrong."""
    LATE = -4
    """Connection without a key after `STRANGERS_TIMEOUT`."""
    CROWDED = -5
    """Too many had none."""


class Arrival(NamedTuple):
    """Event of a connection.

    Attributes:
        connection: its number.
        header: of a message; None where the connection has opened or closed.
        payload: of a message.
        closed: the reason why it has closed, see `Why`; None where it has not.
    """

    connection: int
    header: Header | None
    payload: memoryview
    closed: int | None = None


class Progress(NamedTuple):
    """Effect of answers that a wire has taken itself: a chunk is finished, or a task has landed.

    Attributes:
        chunk: see `foretrain.comm.ps.client.inflight.InFlight.finished`; None where a task has landed.
        task: that has landed; −1 where a chunk is finished.
        used: whether any worker had a gradient for it.
    """

    chunk: int | None
    task: int = -1
    used: bool = False


class Watched(Protocol):
    """Descriptor that wakes a wire."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...

    def clear_wakeups(self) -> None:
        """Read what made it readable."""


class Wire:
    """Connections of one owner, with a thread that receives. Not thread-safe. Use as a context manager, or `close` it.

    Args:
        limit: most bytes of a payload.
        strangers_limit: most bytes of a payload on a connection without keys.

    Raises:
        ForetrainError: its C++ is not compiled, and cannot be.
    """

    def __init__(self, limit: int, strangers_limit: int) -> None:
        self._library, self._quick = libraries()
        self._wire = self._library.foretrain_wire_new(limit, strangers_limit)
        self._events = bytearray(_EVENT.size * _BATCH)
        self._events_view = memoryview(self._events)
        self._events_at = ctypes.addressof(ctypes.c_char.from_buffer(self._events))
        self._sinks: dict[int, Callable[[Arrival], None]] = {}
        self._kept: dict[int, deque[tuple[int, Payload]]] = {}
        """Payloads that are being sent, by connection, each with its number."""
        self._watched: Watched | None = None
        self._progress: list[Progress] = []
        self._slabs: dict[int, memoryview] = {}
        self._used: list[Any] = []
        """Slabs that are full, and may still have views."""
        self._slab_count = self._unsent = 0
        for _ in range(_SLABS):
            self._give(_SLAB)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._wire is None

    def listen(self, host: str, port: int, crowd: int) -> int:
        """Accept connections, of which ``crowd`` may be without keys at once; return the port. 0 takes a free one.

        Raises:
            OSError: the address is none of this host's, or taken.
        """
        patience = round(STRANGERS_TIMEOUT * 1e9)
        found = self._library.foretrain_wire_listen(self._wire, host.encode(), str(port).encode(), patience, crowd)
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        return found

    def connect(self, host: str, port: int, sink: Callable[[Arrival], None]) -> int | None:
        """Begin to connect; return the connection's number, or None where that is refused at once.

        ``sink`` is called with its events, within `poll`; those of accepted connections are returned by `poll`.
        """
        found = self._library.foretrain_wire_connect(self._wire, host.encode(), str(port).encode())
        if found < 0:
            return None
        self._sinks[found] = sink
        return found

    def watch(self, watched: Watched) -> None:
        """Let ``watched`` end the wait in `poll`."""
        self._watched = watched
        self._library.foretrain_wire_watch(self._wire, watched.fileno())

    def keys(self, connection: int, sending: bytes, receiving: bytes) -> None:
        """Tag all later messages, and check those that come."""
        self._quick.foretrain_wire_keys(self._wire, connection, sending, receiving, 0)

    def send(self, connection: int, header: Header, payload: Payload = b"", sender: int = 0) -> bool:
        """Queue a message; return False if the connection is closed. ``payload`` must not change until it is answered.

        ``sender`` replaces the header's, and the place that the message has its sequence.
        """
        kind, flag, _, _, *numbers = header
        packed = HEADER.pack(MAGIC, kind, flag, sender, 0, *numbers)
        whole = isinstance(payload, bytes | memoryview)
        pieces = cast("Sequence[Buffer]", (payload,) if whole else payload)
        places: list[int] = []
        size = 0
        for piece in pieces:
            if length := len(piece):
                places += address(piece), length
                size += length
        where = struct.pack(f"<{len(places)}q", *places)
        number = self._quick.foretrain_wire_send(self._wire, connection, packed, where, len(places) // 2)
        if number < 0:
            return False
        if number:
            self._kept.setdefault(connection, deque()).append((number, payload))
        self._hold_back(size)
        return True

    def _hold_back(self, size: int) -> None:
        """Leave ``size`` queued bytes to the next `poll`, unless there are many."""
        self._unsent += size
        if self._unsent > _UNSENT:
            self.flush()

    def serve(
        self, connections: tuple[int, int], shard: int | None, worker: int, epoch: int, number: int, credit: int
    ) -> None:
        """Serve a worker here, see Note [Served connections] in wire.cpp; without a ``shard`` no longer.

        Args:
            connections: the worker's two.
            shard: `foretrain.comm.ps.server.shard.SumShard.native`.
            worker: its rank.
            epoch: of its declaration.
            number: of the shard.
            credit: bytes in flight from which on nothing more is sent.
        """
        given = *connections, shard, worker, epoch, number, credit, MESSAGE
        self._quick.foretrain_wire_serve(self._wire, *given)

    def take_answers(self, connections: tuple[int, int], flights: int, shard: int, worker: int, epoch: int) -> None:
        """Take acknowledgements of `push`; write sums to their places, if those are known, and acknowledge them.

        Args:
            connections: the two to the server.
            flights: `foretrain.comm.ps.client.inflight.InFlight.native`, which knows parts and places.
            shard: the server's number.
            worker: this worker's rank.
            epoch: of its declaration.
        """
        given = *connections, flights, shard, worker, epoch, MESSAGE
        self._quick.foretrain_wire_take_answers(self._wire, *given)

    def push(self, connection: int, step: int, flag: int, spans: bytes) -> bool:
        """Queue pushes of round ``step`` to a server whose answers are taken; return False if it is not connected.

        ``spans`` are ranges of tasks: task, start, end and address of each, as numbers of 64 bits, and 0 as the address
        where there is no gradient. Of those the server gets what is on its shard. The memory must stay until the wire
        is closed, and the bytes until nobody needs them again.
        """
        queued = self._quick.foretrain_wire_push(self._wire, connection, step, flag, spans, len(spans) // SPAN.size)
        if queued > 0:
            self._hold_back(queued)
        return queued >= 0

    def progress(self) -> list[Progress]:
        """Return what answers that were taken here have brought about since the last call, in order."""
        found, self._progress = self._progress, []
        return found

    def take_back(self, connection: int, header: Header, payload: memoryview) -> bool:
        """Take a message that `poll` has returned; return False if it is not regular, or of no peer that is served, or
        whose answers are taken, here.
        """
        kind, flag, sender, place, *numbers = header
        packed = HEADER.pack(MAGIC, kind, flag, sender, place, *numbers)
        size = len(payload)
        where = address(payload) if size else None
        return bool(self._quick.foretrain_wire_take_back(self._wire, connection, packed, where, size))

    def put(self, connection: int, part: int, step: int, start: int, end: int, *, absent: bool) -> bool:
        """Queue a sum for the worker that is served on this connection; return False if nobody is."""
        return bool(self._quick.foretrain_wire_put(self._wire, connection, part, step, start, end, absent))

    def heard(self, connection: int) -> float:
        """Return when the served peer there, or the one whose answers are taken, was last heard: s, monotonic clock."""
        return self._quick.foretrain_wire_heard(self._wire, connection) / 1e9

    def flush(self) -> None:
        """Give to the kernel what it takes now."""
        self._unsent = 0
        self._library.foretrain_wire_flush(self._wire)

    def end(self, connection: int | None, *, orderly: bool = False) -> None:
        """Close a connection, without an event; ``orderly``: when all is sent and the peer has closed its end."""
        if connection is None or self._wire is None:
            return
        self._library.foretrain_wire_close(self._wire, connection, orderly)
        if not orderly:
            self._forget(connection)

    def poll(self, seconds: float) -> list[Arrival]:
        """Send, wait for something to happen, for at most ``seconds``, and return the events of accepted connections.

        Those of others go to their sinks. An opened connection's event has neither header nor reason.
        """
        self._unsent = 0
        milliseconds = math.ceil(1e3 * seconds)
        count = self._library.foretrain_wire_poll(self._wire, milliseconds, self._events_at, _BATCH)
        found: list[Arrival] = []
        sinks = self._sinks
        for connection, what, slab, at, length, _, kind, *rest in _EVENT.iter_unpack(
            self._events_view[: count * _EVENT.size]
        ):
            if what == _What.MESSAGE:
                payload = self._payload(slab, at, length) if length else _EMPTY
                # A kind that nobody knows stays a number.
                known = cast("FrameKind", KINDS.get(kind, kind))
                arrival = Arrival(connection, Header(known, *rest), payload)
            elif what == _What.OPENED:
                arrival = Arrival(connection, None, _EMPTY)
            elif what == _What.CLOSED:
                arrival = Arrival(connection, None, _EMPTY, at)
            else:
                self._account(what, connection, at, length)
                continue
            (sinks.get(connection) or found.append)(arrival)
            if arrival.closed is not None:
                self._forget(connection)
        return found

    def _account(self, what: int, connection: int, number: int, length: int) -> None:
        if what == _What.FINISHED:
            self._progress.append(Progress(number))
        elif what == _What.LANDED:
            self._progress.append(Progress(None, number, bool(length)))
        elif what == _What.SENT:
            kept = self._kept.get(connection)
            while kept and kept[0][0] <= number:
                kept.popleft()
        elif what == _What.WATCHED:
            if self._watched is not None:
                self._watched.clear_wakeups()
        elif what == _What.WANTED:
            self._give(number)
        else:
            self._used.append(self._slabs.pop(number).obj)
            self._give(_SLAB)

    def close(self, linger: float = 0.0) -> None:
        """Close all connections; queued messages have ``linger`` seconds to leave. Idempotent."""
        if self._wire is None:
            return
        deadline = time.monotonic() + linger
        while self._library.foretrain_wire_finish(self._wire) and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, 0.1))
        self._library.foretrain_wire_delete(self._wire)
        self._wire = None
        self._kept.clear()
        self._sinks.clear()

    def _forget(self, connection: int) -> None:
        self._sinks.pop(connection, None)
        self._kept.pop(connection, None)

    def _payload(self, slab: int, at: int, length: int) -> memoryview:
        if slab == _STRANGE:
            return memoryview(ctypes.string_at(at, length))
        view = self._slabs[slab][at : at + length]
        return memoryview(bytes(view)) if length <= _COPIED else view

    def _give(self, size: int) -> None:
        """Give a slab of at least ``size`` bytes to receive into."""
        for place, used in enumerate(self._used):
            # The list, the loop's variable and the argument are all that know it: there are no views.
            if sys.getrefcount(used) <= 3 and len(used) >= size:
                del self._used[place]
                break
        else:
            used = np.empty(max(size, _SLAB), np.uint8)
            del self._used[: max(0, len(self._used) - _SLABS_KEPT)]
        self._slab_count += 1
        view = self._slabs[self._slab_count] = used.data
        self._quick.foretrain_wire_give(self._wire, self._slab_count, address(view), len(view))


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return ``values`` as C++ takes them."""
    return (ctypes.c_int64 * len(values))(*values)


def address(data: Buffer) -> int:
    """Return where ``data`` is in memory."""
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    if data.readonly:
        return np.frombuffer(data, np.uint8).ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Return the library as it is called where a call may take long, and for short calls, which keep Python's lock."""
    try:
        library = runners.library()
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()[:500]
        raise ForetrainError(
            f"servers need C++ that does not compile here ({reason}); install a compiler, e.g. with `apt install g++`, "
            "name yours in CXX, or install foretrain from a wheel that has it compiled"
        ) from None
    quick = ctypes.PyDLL(library._name)
    where, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.foretrain_wire_new.argtypes, library.foretrain_wire_new.restype = [number, number], where
    quick.foretrain_wire_keys.argtypes = [where, number, text, text, number]
    quick.foretrain_wire_give.argtypes = [where, number, where, number]
    quick.foretrain_wire_take_answers.argtypes = [where, number, number, where, *[number] * 4]
    quick.foretrain_wire_push.argtypes = [where, *[number] * 3, text, number]
    quick.foretrain_inflight_new.argtypes, quick.foretrain_inflight_new.restype = [where, number], where
    for name in ("delete", "together", "moved"):
        getattr(quick, f"foretrain_inflight_{name}").argtypes = [where]
    quick.foretrain_inflight_add.argtypes = [where, *[number] * 5]
    quick.foretrain_inflight_acknowledge.argtypes = [where, *[number] * 3]
    quick.foretrain_inflight_arrive.argtypes = [where, *[number] * 3, where]
    quick.foretrain_inflight_finished.argtypes = [where, where]
    quick.foretrain_inflight_ranges.argtypes = [where, number, where, number]
    quick.foretrain_inflight_split.argtypes = quick.foretrain_inflight_place.argtypes = [where, where, number]
    quick.foretrain_inflight_begin.argtypes = [where, number]
    quick.foretrain_wire_serve.argtypes = [where, number, number, where, *[number] * 5]
    quick.foretrain_wire_take_back.argtypes = [where, number, text, where, number]
    quick.foretrain_wire_put.argtypes = [where, *[number] * 6]
    quick.foretrain_wire_heard.argtypes = [where, number]
    quick.foretrain_shard_new.argtypes = [number, number, where, number, where, number]
    quick.foretrain_shard_new.restype = quick.foretrain_shard_sums.restype = where
    quick.foretrain_shard_push.argtypes = [where, *[number] * 5, where, *[number] * 3, where]
    quick.foretrain_shard_pull.argtypes = [where, *[number] * 5]
    quick.foretrain_shard_remove_worker.argtypes = [where, number]
    quick.foretrain_shard_deliveries.argtypes = [where, where, number]
    quick.foretrain_shard_round.argtypes = [where, number, number, number, where]
    quick.foretrain_shard_sums.argtypes = [where, number, number]
    quick.foretrain_shard_delete.argtypes = [where]
    quick.foretrain_wire_send.argtypes = [where, number, text, text, number]
    library.foretrain_wire_listen.argtypes = [where, text, text, number, number]
    library.foretrain_wire_connect.argtypes = [where, text, text]
    library.foretrain_wire_poll.argtypes = [where, number, where, number]
    library.foretrain_wire_watch.argtypes = [where, number]
    library.foretrain_wire_close.argtypes = [where, number, number]
    for name in ("delete", "finish", "flush"):
        getattr(library, f"foretrain_wire_{name}").argtypes = [where]
    for function in (
        quick.foretrain_wire_send,
        quick.foretrain_wire_push,
        quick.foretrain_wire_take_back,
        quick.foretrain_wire_put,
        quick.foretrain_wire_heard,
        quick.foretrain_inflight_acknowledge,
        quick.foretrain_inflight_arrive,
        quick.foretrain_inflight_ranges,
        quick.foretrain_inflight_together,
        quick.foretrain_inflight_moved,
        quick.foretrain_shard_push,
        quick.foretrain_shard_pull,
        quick.foretrain_shard_deliveries,
        quick.foretrain_shard_round,
        library.foretrain_wire_listen,
        library.foretrain_wire_connect,
        library.foretrain_wire_poll,
        library.foretrain_wire_finish,
    ):
        function.restype = number
    return library, quick
