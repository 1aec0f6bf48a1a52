"""State of a server that updates parameters: what ranks tell it before the first update, and ask it, over TCP.

    rank 0 ──▶ DECLARE  the optimizers         LOAD  parameters and optimizer state of a tensor
    a rank ──▶ GET      those of a tensor      ◀── STATE
    a rank ──▶ READY    all before is done     ◀── READY
                                               ◀── ERROR, what has failed on the server, which ends

Everything here arrives: it is no part of a step. A body that is too large for a message is cut; the last piece says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol

import msgspec
from numpy.typing import NDArray

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.event_loop import POLL_INTERVAL
from foretrain.comm.ps.consistency import Group

_PIECE = 8 << 20
"""Bytes of a body in one message."""
_LAST_WORDS = 1.0
"""Seconds that a rank waits for what a server that is lost has to say about that."""
_LOST = "the server that updates was lost: {}; the output of rank 0 says more"


class _Kind(IntEnum):
    """Kind of a message."""

    DECLARE = 0
    LOAD = 1
    GET = 2
    STATE = 3
    READY = 4
    ERROR = 5


class Updater(Protocol):
    """Owner of parameters and their optimizers on a server; one thread at a time calls it. Of a framework's plugin."""

    def declare(self, payload: bytes) -> None:
        """Make the optimizers that ``payload`` describes."""
        ...

    def load(self, tensor: int, frames: Sequence[bytes]) -> None:
        """Set the parameters and optimizer state of ``tensor``."""
        ...

    def state(self, tensor: int) -> Sequence[bytes]:
        """Return the parameters and optimizer state of ``tensor``."""
        ...

    def update(
        self,
        gradients: NDArray[Any],
        parameters: NDArray[Any],
        tensors: Sequence[tuple[int, int, int]],
        groups: Sequence[Group],
    ) -> None:
        """Step with ``gradients`` of ``tensors``, see `foretrain.comm.bounded.Hint`; write what they become.

        Args:
            gradients: their mean over all ranks; of bfloat16 the bits.
            parameters: in the same order.
            tensors: tensor, first element, and the one behind the last.
            groups: hyperparameters.
        """
        ...


class ServerState:
    """Link of one rank to a server that updates. `close` it.

    Args:
        link: to the server.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def declare(self, payload: bytes) -> None:
        """Tell the server its optimizers."""
        _send(self._link, _Kind.DECLARE, 0, payload)

    def load(self, tensor: int, frames: Sequence[bytes]) -> None:
        """Tell the server the parameters and optimizer state of ``tensor``."""
        _send(self._link, _Kind.LOAD, tensor, msgspec.msgpack.encode(frames))

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Wait until the server has done all that it was told; ``check`` raises the error that ends the job."""
        self._ask(_Kind.READY, 0, check)
        next(_bodies(self._link, check))

    def fetch(self, tensors: Sequence[int], check: Callable[[], None]) -> Iterator[tuple[int, list[bytes]]]:
        """Yield each of ``tensors`` with its parameters and optimizer state on the server; read all of them."""
        bodies = _bodies(self._link, check)
        for tensor in tensors:
            try:
                self._ask(_Kind.GET, tensor, check)
                kind, found, body = next(bodies)
                if (kind, found) != (_Kind.STATE, tensor):
                    raise LinkError(f"the server that updates has answered about tensor {found}, not {tensor}")
            except BaseException:
                self._link.close()  # an answer that is still to come would be taken for the next one's
                raise
            yield tensor, msgspec.msgpack.decode(body, type=list[bytes])

    def failure(self) -> str:
        """Return what has failed on a server that is lost; nothing where it has not said so."""
        with contextlib.suppress(LinkError):
            for message in self._link.receive(_LAST_WORDS):
                if message.kind == _Kind.ERROR:
                    return message.body.decode()
        return ""

    def close(self) -> None:
        """End the link, any number of times."""
        self._link.close()

    def _ask(self, kind: _Kind, tensor: int, check: Callable[[], None]) -> None:
        try:
            _send(self._link, kind, tensor, b"")
        except LinkError as error:
            # The thread that has found out first closes the link on this side: what it found is the reason.
            check()
            raise LinkError(_LOST.format("it hung up")) from error


def tell_failure(links: Sequence[Link], error: BaseException) -> None:
    """Tell the ranks at the other ends of ``links`` that ``error`` ends the server."""
    for link in links:
        with contextlib.suppress(LinkError):
            _send(link, _Kind.ERROR, 0, f"{type(error).__name__}: {error}".encode()[:_PIECE])


def answer(link: Link, updater: Updater, lock: threading.Lock) -> None:
    """Do what a rank asks over ``link``, holding ``lock``, until it closes the link."""
    try:
        for kind, tensor, body in _bodies(link, lambda: None):
            if kind is _Kind.READY:
                _send(link, _Kind.READY, 0, b"")
                continue
            with lock:
                found = _answered(kind, tensor, body, updater)
            if found is not None:
                _send(link, _Kind.STATE, tensor, msgspec.msgpack.encode(found))
    except LinkError:
        pass  # the rank has closed, or is lost, which the engines find


def _answered(kind: _Kind, tensor: int, body: bytes, updater: Updater) -> Sequence[bytes] | None:
    if kind is _Kind.GET:
        return updater.state(tensor)
    if kind is _Kind.DECLARE:
        updater.declare(body)
    elif kind is _Kind.LOAD:
        updater.load(tensor, msgspec.msgpack.decode(body, type=list[bytes]))
    return None


def _send(link: Link, kind: _Kind, tensor: int, body: bytes) -> None:
    for at in range(0, max(len(body), 1), _PIECE):
        link.send(kind, int(at + _PIECE >= len(body)), tensor, body[at : at + _PIECE])


def _bodies(link: Link, check: Callable[[], None]) -> Iterator[tuple[_Kind, int, bytes]]:
    """Yield kind, tensor and body of whole messages; call ``check`` now and then."""
    pieces: list[bytes] = []
    while True:
        try:
            messages = link.receive(POLL_INTERVAL)
        except LinkError as error:
            check()
            raise LinkError(_LOST.format("it hung up")) from error
        check()
        for message in messages:
            if message.kind == _Kind.ERROR:
                raise LinkError(_LOST.format(message.body.decode()))
            pieces.append(message.body)
            if message.flag:
                yield _Kind(message.kind), message.value, b"".join(pieces)
                pieces = []
