"""Run plans with NumPy alone: the loop of ring.cpp, for a machine without a compiler. Its sums are the same bits."""

from __future__ import annotations

import errno
import fcntl
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.collectives.plan import KINDS

Bytes: TypeAlias = NDArray[np.uint8]

_HEADER = 7
"""Numbers of an encoded leg before its extents."""
_SIOCATMARK = 0x8905
_MOVING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Runner(Protocol):
    """What runs encoded plans over descriptors, whose sockets stay the caller's, one at a time.

    It may send the beginning of a plan before that runs; see Note [Ahead] in ring.cpp. Only one plan at a time is
    offered, and its memory stays until it has run.
    """

    def run(self, values: Bytes, kind: str, plan: NDArray[np.int64], ahead: int) -> tuple[int, int] | None:
        """Run ``plan`` to its end, of which ``ahead`` bytes were sent before.

        Returns:
            None; or the descriptor of a peer that was lost, and errno, 0 where it hung up.
        """
        ...

    def start(self, values: Bytes, plan: NDArray[np.int64]) -> int:
        """Send the beginning of ``plan``, without waiting and while nothing runs; return how many bytes."""
        ...

    def offer(self, values: Bytes, plan: NDArray[np.int64]) -> None:
        """Let the beginning of ``plan`` be sent while the plan before it runs in another thread."""
        ...

    def claim(self) -> int:
        """Return how many bytes were sent of what was offered, if anything; offer nothing. Nothing runs meanwhile."""
        ...


class _Lost(Exception):
    """A peer hung up; ``args`` are its descriptor and errno."""


class PythonRunner:
    """A `Runner` that moves at most ``segment`` bytes at once, and none ahead."""

    def __init__(self, segment: int) -> None:
        self._scratch = np.empty(segment, np.uint8)

    def run(self, values: Bytes, kind: str, plan: NDArray[np.int64], ahead: int) -> tuple[int, int] | None:
        """Run ``plan`` to its end."""
        del ahead
        legs, *numbers = plan.tolist()
        try:
            for _ in range(legs):
                end = _HEADER + 2 * (numbers[5] + numbers[6])
                leg, numbers = numbers[:end], numbers[end:]
                with _sockets(leg[0], leg[1]) as (to, from_):
                    _Run(values, self._scratch, kind, to, from_, leg).all()
        except _Lost as lost:
            return lost.args
        return None

    def start(self, values: Bytes, plan: NDArray[np.int64]) -> int:
        """Send nothing."""
        return 0

    def offer(self, values: Bytes, plan: NDArray[np.int64]) -> None:
        """Leave it for later."""

    def claim(self) -> int:
        """Return 0."""
        return 0


@contextmanager
def _sockets(*descriptors: int) -> Iterator[list[socket.socket]]:
    """Yield sockets for descriptors that stay open."""
    made = [socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor) for descriptor in descriptors]
    try:
        yield made
    finally:
        for each in made:
            each.detach()


class _Cursor:
    """Place in a stream of extents."""

    def __init__(self, numbers: list[int]) -> None:
        self.extents = list(zip(numbers[::2], numbers[1::2], strict=True))
        self.total = sum(numbers[1::2])
        self.passed = self._within = self._extent = 0

    @property
    def place(self) -> int:
        return self.extents[self._extent][0] + self._within

    @property
    def rest(self) -> int:
        return self.extents[self._extent][1] - self._within if self.passed < self.total else 0

    def pass_(self, size: int) -> None:
        self.passed += size
        self._within += size
        if self._within == self.extents[self._extent][1]:
            self._extent, self._within = self._extent + 1, 0


