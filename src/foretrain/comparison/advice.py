"""The advisor: one plain sentence on whether to change anything, why, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.network import Cluster
from foretrain.schedule import IDEAL, POLICIES
from foretrain.units import Time, format_rate, format_time
from foretrain.virtual import Run
from foretrain.virtual.simulation import bound

_WORTH = 1.03
"""A speed-up below this is not worth anyone's change."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether it is worth it.

    Attributes:
        worth_it: whether the best schedule gains at least 3 % over DDP at its best, not counting what it gains only
            by updating parameters beside the computation.
        gain: the best schedule's speed-up over DDP at its best, that included.
        text: the sentence.
    """

    worth_it: bool
    gain: float
    text: str


def fastest(runs: Sequence[Run]) -> Run:
    """The fastest run of a schedule that one would use: the ideal only where there is no other."""
    return min(runs, key=lambda run: (run.schedule.name == IDEAL, run.iteration_time))


def advise(baseline: Run, runs: Sequence[Run]) -> Advice:
    """What the comparison means for someone who runs DDP today."""
    best = fastest(runs)
    gain = baseline.iteration_time / best.iteration_time
    updates = _updates(baseline, best)
    worth = (baseline.iteration_time - updates) / best.iteration_time >= _WORTH
    verdict = _verdict(baseline, best, worth, gain)
    return Advice(worth, gain, f"{verdict}{_caveat(baseline, best, updates)}; {_why(baseline)}{_what_helps(best)}.")


def _verdict(baseline: Run, best: Run, worth: bool, gain: float) -> str:
    limit = baseline.iteration_time / baseline.bound.time
    if worth:
        return (
            f"Worth it: {best.schedule.name} makes an iteration {gain:.2f}× as fast as DDP at its best; "
            f"no schedule can exceed {limit:.2f}×"
        )
    if limit < _WORTH:
        return f"Not worth it: DDP at its best is within {limit - 1:.1%} of the optimum, so no schedule can gain more"
    if gain <= 1:
        return (
            f"Not worth it: DDP at its best is not beaten by {best.schedule.name}; the optimum is {limit:.2f}× as fast"
        )
    return (
        f"Not worth it: {best.schedule.name} gains {gain - 1:.1%} over DDP at its best, "
        f"of the {limit - 1:.1%} that no schedule can exceed"
    )


def _updates(baseline: Run, best: Run) -> Time:
    """How much of the gain comes not from hiding communication but from running the optimizer beside the computation.

    The model gives updates room to run there; a GPU that is busy has none.
    """
    gained = baseline.iteration_time - best.iteration_time
    return max(0, min(gained, baseline.workload.update)) if not POLICIES[best.schedule.name].barrier else 0


def _caveat(baseline: Run, best: Run, updates: Time) -> str:
    gained = baseline.iteration_time - best.iteration_time
    if not updates or updates < gained / 4:
        return ""
    return f" ({updates / gained:.0%} of that by updating parameters beside the computation, if it leaves room to)"


def _why(run: Run) -> str:
    """Which resource decides, in numbers."""
    b = run.bound
    share = f"communication takes {b.link / b.compute:.2f}× as long as computation"
    if b.kind == "compute-bound":
        return f"the GPU decides ({share} and can hide behind it)"
    if b.kind == "embedding-bound":
        return f"layer {b.layer!r} decides ({share}; what comes last is needed first)"
    return f"the link decides ({share})"


def _what_helps(run: Run) -> str:
    """The change outside the schedule that shortens T* most, if any does by 5 %."""
    now = run.bound
    if now.kind == "compute-bound":
        return "; only faster computation would help, e.g. a larger batch per GPU or lower precision"
    found = [(bound(run.workload, place).time, words) for place, words in _changes(run.cluster)]
    found.append((_half_sized(run), "sending gradients in half the bits"))
    doubled = max(now.time - now.compute, 0) // 2 + now.compute
    found.append((doubled, "accumulating two batches per exchange (per batch)"))
    time, words = min(found)
    if time > 0.95 * now.time:
        return "; no single change of bandwidth, placement, compression or batch would gain 5 %"
    return f"; {words} would bring the optimum from {format_time(now.time)} to {format_time(time)}"


def _changes(place: Cluster) -> list[tuple[Cluster, str]]:
    double = dataclasses.replace(
        place,
        up=2 * place.up,
        down=2 * place.down,
        server_rate=2 * place.server_rate if place.server_rate else None,
    )
    changes = [(double, f"{format_rate(double.up)} links")]
    if place.local:
        inside = dataclasses.replace(place, local=2 * place.local)
        changes.append((inside, f"{format_rate(2 * place.local)} inside each host"))
    if place.exchange == "ps":
        more = dataclasses.replace(place, servers=2 * place.servers)
        changes.append((more, f"{more.servers} parameter servers"))
        beside = dataclasses.replace(place, exchange="all_reduce", servers=0, server_rate=None)
        if place.workers > 1:
            changes.append((beside, "all-reduce instead of parameter servers"))
    return changes


def _half_sized(run: Run) -> int:
    gradients = tuple(dataclasses.replace(g, size=max(1, g.size // 2)) for g in run.workload.gradients)
    return bound(dataclasses.replace(run.workload, gradients=gradients), run.cluster).time
