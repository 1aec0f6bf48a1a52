"""Today's forecasts of the steps that ps.py has measured, from its own calibrations: how far off each is, and why.

    ps_forecasts.py benchmarks/data/ps.json

*then* is the error of the run's own forecast, *now* that of today's simulator. They differ where tensors are placed on
servers otherwise since the run. Beside them stands the CPU time of a worker in an iteration, and what the forecast's
messages take of it: the rest is of what a forecast leaves out, and goes with the number of tensors.

The file lacks the observed steps. The zoo's stand for them, as long as those that were observed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measure import finish, options
from ps import Cell, kept
from rich.console import Console
from rich.table import Table

from foretrain.lab.calibration import fit, nominal
from foretrain.lab.messages import CalibrationSample
from foretrain.network import Cluster
from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.simulation import Run, simulate
from foretrain.units import COST_SHIFT, SECOND, to_seconds
from foretrain.workload import Workload


def place_of(cell: Cell, calibration: dict[str, Any]) -> Cluster:
    """The links as they were calibrated, with the CPU time of messages."""
    links = cell.plan().links
    samples = [CalibrationSample(size, depth, round(time * SECOND)) for size, depth, time in calibration["samples"]]
    latency, cpu = round(calibration["latency"] * SECOND), calibration["cpu"]
    ends = [
        CpuCost(round(message * SECOND), round(byte * (SECOND << COST_SHIFT)))
        for message, byte in (cpu["worker"], cpu["server"])
    ]
    shared = HostCpu(cpu["cores"], *ends, together=True)
    return replace(fit(samples, nominal(links)).on(links), latency=latency, cpu=shared, sharded=True)


def workload_of(cell: Cell, observed: dict[str, Any]) -> Workload:
    """The zoo's step, as long as the observed one; a layer's update takes as long as its share of the bytes."""
    paced = cell.plan().experiments[0].workload
    assert paced is not None
    work = paced.slowed((observed["forward"] + observed["backward"]) * SECOND / paced.compute)
    sizes = [0] * len(work.layers)
    for gradient in work.gradients:
        sizes[gradient.layer] += gradient.size
    updates = (round(observed["update"] * SECOND * size / work.size) for size in sizes)
    layers = (replace(layer, update=update) for layer, update in zip(work.layers, updates, strict=True))
    return replace(work, layers=tuple(layers))


def of_messages(run: Run, cpu: HostCpu) -> float:
    """CPU seconds that a worker's messages take in an iteration."""
    sizes = [span.size for span in run.timeline if span.lane in ("up", "down")]
    return to_seconds(sum(map(cpu.worker.time, sizes))) / (len(run.begins) - 1)


def main() -> None:
    """Prints a table and the RESULT line."""
    arguments = options(__doc__ or "", lambda parser: parser.add_argument("file", type=Path, help="written by ps.py"))
    table = Table(box=None, pad_edge=False)
    for head in ("cell", "tensors", "schedule", "ms", "then", "now", "CPU ms", "of messages"):
        table.add_column(head, justify="left" if head in ("cell", "schedule") else "right", no_wrap=True)
    errors: dict[str, list[float]] = defaultdict(list)
    for cell, result in kept(arguments.file).results:
        place, work = place_of(cell, result["calibration"]), workload_of(cell, result["workload"])
        for case in result["cases"]:
            if case.get("forecast_error") is None or place.cpu is None:
                continue
            run = simulate(work, place, case["schedule"])
            off = case["forecast_error"], to_seconds(run.iteration_time) / case["median"] - 1
            busy = fmean(used for used, _ in case["cores"][: cell.setup.hosts])
            spent = f"{1e3 * busy:.0f}", f"{1e3 * of_messages(run, place.cpu):.0f}"
            where, what = f"{cell.model}, {cell.setup}", f"{len(work.gradients)}"
            shown = (f"{error:+.1%}" for error in off)
            table.add_row(where, what, case["case"], f"{1e3 * case['median']:.0f}", *shown, *spent)
            for name, error in zip(("then", "now"), off, strict=True):
                errors[name].append(error)
                errors[f"{name}, {cell.setup.servers} server{'s' * (cell.setup.servers != 1)}"].append(error)
    Console(width=150, highlight=False).print(table)
    for name, each in errors.items():
        print(f"{name}: off by {median(map(abs, each)):.1%} in the median, {max(map(abs, each)):.0%} at worst")
    values = {f"{name}_median": median(map(abs, errors[name])) for name in ("then", "now")}
    finish(arguments, "ps_forecasts", values, dict(errors))


if __name__ == "__main__":
    main()
