"""A collective on a topology: the plan's endpoints become nodes, its channels paths, its blocks bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Plan
from foretrain.errors import ConfigError
from foretrain.network.program import Paths, Program
from foretrain.network.topology.graph import Topology
from foretrain.units import Time


class Router(Protocol):
    """Chooses paths; see `foretrain.network.routing`."""

    @property
    def topology(self) -> Topology:
        """The network whose links `paths` names."""
        ...

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """A path for each of the node pairs; the same pair and connection always get the same one."""
        ...


@runtime_checkable
class Scattering(Router, Protocol):
    """A router of packets, each of which may take another way."""

    def others(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]
    ) -> tuple[Paths, ...]:
        """More paths for each of the node pairs, besides that of `paths`."""
        ...


def place(
    plan: Plan,
    data: float,
    router: Router,
    ranks: Sequence[int] | NDArray[np.integer] | None = None,
    helpers: Sequence[int] = (),
    *,
    step_latency: Time = 0,
    wire_latency: bool = True,
    weight: float = 1.0,
    priority: int = 0,
    release: Time = 0,
) -> Program:
    """The flows of ``plan`` for ``data`` bytes.

    Args:
        plan: what to move.
        data: bytes, in the sense of `Plan.size`.
        router: chooses paths.
        ranks: for each rank of the plan, which of the topology's ranks it is; the first ones by default.
        helpers: for each helper of the plan, the node it is on.
        step_latency: ps of software before each step.
        wire_latency: whether the links' latency comes on top; not where ``step_latency`` was measured with it.
        weight, priority, release: of all flows; see `Program`.

    Raises:
        ConfigError: the topology cannot hold the plan.
    """
    sources, targets, connections = endpoints(plan, router.topology, ranks, helpers)
    # Transfers of one channel between one pair share a connection, so that each is routed once.
    keys = sources.astype(np.int64) * len(router.topology.nodes) + targets
    keys = keys * (int(connections.max(initial=0)) + 1) + connections
    _, once, which = np.unique(keys, return_index=True, return_inverse=True)
    asked = sources[once], targets[once], connections[once]
    routed = router.paths(*asked)
    others = router.others(*asked) if isinstance(router, Scattering) else ()
    count = plan.transfers
    delay = np.add.reduceat(np.append(router.topology.latency[routed.links], 0), routed.first[:-1]).astype(np.float64)
    delay[np.diff(routed.first) == 0] = 0.0
    return Program(
        paths=routed.gather(which),
        size=plan.size(data),
        steps=plan.steps,
        latency=(delay[which] if wire_latency else np.zeros(count)) + step_latency,
        release=np.full(count, float(release)),
        weight=np.full(count, float(weight)),
        priority=np.full(count, priority, np.int32),
        first=plan.first,
        after=plan.after,
        lag=plan.lag,
        others=tuple(paths.gather(which) for paths in others),
    )


def endpoints(
    plan: Plan,
    topology: Topology,
    ranks: Sequence[int] | NDArray[np.integer] | None = None,
    helpers: Sequence[int] = (),
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Source node, target node and connection of each transfer of ``plan``: what a router is asked for.

    ``ranks`` and ``helpers`` are those of `place`, as are the errors.
    """
    chosen = np.arange(plan.ranks) if ranks is None else np.asarray(ranks, np.int64)
    if len(chosen) != plan.ranks:
        raise ConfigError("ranks", len(chosen), f"places do not hold a plan of {plan.ranks} ranks", "give one per rank")
    if plan.ranks > len(topology.ranks) or (
        len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(topology.ranks)
    ):
        have = len(topology.ranks)
        raise ConfigError("topology", topology.name, f"has {have} ranks and cannot hold {plan.ranks}", "make it larger")
    if len(helpers) != plan.helpers:
        raise ConfigError("helpers", list(helpers), f"are not the {plan.helpers} of this plan", "name a node for each")
    nodes = np.concatenate([topology.ranks[chosen], np.asarray(helpers, np.int32)]).astype(np.int32)
    return nodes[plan.source], nodes[plan.target], plan.channel.astype(np.int32)
