"""Flows with dependencies, in columns for the kernels; simulators that carry them; collectives placed on topologies.

A flow is a persistent channel over one path that sends ``size`` bytes in each of its ``steps``; see
`foretrain.collective.plan` for the rule of dependencies, which is the same here. Simulators of networks are in
`foretrain.network.fidelity`, `foretrain.network.fluid` and `foretrain.network.packet.online_simulator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Plan
from foretrain.errors import ConfigError
from foretrain.network.topology.graph import Topology
from foretrain.units import Time


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The links of each flow, in the order in which bytes cross them.

    Attributes:
        first: int32 (flows + 1,), compressed sparse rows over ``links``.
        links: int32 (hops,).
    """

    first: NDArray[np.int32]
    links: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.first) - 1

    def of(self, flow: int) -> NDArray[np.int32]:
        """Return the links of one flow."""
        return self.links[self.first[flow] : self.first[flow + 1]]

    def gather(self, flows: NDArray[np.integer]) -> Paths:
        """Return the paths of ``flows``, which may repeat."""
        lengths = np.diff(self.first)[flows]
        first = np.zeros(len(flows) + 1, np.int32)
        np.cumsum(lengths, out=first[1:])
        inside = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
        return Paths(first, self.links[np.repeat(self.first[flows], lengths) + inside])

    @classmethod
    def stacked(cls, several: Sequence[Paths]) -> Paths:
        """Join at least one, in order."""
        hops = np.cumsum([0, *(len(paths.links) for paths in several)])
        first = np.concatenate([[0], *(paths.first[1:] + hops[i] for i, paths in enumerate(several))])
        return cls(first.astype(np.int32), np.concatenate([paths.links for paths in several]))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Flows in columns; column lengths are (flows,) unless said.

    Attributes:
        paths: the links of each flow; an empty path costs its latency alone.
        size: bytes of one step, float64, not negative.
        steps: int32, at least 1.
        latency: ps before the bytes of each step begin to arrive, float64: propagation and software.
        release: ps at which a flow may start at the earliest, float64.
        weight: share of a bottleneck in relation to others, float64, positive.
        priority: int32; flows of a lower number take all they can before higher ones get anything.
        first: int32 (flows + 1,), compressed sparse rows over ``after``.
        after: int32 (dependencies,), a flow waited for.
        lag: int32 (dependencies,), how far it must be ahead.
        others: more paths of each flow, which its packets take in turn with ``paths``; a fluid knows the one alone.
    """

    paths: Paths
    size: NDArray[np.float64]
    steps: NDArray[np.int32]
    latency: NDArray[np.float64]
    release: NDArray[np.float64]
    weight: NDArray[np.float64]
    priority: NDArray[np.int32]
    first: NDArray[np.int32]
    after: NDArray[np.int32]
    lag: NDArray[np.int32]
    others: tuple[Paths, ...] = ()

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def of(
        cls,
        paths: Paths,
        size: NDArray[np.float64],
        *,
        steps: NDArray[np.int32] | None = None,
        latency: NDArray[np.float64] | None = None,
        release: NDArray[np.float64] | None = None,
        weight: NDArray[np.float64] | None = None,
        priority: NDArray[np.int32] | None = None,
        first: NDArray[np.int32] | None = None,
        after: NDArray[np.int32] | None = None,
        lag: NDArray[np.int32] | None = None,
        others: tuple[Paths, ...] = (),
    ) -> Program:
        """Return a checked program; by default one step each, no latency, no dependencies, all alike."""
        count = len(paths)
        none = np.zeros(0, np.int32)
        made = cls(
            paths=paths,
            size=np.asarray(size, np.float64),
            steps=np.ones(count, np.int32) if steps is None else steps,
            latency=np.zeros(count) if latency is None else latency,
            release=np.zeros(count) if release is None else release,
            weight=np.ones(count) if weight is None else weight,
            priority=np.zeros(count, np.int32) if priority is None else priority,
            first=np.zeros(count + 1, np.int32) if first is None else first,
            after=none if after is None else after,
            lag=none if lag is None else lag,
            others=others,
        )
        made.check()
        return made

    def check(self) -> None:
        """Raise ConfigError, naming the column and the flow, where a value is impossible."""
        count = len(self)
        for paths in self.others:
            if len(paths) != count:
                raise ConfigError("program.others", len(paths), "is not one path per flow", f"give {count}")
        for name in ("steps", "latency", "release", "weight", "priority"):
            if len(getattr(self, name)) != count:
                raise ConfigError(f"program.{name}", len(getattr(self, name)), "is not one per flow", f"give {count}")
        for name, wrong, problem in (
            ("size", ~(np.isfinite(self.size) & (self.size >= 0)), "is not a size in bytes"),
            ("steps", self.steps < 1, "is below 1"),
            ("latency", ~(np.isfinite(self.latency) & (self.latency >= 0)), "is not a time"),
            ("release", ~(np.isfinite(self.release) & (self.release >= 0)), "is not a time"),
            ("weight", ~(np.isfinite(self.weight) & (self.weight > 0)), "is not a positive weight"),
        ):
            if wrong.any():
                flow = int(np.flatnonzero(wrong)[0])
                raise ConfigError(
                    f"program.{name}[{flow}]", getattr(self, name)[flow].item(), problem, "give a finite number"
                )
        if len(self.after) and not 0 <= self.after.min() <= self.after.max() < count:
            raise ConfigError("program.after", int(self.after.max()), "is no flow", f"flows are 0 to {count - 1}")


def joined(programs: list[Program]) -> Program:
    """Join programs that run at the same time, independent of each other."""
    starts = np.cumsum([0, *map(len, programs)])
    waits = np.cumsum([0, *(len(p.after) for p in programs)])

    def column(name: str) -> NDArray:
        return np.concatenate([getattr(p, name) for p in programs])

    return Program(
        paths=Paths.stacked([p.paths for p in programs]),
        # Whose flows have fewer ways takes them more often.
        others=tuple(
            Paths.stacked([(p.paths, *p.others)[way % (1 + len(p.others))] for p in programs])
            for way in range(1, 1 + max(len(p.others) for p in programs))
        ),
        first=np.concatenate([[0], *(p.first[1:] + waits[i] for i, p in enumerate(programs))]).astype(np.int32),
        after=np.concatenate([p.after + starts[i] for i, p in enumerate(programs)]).astype(np.int32),
        **{name: column(name) for name in ("size", "steps", "latency", "release", "weight", "priority", "lag")},
    )


@dataclass(eq=False, slots=True)
class ProgramHandle:
    """Handle of a program in a network, which `NetworkSimulator.add` returns.

    Attributes:
        program: what was added.
        added: when, ps.
        end: when its last flow ended, ps, rounded up; None while it runs.
        finish: when each flow ended, float64 ps; NaN until all have.
        cancelled: whether it was.
    """

    program: Program
    added: Time
    end: Time | None = None
    cancelled: bool = False
    finish: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _first: int = 0
    _index: int = 0

    @property
    def _range(self) -> tuple[int, int]:
        return self._first, self._first + len(self.program)


class NetworkSimulator(Protocol):
    """Simulator of a network, at any fidelity."""

    @property
    def now(self) -> Time:
        """Return the present, ps."""
        ...

    @property
    def running(self) -> tuple[ProgramHandle, ...]:
        """Return the programs that have not completed, in the order of their addition."""
        ...

    def add(self, program: Program, at: Time | None = None) -> ProgramHandle:
        """Start ``program`` now, or at ``at``, up to which time then passes first.

        Releases in the program count from the network's time 0.
        """
        ...

    def advance(self, until: Time | None = None, *, stop: bool = False) -> tuple[ProgramHandle, ...]:
        """Let time pass to ``until``, or until everything is done; return what completed, in order.

        Args:
            until: ps; None for as long as anything can happen.
            stop: whether to stop where the first program completes.

        Raises:
            StallError: without ``until``, if what is left can never complete.
        """
        ...

    def predict(self, handle: ProgramHandle) -> Time:
        """Return when ``handle`` would complete if nothing else were added or changed, ps."""
        ...

    def next_completion(self) -> Time | None:
        """Return when the next program would complete if nothing were added or changed, ps; None if none runs."""
        ...

    def cancel(self, handle: ProgramHandle) -> None:
        """Remove ``handle`` from the network, now. What it has sent stays sent."""
        ...


class Router(Protocol):
    """Choice of paths; see `foretrain.network.routing`."""

    @property
    def topology(self) -> Topology:
        """The network whose links `paths` names."""
        ...

    def paths(self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]) -> Paths:
        """Return a path for each of the node pairs; the same pair and connection always get the same one."""
        ...


@runtime_checkable
class Scattering(Router, Protocol):
    """A router of packets, each of which may take another path."""

    def others(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], connections: NDArray[np.int32]
    ) -> tuple[Paths, ...]:
        """Return more paths for each of the node pairs, besides that of `paths`."""
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
    """Return the flows of ``plan`` for ``data`` bytes.

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
    """Return source node, target node and connection of each transfer of ``plan``, the arguments of a router.

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
