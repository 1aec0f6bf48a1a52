"""pace: the optimal preemptive order, on tensors fused by dynamic programming.

Source: Bao, Peng, Chen & Wu, "Preemptive All-reduce Scheduling for Expediting Distributed DNN Training", INFOCOM'20.
Only the abstract is public: PACE (1) finds the tensor-preemptive order that minimises the training time on the model's
DAG and (2), with that as its oracle, merges small tensors by dynamic programming. Both are rebuilt here from that:

1. the order is preemptive largest tail first, which is optimal (see `foretrain.schedule.bounds`);
2. neighbours in that order are fused so that the predicted iteration time is least. With groups 1..g in order,

       T = max over groups k of  r_k + Σ_{i≤k} (θ·⌈s_i/δ⌉ + κ·s_i) + q_k,     r_k, q_k the largest of its members

   For a given T the fewest operations that cover the first j tensors, n_j, obey n_j = min over i of
   n_i + ⌈s(i..j)/δ⌉ subject to group (i..j] meeting T: O(n²) with an early exit; T itself by bisection.

Preemption is at partitions of δ bytes under a byte credit, the mechanism of ByteScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from foretrain.schedule.job import CostModel, Job, Knob
from foretrain.schedule.window import Window
from foretrain.tasks import Action, Event, Priorities
from foretrain.units import Time, moving

_PRECISION = 1000
"""T is bisected to one part in this many."""


def fuse(
    releases: Sequence[Time], sizes: Sequence[int], tails: Sequence[Time], cost: CostModel, partition: int
) -> list[range]:
    """Groups of neighbours that minimise the predicted iteration time; sequences in order of urgency."""
    apart = [range(i, i + 1) for i in range(len(sizes))]
    low = _predict(apart, releases, sizes, tails, CostModel(0, cost.per_byte), partition)
    best, high = apart, _predict(apart, releases, sizes, tails, cost, partition)
    while high - low > max(1, high // _PRECISION):
        target = (low + high) // 2
        groups = _cover(target, releases, sizes, tails, cost, partition)
        if groups is None:
            low = target
        else:
            best, high = groups, min(target, _predict(groups, releases, sizes, tails, cost, partition))
    return best


def _predict(
    groups: Sequence[range],
    releases: Sequence[Time],
    sizes: Sequence[int],
    tails: Sequence[Time],
    cost: CostModel,
    partition: int,
) -> Time:
    worst, sent = 0, 0
    for group in groups:
        size = sum(sizes[i] for i in group)
        sent += cost.overhead * -(-size // partition) + moving(size, cost.per_byte)
        worst = max(worst, max(releases[i] for i in group) + sent + max(tails[i] for i in group))
    return worst


def _cover(
    target: Time, releases: Sequence[Time], sizes: Sequence[int], tails: Sequence[Time], cost: CostModel, partition: int
) -> list[range] | None:
    """Return groups that meet ``target`` with the fewest operations, or None."""
    total = [0, *accumulate(sizes)]
    fewest: list[int | None] = [0] + [None] * len(sizes)
    cut_at = [0] * (len(sizes) + 1)
    for end in range(1, len(sizes) + 1):
        sent = moving(total[end], cost.per_byte)
        release = tail = 0
        for begin in range(end - 1, -1, -1):
            release, tail = max(release, releases[begin]), max(tail, tails[begin])
            if release + sent + tail > target:
                break
            before = fewest[begin]
            if before is None:
                continue
            count = before + -(-(total[end] - total[begin]) // partition)
            best = fewest[end]
            if (best is None or count < best) and release + sent + count * cost.overhead + tail <= target:
                fewest[end], cut_at[end] = count, begin
    if fewest[-1] is None:
        return None
    groups, end = [], len(sizes)
    while end:
        groups.append(range(cut_at[end], end))
        end = cut_at[end]
    return groups[::-1]


class Pace:
    """Preemptive order on fused tensors."""

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("partition", 4_000_000, 1 << 10, 1 << 34),
        Knob("credit", 8_000_000, 1 << 10, 1 << 34),
    )
    barrier: bool = False
    warmup: int = 0
    priorities: Priorities

    def __init__(self, job: Job, *, partition: int, credit: int) -> None:
        order = sorted(range(len(job.tasks)), key=lambda i: (-job.tails[i], job.tasks[i].first_use))
        groups = fuse(
            [job.releases[i] for i in order],
            [job.tasks[i].size for i in order],
            [job.tails[i] for i in order],
            job.cost,
            partition,
        )
        self._window = Window(job.tasks, [[order[k] for k in group] for group in groups], partition, credit)
        self.priorities = {"all_reduce": order}

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Send the most urgent fused group's next partition."""
        return self._window.handle(event)