class _Run:
    """One leg under way; the names are those of ring.cpp."""

    def __init__(
        self, values: Bytes, scratch: Bytes, kind: str, to: socket.socket, from_: socket.socket, leg: list[int]
    ) -> None:
        self._values, self._scratch, self._kind = values, scratch, kind
        self._view, self._scratch_view = values.data, scratch.data
        self._to, self._from = to, from_
        self._head, self._lag, self._adding = leg[2:5]
        received = _HEADER + 2 * leg[5]
        self._out, self._in = _Cursor(leg[_HEADER:received]), _Cursor(leg[received:])
        self._held = 0

    def all(self) -> None:
        while self._out.passed < self._out.total or self._in.passed < self._in.total:
            moved = self._add() + self._send()
            if self._look(moved > 0):
                self._receive()

    def _ready(self) -> int:
        return min(self._out.total, self._head + self._in.passed) - self._out.passed

    def _room(self) -> int:
        rest = self._in.rest - self._held
        return min(rest, len(self._scratch) - self._held) if self._in.passed < self._adding else rest

    def _send(self) -> int:
        size = min(self._out.rest, self._ready(), len(self._scratch))
        if size <= 0:
            return 0
        at = self._out.place
        sent = _tried(self._to, lambda: self._to.send(self._view[at : at + size], _MOVING)) or 0
        self._out.pass_(sent)
        return sent

    def _look(self, moved: bool) -> bool:
        """Wait for a peer, unless something moved; return whether there is something to receive."""
        sends, receives, owes = self._ready() > 0, self._room() > 0, self._out.passed < self._out.total
        to, from_ = self._to.fileno(), self._from.fileno()
        events = {from_: select.POLLIN | select.POLLPRI} if receives else {}
        if owes:
            events[to] = events.get(to, 0) | (select.POLLOUT if sends else select.POLLRDHUP)
        poll = select.poll()
        for descriptor, mask in events.items():
            poll.register(descriptor, mask)
        found = dict(poll.poll(0 if moved else None))
        # Who hangs up before it has all from us has failed.
        if owes and not sends and found.get(to, 0) & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
            raise _Lost(to, 0)
        seen = found.get(from_, 0) if receives else 0
        # Bytes are received only where they are seen first: recv would pass over the mark of urgent data.
        if seen & select.POLLPRI and fcntl.ioctl(from_, _SIOCATMARK, b"\0\0\0\0") != b"\0\0\0\0":
            raise _Lost(from_, 0)
        return bool(seen & ~select.POLLOUT)

    def _receive(self) -> None:
        adds = self._in.passed < self._adding
        at, view = (self._held, self._scratch_view) if adds else (self._in.place, self._view)
        size = self._room()
        got = _tried(self._from, lambda: self._from.recv_into(view[at : at + size], 0, socket.MSG_DONTWAIT))
        if got == 0:
            raise _Lost(self._from.fileno(), 0)
        if adds:
            self._held += got or 0
        elif got:
            self._in.pass_(got)

    def _add(self) -> int:
        size = min(self._held, self._out.passed - self._in.passed) if self._lag else self._held
        size -= size % KINDS[self._kind]
        if size <= 0:
            return 0
        at = self._in.place
        _add(self._kind, self._values[at : at + size], self._scratch[:size])
        self._scratch[: self._held - size] = self._scratch[size : self._held].copy()
        self._held -= size
        self._in.pass_(size)
        return size


def _tried(peer: socket.socket, call: Callable[[], int]) -> int | None:
    """Return what ``call`` moved, None where it would have to wait."""
    try:
        return call()
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as error:
        raise _Lost(peer.fileno(), error.errno or errno.EIO) from None


def _add(kind: str, into: Bytes, more: Bytes) -> None:
    """Add elements; 16-bit floats in single precision, rounded to nearest, ties to even."""
    with np.errstate(all="ignore"):
        if kind == "bfloat16":
            into.view(np.uint16)[:] = _to_bfloat16(_from_bfloat16(into) + _from_bfloat16(more))
        elif kind == "float16":
            half = into.view(np.float16)
            half[:] = half.astype(np.float32) + more.view(np.float16).astype(np.float32)
        else:
            sums = into.view(kind)
            np.add(sums, more.view(kind), out=sums)


def _from_bfloat16(values: Bytes) -> NDArray[np.float32]:
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded)
