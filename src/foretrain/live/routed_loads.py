"""Loads of experts in a simulation: how uneven they were, and how a pipeline's stages number their routers.

# Note [Routers of a pipeline]
A rank numbers its routers from 0, and so does each stage of a pipeline; but layers of different stages must not draw
the same loads. Ranks that exchange tokens in an all-to-all are of one stage, and stages exchange messages; in the order
of their first ranks, stages number their routers one after the other. That is known when all ranks have made a step,
after which a script with pipelining starts again. Ranks in a ring, as of context parallelism, send and receive together
from the beginning on: they are no stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from foretrain.live.device.settings import ExpertLoads
from foretrain.live.rank_trace import SimulationTrace


@dataclass(frozen=True, slots=True)
class RoutedLoads:
    """Loads that routers gave to experts.

    Attributes:
        given: as the user wrote them.
        seed: of the draws; None where they are from a file.
        routers: how many there are, in all stages of a pipeline.
        busiest_expert: load of a router's busiest expert over the mean of its experts; the mean over routers and steps.
        busiest_rank: bytes that the busiest rank of an uneven all-to-all sends or receives over the mean of its group;
            the mean over these all-to-alls; None where there are none.
    """

    given: str
    seed: int | None
    routers: int
    busiest_expert: float
    busiest_rank: float | None


def routed_loads(given: ExpertLoads | None, before: Sequence[int], trace: SimulationTrace) -> RoutedLoads | None:
    """Return the loads that routers gave in a simulation; None where none were given, or no choices were counted.

    ``before`` are for each rank the routers of the stages before its own; empty for none.
    """
    found = {rank: one.router_loads for rank, one in trace.rank_traces.items() if one.router_loads}
    if given is None or not found:
        return None
    return RoutedLoads(
        given.text,
        None if given.rows else given.seed,
        max((before[rank] if before else 0) + len(loads) for rank, loads in found.items()),
        fmean(load for loads in found.values() for steps in loads.values() for load in steps),
        fmean(trace.exchanged) if trace.exchanged else None,
    )


def routers_before(
    routers: Mapping[int, int], exchanging: Iterable[Sequence[int]], messages: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Return the number of routers of the stages before each rank's own; see Note [Routers of a pipeline].

    Args:
        routers: how many each rank has.
        exchanging: groups that exchange tokens.
        messages: pairs of ranks of different stages, or of one.
    """
    stages = _joined(routers, (pair for group in exchanging for pair in pairwise(group)))
    pipelines = _joined(set(stages.values()), ((stages[a], stages[b]) for a, b in messages))
    own: dict[int, int] = {}
    for rank, stage in stages.items():
        own[stage] = max(own.get(stage, 0), routers[rank])
    before = {
        stage: sum(own[other] for other in own if other < stage and pipelines[other] == pipelines[stage])
        for stage in own
    }
    return {rank: before[stage] for rank, stage in stages.items()}


def _joined(members: Iterable[int], pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return for each member the least of those that it is connected with by ``pairs``."""
    least = {member: member for member in members}

    def find(member: int) -> int:
        while least[member] != member:
            member = least[member]
        return member

    for pair in pairs:
        first, second = sorted(map(find, pair))
        least[second] = first
    return {member: find(member) for member in least}
