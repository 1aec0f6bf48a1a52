"""Executor of the ranks' logs: reads what they send, advances virtual time as far as it may, and answers.

See Note [Conservative time] in `foretrain.live`. What happens at one instant does not depend on the order in which
frames came: streams and events only ever take the latest of times, which is the same in every order; starts and
queries, which order could influence, wait for the end of the instant and are taken together
(Note [Starts of one instant] in `foretrain.live.network_traffic`).
"""

from __future__ import annotations

import gc
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, Final, NoReturn

from foretrain.errors import ForetrainError, PeerLost, StallError
from foretrain.live.collectives import CommGroup, who
from foretrain.live.event_log import ASK, FORGET, LEAVE, Frame, answer, frames
from foretrain.live.folding import Folding, Message
from foretrain.live.gpu import CommRegistry, DeferredQueries, HostQuery, SimulatedGpu
from foretrain.live.network_traffic import NetworkTraffic
from foretrain.live.rank_trace import SimulationTrace
from foretrain.live.routed_loads import routers_before
from foretrain.simulation.world import VirtualWorld
from foretrain.units import SECOND, Time, format_time

Waiting = Callable[[tuple[int, ...], float], None]

_FOREVER: Final[Time] = 1 << 62
_QUIET_TIME: Final = 1.0
"""Seconds without a frame from any rank until the caller is told which ranks compute."""
_SETTLE_TIME: Final = 2.0
"""Seconds for the other ranks to reach their next stop when one rank is lost."""
_POLLING_LIMIT: Final[Time] = 24 * 3600 * SECOND
"""Virtual time after which a rank that does nothing but ask whether something has happened is told that it never will.
Long enough for every timeout that a script may have of its own."""
_READ: Final = 1 << 20


class FoldingInvalid(ForetrainError):
    """Represented ranks matter by themselves, so they must be live.

    Attributes:
        messages: that they exchange with live ones: source, target, and the group they were addressed in.
        singled_out: ranks that the script does something on, and the line that asks for each.
        routers_before: for each rank, the routers of the stages before its own, where these were not known; else empty.
    """

    def __init__(
        self,
        messages: tuple[Message, ...],
        singled_out: Mapping[int, str] | None = None,
        routers_before: tuple[int, ...] = (),
    ) -> None:
        self.messages, self.routers_before = messages, routers_before
        self.singled_out = dict(singled_out or {})
        super().__init__(f"{len(messages)} messages of ranks that are not live, {len(self.singled_out)} singled out")


