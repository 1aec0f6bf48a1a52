"""Compare schedules at their best with DDP at its best and with the optimum, and advise in one plain sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError
from foretrain.experiments.evaluation import best_run
from foretrain.experiments.grid import ParameterSweep
from foretrain.network import Cluster, Place, cluster
from foretrain.planner import ScheduleRequest, requested_schedule
from foretrain.planner.bucket_advice import BucketAdvice, advise_buckets
from foretrain.planner.choice import ratio_deviation
from foretrain.schedule import IDEAL, POLICIES, Bound, Spec
from foretrain.simulation import Run, simulate
from foretrain.simulation.simulation import bound
from foretrain.units import Time, format_rate, format_time, to_seconds
from foretrain.workload.step import Workload

_WORTH = 1.03
"""A speed-up below this is not worth anyone's change."""
_COSTLY = 0.1
"""A gap to T* from which on what T* leaves out is the reason."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on whether to change the schedule.

    Attributes:
        worth_it: whether the best schedule gains at least 3 % over DDP at its best, not counting what it gains only
            by updating parameters beside the computation.
        gain: the best schedule's speed-up over DDP at its best, that included.
        deviation: one standard deviation of the gain: how far forecasts were off in the lab.
        verdict: worth it or not.
        reasons: why, and what would help.
    """

    worth_it: bool
    gain: float
    deviation: float
    verdict: str
    reasons: str

    @property
    def text(self) -> str:
        """Return verdict and reasons as one sentence."""
        return f"{self.verdict}; {self.reasons}."


def fastest(runs: Sequence[Run]) -> Run:
    """Return the fastest run of a usable schedule; the ideal only where there is no other."""
    return min(runs, key=lambda run: (run.schedule.name == IDEAL, run.iteration_time))


def advise(baseline: Run, runs: Sequence[Run]) -> Advice:
    """Return advice for someone who runs DDP today."""
    best = fastest(runs)
    gain = baseline.iteration_time / best.iteration_time
    updates = _updates(baseline, best)
    worth = (baseline.iteration_time - updates) / best.iteration_time >= _WORTH
    deviation = gain * ratio_deviation(baseline.cluster, best.cluster)
    others = {run.schedule.name for run in runs} - {baseline.schedule.name, IDEAL}
    verdict = _verdict(baseline, best, worth, deviation, *(others if len(others) == 1 else ()))
    if _costly(best):
        # T* leaves latency and θ out, so nothing that is read off it would be to the point.
        reasons = (
            f"latency and the cost per operation decide ({best.gap:.0%} above the optimum, which counts neither); "
            "fewer and larger operations or a faster network stack would help"
        )
    else:
        room = baseline.iteration_time / baseline.bound.time >= _WORTH
        further = "beyond that, " if room and best.bound.kind == "compute-bound" else ""
        reasons = f"{_why(best)}; {further}{_what_helps(best)}"
    return Advice(worth, gain, deviation, verdict, _caveat(baseline, best, updates) + reasons)


def _verdict(baseline: Run, best: Run, worth: bool, deviation: float, only: str = "") -> str:
    """Return whether a change is worth it; ``only`` names the schedule where no other was compared with DDP."""
    gain, limit = (baseline.iteration_time / time for time in (best.iteration_time, baseline.bound.time))
    if worth:
        return (
            f"Worth it: {best.schedule.name} makes an iteration {gain:.2f} ± {deviation:.2f}× as fast as DDP at its "
            f"best; no schedule can exceed {limit:.2f}×"
        )
    if limit < _WORTH:
        return f"Not worth it, keep DDP: its best is within {limit - 1:.1%} of the optimum; no schedule can gain more"
    if only:
        what = f"gains {gain - 1:.1%} ± {deviation:.1%} over" if gain > 1 else "does not beat"
        return f"{only} {what} DDP at its best: not worth it; another schedule could gain up to {limit - 1:.1%}"
    if gain <= 1:
        what = "no schedule here beats DDP at its best"
    else:
        what = f"{best.schedule.name} gains {gain - 1:.1%} ± {deviation:.1%} over DDP at its best"
    return f"Not worth it, keep DDP: {what}; at most {limit - 1:.1%} is possible"


def _updates(baseline: Run, best: Run) -> Time:
    """Return how much of the gain comes not from hiding communication but from running the optimizer beside the
    computation.

    The model gives updates room to run there; a GPU that is busy has none.
    """
    gained = baseline.iteration_time - best.iteration_time
    return 0 if best.barrier else max(0, min(gained, baseline.workload.update))


def _caveat(baseline: Run, best: Run, updates: Time) -> str:
    gained = baseline.iteration_time - best.iteration_time
    if not updates or updates < gained / 4:
        return ""
    return (
        f"{updates / gained:.0%} of the gain is from updating parameters beside the computation, if the GPU has room "
        "for that; "
    )


def _why(run: Run) -> str:
    """Return the resource that limits ``run``, with numbers."""
    b = run.bound
    share = f"communication takes {b.link / b.compute:.2f}× as long as computation"
    if b.kind == "compute-bound":
        return f"the GPU decides ({share} and can hide behind it)"
    if b.kind == "embedding-bound":
        return f"layer {b.layer!r} decides ({share}; what comes last is needed first)"
    return f"the link decides ({share})"


def _costly(run: Run) -> bool:
    """Return whether latency and θ keep ``run`` from the optimum by more than is worth a change."""
    if run.gap < _COSTLY:
        return False
    free = run.cluster.without_latency()
    time = simulate(run.workload, free, run.schedule, trace=False).iteration_time
    return time * (1 + _COSTLY / 2) < run.iteration_time


