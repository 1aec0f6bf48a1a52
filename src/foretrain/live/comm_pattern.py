"""Traffic of one operation, in its group and in the groups that act at the same moment.

A collective becomes a *pattern*: the flows of all groups that it contends with by symmetry, routed once for all sizes.
Algorithm, protocol and latency are NCCL's (`foretrain.collective.nccl`) where the cluster's collective is ``"nccl"``.

# Note [NCCL's times on shared links]
A choice of NCCL's model has a time on an idle network. Flows of the bare bytes are simulated for all groups that act
together; if they need less than the model says, they are made larger in proportion, since flags and copies take their
part of the links; if they need more, the network is the limit, and it takes as long as that. Unlike `Deployment`, which
calibrates one group alone, this neither hides a congested fabric nor counts NICs that groups share twice.

# Note [Fidelity of an exchange]
With ``"auto"`` an exchange goes packet by packet if the packets it takes alone are within what is left of the budget,
and is then taken from it; an exchange that contends with a fluid is a fluid, too. The cost of exchanges that contend is
not foreseen.

# Note [Long rings]
A ring in lock step of very many steps is exact and free while nothing disturbs it, and must be simulated step by step
as soon as something does. Beyond `_MOST_STEPS` its steps are joined, with their bytes and latencies: undisturbed it
takes the same time, and what it leaves of its links to others is the same but for grain.

# Note [Proxies]
From 2.12 on NCCL sends to another server by way of the GPU that has the same place in the sender's server as the
receiver in its own (PXN): on rails a message then stays on one rail and meets no spine. Here that is done wherever it
makes the way between servers shorter; the memory of the GPU in between is no limit, so that both legs are one path.

# Note [Ways of adaptive routing]
Each pattern is routed once, though others may be under way with it at some time: the stages of a pipeline exchange
their gradients one after the other, or together. Adaptive routing finds a pattern's flows the ways on which they meet
least, and of ways that are as good, those that patterns before took least.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import WHOLE, Operation
from foretrain.collective.nccl.generation import gpu_named
from foretrain.collective.nccl.variants import NETWORK_HOP
from foretrain.live.comm_layout import CommLayout, Group
from foretrain.network.collective_placement import choice_on
from foretrain.network.deployment import Deployment
from foretrain.network.fidelity import FLUID, Fidelity, PacketEstimate, packet_hops, speed
from foretrain.network.fluid import run
from foretrain.network.program import Paths, Program
from foretrain.network.routing import Adaptive, link_load, router
from foretrain.units import MICROSECOND, SECOND, Time

_MOST_STEPS: Final = 1 << 17
_LEAST_STEPS: Final = 8
"""See Note [Long rings]: steps of all flows of a pattern, and of each flow after joining."""
_MOST_FLOWS: Final = 1 << 16
"""Flows of all groups that act together; groups beyond that are left out, the last first."""
_LARGE: Final = 1 << 36
_EARLIER: Final = 1e-9
"""Of a flow of an earlier pattern against one of this pattern; see Note [Ways of adaptive routing]."""


@dataclass(frozen=True, slots=True, eq=False)
class CommPattern:
    """Effect of one operation on the network.

    Attributes:
        alone: how long it takes if nothing else is sent, ps.
        program: its flows, and those of the groups that contend with it by symmetry; None if it has only latency.
        links: the links that these use, as bits of an int: link l is bit l.
        carried: bytes on each link, of all groups that act together: the links, and their bytes.
        fidelity: how closely it is simulated.
    """

    alone: Time
    program: Program | None = None
    links: int = 0
    carried: tuple[NDArray[np.int64], NDArray[np.float64]] = (np.zeros(0, np.int64), np.zeros(0))
    fidelity: Fidelity = FLUID


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPattern:
    """A layout on the network, in all groups that act together.

    Attributes:
        unit: the flows of the groups that contend, for one byte and steps of 1 ps.
        wire: ps of propagation of each of their steps, before joining.
        rate: bytes/s of each of their paths alone.
        rounds: steps one behind the other.
        per_byte: ps that a byte of the operation takes, without latency.
        carried: as in `CommPattern`, for one byte.
        bits: as `CommPattern.links`.
    """

    unit: Program
    wire: NDArray[np.float64]
    rate: NDArray[np.float64]
    rounds: int
    per_byte: float
    carried: tuple[NDArray[np.int64], NDArray[np.float64]]
    bits: int


class RoutedCluster:
    """Cluster with its router, on which patterns are laid.

    Args:
        where: topology, collective, routing and GPU; its ranks are the world's, in their order.
        tell: called with a line about each exchange that takes long to simulate.
    """

    def __init__(self, where: Deployment, tell: Callable[[str], None] = lambda line: None) -> None:
        self.where = where
        self.fidelity_policy = FidelityPolicy(where, tell)
        self.members = np.asarray(where.members, np.int64)
        # Bundles of sprayed links at every level: patterns are laid once, before their level is known.
        self.capacity = where.fluid.capacity
        self._router = router(where.topology, where.routing, seed=where.seed)
        self._earlier = np.zeros(len(self.capacity))
        known, mine = self._router.topology, where.topology
        names = {node.name: index for index, node in enumerate(known.nodes)}
        # Routing may bundle switches, and then numbers nodes anew.
        self._number = np.array([names.get(node.name, -1) for node in mine.nodes])
        self.server = np.array([node.server for node in mine.nodes])[mine.ranks[self.members]]
        servers = mine.ranks_of_servers()
        seats = max(map(len, servers))
        # By node of the router: which server it is in, which of its ranks it is; and by both, the node.
        self._home, self._seat = np.zeros((2, len(known.nodes)), np.int64)
        self._proxy = np.full((len(servers), seats), -1)
        for home, ranks in enumerate(servers):
            nodes = self._number[mine.ranks[list(ranks)]]
            self._home[nodes], self._seat[nodes] = home, np.arange(len(nodes))
            self._proxy[home, : len(nodes)] = nodes

    def lay(self, layout: CommLayout, groups: Sequence[Group], *, proxied: bool = False) -> RoutedPattern:
        """Route ``layout`` of the first of ``groups`` in all of them, and keep those that contend with the first.

        ``proxied`` if NCCL's sends and receives go over proxies; see Note [Proxies].
        """
        flows = len(layout.source)
        groups = groups[: max(1, _MOST_FLOWS // max(flows, 1))]
        paths = self._routed(layout, groups, proxied)
        near = _contending(paths, flows, len(groups), len(self.capacity))
        kept = (near[:, None] * flows + np.arange(flows)).reshape(-1)
        mine = paths.gather(kept)
        hops = np.repeat(np.arange(len(mine)), np.diff(mine.first))
        latency = self._router.topology.latency[mine.links]
        rate = np.full(len(mine), np.inf)
        np.minimum.at(rate, hops, self.capacity[mine.links])
        unit = _joined_steps(_unit(layout, mine, len(near)))
        rounds = round(_end(dataclasses.replace(unit, size=unit.size * 0), self.capacity))
        large = dataclasses.replace(unit, size=unit.size * float(_LARGE))
        per_byte = (_end(large, self.capacity) - rounds) / _LARGE
        sent = np.tile(layout.share * layout.steps, len(groups))
        each = np.repeat(sent, np.diff(paths.first))
        bytes_ = np.bincount(paths.links, each, len(self.capacity)).astype(np.float64)
        used = np.flatnonzero(bytes_)
        return RoutedPattern(
            unit=unit,
            wire=np.bincount(hops, latency, len(mine)).astype(np.float64),
            rate=rate,
            rounds=rounds,
            per_byte=per_byte,
            carried=(used, bytes_[used]),
            bits=_bits(mine.links, len(self.capacity)),
        )

    def _routed(self, layout: CommLayout, groups: Sequence[Group], proxied: bool) -> Paths:
        """Return the path of each flow, all of the first group, then all of the next."""
        ranks = self.where.topology.ranks
        nodes = ranks[self.members[np.array(groups, np.int64)[:, layout.order]]]
        helpers = np.array([self._helpers(layout, group, groups[0]) for group in groups], np.int64)
        ends = self._number[np.concatenate([nodes, helpers.reshape(len(groups), -1)], axis=1)]
        sources, targets = ends[:, layout.source].reshape(-1), ends[:, layout.target].reshape(-1)
        channels = np.tile(layout.channel, len(groups))
        keys = (sources * len(self._number) + targets) * (int(channels.max(initial=0)) + 1) + channels
        _, once, which = np.unique(keys, return_index=True, return_inverse=True)
        columns = sources[once], targets[once], channels[once]
        paths = self._by_proxy(*columns) if proxied else self._paths(*columns)
        self._earlier += _EARLIER * link_load(paths, self._router.topology)
        return paths.gather(which)

    def _paths(
        self, sources: NDArray[np.integer], targets: NDArray[np.integer], channels: NDArray[np.integer]
    ) -> Paths:
        router = self._router.reload(self._earlier) if isinstance(self._router, Adaptive) else self._router
        return router.paths(sources.astype(np.int32), targets.astype(np.int32), channels.astype(np.int32))

    def _by_proxy(
        self, sources: NDArray[np.integer], targets: NDArray[np.integer], channels: NDArray[np.integer]
    ) -> Paths:
        """Return the paths of messages; see Note [Proxies]."""
        direct = self._paths(sources, targets, channels)
        proxies = self._proxy[self._home[sources], self._seat[targets]]
        able = np.flatnonzero((proxies >= 0) & (proxies != sources) & (self._home[sources] != self._home[targets]))
        inside = self._paths(sources[able], proxies[able], channels[able])
        beyond = self._paths(proxies[able], targets[able], channels[able])
        shorter = np.diff(beyond.first) < np.diff(direct.first)[able]
        legs = [direct.of(flow) for flow in range(len(direct))]
        for at in np.flatnonzero(shorter).tolist():
            legs[able[at]] = np.concatenate([inside.of(at), beyond.of(at)])
        first = np.cumsum([0, *map(len, legs)]).astype(np.int32)
        return Paths(first, np.concatenate(legs) if legs else direct.links)

    def _helpers(self, layout: CommLayout, group: Group, first: Group) -> list[int]:
        """Return the helpers of ``group``: at the same distance from it as those of ``first`` are from that."""
        if group is first or not layout.helpers:
            return list(layout.helpers)
        ranks, nodes = self.where.topology.ranks, self.where.topology.nodes
        apart = int(ranks[self.members[group[0]]]) - int(ranks[self.members[first[0]]])
        moved = [helper + apart for helper in layout.helpers]
        for one, other in zip(moved, layout.helpers, strict=True):
            same = 0 <= one < len(nodes) and nodes[one].kind == nodes[other].kind
            if not same or nodes[one].server != self.server[group[0]]:
                return list(layout.helpers)  # Servers differ: then all use those of the first, and contend for them.
        return moved


def patterned(
    laid: RoutedPattern, ground: RoutedCluster, size: float, launch: Time, step: float, scale: float | NDArray
) -> CommPattern:
    """Return ``laid`` for ``size`` bytes: ps before it and before each step, and how much larger its flows are."""
    unit = laid.unit
    program = dataclasses.replace(
        unit,
        size=unit.size * (size * scale),
        latency=unit.latency * step,
        release=np.full(len(unit), float(launch)),
    )
    links, bytes_ = laid.carried
    fidelity = ground.fidelity_policy.of(program)
    alone = math.ceil(fidelity.finish(program, ground.where.fluid.network).max(initial=0.0))
    return CommPattern(alone, program, laid.bits, (links, bytes_ * size), fidelity)


class NcclCost(NamedTuple):
    """NCCL's additions to the bare bytes: ps once and before each step, and how much larger the flows are."""

    launch: Time
    step: Time
    scale: float


