"""A parameter server in virtual time, as one worker sees it where all workers are alike.

    start ──▶ local ──▶ up ──▶ server ──▶ queue, the most urgent first ──▶ down ──▶ landed
                                  └── acknowledged: done ──▶ credit

As in `foretrain.comm.ps`, pushing and pulling are two directions with orders of their own. A push is done, and its
credit back, when the server has acknowledged all of it; the sum comes as the server's queue has it. What a server has
handed to its socket cannot be overtaken, so it hands over little (`foretrain.network.switch_cluster`). Beside the
workers both directions share their hosts' links. On a sharded cluster a message is also on the link of the server that
has its bytes, at the same time. Acknowledgements have connections of their own, and wait for nothing. Whoever sends or
receives a message spends CPU time on it first, where the cluster says how much.

All workers being alike, the last of them has pushed a byte when the first has; nobody waits for another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

from foretrain.network.shards import balance, split
from foretrain.network.switch_cluster import MESSAGE, WINDOW, Route, Shards
from foretrain.simulation.host_cores import MessageEnd, UnlimitedEnd
from foretrain.simulation.links import ExclusiveLink, Label, Out, Pipes, SharedLink
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.tasks import Chunk, Op, Piece, Task
from foretrain.trace import Span, Timeline
from foretrain.units import Time, moving

_UP, _DOWN = 0, 1
_NAMES: Final = ("up", "down")
"""The timeline's lanes."""


