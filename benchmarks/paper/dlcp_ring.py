"""DLCP with ring all-reduce: DistributedDataParallel's buckets, one after the other, as on one stream of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from dlcp_network import SEED, WORKERS, Way, fabric, places, sprayed, with_tolerance
from dlcp_tags import tags
from numpy.typing import NDArray

from foretrain.collective import build
from foretrain.collective.plan import WHOLE
from foretrain.network.program import Program, joined, place
from foretrain.network.routing import Ecmp
from foretrain.workload import Workload

FIRST, BUCKET = 1 << 20, 25 << 20
"""DistributedDataParallel's buckets, bytes."""


@dataclass(frozen=True)
class Reduced:
    """What came of one job: ms from one backward pass to the next, and the share of packets that a hop lost."""

    step: float
    lost: float


def per_hop(way: Way, tolerance: float) -> Way:
    """A sum loses on each of its way's N − 1 hops: each may lose p/(N − 1)."""
    return with_tolerance(way, tolerance / (WORKERS - 1))


def buckets(work: Workload) -> list[tuple[int, int]]:
    """Bytes, and when the last gradient is there, ps: in the order of release, a bucket is closed as it is full."""
    found, size, limit = [], 0, FIRST
    ordered = sorted(work.gradients, key=lambda each: each.release)
    for each in ordered:
        size += each.size
        if size >= limit:
            found.append((size, each.release))
            size, limit = 0, BUCKET
    return [*found, (size, ordered[-1].release)] if size else found


def all_reduce(work: Workload, ranks: NDArray[np.int64]) -> Program:
    """All buckets; each flow of one waits for its ring's last flows in the one before, at the same sender."""
    plan = build("ring", "all_reduce", WORKERS)
    router = Ecmp(fabric(), seed=SEED)
    found = buckets(work)
    whole = joined([place(plan, float(size), router, ranks, release=release) for size, release in found])
    flows = plan.transfers
    before = np.arange(len(whole)) - flows
    # What a rank sends next it sends when what it received, and what it sent, of the last bucket is over.
    rows, lags = [], []
    for f in range(len(whole)):
        own = whole.after[whole.first[f] : whole.first[f + 1]].tolist()
        kept = whole.lag[whole.first[f] : whole.first[f + 1]].tolist()
        more = [int(before[f]), int(own[0]) - flows] if before[f] >= 0 else []
        rows.append([*own, *more])
        lags.append([*kept, *[WHOLE] * len(more)])
    return Program.of(
        whole.paths,
        whole.size,
        steps=whole.steps,
        latency=whole.latency,
        release=whole.release,
        priority=whole.priority,
        first=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32),
        after=np.array([each for row in rows for each in row], np.int32),
        lag=np.array([each for row in lags for each in row], np.int32),
    )


def important(work: Workload, program: Program, way: Way) -> list[NDArray[np.bool_]]:
    """Return which packets of each flow are important: those of large magnitude in its bucket, last layers first."""
    payload, count = way.transport.payload, len(buckets(work))
    each = len(program) // count
    packets = np.ceil(program.size / payload).astype(int) * program.steps
    depths = [1 - (f // each + 0.5) / count for f in range(len(program))]
    return [tags(payload, way.important, depths[f], f, f, n) for f, n in enumerate(packets)]


def reduced(
    works: Sequence[Workload], way: Way, progress: Callable[[int, int], None] | None = None, *, spray: bool = False
) -> list[Reduced]:
    """One job of each of ``works`` at random places of the fabric, all at once.

    ``spray`` has packets take all ways in turn.
    """
    of_node = {int(node): rank for rank, node in enumerate(fabric().ranks)}
    nodes = places(len(works), WORKERS)
    programs = [
        all_reduce(work, np.array([of_node[int(node)] for node in at])) for work, at in zip(works, nodes, strict=True)
    ]
    whole = joined(programs)
    others = sprayed(whole.paths) if spray else ()
    vital = None
    if way.tagged:
        vital = [bits for work, program in zip(works, programs, strict=True) for bits in important(work, program, way)]
    outcome = way.on(fabric()).run(whole, others=others, progress=progress, important=vital)
    first = np.cumsum([0, *map(len, programs)])
    found = []
    for k, work in enumerate(works):
        came = outcome.came[first[k] : first[k + 1]]
        end = max(int(outcome.finish[first[k] : first[k + 1]].max()), work.backward) + work.update + work.forward
        found.append(Reduced(end / 1e9, 1 - sum(int(e.sum()) for e in came) / sum(e.size for e in came)))
    return found