class RankLost(PeerLost):
    """A live rank's connection closed before it left; ``rank`` is its number."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class LiveRank:
    """State of a live rank.

    Attributes:
        clock: the least that its host's clock can be.
        query: the query it waits for; None while it runs.
        left: whether it has ended as it should.
        polling_since: since when, by its clock, it has only polled for an event of unknown time; None if it has not.
    """

    __slots__ = ("clock", "gpu", "left", "number", "polling_since", "query")

    def __init__(self, number: int, gpu: SimulatedGpu) -> None:
        self.number, self.gpu = number, gpu
        self.clock: Time = 0
        self.query: HostQuery | None = None
        self.left = False
        self.polling_since: Time | None = None


class Executor:
    """Executor of the logs of all live ranks in one world; `execute` connects it to sockets.

    Args:
        world: owned by the executor from now on.
        traffic: the network.
        folding: which ranks are live.
        reply: sends an answer to a rank.
        slowdown: how much longer computing takes while communication of the same GPU is under way, 1 or more.
        trace: where steps and activities are recorded.
        steps: a rank whose optimizer has made so many is ended on purpose, wherever it is; None if none is.
        uneven_experts: whether loads of experts are given, so that ranks of a group that exchanges tokens in uneven
            parts must all be live.
        routers_before: for each rank, the routers of the stages before its own, as the ranks were told.
    """

    def __init__(
        self,
        world: VirtualWorld,
        traffic: NetworkTraffic,
        folding: Folding,
        reply: Callable[[int, bytes], None],
        *,
        slowdown: float = 1.0,
        trace: SimulationTrace,
        steps: int | None = None,
        uneven_experts: bool = False,
        routers_before: tuple[int, ...] = (),
    ) -> None:
        self._world, self._send, self._trace, self._steps = world, reply, trace, steps
        self._deferred = DeferredQueries(world)
        self._registry = registry = CommRegistry(world, traffic, folding)
        self._folding = folding
        self._uneven_experts = uneven_experts and not folding.final
        self._numbering = uneven_experts and not routers_before
        self._exchanging: set[CommGroup] = set()
        if uneven_experts:
            registry.exchanged = trace.exchanged
        trace.schedules = registry.schedules
        self._ranks = {
            rank: LiveRank(rank, SimulatedGpu(rank, world, registry, trace.rank_traces[rank], slowdown, folding.world))
            for rank in folding.live
        }

    @property
    def over(self) -> bool:
        """Return whether all ranks have left."""
        return all(rank.left for rank in self._ranks.values())

    def receive(self, number: int, frame: Frame) -> None:
        """Take a frame that a rank has sent.

        Raises:
            Disagreement: ranks that meet call different things.
        """
        rank = self._ranks[number]
        asks = bool(frame.entries) and frame.entries[-1].kind == ASK
        told = frame.entries[:-1] if asks else frame.entries
        rank.gpu.take(told)
        if self._registry.uneven:
            self._exchanging |= self._registry.uneven
            if self._uneven_experts:
                self._unfold_experts()
            self._registry.uneven.clear()
        if self._trace.rank_traces[number].marks:  # until its first step it may still send messages that matter as well
            self._check_singled_out()
            self._number_routers()
        if any(entry.kind != FORGET for entry in told):
            rank.polling_since = None
        rank.clock = max(rank.clock, frame.host)
        if not asks:
            return
        entry = frame.entries[-1]
        if entry.code == LEAVE:
            rank.left = True
            self._trace.rank_traces[number].status = entry.a
        rank.query = query = HostQuery(rank.gpu, entry, partial(self._reply, rank))
        query.put()
        if rank.query is query and query.queries:
            self._deferred.at(query)

    def advance(self) -> None:
        """Advance virtual time as far as possible, until a rank goes on.

        Raises:
            StallError: all ranks have stopped, and none can be answered.
        """
        self._world.advance(min((rank.clock for rank in self._running()), default=_FOREVER))
        if not self.over and not self._running():
            self._stall("all ranks wait, and nothing more can happen:")

    def finish(self) -> None:
        """Execute the work that is left when all ranks have left.

        Raises:
            StallError: something waits for a rank that has ended, and was not ended on purpose.
        """
        self._world.advance(_FOREVER)
        self._check_folding()
        missing = {rank for live in self._ranks.values() for call in live.gpu.calls() for rank in call.missing()}
        if not all(self._ended_on_purpose(rank) for rank in missing):
            self._stall("all ranks have ended, but not all that they launched can:")

    def running(self) -> tuple[int, ...]:
        """Return the ranks that neither ask nor have left."""
        return tuple(rank.number for rank in self._running())

    def has_left(self, number: int) -> bool:
        """Return whether a rank has ended as it should."""
        return self._ranks[number].left

    def lost(self, number: int) -> None:
        """Handle a closed connection: RankLost unless the rank has left."""
        rank = self._ranks[number]
        if not rank.left:
            self._world.advance(_FOREVER)  # so that the others' streams reach what they wait for
            waits = "".join(f"\n  - {line}" for line in self._waits(number)[:12])
            heard = f"last heard of {format_time(rank.clock)} after its start"
            waiting = f"For it wait, as far as is known:{waits}" if waits else "No other rank waits for it yet"
            raise RankLost(number, f"rank {number} ended early, without saying so; {heard}. {waiting}")

    def refuse(self, text: str) -> None:
        """Answer all waiting ranks with an error."""
        for rank in self._ranks.values():
            if rank.query is not None:
                rank.query = None
                self._send(rank.number, answer(rank.clock, payload=text.encode(), failed=True))

    def _ended_on_purpose(self, rank: int) -> bool:
        return self._steps is not None and max(self._trace.rank_traces[rank].marks, default=0) >= self._steps

    def _unfold_experts(self) -> None:
        """Raise FoldingInvalid where a group exchanges uneven parts and some of its members are represented."""
        apart = [group for group in self._registry.uneven if len(group.live) < len(group.members)]
        if apart:
            pairs = ((*pair, group.members) for group in apart for pair in pairwise(group.members))
            raise FoldingInvalid(tuple(dict.fromkeys([*self._registry.p2p.unfolded, *pairs])))

    def _number_routers(self) -> None:
        """Raise FoldingInvalid when all ranks have made a step, if a pipeline's stages number their routers alike."""
        traces = self._trace.rank_traces
        if not self._numbering or not all(trace.marks for trace in traces.values()):
            return
        self._numbering = False
        self._check_folding()
        routers = {rank: len(trace.router_loads) for rank, trace in traces.items()}
        groups = [group.live for group in self._exchanging]
        before = routers_before(routers, groups, self._registry.p2p.pipelined())
        if any(before.values()):
            stands = (self._folding.representative(rank) for rank in range(self._folding.world))
            raise FoldingInvalid((), routers_before=tuple(before[rank] for rank in stands))

    def _check_folding(self) -> None:
        self._check_singled_out()
        if self._registry.p2p.unfolded:
            raise FoldingInvalid(tuple(dict.fromkeys(self._registry.p2p.unfolded)))

    def _check_singled_out(self) -> None:
        asked = {rank: line for trace in self._trace.rank_traces.values() for rank, line in trace.singled_out.items()}
        if not self._folding.final and not asked.keys() <= self._ranks.keys():
            raise FoldingInvalid(tuple(dict.fromkeys(self._registry.p2p.unfolded)), asked)

    def _stall(self, what: str) -> NoReturn:
        self._check_folding()
        self._registry.disagreements()
        raise StallError(what, [*self._waits(), *self._registry.schedules.waiting()])

    def _running(self) -> list[LiveRank]:
        return [rank for rank in self._ranks.values() if rank.query is None and not rank.left]

    def _reply(self, rank: LiveRank, time: Time, data: bytes) -> None:
        query = rank.query
        assert query is not None
        self._check_polling(rank, query)
        rank.query = None
        self._trace.rank_traces[rank.number].stopped(query.code, query.host, time)
        rank.clock = time
        if not rank.left:
            self._world.hold(time)
        self._send(rank.number, data)

    def _check_polling(self, rank: LiveRank, query: HostQuery) -> None:
        """Raise StallError if ``rank`` polls for an event that never happens: all others can go no further."""
        if not query.queries or query.known():
            rank.polling_since = None
            return
        self._check_folding()
        if rank.polling_since is None:
            rank.polling_since = query.host
        elif query.host - rank.polling_since > _POLLING_LIMIT:
            self._stall(f"rank {rank.number} has asked its GPU for a day if it is done, and nothing more can happen:")

    def _waits(self, lacking: int | None = None) -> list[str]:
        """Return which ranks wait for what; if ``lacking`` is given, only those that wait for that rank."""
        waits: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank in self._ranks.values():
            found = [(f"in {call}", tuple(call.missing())) for call in rank.gpu.calls()]
            query = rank.query
            if query is not None and query.comm is not None:
                found.append((f"for the values of {query.comm}", tuple(query.comm.unposted())))
            elif query is not None and not found:
                found.append(("for an answer", ()))
            for wait in found:
                if lacking is None or lacking in wait[1]:
                    waits.setdefault(wait, []).append(rank.number)
        return [self._wait_text(what, missing, ranks) for (what, missing), ranks in waits.items()]

    def _wait_text(self, what: str, missing: tuple[int, ...], ranks: list[int]) -> str:
        text = f"{who(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {what}"
        if not missing:
            return text
        ended = [rank for rank in missing if self._ranks[rank].left]
        if not ended:
            return f"{text} for {who(missing)}"
        verb = "have" if len(ended) > 1 else "has"
        whose = "which" if len(ended) == len(missing) else f"of which {who(ended)}"
        return f"{text} for {who(missing)}, {whose} {verb} ended"


