"""Workers and shards without sockets: whatever is lost whenever, every worker has every round's sum, once.

Messages wait in queues until chance delivers them; connections and servers are lost with all that is on its way. What a
message holds must be, when it is delivered, what it was when it was sent: the copies are not written over meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from foretrain.comm.ps.client.inflight import InFlight, InFlightChunk  # noqa: E402
from foretrain.comm.ps.client.push_log import PushedRange, PushLog  # noqa: E402
from foretrain.comm.ps.frames import (  # noqa: E402
    ABSENT,
    ACCUMULATES,
    CLOSED,
    PULL_ONLY,
    STATEFUL,
    FrameKind,
    Header,
    unbundle,
)
from foretrain.comm.ps.placement import Declaration, Placement  # noqa: E402
from foretrain.comm.ps.server.shard import SumShard  # noqa: E402
from foretrain.comm.ps.server.snapshots import SnapshotPolicy, copied  # noqa: E402
from foretrain.plugins.torch.gradient_buffer import GradientBuffer  # noqa: E402
from foretrain.plugins.torch.ps.staging import Staging  # noqa: E402
from foretrain.tasks import Chunk, Piece, Task  # noqa: E402
from tests.comm.ps.server.stateful import RATE, Sgd  # noqa: E402

COUNTS = [40, 12]
"""Elements per task; of the first two parts, by `Limited`."""
LAST = 5


class Limited(Staging):
    """Parts of 128 bytes."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.declaration = Declaration(self.declaration.tasks, self.declaration.workers, limit=128)


class Line:
    """A worker's connection to one shard, and back; see the module."""

    def __init__(self, shard):
        self.shard, self.sessions, self.connected = shard, 1, True
        self.pushes = 0
        self.aside = deque()
        """What overtakes, and is overtaken by, the rest on its way down."""
        self.up, self.down = deque(), deque()

    def send(self, header, payload=b""):
        if self.connected:
            self.up.append((header, payload, bytes(payload)))
        return self.connected

    def cut(self):
        self.connected = False
        self.up.clear()
        self.down.clear()
        self.aside.clear()

    def mend(self):
        self.connected, self.sessions, self.pushes = True, self.sessions + 1, 0


class Server:
    """What `foretrain.comm.ps.server.job.ShardJob` does with a shard."""

    def __init__(self, number, shards, lines, memory):
        self.number, self.shards, self.lines, self.lives = number, shards, lines, 0
        self.memory = memory
        self.die()

    def die(self):
        self.lives += 1
        self.parts, self.keeping, self.done = None, None, set()
        for line in self.lines:
            line.cut()

    def hear(self, rank):
        header, payload, said = self.lines[rank].up.popleft()
        assert bytes(payload) == said, "written over while it was on its way"
        line, kind = self.lines[rank], header.kind
        if kind is FrameKind.DECLARE and self.parts is None:
            what = Declaration.decode(said)
            mine = [part for part in Placement(what, self.shards).parts if part.shard == self.number]
            kind_of_shard = SumShard if self.memory is None else Sgd
            self.parts = kind_of_shard(mine, what.tasks, len(self.lines), anew=header.offset > 0)
            self.keeping = None if self.memory is None else SnapshotPolicy(self.parts, self.memory)
        if kind in (FrameKind.DECLARE, FrameKind.WANTED):
            flag, done = (STATEFUL, self.parts.done[rank]) if self.keeping else (0, 0)
            if self.keeping:
                self.commit(rank, self.keeping.of(rank))
            line.down.append((Header(FrameKind.WANTED, flag, step=done, offset=self.lives), b""))
        elif kind is FrameKind.PUSH:
            flags = {"again": bool(header.flag & ACCUMULATES), "held": bool(header.flag & PULL_ONLY)}
            line.pushes += 1
            line.aside.append(Header(FrameKind.RECEIVED, offset=line.pushes))
            for part, offset, size, data in unbundle(header, memoryview(said)):
                self.answer_message(
                    self.parts.push(rank, part, header.step, offset, size, data if len(data) else None, **flags)
                )
            self.tell_progress()
        elif kind is FrameKind.PULL:
            self.answer_message(self.parts.pull(rank, header.part, header.step, header.offset, header.size))
        elif kind is FrameKind.DONE:
            self.done.add(rank)
            self.parts.worker_closed(rank)
            if self.keeping:
                self.keeping.want()
                self.tell_progress()
            elif len(self.done) == len(self.lines):
                for each in self.lines:
                    each.down.append((Header(FrameKind.DONE), b""))

    def tell_progress(self):
        for rank, progress in self.keeping.news().items() if self.keeping else ():
            if self.lines[rank].connected:
                self.commit(rank, progress)

    def commit(self, rank, to):
        header = Header(FrameKind.COMMITTED, CLOSED if to.closed else 0, step=to.saved, offset=to.done)
        self.lines[rank].down.append((header, b""))

    def answer_message(self, deliveries):
        for rank, (part, step, start, end, data) in deliveries:
            if self.lines[rank].connected:
                flag, payload = (ABSENT, b"") if data is None else (0, bytes(data))
                header = Header(FrameKind.VALUE, flag, part=part, step=step, offset=start, size=end - start)
                self.lines[rank].down.append((header, payload))


