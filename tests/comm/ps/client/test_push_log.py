"""Workers and shards without sockets: whatever is lost whenever, every worker has every round's sum, once.

Messages wait in queues until chance delivers them; connections and servers are lost with all that is on its way. What a
message holds must be, when it is delivered, what it was when it was sent: the copies are not written over meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretrain.comm.ps.client.inflight import InFlight, InFlightChunk
from foretrain.comm.ps.client.push_log import PushedRange, PushLog
from foretrain.comm.ps.frames import FrameKind, Handshake, Header, unbundle
from foretrain.comm.ps.placement import Declaration
from foretrain.comm.ps.server import job
from foretrain.comm.ps.server.job import ServerConfig, ShardJob
from foretrain.comm.ps.server.peers import AuthenticatedPeer
from foretrain.comm.ps.server.snapshots import copied
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.ps.staging import Staging
from foretrain.plugins.torch.streams import HostStreams
from foretrain.tasks import Chunk, Piece, Task
from tests.comm.ps.client.framing import framed
from tests.comm.ps.server.stateful import RATE, Sgd

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
        self.aside = deque()
        """Messages of the second connection."""
        self.up, self.down = deque(), deque()
        self.placement = None
        self.unacknowledged, self.acknowledged = deque(), 0
        """Round and ranges of each message with pushes that has no answer, and how many have one."""

    def take_answers(self, flights, epoch):
        self.unacknowledged.clear()
        self.acknowledged = 0

    def push(self, step, flag, spans):
        for header, payload, ranges in framed(self.placement, self.shard, step, flag, spans):
            if self.send(header, payload):
                self.unacknowledged.append((step, ranges))

    def received(self, header):
        """The ranges that a RECEIVED acknowledges."""
        while self.acknowledged < header.offset:
            step, ranges = self.unacknowledged.popleft()
            self.acknowledged += 1
            for each in ranges:
                yield step, each

    def send(self, header, payload=b""):
        if self.connected:
            payload = payload if isinstance(payload, tuple) else (payload,)
            self.up.append((header, payload, b"".join(payload)))
        return self.connected

    def cut(self):
        self.connected = False
        self.up.clear()
        self.down.clear()
        self.aside.clear()

    def mend(self):
        self.connected, self.sessions = True, self.sessions + 1


class Server:
    """A production `ShardJob` whose messages go over lines."""

    def __init__(self, number, shards, lines):
        self.lines = lines
        # `watch` is not called, so that time plays no role, and the credit needs no acknowledgements of sums.
        self.terms = ServerConfig(
            len(lines), number, shards, peer_timeout=1e9, credit=1 << 40, snapshots=Path("memory")
        )
        self.die()

    def die(self):
        self.job = ShardJob(self.terms, self.deliver)
        for line in self.lines:
            line.cut()

    def admit(self, rank):
        self.job.admit(AuthenticatedPeer(Handshake(rank, self.terms.shard, bytes(32), bytes(32))), rank)
        self.job.peers.of_rank(rank).aside = rank

    def hear(self, rank):
        header, payload, said = self.lines[rank].up.popleft()
        assert b"".join(payload) == said, "written over while it was in flight"
        self.job.take(self.job.peers.of_rank(rank), header, memoryview(said))
        self.job.flush()
        self.job._tell_progress()

    def deliver(self, route, header, payload):
        line = self.lines[route]
        payload = payload if isinstance(payload, tuple) else (payload,)
        if line.connected and header.kind is FrameKind.RECEIVED:
            line.aside.append(header)
        elif line.connected:
            line.down.append((header, b"".join(payload)))
        return line.connected


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
    """What `foretrain.comm.ps.client.exchange.ServedExchange` does; pieces are cut and pushed by chance."""

    def __init__(self, rank, workers, lines, chance, keeps, lossy):
        self.rank, self.lines, self.chance, self.keeps, self.lossy = rank, lines, chance, keeps, lossy
        gradients = GradientBuffer([torch.zeros(count) for count in COUNTS], range(len(COUNTS)))
        tasks = [
            Task(index=place, name=f"layer{place}", size=4 * count, first_use=place)
            for place, count in enumerate(COUNTS)
        ]
        self.staging = Limited(gradients, tasks, None, workers, "job", HostStreams())
        self.flights = InFlight([task.size for task in tasks])
        self.pushes = PushLog(self.staging, lines, self.flights, 0)
        self.views = gradients.views
        self.sums, self.pushed, self.acknowledged = [], [], []
        self.left, self.pulls, self.to_land, self.needed = [], [], 0, None
        for line in lines:
            line.placement = self.pushes.placement
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
            for step, span in line.received(line.aside.popleft()):
                if step == self.pushes.step:
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
            for number, offset, size, data in unbundle(header, memoryview(payload)):
                part = self.pushes.placement.parts[number]
                start = part.offset + offset
                self.finish(self.flights.acknowledge(part.task, start, start + size))
                self.pushes.together = True
                arrived = self.flights.arrive(part.task, start, start + size)
                assert self.lossy or sum(high - low for low, high in arrived.new) == size, "a sum was sent twice"
                for low, high in arrived.new:
                    if len(data):
                        self.staging.store(part.task, low, data[low - start : high - start])
                    else:
                        self.views[part.task][low // 4 : high // 4] = 0
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
    having = [gradient(rank, step, task).numpy() for rank in range(workers) if used(rank, step, task)]
    return sum(having, np.zeros(COUNTS[task], np.float32))


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
    st.integers(0, 1 << 32),
    st.integers(2, 3),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.002, 0.01, 0.05]),
    st.booleans(),
)
@example(0, 2, 1, 0.0, False)
@example(196, 2, 2, 0.01, False)  # a server dies after it has sent DONE to one worker, and not to the other
@settings(max_examples=25, deadline=None)
def test_every_worker_gets_every_sum_once_whatever_is_lost(seed, workers, shards, rate, keeps):
    chance = random.Random(seed)
    memories = [Memory(chance) for _ in range(shards)]
    with pytest.MonkeyPatch.context() as patch:
        if keeps:
            patch.setattr(
                job,
                "mode",
                lambda what, mine, count, lost, restarted, _: Sgd(mine, what.tasks, count, restarted=restarted),
            )
            patch.setattr(job, "Snapshots", lambda *options: memories[options[-2]])
        train(chance, workers, shards, rate, keeps)


def train(chance, workers, shards, rate, keeps):
    grid = [[Line(shard) for shard in range(shards)] for _ in range(workers)]
    servers = [Server(shard, shards, [row[shard] for row in grid]) for shard in range(shards)]
    for rank, row in enumerate(grid):
        for line in row:
            line.connected = True
            servers[line.shard].admit(rank)
    team = [Worker(rank, workers, grid[rank], chance, keeps, rate > 0) for rank in range(workers)]
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
                servers[shard].admit(worker.rank)
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