def execute(
    sockets: Mapping[int, socket.socket],
    world: VirtualWorld,
    traffic: NetworkTraffic,
    folding: Folding,
    *,
    slowdown: float = 1.0,
    trace: SimulationTrace | None = None,
    steps: int | None = None,
    uneven_experts: bool = False,
    routers_before: tuple[int, ...] = (),
    waiting: Waiting = lambda ranks, seconds: None,
) -> SimulationTrace:
    """Execute the live ranks until all have left.

    Args:
        sockets: the executor's end of each live rank's socket pair, blocking.
        world, traffic, folding, slowdown, steps, uneven_experts, routers_before: as of `Executor`.
        trace: where steps and activities are recorded; by default without activities.
        waiting: called about once a second while nothing comes: which ranks compute on their host, for how many s.

    Raises:
        Disagreement: ranks that meet call different things.
        RankLost: a rank's connection was closed before it left.
        StallError: all ranks have stopped and none can be answered, or all have ended and something waits for them.
    """
    trace = trace or SimulationTrace(folding.live)

    def reply(rank: int, data: bytes) -> None:
        with suppress(ConnectionError):  # Reading will show that it is gone.
            sockets[rank].sendall(data)

    executor = Executor(
        world, traffic, folding, reply, slowdown=slowdown, trace=trace, steps=steps, uneven_experts=uneven_experts,
        routers_before=routers_before,
    )  # fmt: skip
    try:
        with _collecting_rarely():
            _serve(executor, sockets, waiting)
    except FoldingInvalid:
        raise
    except ForetrainError as error:
        executor.refuse(str(error))
        raise
    executor.finish()
    return trace


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Collect garbage less often: scanning the many queued records takes half the time."""
    threshold = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


def _serve(executor: Executor, sockets: Mapping[int, socket.socket], waiting: Waiting) -> None:
    with selectors.DefaultSelector() as selector:
        for rank, end in sockets.items():
            selector.register(end, selectors.EVENT_READ, (rank, end, bytearray()))
        heard = time.monotonic()
        while not executor.over:
            ready = selector.select(_QUIET_TIME)
            if not ready:
                waiting(executor.running(), time.monotonic() - heard)
                continue
            gone = _receive(executor, selector, ready)
            if gone:
                _receive_from_others(executor, selector, gone)
                executor.lost(min(gone))
            executor.advance()
            heard = time.monotonic()


def _receive(executor: Executor, selector: selectors.BaseSelector, ready: list[Any]) -> set[int]:
    """Read what has arrived; return the ranks whose connections closed before they left."""
    gone = set()
    for key, _ in ready:
        rank, end, buffer = key.data
        data = _read(end)
        buffer += data
        for frame in frames(buffer):
            executor.receive(rank, frame)
        if not data:
            selector.unregister(end)
            if not executor.has_left(rank):
                gone.add(rank)
    return gone


def _receive_from_others(executor: Executor, selector: selectors.BaseSelector, gone: set[int]) -> None:
    """Let the other ranks run until they wait, to find out which wait for the lost ones."""
    until = time.monotonic() + _SETTLE_TIME
    while set(executor.running()) - gone and time.monotonic() < until:
        gone |= _receive(executor, selector, selector.select(_SETTLE_TIME / 10))


def _read(end: socket.socket) -> bytes:
    """Return the bytes that have arrived; empty if the other end is closed."""
    try:
        return end.recv(_READ)
    except ConnectionError:
        return b""
