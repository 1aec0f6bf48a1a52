"""Questions of ranks that have stopped, and when they can be answered.

What a question is about becomes known in the world; its answer never depends on what happened to be known when it was
asked. A query is about one instant, the asker's: it is answered when nothing more can happen then.
"""

from __future__ import annotations

from collections.abc import Callable

from foretrain.live.collectives import Collective
from foretrain.live.event_log import (
    DEVICE,
    ELAPSED,
    EVENT,
    LEAVE,
    QUERY_EVENT,
    QUERY_STREAM,
    QUESTIONS,
    ROOM,
    STREAM,
    VALUES,
    LogRecord,
    answer,
)
from foretrain.live.gpu import SimulatedGpu
from foretrain.live.p2p import P2PEndpoint
from foretrain.live.streams import StreamEvent, device_of
from foretrain.simulation.world import LOOK, VirtualWorld
from foretrain.units import Time


class HostQuery:
    """What one rank has asked.

    Args:
        gpu: the asker's.
        entry: the ASK.
        reply: called once, with the time at which the asker goes on and the answer.

    Attributes:
        host: when the asker asked, by its clock.
        meeting: whose values it asks for, or None.
    """

    def __init__(self, gpu: SimulatedGpu, entry: LogRecord, reply: Callable[[Time, bytes], None]) -> None:
        self.host = entry.host
        self.code = entry.code
        self.meeting: Collective | P2PEndpoint | None = None
        self._reply = reply
        self._events: list[StreamEvent] = []
        self._gpu, self._a = gpu, entry.a
        self._asked_about(entry)

    @property
    def queries(self) -> bool:
        """Whether it is about how things stand at `host`."""
        return self.code in (QUERY_STREAM, QUERY_EVENT)

    def known(self) -> bool:
        """Whether it is known when all that it is about happens."""
        return all(event.time is not None for event in self._events)

    def put(self) -> None:
        """Answers as soon as it can be; queries that cannot be at once are looked at by `DeferredQueries`."""
        if self.code == LEAVE:
            self._reply(self.host, answer(self.host))
        elif self.meeting is not None:
            self._answer_values(self.meeting)
        elif self.queries:
            if self.known():
                self.look()
        else:
            self._proceed()

    def look(self) -> None:
        """Answers a query: `host` is now, or what it is about is known."""
        done = all(event.time is not None and event.time <= self.host for event in self._events)
        self._reply(self.host, answer(self.host, int(done)))

    def _asked_about(self, entry: LogRecord) -> None:
        gpu, code = self._gpu, entry.code
        try:
            if code in (STREAM, QUERY_STREAM):
                self._events = [gpu.stream_end(entry.stream)]
            elif code == DEVICE:
                self._events = gpu.device_ends(device_of(entry.stream))
            elif code in (EVENT, QUERY_EVENT, ROOM):
                self._events = [gpu.event(entry.a)]
            elif code == ELAPSED:
                self._events = [gpu.event(entry.a), gpu.event(entry.b)]
            elif code == VALUES:
                self.meeting = gpu.event(entry.a).meeting
                assert self.meeting is not None, f"rank {gpu.rank}: event {entry.a} is no communication's"
        except KeyError as error:
            text = f"rank {gpu.rank} asks for {QUESTIONS[code]} of event {error}, which it never recorded or forgot"
            raise AssertionError(text) from None

    def _proceed(self) -> None:
        """Waits for the next event that is not known, or answers."""
        for event in self._events:
            if event.time is None:
                event.then(self._proceed)
                return
        times = [event.time for event in self._events if event.time is not None]
        time = max([self.host, *times])
        value = times[1] - times[0] if self.code == ELAPSED else times[0] if self.code == ROOM else 0
        self._reply(time, answer(time, value))

    def _answer_values(self, meeting: Collective | P2PEndpoint) -> None:
        values = meeting.values()
        if values is None:
            meeting.then(self.put)
        else:
            self._reply(self.host, answer(self.host, payload=values))


class DeferredQueries:
    """Queries that wait for their instant. All of one instant are answered together, whoever asked first."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._due: dict[Time, list[HostQuery]] = {}

    def at(self, question: HostQuery) -> None:
        """Looks when nothing more can happen at the question's `host`."""
        due = self._due.get(question.host)
        if due is None:
            self._due[question.host] = [question]
            self._world.schedule(question.host, LOOK, self._look, question.host)
        else:
            due.append(question)

    def _look(self, when: Time) -> None:
        for question in self._due.pop(when):
            question.look()
