"""The optimum T*: what no schedule can beat, and why.

Exchanging gradients on one link is the scheduling problem 1 | pmtn, r_i | max(C_i + q_i): gradient i is released at
r_i, takes c_i = s_i·κ on the link and is followed by a tail q_i = u_i + Σ_{j≥i} f_j. Jackson's preemptive rule, always
send the largest tail, solves it exactly, for tied weights too. With releases and tails in layer order the answer is
closed:

    T* = max over m of [ r_m + S_m + q_m ],    S_m = Σ_{i≤m} c_i,    and at least Σb + Σf

Latency and θ are left out: T* bounds what scheduling can do on this link, whatever an operation costs. With partition
δ, credit W, cost θ and latency ℓ that the credit covers, a priority schedule is within

    T*(c_i + θ⌈s_i/δ⌉) + (W + δ)κ + θn + ℓ

where n operations may be under way: W/δ + 1, and one more for each tensor that ends in less than a partition.

A parameter server has two directions. Either alone is a relaxation, so the dearer one's T* still bounds everything, and
so do its comparators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from foretrain.schedule.job import Job
from foretrain.units import COST_SHIFT, Time, format_time, moving
from foretrain.workload.step import Workload

_NOTICEABLE = 0.01
"""Exposed communication below this share of the computation is not worth a name."""
_LATE = 0.98
"""From this share of the backward pass on, a gradient counts as coming last."""


@dataclass(frozen=True, slots=True)
class Bound:
    """T* and what makes it so. Times in ps; ``release + communication + tail`` is ``time`` unless compute-bound.

    Attributes:
        time: T*, the shortest possible period of a steady state.
        layer: the binding layer m: its gradient and all that are more urgent make T*.
        release: r_m, until the gradient that starts the binding chain exists.
        communication: S_m, to send it and everything at least as urgent.
        tail: q_m, its update and the rest of the forward pass.
        compute: Σb + Σf.
        link: Σc, the link's time if it never idled.
        wfbp: the comparator with a barrier: wait-free backpropagation, DDP and fusion take at least this.
        dear: the comparator that splits all-reduce in two at the barrier takes at least this.
        kind: what binds.
    """

    time: Time
    layer: str
    release: Time
    communication: Time
    tail: Time
    compute: Time
    link: Time
    wfbp: Time
    dear: Time
    kind: Literal["compute-bound", "communication-bound", "embedding-bound"]

    @property
    def exposed(self) -> Time:
        """Communication that not even the best schedule hides."""
        return self.time - self.compute

    def __str__(self) -> str:
        if self.kind == "compute-bound":
            rest = f", but for {format_time(self.exposed)} of sending and updating" if self.exposed else ""
            return f"T* = {format_time(self.time)}, compute-bound: communication can hide behind the computation{rest}"
        first = self.kind == "embedding-bound"
        why = "what comes last is needed first" if first else "the link cannot carry everything in time"
        return (
            f"T* = {format_time(self.time)}, {self.kind} at layer {self.layer!r} ({why}): "
            f"{format_time(self.release)} of backward pass until its gradient exists "
            f"+ {format_time(self.communication)} to send it and all that is more urgent "
            f"+ {format_time(self.tail)} of update and forward pass still to do"
        )


def bound(workload: Workload, job: Job) -> Bound:
    """The optimum of ``workload`` on a link of cost ``job.cost``. O(n log n)."""
    time, task, release, sent, late = _jackson(job)
    compute = workload.compute
    time = max(time, compute)
    layer = workload.layers[job.layers[task]]
    if time - compute - layer.update <= _NOTICEABLE * compute:
        kind = "compute-bound"
    else:
        kind = "embedding-bound" if late else "communication-bound"
    return Bound(
        time=time,
        layer=layer.name,
        release=release,
        communication=sent,
        tail=job.tails[task],
        compute=compute,
        link=moving(workload.size, job.cost.per_byte),
        wfbp=_wfbp(workload, job),
        dear=_dear(workload, job),
        kind=kind,
    )


def _jackson(job: Job) -> tuple[Time, int, Time, Time, bool]:
    """Preemptive largest tail first, in exact fixed point.

    Returns T*, the task that binds, when its chain begins, the link time of the chain, and whether the chain is of few
    tensors that all came last.
    """
    n = len(job.tasks)
    left = [job.tasks[i].size * job.cost.per_byte for i in range(n)]
    arrivals = sorted(range(n), key=lambda i: job.releases[i])
    queue: list[tuple[Time, int]] = []
    served: list[tuple[int, int, int]] = []
    finish = [0] * n
    now = place = 0
    while queue or place < n:
        if not queue:
            now = max(now, job.releases[arrivals[place]] << COST_SHIFT)
        while place < n and job.releases[arrivals[place]] << COST_SHIFT <= now:
            heappush(queue, (-job.tails[arrivals[place]], arrivals[place]))
            place += 1
        task = queue[0][1]
        until = job.releases[arrivals[place]] << COST_SHIFT if place < n else now + left[task]
        end = min(now + left[task], until)
        served.append((now, end, task))
        left[task] -= end - now
        now = end
        if not left[task]:
            heappop(queue)
            finish[task] = now
    binding = max(range(n), key=lambda i: (finish[i] + (job.tails[i] << COST_SHIFT), -i))
    begin, chain = _chain(served, finish[binding], job.tails[binding], job.tails)
    # More than half of all tensors is no embedding but the model.
    late = 2 * len(chain) <= n and all(job.releases[task] >= _LATE * job.backward for task in chain)
    time = (finish[binding] + (job.tails[binding] << COST_SHIFT)) >> COST_SHIFT
    release = begin >> COST_SHIFT
    return time, binding, release, time - job.tails[binding] - release, late


def _chain(served: Sequence[tuple[int, int, int]], end: int, tail: Time, tails: Sequence[Time]) -> tuple[int, set[int]]:
    """The unbroken time up to ``end`` in which only tasks with at least ``tail`` were sent: its start, and these."""
    begin, chain = end, set()
    for start, stop, task in reversed(served):
        if stop > begin or stop > end:
            continue
        if stop < begin or tails[task] < tail:
            break
        begin = start
        chain.add(task)
    return begin, chain


def _wfbp(workload: Workload, job: Job) -> Time:
    """max_m(r_m + S_m) + Σu + Σf, in the order of release."""
    free: Time = 0
    for task in job.by_release:
        free = max(free, job.releases[task]) + moving(job.tasks[task].size, job.cost.per_byte)
    return max(free, workload.backward) + workload.update + workload.forward


def _dear(workload: Workload, job: Job) -> Time:
    """R = max_m(r_m + S^rs_m); T = max_i [ R + Σ_{j≤i} ag_j + q_i ], the halves costing the same."""
    half = [moving(task.size, job.cost.per_byte) // 2 for task in job.tasks]
    free: Time = 0
    for task in job.by_release:
        free = max(free, job.releases[task]) + half[task]
    free = max(free, workload.backward)
    worst = workload.compute
    for task in job.by_urgency:
        free += half[task]
        worst = max(worst, free + job.tails[task])
    return worst
