"""Forecast of the steps that bounded.py measures: the same lab, packet by packet, under the same schedule.

    forecast(place, sizes, "bytescheduler", BoundedLoss(0.01), overheads)     # seconds of a step

hosts        what a `Place` says, at one switch, whose links have the lab's rate, queue and losses; with bands the
             switch, but no host, drops what may be dropped when more waits than the lab's short queue holds
schedule     the project's own policy, in the training loop of its simulator, without a barrier, as the session's
operations   `BoundedLoss`: the stages of `foretrain.comm.bounded.plans`, each when all of the one before has come,
             under the simulated `Bounded`, as many at once as the schedule starts. `AllReduce`: a ring under NewReno,
             one operation at a time, and the next one in what it leaves free. They complete in their order.
control      before an operation all ranks tell rank 0 that they are ready, and it tells all to begin. None of these
             messages is lost: where one is, the next one of the same connection tells at once
background   bursts of other hosts at the lab's times, in one queue with what they delay
overheads    what a host adds, which no simulation knows: measured once, alone on the lab, without losses

What is not simulated: a timer of TCP's of 200 ms, since the next operation's packets say what was lost; buckets of
tokens, by which 1 ms of a link's bytes goes at once after a pause; and background flows where what is measured goes
before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from foretrain.collective.ring import ring
from foretrain.comm.bounded.engine import HEADER, SETTINGS
from foretrain.comm.bounded.plans import stages
from foretrain.comm.options import AllReduce, BoundedLoss
from foretrain.lab.conditions import MTU, spare_of
from foretrain.lab.host import SOURCES
from foretrain.lab.sender import PERIOD
from foretrain.network.fabrics.clos import star
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.online_simulator import Online
from foretrain.network.packet.port_config import UNLIMITED
from foretrain.network.packet.transports.transport import NewReno, Transport
from foretrain.network.program import Program, ProgramHandle
from foretrain.network.program import place as placed
from foretrain.network.routing import Ecmp
from foretrain.network.topology.graph import Topology
from foretrain.schedule import CostModel, Job, spec
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.world import ARRIVAL, TIMER, VirtualWorld
from foretrain.tasks import Chunk
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time, parse_rate, per_byte
from foretrain.workload.step import Gradient, Layer, Workload

if TYPE_CHECKING:
    from bounded import Place

_LATENCY: Time = 5 * MICROSECOND
"""Of a virtual cable, and the thread behind it."""
_MESSAGE = 64
"""Bytes of a message about an operation."""
_QUEUE = 0.008
_LEAST_QUEUE = 512 << 10
"""Seconds, and bytes at least, of the queue in front of a link of the lab."""
_FASTEST = 6.25e8
"""Bytes/s where a lab has no rate."""
_ITEM, _MOST_LOST = 4, 8
"""Bytes of an element, and the share of an array's packets that may be lost, as in engine.cpp."""
_IMPORTANT = {"packet": 0.0, "layer": 0.5, "magnitude": 0.75}
"""Share of packets that no switch drops first; by magnitude half of those of front layers, and all of the back."""
_HELD: Time = MILLISECOND
"""How long packets wait that count as marked, as in engine.cpp, Note [Delay]."""
_FULL = 110
"""Packets that a queue of 8 ms holds at 1 Gb/s: no window grows beyond."""
_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples spread evenly over the times at which bursts may begin."""
_AHEAD = 2
"""Operations of the ring that send: the one that runs, and the beginning of the next."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What hosts add, seconds.

    Attributes:
        operation: of an operation, from `ready` to the sum, besides its packets.
        per_byte: of a byte of it.
        sleep: by how much a sleep is longer than asked for.
        call: of handing a gradient over, in the thread that computes.
        ready, copy: of a byte there: to hand it over, and to copy its sum.
    """

    operation: float = 0.0
    per_byte: float = 0.0
    sleep: float = 0.0
    call: float = 0.0
    ready: float = 0.0
    copy: float = 0.0

    def of(self, size: int) -> Time:
        """Return the time of an operation of ``size`` bytes, ps."""
        return round((self.operation + size * self.per_byte) * SECOND)


NOTHING = Overheads()


def forecast(
    place: Place,
    sizes: Sequence[int],
    schedule: str,
    transport: AllReduce | BoundedLoss,
    overheads: Overheads = NOTHING,
    *,
    cost: CostModel | None = None,
    steps: int = 4,
    seeds: Iterable[int] = range(2),
) -> float:
    """Return the seconds of a step: the median over ``steps`` steps of each of ``seeds``.

    Args:
        place: hosts, links and computation.
        sizes: bytes of each layer's gradient.
        schedule: a policy with its knobs, as text.
        transport: sums the gradients.
        overheads: of the hosts.
        cost: what the policy knows of the network, as a session measures it; the network's nominal rate by default.
        steps: of each seed, after two more.
        seeds: of losses, and of when bursts begin.
    """
    times: list[float] = []
    largest = min(max(sizes), int(spec(schedule).settings.get("partition", max(sizes))))
    for seed in seeds:
        carrier = _Carrier(_Lab(place, transport, seed, largest), overheads)
        work = _workload(place, sizes, overheads)
        nominal = CostModel(overheads.of(0), per_byte(rate_of(place), 2 * (place.hosts - 1) / place.hosts))
        times += _steps(Job.of(work, cost or nominal), work, schedule, carrier, steps)
        if not place.loss and not place.background:
            break
    return median(times)


def alone(place: Place, size: int, transport: AllReduce | BoundedLoss) -> float:
    """Return the seconds of one operation of ``size`` bytes in an empty network."""
    lab = _Lab(place, transport, 0, size)
    network = lab.packets.online()
    network.advance(network.predict(lab.agree(network)))
    return network.predict(lab.begin(network, Chunk("all_reduce", (), size), 0)) / SECOND


def overheads(
    place: Place, transport: AllReduce | BoundedLoss, found: Mapping[str, Mapping[str, float]], sleep: float
) -> Overheads:
    """Return the overheads that explain all-reduces of two sizes.

    Args:
        place: where they were measured.
        transport: under which.
        found: seconds by size in bytes: "operation", from `ready` to the sum; "ready" and "copy", as of `Overheads`.
        sleep: as of `Overheads`.
    """
    small, large = sorted(int(size) for size in found)
    first, second = (found[str(size)]["operation"] - alone(place, size, transport) for size in (small, large))
    slope = max(0.0, second - first) / (large - small)
    ready, copy = (
        max(0.0, found[str(large)][what] - found[str(small)][what]) / (large - small) for what in ("ready", "copy")
    )
    return Overheads(max(0.0, first - small * slope), slope, sleep, found[str(small)]["ready"], ready, copy)


def rate_of(place: Place) -> float:
    """Return the bytes/s of a link of ``place``."""
    return parse_rate(place.rate) if place.rate != "none" else _FASTEST


def switch_queues(place: Place, transport: AllReduce | BoundedLoss) -> Queues:
    """Return the queues of a port of the switch, as the lab has them."""
    limit = max(_LEAST_QUEUE, round(_QUEUE * rate_of(place)))
    selective = place.bands > 1 and isinstance(transport, BoundedLoss)  # TCP has no marks
    return Queues(limit=limit, spare=spare_of(limit) if selective else UNLIMITED)


def _steps(job: Job, work: Workload, schedule: str, carrier: _Carrier, steps: int) -> list[float]:
    """Return the seconds of each step after the first two."""
    policy = spec(schedule).build(job)
    policy.barrier = False  # a session's tasks are waited for one by one, whatever the policy
    world = VirtualWorld(carrier)
    loop = TrainingLoop(work, job, policy, world, policy.warmup + 2 + steps)
    loop.begin()
    world.run()
    loop.raise_if_stalled()
    return [(after - before) / SECOND for before, after in pairwise(loop.begins[-steps - 1 :])]


def _workload(place: Place, sizes: Sequence[int], overheads: Overheads) -> Workload:
    """Return the step as it is paced: sleeps, and the copies of gradients and sums."""
    unit = place.compute / len(sizes) / 3
    forward = [unit + overheads.sleep + size * overheads.copy for size in sizes]
    backward = [2 * unit + overheads.sleep + overheads.call + size * overheads.ready for size in sizes]
    layers = [
        Layer(f"layer{k}", round(ahead * SECOND), round(back * SECOND))
        for k, (ahead, back) in enumerate(zip(forward, backward, strict=True))
    ]
    releases = list(accumulate(layer.backward for layer in reversed(layers)))[::-1]
    gradients = [
        Gradient(layer.name, size, k, release)
        for k, (layer, size, release) in enumerate(zip(layers, sizes, releases, strict=True))
    ]
    return Workload("paced", 1, tuple(layers), tuple(gradients))


class _Lab:
    """A lab as packets: its network, and the flows of an operation there.

    Args:
        place: hosts, rate and conditions.
        transport: sums gradients.
        seed: of losses, and of when bursts begin.
        largest: bytes of the largest tensor, or partition.

    Attributes:
        packets: the network.
        agreement: what it takes all ranks to agree on an operation where packets are lost, ps; see above.
        ranks, transport: as above.
        burst: bytes of background traffic that all its hosts send to the last rank at once.
        phase: of the bursts, as a share of the time from one to the next.
    """

    def __init__(self, place: Place, transport: AllReduce | BoundedLoss, seed: int, largest: int) -> None:
        # With bands, what is marked goes before background flows, which are not.
        first = place.bands > 1 and isinstance(transport, BoundedLoss)
        rate, share = rate_of(place), 0.0 if first else place.background
        self.ranks, self.transport = place.hosts, transport
        self.burst, self.phase = share * rate * PERIOD, seed * _GOLDEN % 1
        where = star(place.hosts + SOURCES * (share > 0), rate, latency=_LATENCY)
        into = [_link_to(where, int(node)) for node in where.ranks[: place.hosts]]
        self._topology, self._router = where, Ecmp(where)
        carried = _simulated(transport, place.loss, rate)
        self._loss, self._payload = place.loss, carried.payload
        # What all may have under way at the beginning is no congestion.
        first = (place.hosts - 1) * carried.first_window * (carried.payload + carried.header)
        held = round(_HELD * rate / SECOND) + first
        if isinstance(transport, BoundedLoss):
            # Acknowledgements wait in two such queues, behind an array's other packets, and are not lost for that.
            waits = round(2 * min(held, largest / place.hosts) / rate * SECOND)
            carried = replace(carried, least_timeout=max(SETTINGS.least_timeout, waits))
        losses = LinkLosses.bursts(place.loss, getattr(place, "burst", 1.0)) if place.loss else None
        queues = {"hosts": Queues(mark_from=held, mark_to=held), "switches": switch_queues(place, transport)}
        self.packets = Packets(where, transport=carried, **queues, seed=seed)
        self.agreement: Time | None = None
        if losses:
            network = self.packets.online()
            self.agreement = network.predict(self.agree(network))
            self.packets = Packets(where, transport=carried, **queues, losses=dict.fromkeys(into, losses), seed=seed)

    def agree(self, network: Online) -> ProgramHandle:
        """Start the messages by which all ranks agree on the next operation."""
        rank, others = self._topology.ranks[0], self._topology.ranks[1 : self.ranks]
        count, first = len(others), np.repeat(rank, len(others))
        nothing = np.zeros(2 * count, np.int32)
        paths = self._router.paths(np.concatenate([others, first]), np.concatenate([first, others]), nothing)
        # An answer waits for all messages.
        after = np.tile(np.arange(count, dtype=np.int32), count)
        begins = np.concatenate([np.zeros(count), count * np.arange(count + 1)]).astype(np.int32)
        sizes = np.full(2 * count, float(_MESSAGE))
        return network.add(Program.of(paths, sizes, first=begins, after=after, lag=np.ones(len(after), np.int32)))

    def congest(self, network: Online, number: int) -> None:
        """Start a burst of background traffic, which queues as operation ``number`` does."""
        node = self._topology.ranks
        into, nothing = np.repeat(node[self.ranks - 1], SOURCES), np.zeros(SOURCES, np.int32)
        paths, sizes = self._router.paths(node[self.ranks :], into, nothing), np.full(SOURCES, self.burst / SOURCES)
        network.add(Program.of(paths, sizes, priority=nothing + self._class(number)))

    def _class(self, number: int) -> int:
        """Return the class of the packets of operation ``number``: what TCP sends ahead goes after the one before."""
        return 1 + number % 7 if isinstance(self.transport, AllReduce) else 0

    def begin(self, network: Online, chunk: Chunk, number: int) -> ProgramHandle:
        """Start ``chunk``, which is operation ``number``, in ``network``."""
        if isinstance(self.transport, BoundedLoss):
            return self._begin_stages(network, chunk, self.transport)
        plan = ring(chunk.op, self.ranks)
        return network.add(placed(plan, chunk.size, self._router, priority=self._class(number)))

    def _begin_stages(self, network: Online, chunk: Chunk, transport: BoundedLoss) -> ProgramHandle:
        """Start a flow for each send of each stage; it begins when its rank has all of the stage before."""
        count, tolerance = -(-chunk.size // _ITEM), transport.tolerance
        tolerance = tolerance if isinstance(tolerance, float) and chunk.size > transport.reliable_bytes else 0.0
        plans = [stages(chunk.op, transport.over, r, self.ranks, count, _ITEM, tolerance) for r in range(self.ranks)]
        sends = [
            (number, rank, send.to, send.size, 0.0 if send.reliable else tolerance)
            for number in range(len(plans[0]))
            for rank, plan in enumerate(plans)
            for send in plan[number].sends
        ]
        waits = [
            [k for k, (before, _, to, *_) in enumerate(sends) if (before, to) == (number - 1, rank)]
            for number, rank, *_ in sends
        ]
        node = self._topology.ranks
        source, target = node[[rank for _, rank, *_ in sends]], node[[to for _, _, to, *_ in sends]]
        after = np.array([k for each in waits for k in each], np.int32)
        program = Program.of(
            self._router.paths(source, target, np.zeros(len(sends), np.int32)),
            np.array([send[3] for send in sends], np.float64),
            first=np.cumsum([0, *map(len, waits)]).astype(np.int32),
            after=after,
            lag=np.ones(len(after), np.int32),
        )
        return network.add(program, enough=np.array([self._need(send[3], send[4]) for send in sends]))

    def _need(self, size: int, tolerance: float) -> int:
        """Return the bytes of an array that are enough.

        An array may lose what those before it did not, up to an eighth of its packets; where less than the tolerance is
        lost, so much is always there.
        """
        may = int(size * tolerance)
        if tolerance > self._loss:
            may = max(may, size // self._payload // _MOST_LOST * self._payload)
        return size - may


def _simulated(transport: AllReduce | BoundedLoss, loss: float, rate: float) -> Transport:
    """Return the settings with which the packet simulation carries what ``transport`` sends.

    Each operation is a connection of its own in the simulation. It begins with the window that one that lasts has on
    average: of TCP 1.22/√loss packets (Mathis et al., 1997), and a full queue without losses; of ours what fills the
    path until packets are marked, at most what a new one begins with, since all operations to a peer share one window.
    A loss at an operation's end, of which the next one's packets tell, is noticed after the time of a full window.
    Packets keep their order, so that the first behind a lost one tells of it, as Linux's RACK has it.
    """
    if isinstance(transport, AllReduce):
        window = _FULL if not loss else max(2, min(_FULL, round(1.22 / loss**0.5)))
        most = min(2 * window, _FULL)
        return NewReno(
            payload=MTU - 52,
            header=66,
            reply=66,
            first_window=window,
            most=most,
            least_timeout=round(2 * most * (MTU + 14) / rate * SECOND),
            reordering=1,
        )
    payload = min(8192, MTU - HEADER - 28) // 16 * 16
    signal = HEADER + 28 + 14
    packet = payload + signal
    until_marked = _HELD * rate / SECOND + 2 * packet
    window = min(SETTINGS.first_window, max(2, round(until_marked / packet)))
    return replace(
        SETTINGS,
        payload=payload,
        header=signal,
        reply=signal,
        prompt=True,
        first_window=window,
        important=_IMPORTANT[transport.droppable],
    )


def _link_to(topology: Topology, node: int) -> int:
    """Return the last link on the way to ``node``."""
    return int(np.flatnonzero(topology.target == node)[0])


class _Operation:
    """Operation under way: ``chunk``, whom to tell, whether all ranks have agreed on it, and whether it is over."""

    def __init__(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        self.chunk, self.done, self.agreed, self.over = chunk, done, False, False


class _Carrier:
    """Carrier of chunks over the simulated lab, which begins and completes them in order.

    Args:
        lab: the network.
        overheads: of the hosts.
    """

    def __init__(self, lab: _Lab, overheads: Overheads) -> None:
        self._lab, self._overheads = lab, overheads
        self._together = _AHEAD if isinstance(lab.transport, AllReduce) else 1 << 30
        self._network = lab.packets.online()
        self._waiting: deque[_Operation] = deque()
        self._begun: deque[_Operation] = deque()
        self._agreeing: dict[ProgramHandle, _Operation] = {}
        self._running: dict[ProgramHandle, _Operation] = {}
        self._asked = self._number = self._bursts = 0

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` behind all that were started before."""
        self._waiting.append(_Operation(chunk, done))
        world.schedule(world.now() + self._overheads.of(chunk.size), TIMER, self._agree, world, self._waiting[-1])

    def _agree(self, world: VirtualWorld, operation: _Operation) -> None:
        if self._lab.agreement is not None:
            world.schedule(world.now() + self._lab.agreement, TIMER, self._agreed, world, operation)
        else:
            self._pass(world)
            self._agreeing[self._lab.agree(self._network)] = operation
            self._arm(world)

    def _agreed(self, world: VirtualWorld, operation: _Operation) -> None:
        operation.agreed = True
        self._pass(world)
        self._arm(world)

    def _pass(self, world: VirtualWorld) -> None:
        """Advance the network to the present, complete what has arrived, and begin what may, both in order."""
        arrived = []
        # A burst only delays what arrives: nothing was missed that nobody looked at since.
        while self._lab.burst and (due := round((self._bursts + self._lab.phase) * PERIOD * SECOND)) <= world.now():
            arrived += self._network.advance(due)
            self._lab.congest(self._network, max(0, self._number - 1))
            self._bursts += 1
        arrived += self._network.advance(world.now())
        for handle in arrived:
            if handle in self._agreeing:
                self._agreeing.pop(handle).agreed = True
            elif handle in self._running:
                self._running.pop(handle).over = True
        while self._begun and self._begun[0].over:
            operation = self._begun.popleft()
            world.schedule(world.now(), TIMER, operation.done, operation.chunk)
        while self._waiting and self._waiting[0].agreed and len(self._running) < self._together:
            operation = self._waiting.popleft()
            self._begun.append(operation)
            self._running[self._lab.begin(self._network, operation.chunk, self._number)] = operation
            self._number += 1

    def _arm(self, world: VirtualWorld) -> None:
        """Look again when the next program arrives; an earlier change makes that void."""
        self._asked += 1
        when = self._network.next_completion()
        if when is not None:
            world.schedule(when, ARRIVAL, self._arrive, world, self._asked)

    def _arrive(self, world: VirtualWorld, asked: int) -> None:
        if asked == self._asked:
            self._pass(world)
            self._arm(world)
