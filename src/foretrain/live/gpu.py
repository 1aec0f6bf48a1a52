"""Simulated GPUs of one rank, whose streams run the records of its log, and the queries of its host.

An answer never depends on how much the executor knew when the query came. A query about one instant, the host's own, is
answered when nothing more can happen at that instant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from foretrain.live import event_log
from foretrain.live.collectives import ROOTED, Collective, CollectiveCall, CollectiveSource, CommGroup, RankHandle
from foretrain.live.event_log import COLLECTIVE, MESSAGE, OPERATIONS, RECORD, RUN, WAIT, LogRecord, answer
from foretrain.live.folding import Folding
from foretrain.live.network_traffic import CommLaunches, NetworkTraffic
from foretrain.live.p2p import P2PBatch, P2PEndpoint, P2PMatcher
from foretrain.live.rank_trace import RankTrace
from foretrain.live.scheduled_gradients import GradientSchedules, Member
from foretrain.live.streams import CALL, CommCall, SmShares, Stream, StreamEvent, device_of
from foretrain.simulation.world import LOOK, VirtualWorld
from foretrain.units import Time

ALL_TO_ALL: Final = OPERATIONS.index("all_to_all")


class CommRegistry:
    """Groups, collectives and messages under way, shared by all ranks.

    Attributes:
        uneven: groups whose members have sent each other uneven parts.
        exchanged: where to note of each uneven all-to-all the bytes of the busiest rank over the mean; None to not.
    """

    def __init__(self, world: VirtualWorld, traffic: NetworkTraffic, folding: Folding) -> None:
        self.starts = CommLaunches(world, traffic)
        self.p2p = P2PMatcher(self.starts, folding)
        self.schedules = GradientSchedules(self.starts, traffic, folding)
        self.uneven: set[CommGroup] = set()
        self.exchanged: list[float] | None = None
        self._folding, self._traffic = folding, traffic
        self._learnt: set[tuple[tuple[int, ...], int]] = set()
        self._groups: dict[tuple[tuple[int, ...], int], CommGroup] = {}
        self._asking: list[Callable[[], None]] = []

    def group(self, members: tuple[int, ...], copy: int, family: int) -> CommGroup:
        """Return the group of ``members``: the ``copy``-th that a rank makes of them is that of the other ranks."""
        group = self._groups.get((members, copy))
        if group is None:
            group = self._groups[members, copy] = CommGroup(members, family, self._folding, self.exchanged)
            asking, self._asking = self._asking, []
            for ask in asking:
                ask()
        return group

    def learn(self, members: tuple[int, ...], family: int) -> None:
        """Add a group that the script has made to folding and traffic."""
        if (members, family) not in self._learnt:
            self._learnt.add((members, family))
            self._folding.add(members, family)
            self._traffic.regrouped()

    def collective(self, group: CommGroup, rank: int, root: int | None) -> Collective:
        """Return the next collective of ``group`` that ``rank`` calls; ``root`` is its root's rank in the group."""
        number = group.called[rank] = group.called[rank] + 1
        collective = group.pending.get(number)
        if collective is None:
            collective = group.pending[number] = Collective(self.starts, group, number)
        stand_in = None if root is None else self._folding.representative(group.members[root])
        if stand_in is not None and stand_in not in group.weights:
            # Live for another reason than to represent: its group's root is represented in another group.
            members = self._folding.sibling(group.family, stand_in)
            if members is not None:
                find = partial(self._numbered, members, group.family, number)
                collective.source = CollectiveSource(find, self._asking.append)
        return collective

    def _numbered(self, members: tuple[int, ...], family: int, number: int) -> Collective | None:
        """Return the ``number``-th collective of the group of a family; None if nobody has made that group yet."""
        groups = (group for group in self._groups.values() if group.members == members and group.family == family)
        group = next(groups, None)
        if group is None:
            return None
        found = (group.kept or {}).get(number) or group.pending.get(number)
        if found is None:
            found = group.pending[number] = Collective(self.starts, group, number)
        return found

    def disagreements(self) -> None:
        """Raise Disagreement if members of a group have called different collectives so far."""
        for group in self._groups.values():
            for collective in group.pending.values():
                collective.check()


