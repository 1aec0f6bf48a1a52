"""Ranks without a script: generators that write a log and are sent the answers to their questions.

A program is ``def program(rank: Rank)``; ``yield rank.frame()`` sends what has been written so far, and
``answer = yield rank.ask(...)`` stops for an answer.
"""

import random
import socket
import struct
from dataclasses import dataclass, field
from threading import Thread
from typing import NamedTuple

from foretrain.live import event_log as log
from foretrain.live.event_log import frames
from foretrain.live.executor import Executor, execute
from foretrain.live.folding import Folding
from foretrain.live.rank_trace import SimulationTrace
from foretrain.schedule import CostModel
from foretrain.simulation.world import ARRIVAL, VirtualWorld
from foretrain.units import per_byte

PER_BYTE = per_byte(1e9)
"""Of an all-reduce as policies see it: 1 byte a nanosecond."""


class Reply(NamedTuple):
    failed: bool
    time: int
    value: int
    payload: bytes

    def values(self):
        """(rank in the group, weight, bytes) of each."""
        found, at = [], 0
        while at < len(self.payload):
            rank, weight, size = log.CONTRIBUTION.unpack_from(self.payload, at)
            at += log.CONTRIBUTION.size
            found.append((rank, weight, self.payload[at : at + size]))
            at += size
        return found


@dataclass
class Rank:
    """Writes the log of one rank. ``clock`` is the host's."""

    number: int
    clock: int = 0
    replies: list[Reply] = field(default_factory=list)
    _records: bytearray = field(default_factory=bytearray)
    _payloads: bytearray = field(default_factory=bytearray)
    _event: int = 0
    _group: int = 0

    def put(self, kind, *, flag=0, code=0, stream=0, a=0, b=0, c=0, host=0, count=0, payload=b""):
        self._records += log.RECORD_LAYOUT.pack(kind, flag, code, stream, a, b, c, host, len(payload), count)
        self._payloads += payload

    def run(self, stream, work, *, floor=0, copied=0):
        """Kernels launched now; or later, if there is a ``floor``. Copy engines do ``copied`` of ``work``."""
        self.put(log.RUN, stream=stream, a=work, b=max(floor, self.clock + work), c=copied, count=1)

    def kernels(self, stream, *durations, every=0, copied=0):
        """The same, traced: one kernel launched each ``every``."""
        launches = [self.clock + every * i for i in range(len(durations))]
        floor = max(launch + sum(durations[i:]) for i, launch in enumerate(launches))
        each = (log.KERNEL.pack(i, 0, launches[i], durations[i]) for i in range(len(durations)))
        payload = b"".join(each)
        self.put(log.RUN, stream=stream, a=sum(durations), b=floor, c=copied, count=len(durations), payload=payload)

    def record(self, stream):
        self._event += 1
        self.put(log.RECORD, stream=stream, a=self._event, host=self.clock)
        return self._event

    def wait(self, stream, event):
        self.put(log.WAIT, stream=stream, a=event)

    def call(self, stream, operation, size=0, *, group=0, root=0, payload=b"", splits=None):
        if splits is not None:
            self.put(log.SPLITS, payload=struct.pack(f"<{len(splits)}q", *splits))
        self._event += 1
        code, event, host = log.OPERATIONS.index(operation), self._event, self.clock
        self.put(
            log.COLLECTIVE, code=code, stream=stream, a=event, b=group, c=size, host=host, count=root, payload=payload
        )
        return event

    def message(self, stream, peer, size, *, sends, group=0, more=False, payload=b""):
        self._event += 1
        how = {"flag": int(more), "code": int(not sends), "stream": stream, "count": peer, "payload": payload}
        self.put(log.MESSAGE, **how, a=self._event, b=group, c=size, host=self.clock)
        return self._event

    def group(self, *members, family=1):
        self._group += 1
        self.put(log.GROUP, a=self._group, b=family, payload=struct.pack(f"<{len(members)}i", *members))
        return self._group

    def tasks(self, number, announcement, *, lane=99):
        self.put(log.TASKS, stream=lane, a=number, payload=announcement.encode())

    def begin(self, stream, number):
        self.put(log.BEGIN, stream=stream, b=number, host=self.clock)

    def ready(self, stream, number, task):
        self._event += 1
        self.put(log.READY, stream=stream, a=self._event, b=number, count=task, host=self.clock)
        return self._event

    def forget(self, *events):
        self.put(log.FORGET, payload=struct.pack(f"<{len(events)}q", *events))

    def step(self, number, event):
        self.put(log.NOTE, code=log.STEP, a=number, b=event, host=self.clock)

    def note(self, code, *, a=0, b=0, payload=b""):
        self.put(log.NOTE, code=code, a=a, b=b, host=self.clock, payload=payload)

    def frame(self, asking=False):
        header = log.HEADER.pack(
            len(self._records) // log.RECORD_LAYOUT.size, len(self._payloads), self.clock, asking, 0
        )
        data = header + bytes(self._records) + bytes(self._payloads)
        self._records.clear()
        self._payloads.clear()
        return data, asking

    def ask(self, code, *, stream=0, a=0, b=0):
        self.put(log.ASK, code=code, stream=stream, a=a, b=b, host=self.clock)
        return self.frame(asking=True)

    def leave(self, status=0):
        return self.ask(log.LEAVE, a=status)

    def hear(self, data):
        status, size, time, value = log.ANSWER.unpack_from(data)
        reply = Reply(bool(status), time, value, data[log.ANSWER.size : log.ANSWER.size + size])
        if not reply.failed:
            self.clock = max(self.clock, time)
        self.replies.append(reply)
        return reply