def cost(laid: RoutedPattern, ground: RoutedCluster, operation: Operation, size: int, group: Group) -> NcclCost:
    """Return what makes ``laid`` take the time of NCCL's model; see Note [NCCL's times on shared links]."""
    where = ground.where
    members = ground.members[list(group)].tolist()
    choice, _ = choice_on(where.topology, members, where.device, operation, size)
    step = choice.steps * choice.step_latency // laid.rounds
    moving = choice.time - choice.launch - laid.rounds * step
    return NcclCost(choice.launch, step, max(1.0, moving / (size * laid.per_byte)))


def by_wire(laid: RoutedPattern, ground: RoutedCluster, size: float) -> CommPattern:
    """Return bare bytes on links with their latency, after the cluster's software of a step."""
    stretched = dataclasses.replace(laid.unit, latency=laid.unit.latency * (laid.wire + ground.where.step))
    return patterned(dataclasses.replace(laid, unit=stretched), ground, size, 0, 1.0, 1.0)


def by_messages(laid: RoutedPattern, ground: RoutedCluster, size: float, between: bool) -> CommPattern:
    """Return sends and receives of NCCL: the curve that its all-to-all is fitted by, without the copy of the own block.

    Args:
        laid: one flow a message.
        ground: the cluster.
        size: bytes of the operation.
        between: whether any of it leaves its server.
    """
    gpu = gpu_named(ground.where.device or "")
    curve = gpu.generation.direct
    block = np.maximum(laid.unit.size * size, 1.0)
    fastest = curve.rate * gpu.link / gpu.generation.link
    takes = block / np.minimum(fastest, laid.rate) * SECOND + curve.ramp * np.sqrt(block)
    hop = round(NETWORK_HOP["direct", "Simple"] * MICROSECOND) if between else curve.hop
    scale = np.where(np.isfinite(laid.rate), takes * laid.rate / (block * SECOND), 1.0)
    return patterned(laid, ground, size, curve.launch, hop, scale)