class Memory:
    """A disk that is written now and then, and survives the server."""

    failed = 0

    def late(self, shard):
        return False

    def __init__(self, chance):
        self.chance, self.saved, self.left, self.state, self.seen = chance, (), (), None, [0]

    def offer(self, shard, *, now=False):
        before, self.seen = self.seen, [*shard.done]
        if not (shard.between and (now or (self.seen != before and self.chance.random() < 0.4))):
            return False
        self.saved, self.left, self.state = [*shard.done], [*shard.left], copied(shard.state())
        return True

    def restore(self, shard):
        if self.state is not None:
            shard.restore(copied(self.state))
        self.seen = [*shard.done]


class Worker:
    """What `foretrain.plugins.torch.ps.exchange.ServedExchange` does; pieces are cut and pushed by chance."""

    def __init__(self, rank, workers, lines, chance, keeps):
        self.rank, self.lines, self.chance, self.keeps = rank, lines, chance, keeps
        gradients = GradientBuffer([torch.zeros(count) for count in COUNTS], range(len(COUNTS)))
        tasks = [
            Task(index=place, name=f"layer{place}", size=4 * count, first_use=place)
            for place, count in enumerate(COUNTS)
        ]
        self.staging = Limited(gradients, tasks, None, workers, "job")
        self.flights = InFlight([task.size for task in tasks])
        self.pushes = PushLog(self.staging, lines, self.flights, 0)
        self.views = gradients.views
        self.sums, self.pushed, self.acknowledged = [], [], []
        self.left, self.pulls, self.to_land, self.needed = [], [], 0, None
        for line in lines:
            self.pushes.hear(line)

    def begin(self):
        """The next round, if there is one and its time has come."""
        if self.to_land or self.needed is not None:
            return
        if self.pushes.step >= 0:
            self.sums.append([view.clone() for view in self.views])
        if self.pushes.step == LAST:
            self.needed = {line.shard for line in self.lines}
            for line in self.lines:
                self.say_done(line)
            return
        self.pushes.begin(again=(self.pushes.step + 1) % 3 == 2)
        self.to_land = len(COUNTS)
        self.left, self.pulls = [], []
        for task, view in enumerate(self.views):
            view.copy_(gradient(self.rank, self.pushes.step, task))
            cuts = sorted({0, COUNTS[task], *(self.chance.randrange(1, COUNTS[task]) for _ in range(2))})
            held = self.chance.random() < 0.3
            self.left += [(PushedRange(task, 4 * low, 4 * high), held) for low, high in pairwise(cuts)]
        self.chance.shuffle(self.left)

    def say_done(self, line):
        if self.needed is None or not self.pushes.ready(line.shard):
            return
        if self.keeps and self.pushes.saved(line.shard):
            self.needed.discard(line.shard)
        else:
            line.send(Header(FrameKind.DONE))

    def push(self):
        if self.left:
            together = [self.left.pop()]
            while self.left and self.left[-1][1] == together[0][1] and self.chance.random() < 0.5:
                together.append(self.left.pop())
            spans, held = [span for span, _ in together], together[0][1]
            size = sum(end - start for _, start, end in spans)
            pieces = tuple(Piece(task, start, end - start) for task, start, end in spans)
            chunk = Chunk("reduce_scatter" if held else "all_reduce", pieces, size)
            flight = InFlightChunk(chunk, self.acknowledged.append, size, 0)
            for span in spans:
                self.flights.push(flight, *span)
            self.pushed.append(chunk)
            step = self.pushes.step
            self.pushes.push(spans, lambda task: used(self.rank, step, task), held=held)
            if held:
                self.pulls += spans
        elif self.pulls:
            task, start, end = self.pulls.pop()
            chunk = Chunk("all_gather", (Piece(task, start, end - start),), end - start)
            self.flights.pull(InFlightChunk(chunk, lambda chunk: None, end - start, 0), task, start, end)
            self.pushes.pull(task, start, end)

    def hear(self, line):
        if line.aside and self.chance.random() < 0.5:
            for span in self.pushes.received(line, line.aside.popleft()):
                self.finish(self.flights.acknowledge(*span))
            return
        if not line.down:
            return
        header, payload = line.down.popleft()
        if header.kind is FrameKind.WANTED:
            self.pushes.wanted(line, header)
            self.say_done(line)
        elif header.kind is FrameKind.COMMITTED:
            self.pushes.committed(line, header)
            self.say_done(line)
        elif header.kind is FrameKind.DONE:
            self.needed.discard(line.shard)
        elif header.step == self.pushes.step:
            part = self.pushes.placement.parts[header.part]
            start = part.offset + header.offset
            self.finish(self.flights.acknowledge(part.task, start, start + header.size))
            self.pushes.together = True
            arrived = self.flights.arrive(part.task, start, start + header.size)
            for low, high in arrived.new:
                if header.flag & ABSENT:
                    self.views[part.task][low // 4 : high // 4] = 0
                else:
                    self.staging.store(part.task, low, memoryview(payload)[low - start : high - start])
            self.to_land -= arrived.landed

    def finish(self, flights):
        for flight in flights:
            flight.done(flight.chunk)

    def leave(self):
        """As when it has said goodbye."""
        for line in self.lines:
            line.cut()

    @property
    def over(self):
        return self.needed is not None and not self.needed


def used(rank, step, task):
    return (rank + step + task) % 5 != 0


def gradient(rank, step, task):
    return torch.randn(COUNTS[task], generator=torch.Generator().manual_seed(100 * step + 10 * rank + task))


def total(workers, step, task):
    found = np.zeros(COUNTS[task], np.float32)
    having = [gradient(rank, step, task).numpy() for rank in range(workers) if used(rank, step, task)]
    for place, each in enumerate(having):
        found = each if not place else found + each
    return found


def expected(workers, keeps):
    """By round and task: sums, or where servers keep parameters those after a step with each."""
    found = [np.zeros(count, np.float32) for count in COUNTS]
    for step in range(LAST + 1):
        having = [any(used(rank, step, task) for rank in range(workers)) for task in range(len(COUNTS))]
        if keeps:
            for task in range(len(COUNTS)):
                found[task] = found[task] - RATE * total(workers, step, task)
        else:
            found = [total(workers, step, task) for task in range(len(COUNTS))]
        yield [each if some else 0 * each for each, some in zip(found, having, strict=True)]


@given(
    st.integers(0, 1 << 32), st.integers(2, 3), st.integers(1, 2), st.sampled_from([0.002, 0.01, 0.05]), st.booleans()
)
@example(0, 2, 1, 0.0, False)
@example(
    196, 2, 2, 0.01, False
)  # a server is lost after it has told one worker that nobody needs it, and not the other
@settings(max_examples=25, deadline=None)
def test_every_round_once_whatever_is_lost(seed, workers, shards, rate, keeps):
    chance = random.Random(seed)
    grid = [[Line(shard) for shard in range(shards)] for _ in range(workers)]
    servers = [
        Server(shard, shards, [row[shard] for row in grid], Memory(chance) if keeps else None)
        for shard in range(shards)
    ]
    for line in (line for row in grid for line in row):
        line.connected = True
    team = [Worker(rank, workers, grid[rank], chance, keeps) for rank in range(workers)]
    turns = 0
    # Who hears that nobody needs it any more leaves; the others may not hear it, and wait no longer than they must.
    while not any(worker.over for worker in team) or any(worker.needed is None for worker in team):
        turns += 1
        assert turns < 100_000, "they wait for ever"
        worker, shard = chance.choice(team), chance.randrange(shards)
        line, trouble = worker.lines[shard], chance.random()
        if worker.over:
            worker.leave()
            continue
        if turns < 5000 and trouble < rate:
            servers[shard].die()
        elif turns < 5000 and trouble < 2 * rate:
            line.cut()
        elif not line.connected:
            if chance.random() < 0.2:
                line.mend()
                worker.pushes.hear(line)
        elif chance.random() < 0.4:
            worker.begin()
            worker.push()
        elif chance.random() < 0.5:
            worker.hear(line)
        elif line.up:
            servers[shard].hear(worker.rank)
    for worker in team:
        assert len(worker.sums) == LAST + 1
        assert sorted(map(id, worker.pushed)) == sorted(map(id, worker.acknowledged))
        for sums, right in zip(worker.sums, expected(workers, keeps), strict=True):
            for found, each in zip(sums, right, strict=True):
                np.testing.assert_array_equal(found.numpy(), each)
