"""Advice for those who keep DistributedDataParallel: its best bucket size, its best list of bucket sizes, its options.

Buckets are all-reduced one after the other, bucket k not before its last gradient is released, and the optimizer waits
for all of them. With gradients in the order of release, S their cumulative sizes and t(s) the time of an operation, the
earliest end F of the first j gradients is

    F(j) = min over i < j of [ max(F(i), r_j) + t(S_j − S_i) ]

since an earlier end of the first i never delays what follows. So a dynamic program finds the best consecutive buckets,
and ``bucket_cap_mb_list`` can express any: DDP closes a bucket when it reaches its cap. Exact where an operation
occupies one link; elsewhere a good start that the simulation judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.network import Place, cluster
from foretrain.planner.candidate_search import Candidate, Setting, compressed, halvable, streaming
from foretrain.planner.choice import GainUncertainty, uncertainty, usual
from foretrain.schedule import Job, Spec
from foretrain.schedule.window import by_size
from foretrain.simulation.simulation import job_on
from foretrain.units import SECOND, Time, format_size, format_time, to_seconds
from foretrain.workload.step import Workload

_MIB = 1 << 20
_WORTH = 0.01
"""A smaller gain is not worth a changed argument."""
_CAPS = [digits * 10.0**power for power in range(-2, 4) for digits in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
"""Values of ``bucket_cap_mb`` that are tried; what lies between cuts hardly otherwise."""
_SIMULATED = 4
"""Number of them that are simulated, those that end earliest."""


def best_buckets(job: Job) -> list[list[int]]:
    """Return the tasks of each bucket, in the order of release, that end the exchange first. O(n²) at worst.

    Neighbours are merged as long as the end is later by no more than a thousandth.
    """
    order = job.by_release
    total = [0]
    for task in order:
        total.append(total[-1] + job.tasks[task].size)
    ends: list[Time] = [0]
    starts = [0]
    """Per number of gradients, where the last bucket begins."""
    earliest = 0
    for count, task in enumerate(order, 1):
        release = job.releases[task]
        # Of those prefixes that end before the release, the longest leaves the smallest bucket.
        while earliest + 1 < count and ends[earliest + 1] <= release:
            earliest += 1
        options = [
            (max(ends[first], release) + job.cost.time(total[count] - total[first]), first)
            for first in range(earliest, count)
        ]
        end, first = min(options)
        ends.append(end)
        starts.append(first)
    buckets, last = list[list[int]](), len(order)
    while last:
        buckets.append(list(order[starts[last] : last]))
        last = starts[last]
    return _merged(job, buckets[::-1], ends[-1])


def _merged(job: Job, buckets: list[list[int]], end: Time) -> list[list[int]]:
    """Merge neighbours as long as that delays the end by no more than a thousandth: fewer buckets are more robust."""
    limit = end + (job.backward + end) // 1000
    found = [buckets[0]]
    for place, bucket in enumerate(buckets[1:], 1):
        joined = [*found[:-1], found[-1] + bucket]
        if _end(job, [*joined, *buckets[place + 1 :]]) <= limit:
            found = joined
        else:
            found.append(bucket)
    return found


def _end(job: Job, buckets: Sequence[Sequence[int]]) -> Time:
    """Return when the last of these buckets has been sent."""
    end: Time = 0
    for bucket in buckets:
        released = max(job.releases[task] for task in bucket)
        end = max(end, released) + job.cost.time(sum(job.tasks[task].size for task in bucket))
    return end


def caps_in_mib(sizes: Sequence[Sequence[int]]) -> list[float]:
    """Return the roundest ``bucket_cap_mb_list`` that cuts gradients into these buckets.

    Args:
        sizes: per bucket, the bytes of its gradients in the order of release.
    """
    caps = []
    for bucket in sizes:
        whole = sum(bucket)
        # DDP closes a bucket when its size reaches the cap: any cap in (below, whole] cuts here.
        below, exact = whole - bucket[-1], whole / _MIB
        rounded = (math.floor(exact * 10**digits) / 10**digits for digits in range(7))
        cap = next((cap for cap in rounded if int(cap * _MIB) > below), exact)
        caps.append(int(cap) if cap == int(cap) else cap)
    return caps


def best_list(job: Job, unused: bool = False) -> list[float]:
    """Return the ``bucket_cap_mb_list`` that cuts into the best buckets.

    Args:
        job: what is exchanged.
        unused: whether DDP looks for unused parameters, and so cuts in the order of registration. That is the reverse
            of the order of release, or nearly so.
    """
    sizes = [[job.tasks[task].size for task in bucket] for bucket in best_buckets(job)]
    return caps_in_mib([bucket[::-1] for bucket in sizes[::-1]] if unused else sizes)


def best_caps(job: Job, unused: bool = False) -> list[float]:
    """Return the values of ``bucket_cap_mb`` that end the exchange first, the best first, one for each way to cut.

    Args:
        job: what is exchanged.
        unused: as of `best_list`.
    """
    order = range(len(job.tasks)) if unused else job.by_release
    ends: dict[tuple[tuple[int, ...], ...], tuple[Time, float]] = {}
    for cap in sorted(_CAPS, key=lambda cap: (len(f"{cap:g}"), cap)):  # of those that cut alike the roundest
        buckets = tuple(by_size(order, job.tasks, [int(cap * _MIB)]))
        if buckets not in ends:
            ends[buckets] = (_end(job, buckets[::-1] if unused else buckets), cap)
    return [cap for _, cap in sorted(ends.values())[:_SIMULATED]]


@dataclass(frozen=True, slots=True)
class BucketAdvice:
    """DistributedDataParallel with other arguments, forecast.

    Attributes:
        present: as it is; by default with buckets of 25 MiB after a first one of 1 MiB.
        single: with its best ``bucket_cap_mb``, which is also the first bucket's.
        listed: with its best ``bucket_cap_mb_list``.
        cap_list: that list, MiB.
        half: with that list and the fp16 hook; None where gradients have two bytes already.
        searchless: as it is, with ``static_graph=True``; None where DDP does not look for unused parameters.
        uncertainty: one standard deviation of the gain of ``listed`` over ``present``, as a share.
        copy: what copying gradients into buckets takes, which ``gradient_as_bucket_view=True`` saves; ps.
        size: bytes of memory that it saves.
    """

    present: Candidate
    single: Candidate
    listed: Candidate
    cap_list: tuple[float, ...]
    half: Candidate | None
    searchless: Candidate | None
    uncertainty: float
    copy: Time
    size: int

    def gain(self, one: Candidate) -> float:
        """Return the forecast gain of ``one`` over DDP as it is: 0.05 is 5 % more iterations in the same time."""
        return _time(self.present) / _time(one) - 1

    @property
    def cap(self) -> float:
        """Return the best ``bucket_cap_mb``."""
        return round(self.single.schedule.settings["bucket"] / _MIB, 3)

    @property
    def recommended(self) -> Candidate:
        """Return the simplest within a hundredth of the fastest, or DDP as it is where no gain is certain."""
        worth = max(_WORTH, self.uncertainty)
        ranked = [one for one in (self.single, self.listed) if self.gain(one) > worth]
        if not ranked:
            return self.present
        least = min(map(_time, ranked))
        return next(one for one in ranked if _time(one) <= least * (1 + _WORTH))

    @property
    def lines(self) -> list[str]:
        """Return lines for people: the arguments to write, their gains, and what other options would bring."""
        found = [f"DDP as it is takes {format_time(_time(self.present))} an iteration; with other arguments, forecast:"]
        for one, text in (
            (self.single, f"bucket_cap_mb={self.cap:g}"),
            (self.listed, f"bucket_cap_mb_list={list(self.cap_list)}"),
        ):
            found.append(f"  {self._gain(one)}  {text}")
        if self.half is not None:
            found.append(f"  {self._gain(self.half)}  the list and register_comm_hook(None, fp16_compress_hook), lossy")
        graph = "static_graph=True saves the search for unused parameters, if you ask for it."
        if self.searchless is not None:
            what = "static_graph=True, or find_unused_parameters=False where all are used"
            found.append(f"  {self._gain(self.searchless)}  {what}")
            graph = "what the search for unused parameters takes is not counted."
        view = f"saves {format_size(self.size)} of memory and {format_time(self.copy)} of copying"
        found.append(f"gradient_as_bucket_view=True {view if self.size else 'is set already'}; {graph}")
        found.append(self._verdict())
        return found

    def _gain(self, one: Candidate) -> str:
        return f"{format_time(_time(one)):>8}  {self._share(one)}"

    def _share(self, one: Candidate) -> str:
        return f"{self.gain(one):+.1%} ± {self.uncertainty:.1%}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
        return {
            "present": to_seconds(_time(self.present)),
            "bucket_cap_mb": self.cap,
            "single": to_seconds(_time(self.single)),
            "bucket_cap_mb_list": list(self.cap_list),
            "listed": to_seconds(_time(self.listed)),
            "fp16_hook": to_seconds(_time(self.half)) if self.half else None,
            "static_graph": to_seconds(_time(self.searchless)) if self.searchless else None,
            "uncertainty": self.uncertainty,
        }

    @property
    def line(self) -> str:
        """Return one line for people: what those who keep DDP should write."""
        chosen = self.recommended
        if chosen is self.present:
            return f"if you keep DDP: no other bucket sizes are certain to be faster (± {self.uncertainty:.1%})"
        what = f"bucket_cap_mb={self.cap:g}" if chosen is self.single else f"bucket_cap_mb_list={list(self.cap_list)}"
        time = format_time(_time(chosen))
        return f"if you keep DDP: {what} takes {time} an iteration, {self._share(chosen)} over its default buckets"

    def _verdict(self) -> str:
        chosen = self.recommended
        if chosen is self.present:
            return "Keep DDP's buckets as they are: no others are certain to be faster."
        if chosen is self.single:
            return f"Write DistributedDataParallel(model, bucket_cap_mb={self.cap:g}); a list gains no more."
        return f"Write DistributedDataParallel(model, bucket_cap_mb_list={list(self.cap_list)})."


def advise_buckets(
    workload: Workload,
    where: str | Place,
    *,
    present: Spec | None = None,
    copies: bool = True,
    doubt: GainUncertainty | None = None,
) -> BucketAdvice:
    """Forecast DistributedDataParallel with its best arguments.

    Args:
        workload: one worker's step.
        where: a cluster or its notation; gradients are all-reduced there.
        present: DDP as it is, by default with its default buckets.
        copies: whether it copies gradients into buckets.
        doubt: of the forecasts; by default as far as ours were off.
    """
    place = cluster(where)
    setting, job = Setting(workload, place), job_on(workload, place)
    now = setting.candidate(present or Spec("ddp"))
    unused = int(now.schedule.settings["find_unused"])

    def ddp(**knobs: Any) -> Spec:
        return Spec("ddp", {**knobs, "find_unused": unused} if unused else knobs)

    capped = (int(cap * _MIB) for cap in best_caps(job, bool(unused)))
    single = min((setting.candidate(ddp(bucket=cap, first=cap)) for cap in capped), key=_time)
    caps = best_list(job, bool(unused))
    listed = setting.candidate(ddp(buckets=tuple(max(1, int(cap * _MIB)) for cap in caps)))
    if _time(single) < _time(listed):
        caps, listed = [single.schedule.settings["bucket"] / _MIB], single
    half = None
    if halvable(workload):
        # DDP cuts gradients of four bytes, of which two are sent.
        cuts = tuple(max(1, int(cap * _MIB / 2)) for cap in caps)
        narrow = Setting(compressed(workload, "fp16", streaming(place)), place, "fp16")
        half = narrow.candidate(ddp(buckets=cuts))
    searchless = setting.candidate(Spec("ddp", {**now.schedule.knobs, "find_unused": 0})) if unused else None
    doubt = doubt or usual(place)
    spread = uncertainty(now, listed, (doubt, doubt))
    copy = round(4 * workload.size / streaming(place) * SECOND)  # read and written, into the bucket and back
    saved = (copy * copies, workload.size * copies)
    return BucketAdvice(now, single, listed, tuple(caps), half, searchless, spread, *saved)


def _time(one: Candidate) -> Time:
    assert one.time is not None
    return one.time