def _unit(layout: CommLayout, paths: Paths, copies: int) -> Program:
    """Return the flows of so many copies of ``layout``, for one byte and with steps of 1 ps."""
    flows, waits = len(layout.source), len(layout.after)
    index = np.arange(copies)[:, None]
    first = np.append(0, (layout.first[1:] + index * waits).reshape(-1))
    return Program.of(
        paths,
        np.tile(layout.share, copies),
        steps=np.tile(layout.steps, copies),
        # Not 0: rings collapse only while their latency runs, and large ones must.
        latency=np.ones(flows * copies),
        first=first.astype(np.int32),
        after=(layout.after + index * flows).reshape(-1).astype(np.int32),
        lag=np.tile(layout.lag, copies),
    )


def _joined_steps(program: Program) -> Program:
    """Return ``program`` with fewer and longer steps if it has too many; see Note [Long rings]."""
    total = int(program.steps.sum(dtype=np.int64))
    if total <= _MOST_STEPS or ((program.lag > 0) & (program.lag < WHOLE)).any():
        return program  # Joining would delay a pipeline, which passes on every step.
    factor = -(-total // _MOST_STEPS)
    steps = np.maximum(-(-program.steps // factor), np.minimum(program.steps, _LEAST_STEPS))
    longer = program.steps / steps
    return dataclasses.replace(
        program, steps=steps.astype(np.int32), size=program.size * longer, latency=program.latency * longer
    )


def _contending(paths: Paths, flows: int, groups: int, links: int) -> NDArray[np.int64]:
    """Return the groups, of so many flows each, that share links with the first, directly or through others."""
    owner = np.repeat(np.arange(groups), np.diff(paths.first[:: max(flows, 1)])) if flows else np.zeros(0, np.int64)
    met = np.zeros(groups, np.bool_)
    met[0] = True
    while True:
        taken = np.zeros(links, np.bool_)
        taken[paths.links[met[owner]]] = True
        before = int(met.sum())
        met[owner[taken[paths.links]]] = True
        if int(met.sum()) == before:
            return np.flatnonzero(met)


def _bits(links: NDArray[np.integer], count: int) -> int:
    used = np.zeros(count, np.bool_)
    used[links] = True
    return int.from_bytes(np.packbits(used, bitorder="little").tobytes(), "little")


def _end(program: Program, capacity: NDArray[np.float64]) -> float:
    return float(run(program, capacity).finish.max(initial=0.0))


_LONG: Final = 5.0
"""Seconds of simulation from which an exchange is reported before it begins."""


class FidelityPolicy:
    """Choice between fluid and packets, exchange by exchange.

    Args:
        where: the cluster, and its fidelity.
        tell: called with a line about what takes long, or is not simulated packet by packet.
    """

    def __init__(self, where: Deployment, tell: Callable[[str], None]) -> None:
        self._where, self._tell = where, tell
        self._left = where.fidelity.budget
        self._speed = 0.0
        self._reported = False

    def of(self, program: Program) -> Fidelity:
        """Return the fidelity that an exchange is simulated with."""
        fidelity = self._where.fidelity
        if fidelity.level in ("ideal", "fluid"):
            return fidelity
        if not self._speed:
            self._speed = speed(fidelity, self._where.fluid.network, program)
        found = PacketEstimate(packet_hops(program, fidelity.transport.payload), self._speed)
        if fidelity.level == "packet" or found.seconds <= self._left:
            self._left -= found.seconds
            if found.seconds > _LONG:
                self._tell(f"packet level: an exchange of {found}")
            return dataclasses.replace(fidelity, level="packet")
        if not self._reported:
            self._reported = True
            self._tell(f"auto: an exchange of {found} is more than what is left of the budget; such ones are fluids")
        return dataclasses.replace(fidelity, level="fluid")
