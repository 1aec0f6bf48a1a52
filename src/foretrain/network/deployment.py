"""A job on a topology: its ranks, collective and routing.

Where `Cluster` has a formula, a deployment asks a simulation how long a collective takes when nothing else is sent: the
fluid one unless its fidelity says otherwise. Collectives of one job run one after the other, as on one stream of NCCL,
so that is all a job alone needs; jobs that share a network are simulated flow by flow
(`foretrain.simulation.shared_network`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation
from foretrain.errors import ConfigError
from foretrain.network.collective_placement import Arrangement, arrange, choice_on, chunks, suited
from foretrain.network.fidelity import FLUID, Fidelity, decided, packet_hops, parts
from foretrain.network.fluid import run
from foretrain.network.program import NetworkSimulator, Program, place
from foretrain.network.switch_cluster import DEFAULT_OVERHEAD
from foretrain.network.topology.graph import Topology
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, MICROSECOND, Time, format_rate, format_time, moving

DEFAULT_STEP: Time = 2 * MICROSECOND
"""Software of one step of a collective, besides the links' latency: what RDMA takes from GPU to GPU."""
_WHOLE_ONLY = ("double_tree",)
"""Collectives that do a whole all-reduce and no half of it."""
_MOST_STEPS = 4_000_000
"""Steps of all transfers of a collective that ``"auto"`` considers: those of a ring of 1,400 ranks, a second's work."""
_MOST_HOPS = 4_000_000
"""Packet hops of a collective that is simulated: a second's work; larger ones go on as the last two that were."""
_CURVE: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")
"""Operations whose duration schedules ask for."""
_LARGE = 1 << 36
"""Bytes from which on only the rate of a collective matters: 64 GiB take seconds on the fastest link there is."""


