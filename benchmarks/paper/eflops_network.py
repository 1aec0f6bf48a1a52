"""EFLOPS (b): HDRM on a BiGraph against rings and halving-doubling on fat trees with ECMP, and on the BiGraph itself.

All fabrics of P hosts have switches of equally many ports where that is possible: a BiGraph of 2M switches with M hosts
each, a two-tier fat tree of 2M leaves with M hosts each under M spines, and the smallest three-tier fat tree that holds
P hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Plan, build, hdrm_mapping, rounds
from foretrain.network.fabrics.clos import bigraph, fat_tree, leaf_spine
from foretrain.network.fluid import run
from foretrain.network.program import Program, place
from foretrain.network.routing import Ecmp
from foretrain.network.topology.graph import Topology
from foretrain.units import SECOND, Time

RATE = 12.5e9
HOSTS = {32: 4, 128: 8, 512: 16}
"""P, and M = H of the BiGraph with as many hosts, P = 2 M²."""
SIZES = (1_000_000, 25_000_000, 100_000_000, 1_024_000_000)
CASES = ("ring, in order", "ring, at random", "near, in order", "far, in order", "at random")
"""Rings, and halving-doubling with near or far partners first, which makes no difference at random."""
SLOWDOWNS = {
    (128, "near, in order"): 1.35,
    (128, "far, in order"): 3.73,
    (128, "at random"): 4.23,
    (128, "ring, in order"): 1.0,
    (128, "ring, at random"): 4.18,
    (512, "near, in order"): 1.23,
    (512, "far, in order"): 4.75,
    (512, "at random"): 5.18,
    (512, "ring, in order"): 1.0,
    (512, "ring, at random"): 5.02,
}
"""Bandwidth terms over 2 (P − 1)/P · S/B, two tiers, rounds in lock step: an earlier calculation of this project."""
WHY = """
What decides. With large data only collisions matter. Rings in order have none on a fat tree, so HDRM saves nothing but
rounds there; at random, the unluckiest link of hundreds sets the pace of a ring. Halving-doubling in order loses little
if near partners come first. As data gets small, rounds favour HDRM over rings without limit: a maximum says little
without its size. Ranks that run ahead lose less than in lock step with far partners or at random; with near partners
first they meet flows of other rounds and lose a little more.
"""


def fabric(name: str, hosts: int) -> Topology:
    """``"bigraph"``, ``"two-tier"`` or ``"three-tier"``, for at least ``hosts`` hosts."""
    per_switch = HOSTS[hosts]
    if name == "bigraph":
        return bigraph(2 * per_switch, per_switch, RATE)
    if name == "two-tier":
        return leaf_spine(2 * per_switch, per_switch, RATE)
    return fat_tree(next(k for k in range(2, 100, 2) if k**3 // 4 >= hosts), RATE)


def plan(case: str, hosts: int) -> Plan:
    if case.startswith("ring"):
        return build("ring", "all_reduce", hosts)
    return build("halving_doubling", "all_reduce", hosts, first="far" if case.startswith("far") else "near")


@dataclass(frozen=True)
class Trials:
    """One all-reduce on one fabric under several seeds, of the hash and of the placement.

    Attributes:
        routers: one a seed.
        plan: what is exchanged.
        ranks: for each seed, the host of each rank.
    """

    routers: tuple[Ecmp, ...]
    plan: Plan
    ranks: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, topology: Topology, case: str, hosts: int, seeds: int) -> Trials:
        order = np.arange(hosts)
        shuffled = [np.random.default_rng(seed).permutation(hosts) for seed in range(seeds)]
        ranks = tuple(shuffled if case.endswith("random") else [order] * seeds)
        return cls(tuple(Ecmp(topology, seed=seed) for seed in range(seeds)), plan(case, hosts), ranks)

    def programs(self, size: float, alpha: Time) -> Iterator[Program]:
        for router, ranks in zip(self.routers, self.ranks, strict=True):
            yield place(self.plan, size, router, ranks, step_latency=alpha, wire_latency=False)

    def times(self, size: float, alpha: Time) -> list[float]:
        """Seconds under each seed."""
        capacity = self.routers[0].topology.capacity
        return [float(run(one, capacity).finish.max()) / SECOND for one in self.programs(size, alpha)]

    def slowdowns(self) -> tuple[list[float], list[float]]:
        """Time over 2 (P − 1)/P · S/B without latency: simulated, and with all in lock step."""
        size, hosts = 1e8, self.plan.ranks
        ideal = 2 * (hosts - 1) / hosts * size / RATE
        stepped = [lock_step(self.plan, one, self.routers[0].topology) / ideal for one in self.programs(size, 0)]
        return [time / ideal for time in self.times(size, 0)], stepped


def lock_step(made: Plan, program: Program, topology: Topology) -> float:
    """Seconds if each round began when the last one had ended everywhere: Σ of the busiest link's time."""
    if made.name == "ring":
        return int(program.steps[0]) * _busiest(program, np.arange(len(program)), topology)
    return sum(_busiest(program, under_way, topology) for under_way in rounds(made))


def _busiest(program: Program, flows: NDArray[np.int64], topology: Topology) -> float:
    paths = program.paths.gather(flows)
    load = np.bincount(paths.links, np.repeat(program.size[flows], np.diff(paths.first)), topology.links)
    return float((load / topology.capacity).max())


def hdrm(hosts: int, size: float, alpha: Time, *, mapped: bool = True) -> float:
    """Seconds of HDRM on the BiGraph; without its mapping, rank r sits on host r, and ECMP goes where it must."""
    per_switch = HOSTS[hosts]
    made = build("hdrm", "all_reduce", hosts, switches=2 * per_switch, hosts=per_switch)
    seats = hdrm_mapping(2 * per_switch, per_switch).host if mapped else None
    router = Ecmp(fabric("bigraph", hosts))
    program = place(made, size, router, seats, step_latency=alpha, wire_latency=False)
    return float(run(program, router.topology.capacity).finish.max()) / SECOND


def closed_form(hosts: int, size: float, alpha: Time) -> float:
    """T_HDRM, seconds."""
    rounds_in_all = 2 * (hosts.bit_length() - 1)
    return rounds_in_all * alpha / SECOND + 2 * (hosts - 1) / hosts * size / RATE


def spread(values: list[float], middle: float) -> str:
    """The middle, least and most."""
    if max(values) - min(values) < 5e-3:
        return f"{middle:.2f}"
    return f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"
