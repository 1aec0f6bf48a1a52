"""What DDP gains by the adviser's bucket list: real steps in the lab, list against best single size against default.

Gradients travel over gloo between hosts that are network namespaces of this machine; computation is paced. The adviser
knows the model and the nominal links, and what an operation takes at least. Needs root.

Models have their shapes, with 6 to 30 % of their bytes, so that a step of the lab takes half a second. --quick: two
models. --full: five, at three ratios of communication to computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lab import lab
from measure import finish, options
from rich.console import Console

from foretrain.lab.compare import conduct, experiment
from foretrain.lab.messages import Experiment, LabPlan
from foretrain.lab.result import CaseResult, LabResult
from foretrain.planner.bucket_advice import BucketAdvice, advise_buckets
from foretrain.report.lab import lab_summary
from foretrain.units import MILLISECOND, Time, parse_rate

HOSTS = 2
START: Time = MILLISECOND
"""About what an operation of gloo takes at least here."""
COMMON: Mapping[str, Any] = {"iterations": 16, "rounds": 4, "warmup": 2, "schedules": (), "half_hook": False}


def quick() -> tuple[str, list[dict[str, Any]]]:
    """The rate of the links, and the experiments."""
    return "2Gbps", [
        {"model": "resnet50", "ratio": 0.6, "size": 0.3},
        {"model": "bert_base", "ratio": 0.6, "size": 0.08},
    ]


def full() -> tuple[str, list[dict[str, Any]]]:
    """The rate of the links, and the experiments."""
    sizes = {"resnet50": 0.3, "vgg16": 0.06, "inception_v3": 0.3, "bert_base": 0.08, "gpt2": 0.06}
    return "1Gbps", [{"model": m, "ratio": r, "size": size} for m, size in sizes.items() for r in (0.5, 0.8, 1.2)]


def advised(rate: str, asked: Mapping[str, Any]) -> tuple[Experiment, BucketAdvice]:
    """DDP's defaults, its best single size and the adviser's list for one model, and the advice."""
    fixed: dict[str, Any] = {"hosts": HOSTS, "rate": rate, **COMMON, **asked}
    model = fixed.pop("model")
    workload = experiment(model, buckets=(None,), **fixed).workload
    assert workload is not None
    advice = advise_buckets(workload, f"{HOSTS} workers @ {rate}, overhead=0ms, floor={START}ps")
    single = int(advice.single.schedule.settings["bucket"])
    listed = tuple(max(1, int(cap * (1 << 20))) for cap in advice.cap_list)
    return experiment(model, buckets=(None, single, listed), **fixed), advice


def cases(result: LabResult) -> tuple[CaseResult, CaseResult, CaseResult]:
    """Measurements of the default, the single size and the list."""
    default, single, listed = result.measurements
    return default, single, listed


def values(results: Sequence[LabResult]) -> dict[str, float]:
    """Medians over all experiments, and the worst."""
    against_default = [default.time / listed.time for default, _, listed in map(cases, results)]
    against_single = [single.time / listed.time for _, single, listed in map(cases, results)]
    errors = [abs(one.error) for result in results for one in result.measurements if one.error is not None]
    return {
        "list_vs_default": median(against_default),
        "list_vs_best_single": median(against_single),
        "forecast_error": median(errors),
        "list_vs_default_worst": min(against_default),
        "list_vs_default_best": max(against_default),
        "list_vs_best_single_worst": min(against_single),
    }


def main() -> None:
    """Print a table for each experiment, and the RESULT line."""
    arguments = options(__doc__ or "")
    rate, asked = quick() if arguments.quick else full()
    found = [advised(rate, one) for one in asked]
    console = Console(width=110, highlight=False)
    plan = LabPlan(HOSTS, parse_rate(rate), tuple(one for one, _ in found), calibration=1.0)
    with lab(HOSTS, rate) as on_hosts:
        results = conduct(plan, on_hosts)
    for result, (_, advice) in zip(results, found, strict=True):
        console.print(lab_summary(result))
        default, single, listed = cases(result)
        console.print(
            f"list over default {default.time / listed.time:.3f} measured, {1 + advice.gain(advice.listed):.3f} "
            f"forecast; over the best single size {single.time / listed.time:.3f}\n"
        )
    finish(arguments, "advise", values(results), {"cells": [one.to_dict() for one in results]})


if __name__ == "__main__":
    main()