class _Way(NamedTuple):
    """Exchange of data of one size: collective, latency of a step, launch and share of links, ours or NCCL's."""

    name: str
    arrangement: Arrangement
    step: Time
    launch: Time = 0
    efficiency: float = 1.0
    wire: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """A job on a topology.

    Attributes:
        topology: the network.
        collective: an algorithm; ``"auto"``, the fastest of those that suit the topology at each size; or ``"nccl"``,
            NCCL's choice with its protocols and latencies (`foretrain.collective.nccl`).
        routing: a policy of `foretrain.network.routing`.
        ranks: which ranks of the topology the job has, in its own order; all where empty.
        device: what a GPU is, a preset of `foretrain.device`; None where a recorded workload brings its times along.
        overhead: θ, cost of one operation whatever its size, ps.
        step: software of each step of a collective, ps; ``"nccl"`` has its own.
        seed: of the routing.
        alone: whether a single rank is a job too; it exchanges nothing.
        fidelity: how closely the network is simulated. What decides, as `cost` and the choices of ``"auto"``, is the
            fluid simulation's where packets would be: T* is a bound of the fluid.
    """

    topology: Topology
    collective: str = "auto"
    routing: str = "ecmp"
    ranks: tuple[int, ...] = ()
    device: str | None = None
    overhead: Time = DEFAULT_OVERHEAD
    step: Time = DEFAULT_STEP
    seed: int = 0
    alone: bool = False
    fidelity: Fidelity = FLUID
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        have = len(self.topology.ranks)
        if self.ranks and not 0 <= min(self.ranks) <= max(self.ranks) < have:
            raise ConfigError("ranks", max(self.ranks), "is no rank of the topology", f"they are 0 to {have - 1}")
        if len(set(self.ranks)) < len(self.ranks):
            raise ConfigError("ranks", list(self.ranks)[:8], "has one twice", "name different ones")
        if len(self.members) < 2 and not self.alone:
            raise ConfigError("ranks", 1, "has nobody to exchange gradients with", "give the job at least 2")
        for name in ("overhead", "step"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "is negative", "write e.g. '20us'")
        if len(self.members) > 1:
            self._way("all_reduce", 1 << 20)

    @property
    def members(self) -> tuple[int, ...]:
        """The topology's ranks that the job has."""
        return self.ranks or tuple(range(len(self.topology.ranks)))

    @property
    def total_gpus(self) -> int:
        """GPUs in the job; a host that is a rank counts as one."""
        return len(self.members)

    @property
    def slowdown(self) -> float:
        """Return the slowdown of the slowest rank, for which synchronous training waits."""
        return max(self.topology.nodes[self.topology.ranks[rank]].slowdown for rank in self.members)

    @property
    def network(self) -> Topology:
        """Return the topology that routing uses: switches are bundled where packets are sprayed."""
        return self._router().topology

    @property
    def capacity(self) -> NDArray[np.float64]:
        """Bytes/s of each link of `network`."""
        return self.network.capacity

    @property
    def cost(self) -> CostModel:
        """Return κ and θ for policies: the cost of a byte in large collectives, and that of an operation.

        κ is the least that any size costs per byte, whole or in two halves, so that no schedule beats the optimum.
        """
        if self.fidelity.level in ("packet", "auto"):
            return self.fluid.cost
        if "cost" not in self._memo:
            halves = self._per_byte("reduce_scatter") + self._per_byte("all_gather")
            kappa = math.floor(min(self._per_byte("all_reduce"), halves) * (1 << COST_SHIFT) * (1 - 1e-9))
            size = 1 << 20
            start = max(0, self.duration("all_reduce", size) - moving(size, kappa))
            self._memo["cost"] = CostModel(overhead=self.overhead + start, per_byte=kappa)
        return self._memo["cost"]

    def duration(self, operation: Operation, size: int) -> Time:
        """Return the time of a collective of ``size`` bytes alone, ps, without θ.

        Simulated at powers of two and linear in between: exact where the collective's time is linear, as it is where
        latency or rate decides. ``size`` is that of the gradient, for the halves of an all-reduce as well.
        Packet by packet, what is large goes on from the two powers before at their rate.
        """
        low = 1 << max(0, size.bit_length() - 1)
        first, second = self._exact(operation, low), self._exact(operation, 2 * low)
        return math.ceil(first + (second - first) * (size - low) / low)

    def collective_at(self, size: int, operation: Operation = "all_reduce") -> str:
        """Return the collective's name for ``size`` bytes, e.g. ``"hierarchical"``, or ``"ring, LL128"`` of NCCL."""
        return self._way(operation, size).name

    def program(self, operation: Operation, size: int, release: Time = 0, *, collective: str | None = None) -> Program:
        """Return the flows of a collective of ``size`` bytes, by the job's own collective or by another."""
        way = self._way(operation, size) if collective is None else self._plain(operation, collective, size)
        return self._program(way, size, release)

    def carrier(self) -> NetworkSimulator:
        """Return the network, empty, as a simulator of its fidelity."""
        return self.fidelity.carrier(self.network)

    def simulated(self, fidelity: Fidelity) -> Deployment:
        """Return a copy that is simulated with ``fidelity``."""
        return self._with(fidelity=fidelity)

    def decided(self, largest: int) -> tuple[Deployment, str]:
        """Return a copy with ``"auto"`` decided for collectives of up to ``largest`` bytes, and why, as one line."""
        if self.fidelity.level in ("ideal", "fluid"):
            return self, f"{self.fidelity.level} level"
        made = decided(self.fidelity, self.network, [program for _, _, program in self._curve(largest)])
        return self._with(fidelity=made.fidelity), made.why

    def measure(self, largest: int, progress: Callable[[int, int], None]) -> None:
        """Simulate now what `duration` would simulate for collectives of up to ``largest`` bytes.

        Args:
            largest: bytes.
            progress: told how many packet hops are behind it, of about how many.
        """
        if self.fidelity.level != "packet":
            return
        curve = self._curve(largest)
        hops = [packet_hops(program, self.fidelity.transport.payload) for _, _, program in curve]
        for (operation, size, program), told in zip(curve, parts(hops, progress), strict=True):
            self._memo[operation, size] = float(self.fidelity.finish(program, self.network, told).max())

    def _curve(self, largest: int) -> list[tuple[Operation, int, Program]]:
        """Return the packet simulations that sizes of up to ``largest`` bytes need: operation, size and flows."""
        sizes = [1 << k for k in range(largest.bit_length() + 1)]
        found: list[tuple[Operation, int, Program]] = []
        for operation in _CURVE:
            simulated = (size for size in sizes if not self._goes_on(operation, size))
            found.extend((operation, size, self._alone(operation, size)) for size in simulated)
        return found

    def _goes_on(self, operation: Operation, size: int) -> bool:
        """Return whether a collective is extrapolated from smaller ones instead of simulated packet by packet."""
        if self.fidelity.level == "fluid" or size < 4:
            return False
        payload = self.fidelity.transport.payload
        hops, quarter = (packet_hops(self._alone(operation, each), payload) for each in (size, size // 4))
        return hops > _MOST_HOPS and 3 * quarter <= hops

    def _alone(self, operation: Operation, size: int) -> Program:
        return self._program(self._way(operation, size), size, 0)

    @property
    def fluid(self) -> Deployment:
        """Return a copy simulated as a fluid, in which sprayed packets cross bundles of links."""
        if "fluid" not in self._memo:
            self._memo["fluid"] = self._with(fidelity=FLUID)
        return self._memo["fluid"]

    def carried_by(self, collective: str) -> Deployment:
        """Return a copy with another collective."""
        return self._with(collective=collective)

    def without_latency(self) -> Deployment:
        """Return a copy in which an operation costs nothing besides its bytes."""
        wires = self.topology.changed(range(self.topology.links), latency=0)
        return self._with(topology=wires, overhead=0, step=0)

    def scaled(self, factor: float) -> Deployment:
        """Return a copy with every link ``factor`` times as fast, background traffic included."""
        topology = self.topology
        faster = dataclasses.replace(topology, rate=topology.rate * factor, background=topology.background * factor)
        return self._with(topology=faster)

    def changed(self, parameter: str, value: float) -> Deployment:
        """Return a copy with another value of one parameter of a sweep.

        Args:
            parameter: ``"rate"`` of the fastest cable out of a host or server, all links in proportion; ``"latency"``
                of every link; ``"overhead"``; or ``"workers"``, the job's first ranks.
            value: in bytes/s, ps or ranks.
        """
        if parameter == "rate":
            return self.scaled(value / self._ports().max())
        if parameter == "latency":
            wires = self.topology.changed(range(self.topology.links), latency=int(value))
            return self._with(topology=wires)
        if parameter == "workers":
            if value > len(self.members):
                have = len(self.members)
                raise ConfigError("workers", int(value), f"are more than the job's {have} ranks", "sweep fewer")
            return self._with(ranks=self.members[: int(value)])
        return self._with(overhead=int(value))

    def _ports(self) -> NDArray[np.float64]:
        """Return the different rates of the cables that leave the job's hosts or servers, ascending; of one server,
        inside."""
        topology = self.topology
        ranks = topology.ranks[list(self.members)]
        server = np.array([node.server for node in topology.nodes])
        inside = np.isin(np.arange(len(server)), ranks) | ((server >= 0) & np.isin(server, server[ranks]))
        leaving = inside[topology.source] & ~inside[topology.target]
        return np.unique(topology.rate[leaving if leaving.any() else np.isin(topology.source, ranks)])

    def _per_byte(self, operation: Operation) -> float:
        """Return the ps that one byte more takes in large collectives."""
        return (self._exact(operation, 2 * _LARGE) - self._exact(operation, _LARGE)) / _LARGE

    def _with(self, **changes: Any) -> Deployment:
        """Return a copy with other fields and empty caches."""
        return dataclasses.replace(self, **changes, _memo={})

    def _exact(self, operation: Operation, size: int) -> float:
        """Return the ps of a collective of ``size`` bytes alone."""
        key = operation, size
        if key not in self._memo:
            self._memo[key] = self._at_level(operation, size)
        return self._memo[key]

    def _at_level(self, operation: Operation, size: int) -> float:
        if self.fidelity.level == "fluid":
            return self._time(self._way(operation, size), size)
        if self.fidelity.level == "packet" and self._goes_on(operation, size):
            half, quarter = (self._exact(operation, size // part) for part in (2, 4))
            return half + 2 * (half - quarter)
        return float(self.fidelity.finish(self._alone(operation, size), self.network).max())

    def _time(self, way: _Way, size: int) -> float:
        return float(run(self._program(way, size, 0), self.capacity, name=self.network.link_name).finish.max())

    def _way(self, operation: Operation, size: int) -> _Way:
        """Return how ``size`` bytes are exchanged; ``"auto"`` decides once per power of two."""
        if self.fidelity.level in ("packet", "auto") and self.collective in ("auto", "nccl"):
            return self.fluid._way(operation, size)
        if self.collective == "nccl":
            return self._nccl(operation, size)
        if self.collective != "auto":
            return self._plain(operation, self.collective, size)
        low = 1 << max(0, size.bit_length() - 1)
        key = "fastest", operation, low
        if key not in self._memo:
            ways = [self._plain(operation, name, low) for name in self._suited(operation)]
            self._memo[key] = min(ways, key=lambda way: self._time(way, low))
        return self._memo[key]

    def _plain(self, operation: Operation, name: str, size: int) -> _Way:
        if operation in ("reduce_scatter", "all_gather") and name in _WHOLE_ONLY:
            # A schedule that splits an all-reduce needs halves from somewhere: the fastest that there are.
            return self._with(collective="auto")._way(operation, size)
        pieces = chunks(size)
        key = "plain", operation, name, pieces
        if key not in self._memo:
            found = arrange(name, operation, self.topology, self.members, pieces)
            self._memo[key] = _Way(name, found, self.step)
        return self._memo[key]

    def _suited(self, operation: Operation) -> tuple[str, ...]:
        """Return the candidates of ``"auto"``: all that fit, except those that would take minutes to simulate."""
        key = "suited", operation
        if key not in self._memo:
            found = suited(operation, self.topology, self.members)
            steps = {name: int(one.plan.steps.sum()) for name, one in found.items()}
            quick = tuple(name for name in found if steps[name] <= _MOST_STEPS)
            self._memo[key] = quick or (min(steps, key=steps.__getitem__),)
        return self._memo[key]

    def _nccl(self, operation: Operation, size: int) -> _Way:
        """Return NCCL's choice, with the step latency and share of links that take its time on an idle network."""
        choice, name = choice_on(self.topology, self.members, self.device, operation, size)
        key = "nccl", operation, name
        if key not in self._memo:
            arrangement = arrange(name, operation, self.topology, self.members)
            # A step of 1 ps instead of none: rings collapse only while their latency runs, and large ones must.
            bare = _Way(name, arrangement, 1, wire=False)
            rounds = round(self._time(bare, 0))
            self._memo[key] = arrangement, rounds, (self._time(bare, _LARGE) - rounds) / _LARGE
        arrangement, rounds, per_byte = self._memo[key]
        step = choice.steps * choice.step_latency // rounds
        moving = max(choice.time - choice.launch - rounds * step, 1)
        label = f"{name}, {choice.protocol}"
        return _Way(label, arrangement, step, choice.launch, size * per_byte / moving, wire=False)

    def _program(self, way: _Way, size: int, release: Time) -> Program:
        arrangement = way.arrangement
        # Routing may bundle switches, and then numbers nodes anew.
        known, mine = self.network, self.topology
        helpers = arrangement.helpers
        if known is not mine:
            helpers = tuple(known.node(mine.nodes[helper].name) for helper in helpers)
        return place(
            arrangement.plan,
            size / way.efficiency,
            self._router(),
            arrangement.ranks,
            helpers,
            step_latency=way.step,
            wire_latency=way.wire,
            release=release + way.launch,
        )

    def _router(self) -> Any:
        if "router" not in self._memo:
            from foretrain.network.routing import Scatter, router

            if self.routing == "spray" and self.fidelity.level in ("packet", "auto"):
                self._memo["router"] = Scatter(self.topology, seed=self.seed)
            else:
                self._memo["router"] = router(self.topology, self.routing, seed=self.seed)
        return self._memo["router"]

    def __str__(self) -> str:
        if len(self.members) == 1:
            return f"1 {self.device or 'GPU'}"
        rates = " and ".join(format_rate(rate) for rate in self._ports()[:2])
        ranks = f"{len(self.members)} of " if self.ranks else ""
        gpus = f" {self.device}" if self.device else ""
        return (
            f"{self.topology.name}, {ranks}{len(self.topology.ranks)}{gpus} ranks @ {rates}, {self.collective},"
            f" {self.routing}, θ {format_time(self.overhead)}{'' if self.fidelity == FLUID else f', {self.fidelity}'}"
        )