class SimulatedGpu:
    """GPUs of one rank: their streams, events and groups.

    Args:
        rank: in the world.
        world: the virtual clock.
        registry: groups and communications of all ranks.
        rank_trace: where steps and activities are recorded.
        slowdown: how much longer computing takes while communication of the same GPU is under way, 1 or more.
        size: ranks of the world.
    """

    def __init__(
        self, rank: int, world: VirtualWorld, registry: CommRegistry, rank_trace: RankTrace, slowdown: float, size: int
    ) -> None:
        self.rank = rank
        self._world, self._registry, self._rank_trace = world, registry, rank_trace
        self._sm_shares = SmShares(world, slowdown)
        self._handle = RankHandle(rank, self._sm_shares, rank_trace)
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, StreamEvent] = {}
        everyone = tuple(range(size))
        self._groups = {0: registry.group(everyone, 1, 0)}
        self._copies = Counter([everyone])
        self._splits: tuple[int, ...] | None = None
        self._batches: dict[int, P2PBatch] = {}
        self._exchanges: dict[int, Member] = {}

    def take(self, entries: Sequence[LogRecord]) -> None:
        """Queue ``entries``, which contain no queries, and execute what can be executed."""
        streams, events = self._streams, self._events
        for entry in entries:
            kind, _, _, number, a, _, _, host, _, _ = entry
            if kind == RUN:
                (streams.get(number) or self._stream(number)).queue.append(entry)
            elif kind == RECORD:
                event = events[a] = StreamEvent()
                (streams.get(number) or self._stream(number)).queue.append((RECORD, event, host))
            elif kind == WAIT:
                (streams.get(number) or self._stream(number)).queue.append((WAIT, events[a]))
            elif kind == COLLECTIVE:
                self._call(entry)
            elif kind == MESSAGE:
                self._send_or_receive(entry)
            else:
                self._other(entry)
        for stream in tuple(streams.values()):
            if stream.blocked is None and stream.queue:
                stream.advance()
        if self._rank_trace.is_long():
            self._rank_trace.settle(self._world.now(), self._running())

    def event(self, number: int) -> StreamEvent:
        """Return event ``number``; KeyError if there is none."""
        return self._events[number]

    def stream_end(self, number: int) -> StreamEvent:
        """Return the event that all work so far on stream ``number`` is done."""
        stream = self._streams.get(number)
        return stream.tail() if stream is not None else StreamEvent(0)

    def device_ends(self, device: int) -> list[StreamEvent]:
        """Return these events for all streams of ``device``."""
        return [stream.tail() for number, stream in self._streams.items() if device_of(number) == device]

    def calls(self) -> Iterator[CommCall]:
        """Yield the communications that its streams wait for, by stream."""
        for _, stream in sorted(self._streams.items()):
            if isinstance(stream.blocked, CollectiveCall | P2PBatch):
                yield stream.blocked

    def _stream(self, number: int) -> Stream:
        stream = self._streams[number] = Stream(number, self._world, self._sm_shares.of(number), self._rank_trace)
        return stream

    def _call(self, entry: LogRecord) -> None:
        group = self._groups[entry.b]
        stream = self._streams.get(entry.stream) or self._stream(entry.stream)
        part = CollectiveCall(self._handle, stream, entry)
        splits = None
        if entry.code == ALL_TO_ALL:
            splits, self._splits = self._splits, None
            if splits is not None and len(set(splits)) > 1:
                self._registry.uneven.add(group)
        root = part.root if part.code in ROOTED else None
        self._registry.collective(group, self.rank, root).post(part, splits)
        self._events[entry.a] = part.event
        stream.queue.append((CALL, part))

    def _send_or_receive(self, entry: LogRecord) -> None:
        stream = self._streams.get(entry.stream) or self._stream(entry.stream)
        batch = self._batches.get(entry.stream)
        if batch is None:
            batch = self._batches[entry.stream] = P2PBatch(self._handle, stream)
        end = self._registry.p2p.post(batch, self._groups[entry.b], entry)
        batch.ends.append(end)
        batch.host = max(batch.host, entry.host)
        self._events[entry.a] = end.event
        if not entry.flag:
            stream.queue.append((CALL, self._batches.pop(entry.stream)))

    def _other(self, entry: LogRecord) -> None:
        """Handle one of the rarer records."""
        if entry.kind == event_log.FORGET:
            for number in memoryview(entry.payload).cast("q"):
                self._events.pop(number, None)
        elif entry.kind == event_log.GROUP:
            members = tuple(memoryview(entry.payload).cast("i"))
            self._copies[members] += 1
            self._groups[entry.a] = self._registry.group(members, self._copies[members], entry.b)
            self._registry.learn(members, entry.b)
        elif entry.kind == event_log.SPLITS:
            self._splits = tuple(memoryview(entry.payload).cast("q"))
        elif entry.kind in (event_log.BEGIN, event_log.READY):
            here, landed = self._exchanges[entry.b].take(entry)
            if landed is not None:
                self._events[entry.a] = landed
            (self._streams.get(entry.stream) or self._stream(entry.stream)).queue.append((RECORD, here, entry.host))
        elif entry.kind == event_log.TASKS:
            self._exchanges[entry.a] = self._registry.schedules.join(self._handle, entry)
        elif entry.kind == event_log.NOTE and entry.code == event_log.STEP:
            self._rank_trace.marks[entry.a] = entry.host
            event = self._events[entry.b]
            event.then(partial(self._mark, entry.a, event))
        elif entry.kind == event_log.NOTE and entry.code == event_log.CHECKPOINT:
            event, step = self._events[entry.b], max(self._rank_trace.marks, default=0)
            event.then(partial(self._saved, entry, step, event))
        elif entry.kind == event_log.NOTE:
            self._rank_trace.note(entry)

    def _saved(self, entry: LogRecord, step: int, before: StreamEvent) -> None:
        assert before.time is not None
        self._rank_trace.saved(entry, step, max(entry.host - max(entry.a, before.time), 0))

    def _mark(self, step: int, event: StreamEvent) -> None:
        """Close ``step`` when nothing more can happen before its end, which is known now."""
        assert event.time is not None
        self._world.schedule(event.time, LOOK, self._close, step, event.time)

    def _close(self, step: int, end: int) -> None:
        self._rank_trace.close(step, end, self._running())

    def _running(self) -> Iterable[int]:
        return [begin for stream in self._sm_shares.running() if (begin := stream.under_way()) is not None]


