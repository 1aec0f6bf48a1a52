"""What scheduling gains in real training steps, over models, hosts and ratios of communication to computation.

Every number is a ratio to stock DDP at its best of several bucket sizes, measured in the same run, case by case in
interleaved rounds, on hosts that are network namespaces of this machine. Needs root.

--quick: the first cell of --full, ResNet-50 on 2 hosts, with steps as long as there; one schedule, DDP with the bucket
that is forecast to be its best, and one turn of each, so that drift of the machine counts. Other models, the real
transformer among them, and the straggler are in --full alone, and so is what RESULT has of them.
--full: the grid, about an hour; --json is written anew after every cell, so that nothing measured is lost.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from measure import finish, options
from rich.console import Console

from foretrain.errors import ForetrainError
from foretrain.lab import Lab, launch
from foretrain.lab.compare import TRANSFORMER, Launch, OnLine, conduct, experiment
from foretrain.lab.messages import Experiment, LabPlan, LabProgress
from foretrain.lab.result import LabResult
from foretrain.report.lab import lab_summary
from foretrain.schedule.policies import AUTO
from foretrain.simulation import bound, simulate
from foretrain.units import MILLISECOND, SECOND, Time, parse_rate, to_seconds

OURS = "bytescheduler"
"""The schedule whose gain is reported, but for the real transformer, of which the best is; others are in the JSON."""
BUCKETS = (None, 1 << 20, 5 << 20, 10 << 20, 100 << 20)
START: Time = MILLISECOND
"""About what an operation of gloo takes at least here; for choosing buckets only."""
RATIOS = (0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
SEED = 0
"""Of jitter, parameters and data."""
_STARTING = 12.0
"""Seconds of a launch before it measures: imports, calibration, observation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment and where it runs.

    Attributes:
        options: those of `experiment`.
        buckets: of how many sizes DDP is measured: those of the five that are forecast to be its best.
    """

    model: str
    hosts: int
    rate: str
    options: Mapping[str, Any]
    buckets: int = 2

    @property
    def experiment(self) -> Experiment:
        """With DDP's most promising buckets; all where a real model does not let us forecast."""
        fixed = {"hosts": self.hosts, "rate": self.rate, "half_hook": False, "buckets": BUCKETS, "seed": SEED}
        one = experiment(self.model, **fixed, **self.options)
        if one.workload is None:
            return one
        workload, place = one.workload, f"{self.hosts} workers @ {self.rate}, overhead=0ms, floor={START}ps"
        ddp = [case for case in one.cases if case.kind == "ddp"]
        ddp.sort(key=lambda case: simulate(workload, place, case.plan, trace=False).iteration_time)
        rest = tuple(case for case in one.cases if case.kind != "ddp")
        return dataclasses.replace(one, cases=(*ddp[: self.buckets], *rest))

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        one = self.experiment
        place = f"{self.hosts} workers @ {self.rate}"
        step = bound(one.workload, place).time if one.workload else one.step_time or SECOND
        # The schedules observe and profile before they are measured, and every case is built anew in every round.
        turns = one.rounds * len(one.cases)
        return _STARTING + 1.25 * to_seconds(step) * turns * (one.iterations / one.rounds + one.warmup + 5)

    def __str__(self) -> str:
        extra = ", ".join(f"{k} {v}" for k, v in self.options.items() if k in ("ratio", "straggler", "jitter", "size"))
        return f"{self.model}, {self.hosts} hosts, {self.rate}, {extra}"


def quick() -> list[Cell]:
    """The first cell of `full`, with no more cases, samples and turns than a comparison needs.

    A second turn would observe a second time: three steps under a barrier, of twice T* each.
    """
    first = full()[0]
    fewer = {"iterations": 15, "rounds": 1, "warmup": 1, "schedules": (OURS,)}
    return [dataclasses.replace(first, options={**first.options, **fewer}, buckets=1)]