class ParameterServerCarrier:
    """Moves chunks through servers.

    Args:
        routes: the hops of each operation; an all-reduce's last two are pushing and pulling.
        tasks: indexed by `Task.index`.
        landed: called with a task's index when the sums of all its bytes have come.
        timeline: where to record who used which wire when; None records nothing.
        label: names a chunk for the timeline.
        message: bytes that are summed, and answered, together, at most.
        ends: the cores of workers and of servers.
        shards: the links of several servers; a message is on the link of the one that has its bytes.
    """

    def __init__(
        self,
        routes: dict[Op, Route],
        tasks: Sequence[Task],
        landed: Callable[[int], None],
        timeline: Timeline | None = None,
        label: Label = lambda _: ("", 0),
        *,
        message: int = MESSAGE,
        ends: tuple[MessageEnd | UnlimitedEnd, MessageEnd | UnlimitedEnd] = (UnlimitedEnd(), UnlimitedEnd()),
        shards: Shards | None = None,
    ) -> None:
        self._message = message
        self._worker, self._server = ends
        self._push, self._pull = routes["all_reduce"][-2:]
        ways: dict[Op, Route] = {op: route[: -2 if op == "all_reduce" else -1] for op, route in routes.items()}
        self._local = Pipes(ways, timeline, label) if any(ways.values()) else None
        self._tasks, self._landed, self._timeline, self._label = tasks, landed, timeline, label
        shared = self._push.pipe == self._pull.pipe
        self._lanes = SharedLink(2).lanes if shared else (ExclusiveLink(), ExclusiveLink())
        self._shards = None if shards is None else ShardLinks(shards, tasks, message)
        self._left = [task.size for task in tasks]
        self._queue: list[tuple[int, int, _Answer]] = []
        self._count = self._handed = 0

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Push ``chunk``, or pull what was pushed."""
        if self._local is not None:
            self._local.carry(chunk, world, lambda chunk: self._leave_host(chunk, world, done))
        else:
            self._leave_host(chunk, world, done)

    def _leave_host(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        if chunk.op == "all_gather":
            # Asked for without being sent: a message of a few bytes.
            pull = _Pull(chunk, done, chunk.size)
            overhead, asked = self._pull.overhead, world.now() + self._push.latency
            for piece in chunk.pieces:
                world.schedule(asked, ARRIVAL, self._answer, piece, overhead, world, pull)
                overhead = 0
            return

        cut = partial(_messages, most=self._message) if self._shards is None else self._shards.cut
        messages = [part for piece in chunk.pieces for part in cut(piece)]
        for place, part in enumerate(messages):
            last = place + 1 == len(messages)
            # One operation, however it is cut: the first message costs what any does, the last what the least does.
            work = moving(part.size, self._push.cost) + (0 if place else self._push.overhead)
            work = max(self._push.floor if last else 0, work)
            heard = self._hears(chunk, part, 0 if place else self._pull.overhead, done if last else None, world)
            self._worker.handle(part.size, world, partial(self._send, _UP, part, work, world, heard))

    def _hears(
        self, chunk: Chunk, part: Piece, overhead: Time, done: Callable[[Chunk], None] | None, world: VirtualWorld
    ) -> Callable[[], None]:
        """Handle that ``part`` has left: the server has it, says so, and has its sum to send."""

        def arrive() -> None:
            if done is not None:
                world.schedule(world.now() + self._pull.latency, ARRIVAL, done, chunk)
            if chunk.op == "all_reduce":
                self._answer(part, overhead, world)

        receive = partial(self._server.handle, part.size, world, arrive)
        return lambda: world.schedule(world.now() + self._push.latency, ARRIVAL, receive)

    def _answer(self, part: Piece, overhead: Time, world: VirtualWorld, pull: _Pull | None = None) -> None:
        """The server has, or is asked for, ``part``: its sum waits for its turn."""
        self._count += 1
        answer = _Answer(part, overhead, pull)
        heappush(self._queue, (self._tasks[part.task].first_use, self._count, answer))
        self._hand_over(world)

    def _hand_over(self, world: VirtualWorld) -> None:
        while self._queue and self._handed < WINDOW:
            urgency, count, answer = heappop(self._queue)
            piece = answer.piece
            if piece.size > (most := self._message):
                rest = Piece(piece.task, piece.offset + most, piece.size - most)
                heappush(self._queue, (urgency, count, _Answer(rest, 0, answer.pull)))
                answer = answer._replace(piece=Piece(piece.task, piece.offset, most))
            self._handed += answer.piece.size
            self._give_back(answer, world)

    def _give_back(self, answer: _Answer, world: VirtualWorld) -> None:
        size = answer.piece.size

        receive = partial(self._worker.handle, size, world, partial(self._arrive, answer, world))

        def sent() -> None:
            world.schedule(world.now() + self._pull.latency, ARRIVAL, receive)

        work = max(self._pull.floor, answer.overhead + moving(size, self._pull.cost))
        self._server.handle(size, world, partial(self._send, _DOWN, answer.piece, work, world, sent))

    def _arrive(self, answer: _Answer, world: VirtualWorld) -> None:
        task, size = answer.piece.task, answer.piece.size
        world.schedule(world.now() + self._push.latency, ARRIVAL, self._acknowledge, size, world)
        self._left[task] -= size
        if not self._left[task]:
            self._left[task] = self._tasks[task].size
            self._landed(task)
        if answer.pull is not None:
            answer.pull.came(size)

    def _acknowledge(self, size: int, world: VirtualWorld) -> None:
        self._handed -= size
        self._hand_over(world)

    def _send(self, way: int, piece: Piece, work: Time, world: VirtualWorld, sent: Callable[[], None]) -> None:
        """Call ``sent`` when ``piece`` has left both the worker's link and the server's."""
        timeline, size = self._timeline, piece.size
        left = 1 if self._shards is None else 2

        def through(start: Time) -> None:
            nonlocal left
            left -= 1
            if not left:
                sent()

        name, step = self._label(Chunk("all_reduce", (piece,), size)) if timeline is not None else ("", 0)

        def out(start: Time) -> None:
            if timeline is not None:
                timeline.add(Span(_NAMES[way], "communication", name, step, start, world.now(), size))
            through(start)

        self._lanes[way].send(work, world, out)
        if self._shards is not None:
            self._shards.send(way, piece, world, through)


class ShardLinks:
    """Links of servers that hold parts of the tasks each.

    Args:
        shards: their number and rates.
        tasks: indexed by task.
        limit: most bytes of a part.
    """

    def __init__(self, shards: Shards, tasks: Sequence[Task], limit: int) -> None:
        parts = [(task, *part) for task in tasks for part in split(task.size, limit)]
        homes = balance([size for _, _, size in parts], [task.first_use for task, _, _ in parts], shards.number)
        self._starts: list[list[int]] = [[] for _ in tasks]
        self._homes: list[list[int]] = [[] for _ in tasks]
        for (task, offset, _), home in zip(parts, homes, strict=True):
            self._starts[task.index].append(offset)
            self._homes[task.index].append(home)
        self._costs = shards.push, shards.pull
        self._links = tuple(tuple(ExclusiveLink() for _ in range(shards.number)) for _ in self._costs)

    def cut(self, piece: Piece) -> Iterator[Piece]:
        """Yield the messages in which ``piece`` is pushed: a message is for one part."""
        starts, at, end = self._starts[piece.task], piece.offset, piece.offset + piece.size
        while at < end:
            part = bisect_right(starts, at)
            until = min(end, starts[part]) if part < len(starts) else end
            yield Piece(piece.task, at, until - at)
            at = until

    def send(self, way: int, piece: Piece, world: VirtualWorld, out: Out) -> None:
        """Send ``piece`` over the link of the server that has its first byte."""
        part = bisect_right(self._starts[piece.task], piece.offset) - 1
        link = self._links[way][self._homes[piece.task][part]]
        link.send(moving(piece.size, self._costs[way]), world, out)


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


def _messages(piece: Piece, most: int) -> Iterator[Piece]:
    """The messages of at most ``most`` bytes in which ``piece`` is pushed."""
    for start in range(0, piece.size, most):
        yield Piece(piece.task, piece.offset + start, min(most, piece.size - start))
