"""Messages between the coordinator and its clients, and the interface that training threads use.

    every rank   OPEN step, READY tasks (used or not) ──▶  rank 0: the leader, whose engine runs the policy on what is
    every rank   ◀── ORDER sequence, pieces, unused        ready *everywhere*; each rank issues orders as they come

Without agreement gloo sums tensors that do not belong together, silently, and NCCL hangs (both were seen). An order
that rank 0 gave from its own readiness alone would idle the link whenever another rank is slower: head-of-line
blocking. So only what is ready everywhere is ordered.

Note [Small tasks wait for company]. A message costs the sender a system call on the training thread and the leader a
wake-up, whatever it says. Two thirds of a ResNet's tensors are norms and biases of a few hundred bytes, which nobody
waits for in particular: a follower tells of them with the next task that is worth it, or when the pass is over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol, get_args

import msgspec

from foretrain.comm.commands import CollectiveCommand
from foretrain.engine import Decision
from foretrain.errors import Disagreement, ForetrainError, PeerLost, StallError
from foretrain.schedule import Spec
from foretrain.tasks import Chunk, Op, Piece, Task

_PIECE = struct.Struct("<IQQ")
_WORD = struct.Struct("<I")
_MARK = 1 << 31
"""The highest bit of a task's word: in a READY that the sender has a gradient for it, in an ORDER that nobody has."""
_ERRORS: tuple[type[ForetrainError], ...] = (PeerLost, StallError, Disagreement)
_OPS: tuple[Op, ...] = get_args(Op)


class CoordinatorMessage(IntEnum):
    """Kinds of messages; beside each kind stands what ``value`` and ``flag`` mean."""

    OPEN = 1
    """value: the round whose first gradient exists on the sender; flag: whether it adds to the one before."""
    READY = 2
    """body: tasks, each as `ready_word`."""
    ORDER = 3
    """value: sequence; flag: operation; body: pieces."""
    ALIVE = 4
    """The sender still runs."""
    FAIL = 5
    """The job is over; flag: the kind of error; body: why, as text."""
    CHECK = 6
    """value: step; body: sequence and hash of all orders so far."""
    BYE = 7
    """The sender closes, and means to; value, where there is no leader: how many rounds it took part in."""
    KNOBS = 8
    """value: the step from which on they are in force; body: policy and knobs, JSON."""


class CoordinatedExchange(Protocol):
    """One rank's part of the agreement. `open` and `ready` are called on the training thread."""

    def open(self, step: int, again: bool) -> None:
        """Announce the first gradient of round ``step``; ``again`` if it adds to the sums of the last round."""
        ...

    def ready(self, task: int, used: bool) -> None:
        """Allow ``task`` to be sent; ``used`` tells whether this rank has a gradient for it, or zeros."""
        ...

    def flush(self) -> None:
        """Send what was held back for company: nothing more is ready for now."""
        ...

    def close(self, reason: str | None = None) -> None:
        """End threads and connections; ``reason`` tells other ranks why this one gives up. Idempotent."""
        ...


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
        ...


def pack(order: CollectiveCommand) -> tuple[int, bytes]:
    """Return flag and body of the ORDER message of ``order``."""
    body = b"".join(
        _PIECE.pack(p.task | (_MARK if p.task in order.unused else 0), p.offset, p.size) for p in order.chunk.pieces
    )
    return _OPS.index(order.chunk.op), body


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
    return CollectiveCommand(sequence, chunk, frozenset(unused))


def ready_word(task: int, used: bool) -> int:
    """Return ``task`` as a word of a READY message; the highest bit says that the sender has a gradient for it."""
    return task | _MARK if used else task


def pack_ready(words: Sequence[int]) -> bytes:
    """Return the body of a READY message."""
    return struct.pack(f"<{len(words)}I", *words)


def unpack_ready(body: bytes) -> Iterator[tuple[int, bool]]:
    """Yield its tasks in the order in which they became ready, and whether the sender has a gradient for each."""
    for (word,) in _WORD.iter_unpack(body):
        yield word & ~_MARK, word >= _MARK


def pack_spec(spec: Spec) -> bytes:
    """Return the body of a KNOBS message."""
    return msgspec.json.encode((spec.name, dict(spec.knobs)))


def unpack_spec(body: bytes) -> Spec:
    """Return the policy and knobs in a KNOBS message; ForetrainError if it is malformed."""
    try:
        return Spec(*msgspec.json.decode(body, type=tuple[str, dict[str, float]]))
    except msgspec.MsgspecError as error:
        raise ForetrainError(f"policy and knobs do not read: {error}") from None


def pack_failure(error: BaseException) -> tuple[int, bytes]:
    """Return flag and body of a FAIL message."""
    return _ERRORS.index(type(error)) if type(error) in _ERRORS else 0, str(error).encode()[:60_000]


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