def full() -> list[Cell]:
    """The grid: every ratio for ResNet-50 on 2 and 4 hosts, skew, other models. What matters most comes first.

    4 hosts have half the rate of 2, because all of them share this machine's cores, and a packet costs the same.
    Fewer bytes are sent where a step would else take many seconds.
    """
    common = {"iterations": 16, "rounds": 2, "warmup": 2}
    both, alone = {**common, "schedules": (OURS, "prophet")}, {**common, "schedules": (OURS,)}
    places = ((2, "1Gbps", 1.0), (4, "500Mbps", 0.5))
    cells = [
        Cell("resnet50", hosts, rate, {**both, "ratio": 1.0, "size": size}, buckets=len(BUCKETS))
        for hosts, rate, size in places
    ]
    cells.append(Cell("vgg16", 2, "1Gbps", {**both, "ratio": 1.0, "size": 0.25}))
    cells.append(Cell("resnet50", 2, "1Gbps", {**alone, "ratio": 1.0, "straggler": 0.2}))
    cells.append(Cell(TRANSFORMER, 2, "1Gbps", {**common, "schedules": (*both["schedules"], AUTO), "ratio": 1.0}))
    cells += [Cell(model, 2, "1Gbps", {**alone, "ratio": 1.0, "size": 0.25}) for model in ("bert_base", "gpt2")]
    for hosts, rate, size in places:
        cells += [
            Cell("resnet50", hosts, rate, {**alone, "ratio": x, "size": size * min(1.0, 2 * x) / 2})
            for x in sorted(RATIOS, reverse=True)
            if x != 1
        ]
        skews = ({"straggler": 0.05}, {"jitter": 0.3}, *([{"straggler": 0.2}] if hosts > 2 else []))
        cells += [Cell("resnet50", hosts, rate, {**alone, "ratio": 1.0, "size": size / 2, **skew}) for skew in skews]
    for model in ("vgg16", "bert_base", "gpt2"):
        cells += [Cell(model, 2, "1Gbps", {**alone, "ratio": x, "size": 0.125}) for x in (0.5, 2.0)]
        cells.append(Cell(model, 4, "500Mbps", {**alone, "ratio": 1.0, "size": 0.0625}))
    return cells


@contextmanager
def lab(hosts: int, rate: str) -> Iterator[Launch]:
    """Hosts that take commands."""
    with Lab.up("bench", hosts, rate) as built:

        def on_hosts(command: Sequence[str], *, environment: Mapping[str, str], timeout: float, on_line: OnLine) -> int:
            return launch(built, command, environment=environment, timeout=timeout, on_line=on_line)

        yield on_hosts


