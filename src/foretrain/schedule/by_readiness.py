"""Policies that send whole gradients, or buckets of them, in the order in which they become ready.

fifo      each by itself
ddp       DistributedDataParallel's buckets
fusion    Horovod's: what has become ready in a cycle
mgwfbp    merged where that costs nothing or saves a start-up
dear      all-reduce split at the barrier
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrain.schedule.job import CostModel, Job, Knob
from foretrain.schedule.window import Buckets, by_size, whole
from foretrain.tasks import AS_THEY_COME, Action, Done, Event, Priorities, Ready, Start, StepBegin, Wake, WakeAt
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time


class Fifo:
    """Wait-free backpropagation (WFBP).

    Source: wait-free backpropagation, Poseidon (ATC'17) §3, the default of MXNet's and Horovod's all-reduce without
    fusion. T = max over m of (r_m + S_m) + Σu + Σf: see `foretrain.schedule.bounds`.
    """

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = True
    warmup: int = 0
    priorities: Priorities = AS_THEY_COME

    def __init__(self, job: Job) -> None:
        self._chunks = [whole("all_reduce", job.tasks, [task.index]) for task in job.tasks]

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start what is ready."""
        return (Start(self._chunks[event.task]),) if type(event) is Ready else ()


class Ddp:
    """DistributedDataParallel's buckets.

    Source: Li et al., VLDB'20 §3.2, and torch 2.13's `torch/nn/parallel/distributed.py` and `reducer.cpp`:

    - In the first step there is a single bucket with everything (torch 2.13 without ``find_unused_parameters``), so
      that the first step overlaps nothing and predicts nothing.
    - It then rebuilds the buckets once, in the order in which gradients became ready, with a first bucket of 1 MiB.
    - With ``find_unused_parameters`` it never rebuilds: buckets are cut in registration order, the first of 1 MiB, and
      used in reverse, from the first step on.
    - With ``bucket_cap_mb_list``, here ``buckets``, bucket k has cap k and the last cap serves all that follow, from
      the first step on.
    - Buckets start strictly in index order, each when all its gradients are ready. The optimizer waits for all of them.

    Departure: with an explicit ``bucket_cap_mb`` torch also uses it for the first bucket. Here the first bucket stays
    at ``first``, so that the baseline "DDP at its best bucket" is as strong as DDP can be made.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("bucket", 25 << 20, 1 << 10, 1 << 34),
        Knob("buckets", (), 1, 1 << 34, "sizes", tunable=False),
        Knob("first", 1 << 20, 1 << 10, 1 << 34, tunable=False),
        Knob("find_unused", 0, 0, 1, "count", tunable=False),
    )
    barrier: bool = True
    warmup: int = 1
    priorities: Priorities = AS_THEY_COME

    def __init__(self, job: Job, *, bucket: int, buckets: tuple[int, ...], first: int, find_unused: int) -> None:
        self._tasks = job.tasks
        self._caps = buckets or (min(first, bucket), bucket)
        registered = range(len(job.tasks))
        initial = by_size(registered, job.tasks, self._caps)[::-1] if find_unused or buckets else [registered]
        self._buckets = Buckets(job.tasks, initial)
        self._seen: list[int] = []
        self._rebuilt = bool(find_unused)

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the buckets whose turn has come; rebuild them after the first step."""
        if type(event) is StepBegin:
            if self._seen and not self._rebuilt:
                self._buckets = Buckets(self._tasks, by_size(self._seen, self._tasks, self._caps))
                self._rebuilt = True
            self._buckets.reset()
        elif type(event) is Ready:
            if not self._rebuilt:
                self._seen.append(event.task)
            return self._buckets.ready(event.task)
        return ()


class Fusion:
    """Horovod's cycle and fusion buffer.

    Source: Sergeev & Del Balso, arXiv:1802.05799 §4, and Horovod's controller: a background cycle wakes every
    ``cycle``; what has become ready since is fused greedily, in the order of readiness, up to ``threshold`` bytes per
    operation. The optimizer waits for all.

    Departure: cycles tick from the start of the backward pass; Horovod's run freely, which shifts each by less than
    one.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob("threshold", 128 << 20, 1 << 10, 1 << 34),
        Knob("cycle", MILLISECOND, 10 * MICROSECOND, SECOND, "time"),
    )
    barrier: bool = True
    warmup: int = 0
    priorities: Priorities = AS_THEY_COME

    def __init__(self, job: Job, *, threshold: int, cycle: Time) -> None:
        self._tasks = job.tasks
        self._threshold = threshold
        self._cycle = cycle
        self._began: Time = 0
        self._queue: list[int] = []

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Queue what is ready; fuse it at the end of the cycle."""
        if type(event) is StepBegin:
            self._began = now
        elif type(event) is Ready:
            self._queue.append(event.task)
            if len(self._queue) == 1:
                cycles = -(-(now - self._began) // self._cycle)
                return (WakeAt(self._began + cycles * self._cycle),)
        elif type(event) is Wake:
            return self._flush()
        return ()

    def _flush(self) -> list[Action]:
        actions: list[Action] = []
        bucket: list[int] = []
        size = 0
        for index in self._queue:
            if bucket and size + self._tasks[index].size > self._threshold:
                actions.append(Start(whole("all_reduce", self._tasks, bucket)))
                bucket, size = [], 0
            bucket.append(index)
            size += self._tasks[index].size
        self._queue.clear()
        return [*actions, Start(whole("all_reduce", self._tasks, bucket))]


def merge(releases: Sequence[Time], sizes: Sequence[int], cost: CostModel) -> list[range]:
    """Return the groups of consecutive gradients to merge; both sequences in the order of release. O(n)."""
    groups: list[range] = []
    free: Time = 0
    first = size = 0
    for index, (release, own) in enumerate(zip(releases, sizes, strict=True)):
        size += own
        start = max(free, release)
        following = releases[index + 1] if index + 1 < len(releases) else None
        end = start + cost.time(size)
        if following is not None and following < end and (start > following or following - start < cost.startup):
            continue
        groups.append(range(first, index + 1))
        free, first, size = end, index + 1, 0
    return groups


class MgWfbp:
    """Merged-gradient WFBP.

    Source: Shi, Chu & Li, "MG-WFBP", INFOCOM'19 algorithm 1: an all-reduce of s bytes takes t(s) = α + βs; going
    through the gradients in the order of release, one is merged into the next when that costs nothing or saves a
    start-up:

        R = ready(next):  merge  iff  R < start + t(size)  and  (start > R  or  R − start < α)

    where ``start`` is when the link is free and the gradient ready. The optimizer waits for all.

    α is the part of an operation that occupies the link (θ): latency is overlapped by what follows.
    """

    knobs: ClassVar[tuple[Knob, ...]] = ()
    barrier: bool = True
    warmup: int = 0
    priorities: Priorities = AS_THEY_COME

    def __init__(self, job: Job) -> None:
        order = job.by_release
        groups = merge([job.releases[i] for i in order], [job.tasks[i].size for i in order], job.cost)
        self._buckets = Buckets(job.tasks, [[order[k] for k in group] for group in groups])

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Starts merged gradients in order."""
        if type(event) is StepBegin:
            self._buckets.reset()
        return self._buckets.ready(event.task) if type(event) is Ready else ()


class Dear:
    """Decoupled all-reduce.

    Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining",
    ICDCS'23: an all-reduce is split into its halves; groups of tensors (25 MB) are reduce-scattered as the backward
    pass completes them; after the last, groups are all-gathered in forward order, and a layer's forward waits only for
    its own group.

    Departure: all-gathers are queued together, not one by one as each group's forward begins; they leave in the same
    order and never later. On a parameter server reduce-scatter is push and all-gather is pull.
    """

    knobs: ClassVar[tuple[Knob, ...]] = (Knob("group", 25_000_000, 1 << 10, 1 << 34),)
    barrier: bool = False
    warmup: int = 0
    priorities: Priorities

    def __init__(self, job: Job, *, group: int) -> None:
        groups = by_size(job.by_release, job.tasks, [group])
        self._reduce = Buckets(job.tasks, groups, "reduce_scatter")
        urgency = [min(job.tasks[i].first_use for i in tasks) for tasks in groups]
        order = sorted(range(len(groups)), key=urgency.__getitem__)
        self._gather = [Start(whole("all_gather", job.tasks, groups[k])) for k in order]
        self.priorities = {"all_gather": job.by_urgency}
        self._reducing = 0

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Reduce-scatters groups as they complete; all-gathers when the last reduce-scatter is done."""
        if type(event) is StepBegin:
            self._reduce.reset()
            self._reducing = len(self._gather)
        elif type(event) is Ready:
            return self._reduce.ready(event.task)
        elif type(event) is Done and event.chunk.op == "reduce_scatter":
            self._reducing -= 1
            if not self._reducing:
                return self._gather
        return ()
