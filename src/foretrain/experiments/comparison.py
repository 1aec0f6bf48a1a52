"""compare: each schedule at its best, against DDP at its best and against the optimum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ConfigError
from foretrain.experiments.advice import Advice, advise, fastest
from foretrain.experiments.parameter_sweep import ParameterSweep
from foretrain.network import Place, cluster
from foretrain.planner import Wanted, requested_schedule, resolved, tune
from foretrain.schedule import POLICIES, Bound, Spec
from foretrain.simulation import Run, simulate
from foretrain.units import to_seconds
from foretrain.workload.step import Workload

ALL_SCHEDULES: tuple[str, ...] = tuple(POLICIES)
Progress = Callable[[str, int, int], None]
"""What is being done now, how many are done, of how many."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Schedules side by side.

    Attributes:
        workload: what was trained.
        cluster: where.
        runs: one per schedule, in the order asked for.
        baseline: DDP at its best bucket size, whether or not it was asked for.
        bound: the optimum.
        advice: whether to change anything, and what would help.
        sweep: the same over a parameter, if asked for.
    """

    workload: Workload
    cluster: Place
    runs: tuple[Run, ...]
    baseline: Run
    bound: Bound
    advice: Advice
    sweep: ParameterSweep | None = None

    def speedup(self, run: Run) -> float:
        """How many times faster than the baseline."""
        return self.baseline.iteration_time / run.iteration_time

    def with_sweep(self, sweep: ParameterSweep) -> Comparison:
        """The same comparison with a sweep beside it."""
        return dataclasses.replace(self, sweep=sweep)

    @property
    def best(self) -> Run:
        """The fastest run that is not the ideal one."""
        return fastest(self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, times in seconds, for JSON."""
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
            "advice": {"worth_it": self.advice.worth_it, "gain": self.advice.gain, "text": self.advice.text},
            "sweep": self.sweep.to_dict() if self.sweep else None,
        }


def compare(
    workload: Workload,
    where: str | Place,
    schedules: str | Sequence[str | Wanted] = ALL_SCHEDULES,
    *,
    tuned: bool = True,
    trace: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Simulates every schedule on ``workload`` and ``where``.

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
        best = tune(workload, place, plan) if tuned and isinstance(plan, Spec) else resolved(plan, workload, place)
        runs.append(simulate(workload, place, best, trace=trace))
    progress("ddp", len(plans), len(plans) + 1)
    baseline = simulate(workload, place, tune(workload, place, "ddp"), trace=False)
    ddp = [run for run in runs if run.schedule.name == "ddp"]
    baseline = min([baseline, *ddp], key=lambda run: run.iteration_time)
    progress("done", len(plans) + 1, len(plans) + 1)
    return Comparison(workload, place, tuple(runs), baseline, baseline.bound, advise(baseline, runs))
