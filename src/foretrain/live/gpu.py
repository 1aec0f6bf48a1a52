"""What one rank has launched, on one simulated GPU or several: sorts the records of its log into streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from foretrain.live.collectives import Collective, Part
from foretrain.live.folding import Folding
from foretrain.live.groups import Group, Party
from foretrain.live.messages import Batch, Mail
from foretrain.live.scheduling import Member, Schedules
from foretrain.live.starts import Starts, Traffic
from foretrain.live.story import Chapter
from foretrain.live.streams import CALL, Call, Event, Paces, Stream, device_of
from foretrain.live.wire import (
    BEGIN,
    COLLECTIVE,
    FORGET,
    GROUP,
    MESSAGE,
    NOTE,
    OPERATIONS,
    READY,
    RECORD,
    RUN,
    SPLITS,
    STEP,
    TASKS,
    WAIT,
    Entry,
)
from foretrain.virtual.world import LOOK, VirtualWorld

ALL_TO_ALL: Final = OPERATIONS.index("all_to_all")


class Meetings:
    """What the ranks share: groups, collectives and messages under way."""

    def __init__(self, world: VirtualWorld, traffic: Traffic, folding: Folding) -> None:
        self.starts = Starts(world, traffic)
        self.mail = Mail(self.starts, folding)
        self.schedules = Schedules(self.starts, traffic, folding)
        self._folding, self._traffic = folding, traffic
        self._learnt: set[tuple[tuple[int, ...], int]] = set()
        self._groups: dict[tuple[tuple[int, ...], int], Group] = {}

    def group(self, members: tuple[int, ...], copy: int, family: int) -> Group:
        """The group of ``members``: the ``copy``-th that a rank makes of them is that of the other ranks."""
        group = self._groups.get((members, copy))
        if group is None:
            group = self._groups[members, copy] = Group(members, family, self._folding)
        return group

    def learn(self, members: tuple[int, ...], family: int) -> None:
        """The script has made this group: what was alike may be told apart, and what acts together be known."""
        if (members, family) not in self._learnt:
            self._learnt.add((members, family))
            self._folding.add(members, family)
            self._traffic.regrouped()

    def collective(self, group: Group, rank: int) -> Collective:
        """The next collective of ``group`` that ``rank`` calls."""
        number = group.called[rank] = group.called[rank] + 1
        collective = group.pending.get(number)
        if collective is None:
            collective = group.pending[number] = Collective(self.starts, group, number)
        return collective

    def disagreements(self) -> None:
        """Raises if members of a group have called different things, though not all have called yet."""
        for group in self._groups.values():
            for collective in group.pending.values():
                collective.check()


class Gpu:
    """What one rank has launched.

    Args:
        rank: in the world.
        world: whose time it is.
        meetings: where it meets the others.
        chapter: keeps what happens.
        slowdown: how much longer computing takes while communication of the same GPU is under way, 1 or more.
        size: ranks of the world.
    """

    def __init__(
        self, rank: int, world: VirtualWorld, meetings: Meetings, chapter: Chapter, slowdown: float, size: int
    ) -> None:
        self.rank = rank
        self._world, self._meetings, self._chapter = world, meetings, chapter
        self._paces = Paces(world, slowdown)
        self._party = Party(rank, self._paces, chapter)
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        everyone = tuple(range(size))
        self._groups = {0: meetings.group(everyone, 1, 0)}
        self._copies = Counter([everyone])
        self._splits: tuple[int, ...] | None = None
        self._batches: dict[int, Batch] = {}
        self._exchanges: dict[int, Member] = {}

    def take(self, entries: Sequence[Entry]) -> None:
        """Queues ``entries``, but no questions, and executes what can be executed."""
        streams, events = self._streams, self._events
        for entry in entries:
            kind, _, _, number, a, _, _, host, _, _ = entry
            if kind == RUN:
                (streams.get(number) or self._stream(number)).queue.append(entry)
            elif kind == RECORD:
                event = events[a] = Event()
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
        if self._chapter.is_long():
            self._chapter.settle(self._world.now(), self._running())

    def event(self, number: int) -> Event:
        """Event ``number``; KeyError if there is none."""
        return self._events[number]

    def stream_end(self, number: int) -> Event:
        """The event that all work so far on stream ``number`` is done."""
        stream = self._streams.get(number)
        return stream.tail() if stream is not None else Event(0)

    def device_ends(self, device: int) -> list[Event]:
        """The same of all streams of ``device``."""
        return [stream.tail() for number, stream in self._streams.items() if device_of(number) == device]

    def calls(self) -> Iterator[Call]:
        """The communications that its streams stand at, by stream."""
        for _, stream in sorted(self._streams.items()):
            if isinstance(stream.blocked, Part | Batch):
                yield stream.blocked

    def _stream(self, number: int) -> Stream:
        stream = self._streams[number] = Stream(number, self._world, self._paces.of(number), self._chapter)
        return stream

    def _call(self, entry: Entry) -> None:
        group = self._groups[entry.b]
        stream = self._streams.get(entry.stream) or self._stream(entry.stream)
        part = Part(self._party, stream, entry)
        splits = None
        if entry.code == ALL_TO_ALL:
            splits, self._splits = self._splits, None
        self._meetings.collective(group, self.rank).post(part, splits)
        self._events[entry.a] = part.event
        stream.queue.append((CALL, part))

    def _send_or_receive(self, entry: Entry) -> None:
        stream = self._streams.get(entry.stream) or self._stream(entry.stream)
        batch = self._batches.get(entry.stream)
        if batch is None:
            batch = self._batches[entry.stream] = Batch(self._party, stream)
        end = self._meetings.mail.post(batch, self._groups[entry.b], entry)
        batch.ends.append(end)
        batch.host = max(batch.host, entry.host)
        self._events[entry.a] = end.event
        if not entry.flag:
            stream.queue.append((CALL, self._batches.pop(entry.stream)))

    def _other(self, entry: Entry) -> None:
        """One of the rarer records."""
        if entry.kind == FORGET:
            for number in memoryview(entry.payload).cast("q"):
                self._events.pop(number, None)
        elif entry.kind == GROUP:
            members = tuple(memoryview(entry.payload).cast("i"))
            self._copies[members] += 1
            self._groups[entry.a] = self._meetings.group(members, self._copies[members], entry.b)
            self._meetings.learn(members, entry.b)
        elif entry.kind == SPLITS:
            self._splits = tuple(memoryview(entry.payload).cast("q"))
        elif entry.kind in (BEGIN, READY):
            here, landed = self._exchanges[entry.b].take(entry)
            if landed is not None:
                self._events[entry.a] = landed
            (self._streams.get(entry.stream) or self._stream(entry.stream)).queue.append((RECORD, here, entry.host))
        elif entry.kind == TASKS:
            self._exchanges[entry.a] = self._meetings.schedules.join(self._party, entry)
        elif entry.kind == NOTE and entry.code == STEP:
            self._chapter.marks[entry.a] = entry.host
            event = self._events[entry.b]
            event.then(partial(self._mark, entry.a, event))
        elif entry.kind == NOTE:
            self._chapter.note(entry)

    def _mark(self, step: int, event: Event) -> None:
        """The end of ``step`` is known: its account is made when nothing more can happen before."""
        assert event.time is not None
        self._world.schedule(event.time, LOOK, self._close, step, event.time)

    def _close(self, step: int, end: int) -> None:
        self._chapter.close(step, end, self._running())

    def _running(self) -> Iterable[int]:
        return [begin for stream in self._paces.running() if (begin := stream.under_way()) is not None]
