"""Does the planner choose well? Its choice against the best of an exhaustive grid, and against DDP at its best.

{resnet50, vgg16, bert_base, gpt2} × {1, 10 Gb/s} × {all-reduce, parameter server}, four workers: every policy with all
its tunable knobs searched, as foretrain compare does it. Forecasts are simulations: the same on every machine.

    auto_within_2pct   share of the cells in which the choice takes at most 2 % longer than the best
    auto_worst_vs_ddp  the longest that a choice takes, over DDP at its best bucket size, − 1
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from measure import finish, options
from rich.console import Console
from rich.progress import Progress

from foretrain.experiments.comparison import ALL_SCHEDULES
from foretrain.network import cluster
from foretrain.planner import choose, tune
from foretrain.schedule import IDEAL
from foretrain.simulation import simulate
from foretrain.units import format_time
from foretrain.workload import zoo

MODELS = ("resnet50", "vgg16", "bert_base", "gpt2")
RATES = ("1Gbps", "10Gbps")
ENGINES = ("", ",ps=4", ",ps=colocated")
QUICK = ("ddp", "dear", "p3", "pace", "bytescheduler")
"""Policies of the quick grid: those that have won somewhere in the full one, but for prophet, which takes longest."""
ALL = tuple(name for name in ALL_SCHEDULES if name != IDEAL)


def exhaustive(model: str, where: str, policies: tuple[str, ...], evaluations: int) -> dict[str, int]:
    """The iteration time of each policy at its best, ps."""
    workload, place = zoo(model), cluster(where)
    times = {}
    for name in policies:
        best = tune(workload, place, name, evaluations=evaluations)
        times[name] = simulate(workload, place, best, trace=False).iteration_time
    return times


def planned(model: str, where: str, policies: tuple[str, ...], evaluations: int) -> dict[str, Any]:
    """What is chosen in a cell, and how it compares."""
    began = time.process_time()
    choice = choose(zoo(model), where)
    took = time.process_time() - began
    times = exhaustive(model, where, policies, evaluations)
    best = min(times, key=times.__getitem__)
    return {
        "model": model,
        "cluster": where,
        "chosen": str(choice.schedule),
        "time": choice.time,
        "best": best,
        "over_best": choice.time / times[best] - 1,
        "over_ddp": choice.time / times["ddp"] - 1,
        "gain": choice.gain,
        "uncertainty": choice.uncertainty,
        "simulations": choice.simulations,
        "seconds": took,
    }


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the targets are about."""
    return {
        "auto_within_2pct": sum(row["over_best"] <= 0.02 for row in rows) / len(rows),
        "auto_worst_vs_ddp": max(row["over_ddp"] for row in rows),
    }


def main() -> None:
    """Prints a row for each cell and the RESULT line."""
    arguments = options(__doc__ or "")
    policies = QUICK if arguments.quick else ALL
    engines = ENGINES[:2] if arguments.quick else ENGINES
    cells = [(model, f"4x1xV100@{rate}{engine}") for model in MODELS for rate in RATES for engine in engines]
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning", total=len(cells))
        for model, where in cells:
            progress.update(task, description=f"{model} {where}")
            row = planned(model, where, policies, 16 if arguments.quick else 60)
            rows.append(row)
            print(
                f"{model:10s} {where:26s} {row['chosen'].partition('(')[0]:14s} {format_time(row['time']):>8s}"
                f"  over {row['best']:13s} {row['over_best']:+7.2%}  over DDP {row['over_ddp']:+7.2%}"
                f"  gain {row['gain']:6.1%} ± {row['uncertainty']:5.1%}"
                f"  {row['simulations']:3d} simulations {row['seconds']:5.2f} s",
                flush=True,
            )
            progress.advance(task)
    values = judged(rows) | {
        "auto_seconds_median": median(row["seconds"] for row in rows),
        "auto_seconds_max": max(row["seconds"] for row in rows),
    }
    finish(arguments, "auto", values, rows)


if __name__ == "__main__":
    main()