def _what_helps(run: Run) -> str:
    """Return the change outside the schedule that shortens T* most, if any does by 5 %."""
    now = run.bound
    if now.kind == "compute-bound":
        return "only faster computation would help, e.g. lower precision or a faster GPU"
    found = [(bound(run.workload, place).time, words) for place, words in _changes(run.cluster)]
    found.append((_half_sized(run), "sending gradients in half the bits"))
    doubled = max(now.time - now.compute, 0) // 2 + now.compute
    found.append((doubled, "exchanging once for two batches (per batch)"))
    time, words = min(found)
    if time > 0.95 * now.time:
        return "no single change of bandwidth, placement, compression or batch would gain 5 %"
    return f"{words} would bring the optimum from {format_time(now.time)} to {format_time(time)}"


def _changes(place: Place) -> list[tuple[Place, str]]:
    double = place.scaled(2)
    if not isinstance(place, Cluster):
        changes: list[tuple[Place, str]] = [(double, "links twice as fast")]
        if place.collective != "auto":
            changes.append((place.carried_by("auto"), "the fastest collective"))
        return changes
    changes = [(double, f"{format_rate(2 * place.up)} links")]
    if place.local:
        inside = dataclasses.replace(place, local=2 * place.local)
        changes.append((inside, f"{format_rate(2 * place.local)} inside each host"))
    if place.exchange == "ps":
        more = dataclasses.replace(place, servers=2 * place.servers)
        changes.append((more, f"{more.servers} parameter servers"))
        if place.workers > 1:
            beside = dataclasses.replace(place, exchange="all_reduce", servers=0, server_rate=None)
            changes.append((beside, "all-reduce instead of parameter servers"))
    return changes


def _half_sized(run: Run) -> int:
    gradients = tuple(dataclasses.replace(g, size=max(1, g.size // 2)) for g in run.workload.gradients)
    return bound(dataclasses.replace(run.workload, gradients=gradients), run.cluster).time


ALL_SCHEDULES: tuple[str, ...] = tuple(POLICIES)
Progress = Callable[[str, int, int], None]
"""Callback with the present item, the number done and the total."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of schedules on one workload and cluster.

    Attributes:
        workload: what was trained.
        cluster: where.
        runs: one per schedule, in the order asked for.
        baseline: DDP at its best bucket size, whether or not it was asked for.
        bound: the optimum.
        advice: whether to change anything, and what would help.
        buckets: DDP's best bucket sizes, for those who keep it; None over a parameter server or a topology.
        sweep: the same over a parameter, if asked for.
    """

    workload: Workload
    cluster: Place
    runs: tuple[Run, ...]
    baseline: Run
    bound: Bound
    advice: Advice
    buckets: BucketAdvice | None = None
    sweep: ParameterSweep | None = None

    def speedup(self, run: Run) -> float:
        """Return the speed-up over the baseline."""
        return self.baseline.iteration_time / run.iteration_time

    def with_sweep(self, sweep: ParameterSweep) -> Comparison:
        """Return the comparison with a sweep added."""
        return dataclasses.replace(self, sweep=sweep)

    @property
    def best(self) -> Run:
        """Return the fastest run; the ideal only where there is no other."""
        return fastest(self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
        return {
            "workload": self.workload.name,
            "source": self.workload.source,
            "cluster": str(self.cluster),
            "bound": {
                "optimum": to_seconds(self.bound.time),
                "kind": self.bound.kind,
                "layer": self.bound.layer,
                "release": to_seconds(self.bound.release),
                "communication": to_seconds(self.bound.communication),
                "tail": to_seconds(self.bound.tail),
                "compute": to_seconds(self.bound.compute),
                "wfbp": to_seconds(self.bound.wfbp),
                "dear": to_seconds(self.bound.dear),
            },
            "baseline": str(self.baseline.schedule),
            "runs": [run.to_dict() | {"speedup": self.speedup(run)} for run in self.runs],
            "advice": {
                "worth_it": self.advice.worth_it,
                "gain": self.advice.gain,
                "deviation": self.advice.deviation,
                "text": self.advice.text,
            },
            "buckets": self.buckets.to_dict() if self.buckets else None,
            "sweep": self.sweep.to_dict() if self.sweep else None,
        }


def compare(
    workload: Workload,
    where: str | Place,
    schedules: str | Sequence[str | ScheduleRequest] = ALL_SCHEDULES,
    *,
    tuned: bool = True,
    trace: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Simulate every schedule on ``workload`` and ``where``.

    Args:
        workload: one worker's step.
        where: a cluster or its notation.
        schedules: policies or their notation, whose knobs are kept where they are set; ``"auto"``, what the planner
            chooses; plan files.
        tuned: whether the other knobs are searched for their best; the baseline's bucket always is, to be fair.
        trace: whether to keep timelines.
        progress: told what comes next.
    """
    place = cluster(where)
    plans = [requested_schedule(schedule) for schedule in ([schedules] if isinstance(schedules, str) else schedules)]
    if not plans:
        raise ConfigError("schedules", schedules, "is empty", f"name some of: {', '.join(POLICIES)}")
    runs = []
    for done, plan in enumerate(plans):
        progress(str(plan).partition("(")[0], done, len(plans) + 1)
        runs.append(best_run(workload, place, plan, tuned=tuned, trace=trace))
    progress("ddp", len(plans), len(plans) + 1)
    baseline = best_run(workload, place, Spec("ddp"))
    ddp = [run for run in runs if run.schedule.name == "ddp"]
    baseline = min([baseline, *ddp], key=lambda run: run.iteration_time)
    reduced = isinstance(place, Cluster) and place.exchange == "all_reduce" and place.workers > 1
    buckets = advise_buckets(workload, place) if reduced else None
    progress("done", len(plans) + 1, len(plans) + 1)
    return Comparison(workload, place, tuple(runs), baseline, baseline.bound, advise(baseline, runs), buckets)
