"""Messages between the coordinator and its clients, and the interface that training threads use.

    every rank   OPEN step, READY tasks (used or not) ──▶  rank 0: the coordinator, whose engine runs the policy
    every rank   ◀── ORDER sequence, pieces, unused        on tasks that are ready on *all* ranks

Every rank issues commands in the order of their sequence numbers.

Without agreement gloo sums tensors that do not belong together, silently, and NCCL hangs (both were seen). If rank 0
ordered what is ready on rank 0 alone, the link would idle whenever another rank is slower: head-of-line blocking.

Note [Batched small tasks]. A message costs the sender a system call on the training thread and the coordinator a
wake-up, whatever its size. Two thirds of a ResNet's tensors are norms and biases of a few hundred bytes: a client
reports them together with the next larger task, or at the end of the pass.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, Protocol, get_args

import msgspec

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.engine import Decision
from foretrain.errors import Disagreement, ForetrainError, PeerLost, StallError
from foretrain.schedule import Spec
from foretrain.tasks import Chunk, Op, Piece, Task

_PIECE = struct.Struct("<IQQ")
_WORD = struct.Struct("<I")
_FIELDS = attrgetter("task", "offset", "size")
_MARK = 1 << 31
"""Highest bit of a task's word. In READY: the sender has a gradient for it; in ORDER: no rank has."""
_ERRORS: tuple[type[ForetrainError], ...] = (PeerLost, StallError, Disagreement)
_OPS: tuple[Op, ...] = get_args(Op)


class CoordinatorMessage(IntEnum):
    """Kinds of messages, each with the meaning of ``value``, ``flag`` and ``body``."""

    OPEN = 1
    """value: the round that the sender has begun; flag: whether it adds to the sums of the one before."""
    READY = 2
    """body: ready tasks, each as `ready_word`."""
    ORDER = 3
    """value: sequence; flag: operation; body: pieces."""
    ALIVE = 4
    """The sender still runs."""
    FAIL = 5
    """The job is over; flag: the kind of error; body: its text."""
    CHECK = 6
    """value: step; body: sequence and hash of all commands so far."""
    BYE = 7
    """The sender closes in good order; value, where there is no coordinator: how many rounds it took part in."""
    KNOBS = 8
    """value: the first step in which they are in force; body: policy and knobs, JSON."""


class CollectiveCommand(NamedTuple):
    """Collective that all ranks issue at place ``sequence``, from 0, of their sequences.

    Attributes:
        unused: tasks of the chunk that no rank has a gradient for; their bytes are not sent.
        packed: what `pack` returns of it, if that is known.
    """

    sequence: int
    chunk: Chunk
    unused: frozenset[int] = frozenset()
    packed: tuple[int, bytes] | None = None