class Eta:
    """Progress on stderr, with what is left by what was expected and how that has held so far."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._expected = [cell.seconds for cell in cells]
        self._began = self._last = time.monotonic()

    def show(self, cell: int, what: str, share: float) -> None:
        """``share`` of ``cell`` is done; at most every 5 s."""
        now = time.monotonic()
        if 0 < share < 1 and now - self._last < 5:
            return
        self._last = now
        done = sum(self._expected[:cell]) + share * self._expected[cell]
        pace = (now - self._began) / done if done > 20 else 1.0
        left = pace * (sum(self._expected) - done)
        sys.stderr.write(f"[{cell + 1}/{len(self._expected)}] {what}: {left / 60:.1f} min left\n")
        sys.stderr.flush()


def values(results: Sequence[LabResult]) -> dict[str, float]:
    """The RESULT keys, from whatever has been measured so far.

    ``transformer_threads_ms``: CPU time of rank 0's coordinator, completer and deferred updates in a step of the real
    transformer, under the best schedule.
    """

    def gain(model: str, straggler: float = 0.0) -> list[float]:
        alike = [one for one in results if one.experiment.name == model and not one.experiment.jitter]
        alike = [one for one in alike if one.experiment.straggler == straggler and asked(one) in (None, 1.0)]
        return [ratio for one in alike for ratio in ours(one)]

    transformers = [one for one in results if one.experiment.name == TRANSFORMER and one.baseline]
    best = [one.best for one in transformers if one.best and one.best.threads]
    found = {
        "resnet50_vs_best_ddp": gain("resnet50"),
        "vgg16_vs_best_ddp": gain("vgg16"),
        "transformer_vs_best_ddp": [one.speedup(one.best) for one in transformers if one.best],
        "transformer_auto_vs_best_ddp": [one.speedup(auto) for one in transformers if (auto := one.find(AUTO))],
        "straggler_vs_best_ddp": gain("resnet50", 0.2),
        "worst_vs_best_ddp": [ratio for one in results for ratio in ours(one)],
    }
    numbers = {key: min(ratios) for key, ratios in found.items() if ratios}
    if gaps(results):
        numbers["gap_to_optimum"] = max(gaps(results))
    if best:
        numbers["transformer_threads_ms"] = 1e3 * max(to_seconds(sum(one.threads.values())) for one in best)
    if off := errors(results):
        numbers |= {"forecast_error_median": median(off), "forecast_error_worst": max(off)}
    return numbers


def asked(result: LabResult) -> float | None:
    """Communication over computation as asked for, without a straggler or an optimizer; None for a real model."""
    workload = result.experiment.workload
    if workload is None:
        return None
    sent = 2 * (result.hosts - 1) / result.hosts * workload.size / result.rate
    return round(sent / to_seconds(workload.compute), 3)


def ours(result: LabResult) -> list[float]:
    """The speed-up of `OURS` over DDP at its best, if both ran."""
    one = result.find(OURS)
    return [result.speedup(one)] if one and result.baseline else []


def gaps(results: Sequence[LabResult]) -> list[float]:
    """T/T* − 1 of `OURS` on ResNet-50 without skew, where communication takes at most twice as long."""
    return [
        one.gap
        for result in results
        if result.experiment.name == "resnet50" and (asked(result) or 9) <= 2
        if not result.experiment.straggler and not result.experiment.jitter
        if (one := result.find(OURS))
    ]


def errors(results: Sequence[LabResult]) -> list[float]:
    """Absolute errors of all forecasts of paced models."""
    return [
        abs(one.error)
        for result in results
        if result.experiment.workload is not None
        for one in result.measured
        if one.error is not None
    ]


def one_by_one(
    cells: Sequence[Cell], calibration: float, keep: Callable[[Sequence[LabResult], Sequence[str]], None]
) -> tuple[list[LabResult], list[str]]:
    """Every cell in a launch of its own, so that one that fails costs only itself; ``keep`` gets what there is.

    ``calibration``: seconds that each launch measures its links.
    """
    eta, results, failures = Eta(cells), [], []
    for number, cell in enumerate(cells):

        def progress(now: LabProgress, number: int = number, cell: Cell = cell) -> None:
            eta.show(number, f"{cell}: {now.what}", now.done / max(1, now.total))

        plan = LabPlan(cell.hosts, parse_rate(cell.rate), (cell.experiment,), calibration=calibration)
        try:
            with lab(cell.hosts, cell.rate) as on_hosts:
                results += conduct(plan, on_hosts, progress)
        except ForetrainError as error:
            failures.append(f"{cell}: {error}")
            sys.stderr.write(f"failed: {failures[-1]}\n")
            continue
        Console(width=110, highlight=False).print(lab_summary(results[-1]))
        keep(results, failures)
    return results, failures


def main() -> None:
    """Prints a table per cell and the RESULT line."""
    arguments = options(__doc__ or "")

    def keep(results: Sequence[LabResult], failures: Sequence[str]) -> None:
        if arguments.json:
            text = json.dumps({"partial": values(results), "details": details(results, failures)}, indent=2)
            arguments.json.write_text(text + "\n")

    cells, calibration = (quick(), 1.0) if arguments.quick else (full(), 2.0)
    results, failures = one_by_one(cells, calibration, keep)
    finish(arguments, "lab", values(results), details(results, failures), seed=SEED)
    if failures:
        sys.exit(1)


def details(results: Sequence[LabResult], failures: Sequence[str]) -> dict[str, Any]:
    """Everything measured, for the JSON."""
    return {"cells": [one.to_dict() for one in results], "failures": list(failures)}


if __name__ == "__main__":
    main()
