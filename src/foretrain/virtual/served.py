"""A parameter server in virtual time, as one worker sees it where all workers are alike.

    start ──▶ local ──▶ up ──▶ server ──▶ queue, the most urgent first ──▶ down ──▶ landed
                                  └── acknowledged: done ──▶ credit

As in `foretrain.server`, pushing and pulling are two directions with orders of their own. A push is done, and its
credit back, when the server has all of it; the sum comes as the server's queue has it. What a server has handed to its
socket cannot be overtaken, so it hands over only what a little time takes to send. Beside the workers both directions
share their hosts' links.

All workers being alike, the last of them has pushed a byte when the first has; nobody waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from foretrain.network.route import Route
from foretrain.tasks import Chunk, Op, Piece, Task
from foretrain.timeline import Span, Timeline
from foretrain.units import COST_SHIFT, MILLISECOND, Time, moving
from foretrain.virtual.pipes import Label, Pipes
from foretrain.virtual.wires import Line, SharedWire
from foretrain.virtual.world import ARRIVAL, VirtualWorld

_AHEAD: Final[Time] = 4 * MILLISECOND
"""What a server hands over takes so long to send, as `foretrain.server.outbox` has it."""
_LEAST, _MOST = 1 << 18, 1 << 22
"""Bytes that it hands over at least and at most, whatever the link."""
_SLICE: Final = 1 << 20
"""Largest message with a sum."""
_PART: Final = 1 << 22
"""Largest message that is pushed, and bytes that are summed on their own: `foretrain.server.placement.LIMIT`."""
_UP, _DOWN = 0, 1
_NAMES: Final = ("up", "down")
"""The timeline's lanes."""


class Served:
    """Moves chunks through servers.

    Args:
        routes: the hops of each operation; an all-reduce's last two are pushing and pulling.
        tasks: indexed by `Task.index`.
        landed: called with a task's index when the sums of all its bytes have come.
        timeline: where to record who used which wire when; None records nothing.
        label: names a chunk for the timeline.
    """

    def __init__(
        self,
        routes: dict[Op, Route],
        tasks: Sequence[Task],
        landed: Callable[[int], None],
        timeline: Timeline | None = None,
        label: Label = lambda _: ("", 0),
    ) -> None:
        self._push, self._pull = routes["all_reduce"][-2:]
        ways: dict[Op, Route] = {op: route[: -2 if op == "all_reduce" else -1] for op, route in routes.items()}
        self._local = Pipes(ways, timeline, label) if any(ways.values()) else None
        self._tasks, self._landed, self._timeline, self._label = tasks, landed, timeline, label
        shared = self._push.pipe == self._pull.pipe
        self._lanes = SharedWire(2).lanes if shared else (Line(), Line())
        self._left = [task.size for task in tasks]
        self._queue: list[tuple[int, int, _Answer]] = []
        self._count = self._handed = 0
        per_byte = max(1, self._pull.cost)
        self._credit = min(_MOST, max(_LEAST, (_AHEAD << COST_SHIFT) // per_byte))
        self._slice = min(_SLICE, self._credit // 2)

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Pushes ``chunk``, or has pulled what was pushed."""
        if self._local is not None:
            self._local.carry(chunk, world, lambda chunk: self._leave_host(chunk, world, done))
        else:
            self._leave_host(chunk, world, done)

    def _leave_host(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        if chunk.op == "all_gather":
            # Asked for without being sent: a message of a few bytes.
            pull = _Pull(chunk, done, chunk.size)
            for piece in chunk.pieces:
                world.schedule(world.now() + self._push.latency, ARRIVAL, self._answer, piece, world, pull)
            return

        messages = [part for piece in chunk.pieces for part in _parts(piece)]
        work = self._push.overhead
        for place, part in enumerate(messages):
            last = place + 1 == len(messages)
            work = max(self._push.floor if last else 0, work + moving(part.size, self._push.cost))
            self._push_part(chunk, part, work, world, done if last else None)
            work = 0  # One operation, however it is cut.

    def _push_part(
        self, chunk: Chunk, part: Piece, work: Time, world: VirtualWorld, done: Callable[[Chunk], None] | None
    ) -> None:
        def sent() -> None:
            arrived = world.now() + self._push.latency
            if chunk.op == "all_reduce":
                world.schedule(arrived, ARRIVAL, self._answer, part, world)
            if done is not None:
                world.schedule(arrived + self._pull.latency, ARRIVAL, done, chunk)

        self._send(_UP, part, work, world, sent)

    def _answer(self, part: Piece, world: VirtualWorld, pull: _Pull | None = None) -> None:
        """The server has, or is asked for, ``part``: its sum waits for its turn."""
        self._count += 1
        answer = _Answer(part, self._pull.overhead, pull)
        heappush(self._queue, (self._tasks[part.task].first_use, self._count, answer))
        self._hand_over(world)

    def _hand_over(self, world: VirtualWorld) -> None:
        while self._queue and self._handed < self._credit:
            urgency, count, answer = heappop(self._queue)
            piece = answer.piece
            if piece.size > self._slice:
                rest = Piece(piece.task, piece.offset + self._slice, piece.size - self._slice)
                heappush(self._queue, (urgency, count, _Answer(rest, 0, answer.pull)))
                answer = answer._replace(piece=Piece(piece.task, piece.offset, self._slice))
            self._handed += answer.piece.size
            self._give_back(answer, world)

    def _give_back(self, answer: _Answer, world: VirtualWorld) -> None:
        size = answer.piece.size

        def sent() -> None:
            arrived = world.now() + self._pull.latency
            world.schedule(arrived, ARRIVAL, self._arrive, answer.piece, answer.pull)
            world.schedule(arrived + self._push.latency, ARRIVAL, self._acknowledge, size, world)

        work = max(self._pull.floor, answer.overhead + moving(size, self._pull.cost))
        self._send(_DOWN, answer.piece, work, world, sent)

    def _arrive(self, piece: Piece, pull: _Pull | None) -> None:
        self._left[piece.task] -= piece.size
        if not self._left[piece.task]:
            self._left[piece.task] = self._tasks[piece.task].size
            self._landed(piece.task)
        if pull is not None:
            pull.came(piece.size)

    def _acknowledge(self, size: int, world: VirtualWorld) -> None:
        self._handed -= size
        self._hand_over(world)

    def _send(self, way: int, piece: Piece, work: Time, world: VirtualWorld, sent: Callable[[], None]) -> None:
        timeline, size = self._timeline, piece.size
        name, step = self._label(Chunk("all_reduce", (piece,), size)) if timeline is not None else ("", 0)

        def out(start: Time) -> None:
            if timeline is not None:
                timeline.add(Span(_NAMES[way], "communication", name, step, start, world.now(), size))
            sent()

        self._lanes[way].send(work, world, out)


class _Answer(NamedTuple):
    """Sums that a server has to send; ``overhead`` is what doing so costs besides their bytes, ps."""

    piece: Piece
    overhead: Time
    pull: _Pull | None


class _Pull:
    """Sums that were asked for; ``done(chunk)`` is called when all have come."""

    def __init__(self, chunk: Chunk, done: Callable[[Chunk], None], left: int) -> None:
        self._chunk, self._done, self._left = chunk, done, left

    def came(self, size: int) -> None:
        """``size`` more bytes have."""
        self._left -= size
        if not self._left:
            self._done(self._chunk)


def _parts(piece: Piece) -> Iterator[Piece]:
    """The messages in which ``piece`` is pushed."""
    for start in range(0, piece.size, _PART):
        yield Piece(piece.task, piece.offset + start, min(_PART, piece.size - start))