class CommandExecutor(Protocol):
    """Executor that issues commands in the order of their sequence numbers, on a thread of its own."""

    @property
    def sequence(self) -> int:
        """Number of the next command."""
        ...

    @property
    def digest(self) -> bytes:
        """Hash over all commands so far; equal on ranks that issued the same."""
        ...

    def start(self, command: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        """Issue ``command``; call ``done`` when its result has arrived."""

    def last(self) -> str:
        """Return a line on the last command, for error messages."""
        ...


class CoordinatedExchange(Protocol):
    """Interface of one rank's exchange to its training thread, which calls all methods."""

    def open(self, step: int, again: bool) -> None:
        """Announce the first gradient of round ``step``; ``again`` if it adds to the sums of the last round."""

    def ready(self, task: int, used: bool) -> None:
        """Allow ``task`` to be sent; ``used`` tells whether this rank has a gradient for it, or zeros."""

    def flush(self) -> None:
        """Report ready tasks that wait for a larger one: nothing more is ready for now."""

    def close(self, reason: str | None = None) -> None:
        """End threads and connections; ``reason`` tells other ranks why this one gives up. Idempotent."""


class TunableExchange(CoordinatedExchange, Protocol):
    """Exchange of a real job whose policy can be read and changed."""

    @property
    def spec(self) -> Spec | None:
        """Return the policy and knobs in force; None where a fixed order is replayed."""
        ...

    @property
    def log(self) -> Sequence[Decision]:
        """Return the latest decisions if this rank makes any."""
        ...

    def retune(self, spec: Spec) -> None:
        """Run ``spec`` from the next step on, if this rank decides."""


def pack(command: CollectiveCommand) -> tuple[int, bytes]:
    """Return flag and body of the ORDER message of ``command``."""
    chunk, unused = command.chunk, command.unused
    numbers: list[int] = []
    for task, offset, size in map(_FIELDS, chunk.pieces):
        numbers += (task | _MARK if task in unused else task, offset, size)
    # One call for all: a call for each piece took four times as long.
    return _OPS.index(chunk.op), struct.pack("<" + len(chunk.pieces) * "IQQ", *numbers)


def unpack(sequence: int, flag: int, body: bytes, tasks: Sequence[Task]) -> CollectiveCommand:
    """Return the command in an ORDER message; ForetrainError if it names tasks or bytes that do not exist."""
    if flag >= len(_OPS) or len(body) % _PIECE.size or not body:
        raise ForetrainError(f"order {sequence} does not read: operation {flag}, {len(body)} bytes of pieces")
    pieces, unused = [], set()
    for word, offset, size in _PIECE.iter_unpack(body):
        task = word & ~_MARK
        if task >= len(tasks) or offset + size > tasks[task].size or not size:
            raise ForetrainError(f"order {sequence} names bytes [{offset}, {offset + size}) of task {task}")
        pieces.append(Piece(task, offset, size))
        if word & _MARK:
            unused.add(task)
    chunk = Chunk(_OPS[flag], tuple(pieces), sum(piece.size for piece in pieces))
    return CollectiveCommand(sequence, chunk, frozenset(unused), (flag, body))


def ready_word(task: int, used: bool) -> int:
    """Return ``task`` as a word of a READY message; the highest bit says that the sender has a gradient for it."""
    return task | _MARK if used else task


def pack_ready(words: Sequence[int]) -> bytes:
    """Return the body of a READY message."""
    return struct.pack(f"<{len(words)}I", *words)


def unpack_ready(body: bytes) -> Iterator[tuple[int, bool]]:
    """Yield tasks in the order in which they became ready, and whether the sender has a gradient for each."""
    for (word,) in _WORD.iter_unpack(body):
        yield word & ~_MARK, word >= _MARK


def pack_spec(spec: Spec) -> bytes:
    """Return the body of a KNOBS message."""
    return msgspec.json.encode((spec.name, dict(spec.knobs)))


def unpack_spec(body: bytes) -> Spec:
    """Return the policy and knobs in a KNOBS message; ForetrainError if it is malformed."""
    try:
        return Spec(*msgspec.json.decode(body, type=tuple[str, dict[str, float | tuple[int, ...]]]))
    except msgspec.MsgspecError as error:
        raise ForetrainError(f"policy and knobs do not read: {error}") from None


def send_failure(links: Iterable[Link], error: BaseException) -> None:
    """Send ``error`` over all ``links`` that have not ended."""
    flag = _ERRORS.index(type(error)) if type(error) in _ERRORS else 0
    for link in links:
        with contextlib.suppress(LinkError):
            link.send(CoordinatorMessage.FAIL, flag, 0, str(error).encode()[:60_000])


def unpack_failure(flag: int, body: bytes) -> ForetrainError:
    """Return the error in a FAIL message."""
    return remade(_ERRORS[min(flag, len(_ERRORS) - 1)], body.decode(errors="replace"))


def remade(kind: type[ForetrainError], text: str) -> ForetrainError:
    """Return an error of ``kind`` with the message ``text``."""
    return StallError(text, ()) if issubclass(kind, StallError) else kind(text)


def accumulated_differently(step: int, who: str) -> Disagreement:
    """Return the error for ranks that differ in calling backward() again before step(), or in reading .grad between."""
    return Disagreement(
        f"in round {step} backward() ran again before step() on some ranks and not on others ({who}); "
        "run it equally often on all ranks, or all but the last under no_sync(), "
        "and read .grad in between on all ranks or on none"
    )