class HostQuery:
    """Query of one rank's host.

    Args:
        gpu: of the rank that asks.
        entry: the ASK.
        reply: called once, with the time at which the rank goes on and the answer.

    Attributes:
        host: the rank's clock when it asked.
        comm: the communication whose values it asks for, or None.
    """

    def __init__(self, gpu: SimulatedGpu, entry: LogRecord, reply: Callable[[Time, bytes], None]) -> None:
        self.host = entry.host
        self.code = entry.code
        self.comm: Collective | P2PEndpoint | None = None
        self._reply = reply
        self._events: list[StreamEvent] = []
        self._gpu = gpu
        self._asked_about(entry)

    @property
    def queries(self) -> bool:
        """Return whether it asks for the state at `host`."""
        return self.code in (event_log.QUERY_STREAM, event_log.QUERY_EVENT)

    def known(self) -> bool:
        """Return whether the times of all events it depends on are known."""
        return all(event.time is not None for event in self._events)

    def put(self) -> None:
        """Answer as soon as possible; queries that cannot be answered at once go to `DeferredQueries`."""
        if self.code == event_log.LEAVE:
            self._reply(self.host, answer(self.host))
        elif self.comm is not None:
            self._answer_values(self.comm)
        elif self.queries:
            if self.known():
                self.look()
        else:
            self._proceed()

    def look(self) -> None:
        """Answer a query about the instant `host`, which is now unless the events are known."""
        done = all(event.time is not None and event.time <= self.host for event in self._events)
        self._reply(self.host, answer(self.host, int(done)))

    def _asked_about(self, entry: LogRecord) -> None:
        gpu, code = self._gpu, entry.code
        try:
            if code in (event_log.STREAM, event_log.QUERY_STREAM):
                self._events = [gpu.stream_end(entry.stream)]
            elif code == event_log.DEVICE:
                self._events = gpu.device_ends(device_of(entry.stream))
            elif code in (event_log.EVENT, event_log.QUERY_EVENT, event_log.ROOM):
                self._events = [gpu.event(entry.a)]
            elif code == event_log.ELAPSED:
                self._events = [gpu.event(entry.a), gpu.event(entry.b)]
            elif code == event_log.VALUES:
                self.comm = gpu.event(entry.a).comm
                assert self.comm is not None, f"rank {gpu.rank}: event {entry.a} is no communication's"
        except KeyError as error:
            what = f"{event_log.QUESTIONS[code]} of event {error}"
            raise AssertionError(f"rank {gpu.rank} asks for {what}, which it never recorded or forgot") from None

    def _proceed(self) -> None:
        """Wait for the next event whose time is not known, or answer."""
        for event in self._events:
            if event.time is None:
                event.then(self._proceed)
                return
        times = [event.time for event in self._events if event.time is not None]
        time = max([self.host, *times])
        value = 0
        if self.code == event_log.ELAPSED:
            value = times[1] - times[0]
        elif self.code == event_log.ROOM:
            value = times[0]
        self._reply(time, answer(time, value))

    def _answer_values(self, comm: Collective | P2PEndpoint) -> None:
        values = comm.values()
        if values is None:
            comm.then(self.put)
        else:
            # Virtual time may have gone on while it waited for another group.
            time = max(self.host, comm.sourced()) if isinstance(comm, Collective) else self.host
            self._reply(time, answer(time, payload=values))


class DeferredQueries:
    """Queries that wait for their instant; those of one instant are answered together."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._due: dict[Time, list[HostQuery]] = {}

    def at(self, query: HostQuery) -> None:
        """Look when nothing more can happen at the query's `host`."""
        due = self._due.get(query.host)
        if due is None:
            self._due[query.host] = [query]
            self._world.schedule(query.host, LOOK, self._look, query.host)
        else:
            due.append(query)

    def _look(self, when: Time) -> None:
        for query in self._due.pop(when):
            query.look()