class Constant:
    """Traffic in which everything takes a fixed time, whatever else is under way."""

    def __init__(self, world, duration=100):
        self._world, self._duration = world, duration
        self.log = []

    def _end(self, *what):
        duration = self._duration(*what) if callable(self._duration) else self._duration
        return self._world.now() + duration

    def collective(self, operation, size, group, splits, done):
        self.log.append((self._world.now(), operation, size, group, splits))
        self._world.schedule(self._end(operation, size), ARRIVAL, done)

    def messages(self, transfers, done):
        self.log.append((self._world.now(), "messages", tuple(transfers)))
        for (_, _, size), call in zip(transfers, done, strict=True):
            self._world.schedule(self._end("message", size), ARRIVAL, call)

    def regrouped(self):
        pass

    def cost(self, group):
        return CostModel(self.overhead(), PER_BYTE)

    def overhead(self):
        return 7


class Played(NamedTuple):
    trace: SimulationTrace
    ranks: dict[int, Rank]
    log: list

    def times(self, rank=0):
        """When each question of ``rank`` but the last, its leave, was answered."""
        return [reply.time for reply in self.ranks[rank].replies[:-1]]

    def outcome(self):
        """All that anyone could see of it."""
        rank_traces = {rank: (c.steps, list(c.activities()), c.warnings) for rank, c in self.trace.rank_traces.items()}
        return rank_traces, {rank: played.replies for rank, played in self.ranks.items()}, self.log


def folding_of(*representatives):
    """The folding in which each rank is represented by the given one."""
    live = [rank for rank, other in enumerate(representatives) if rank == other]
    return Folding(len(representatives), live, representatives)


class Stage:
    """A world with traffic, and the live ranks of a folding with their programs."""

    def __init__(self, programs, duration, folding, kept):
        self.folding = folding or Folding.all_live(len(programs))
        self.world = VirtualWorld()
        self.traffic = Constant(self.world, duration)
        self.ranks = {number: Rank(number) for number in self.folding.live}
        self.trace = SimulationTrace(self.folding.live, kept)
        self.playing = {n: _whole(program, self.ranks[n]) for n, program in zip(self.ranks, programs, strict=True)}

    def played(self):
        return Played(self.trace, self.ranks, self.traffic.log)


def play(*programs, duration=100, slowdown=1.0, folding=None, kept=0, steps=None):
    """Plays the program of each live rank in a thread over a real socket pair; the rank leaves at its end."""
    stage = Stage(programs, duration, folding, kept)
    pairs = {number: socket.socketpair() for number in stage.ranks}
    threads = [Thread(target=_drive, args=(stage.playing[n], rank, pairs[n][1])) for n, rank in stage.ranks.items()]
    for thread in threads:
        thread.start()
    ours = {rank: end for rank, (end, _) in pairs.items()}
    try:
        execute(ours, stage.world, stage.traffic, stage.folding, slowdown=slowdown, trace=stage.trace, steps=steps)
    finally:
        for end in ours.values():
            end.close()
        for thread in threads:
            thread.join()
    return stage.played()


def shuffled(seed, *programs, duration=100, slowdown=1.0, folding=None, kept=0):
    """The same without sockets: frames come, and time advances, in an order drawn with ``seed``."""
    rng, stage, asking = random.Random(seed), Stage(programs, duration, folding, kept), set()

    def reply(number, data):
        asking.discard(number)
        stage.ranks[number].hear(data)

    executor = Executor(stage.world, stage.traffic, stage.folding, reply, slowdown=slowdown, trace=stage.trace)
    while stage.playing:
        ready = sorted(set(stage.playing) - asking)
        if not ready or rng.random() < 0.3:
            executor.advance()
        else:
            _deliver(executor, stage.playing, stage.ranks[rng.choice(ready)], asking)
    executor.finish()
    return stage.played()


def _deliver(executor, playing, rank, asking):
    generator, reply = playing[rank.number], rank.replies[-1] if rank.replies else None
    try:
        data, asks = generator.send(reply)
    except StopIteration:
        del playing[rank.number]
        return
    if asks:
        asking.add(rank.number)
    for frame in frames(bytearray(data)):
        executor.receive(rank.number, frame)


def _whole(program, rank):
    yield from program(rank)
    yield rank.leave()


def _drive(generator, rank, end):
    """Sends what the program yields, and the answers to it."""
    with end, end.makefile("rb") as answers:
        reply = None
        while True:
            try:
                data, asks = generator.send(reply)
                end.sendall(data)
                reply = rank.hear(_answer(answers)) if asks else None
            except (StopIteration, ConnectionError):
                return


def _answer(answers):
    head = answers.read(log.ANSWER.size)
    if len(head) < log.ANSWER.size:
        raise ConnectionResetError
    return head + answers.read(log.ANSWER.unpack(head)[1])


def calling(operation, size=4, *, clock=0, **how):
    """A program that calls a collective and asks for its end."""

    def program(rank):
        rank.clock = clock
        rank.call(1, operation, size, **how)
        yield rank.ask(log.STREAM, stream=1)

    return program


def idle(rank):
    """A program that does nothing."""
    return iter(())
