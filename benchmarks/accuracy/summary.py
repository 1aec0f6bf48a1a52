"""What many outcomes come to: by family and GPU, and whether configurations are ranked as measurements rank them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from factors import ANCHORS, HOST_ANCHORS
from row_outcome import Outcome
from rows import COMPUTED, CONTRIBUTED, Row

from foretrain.cli.accuracy import load_measurements

FITTED = {name for names in (*ANCHORS.values(), *HOST_ANCHORS.values()) for name in names}
"""Rows that a constant was fitted on, whose errors are small for that reason too."""


def mean_absolute(values: Sequence[float]) -> float:
    """Mean of absolute values; NaN of none."""
    return statistics.fmean(map(abs, values)) if values else float("nan")


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def measurements(found: Sequence[Outcome]) -> list[Outcome]:
    """Those of ``found`` that have a forecast and whose times were measured."""
    return [one for one in found if one.predicted is not None and one.family not in COMPUTED]


def computed(found: Sequence[Outcome]) -> list[Outcome]:
    """Those of ``found`` that have a forecast and whose times another model computed."""
    return [one for one in found if one.predicted is not None and one.family in COMPUTED]


def rankings(found: Sequence[Outcome]) -> dict[str, float]:
    """Rank correlation of the configurations of each model of vTrain's multi-node rows that has three or more."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        if one.family == "vtrain-multi":
            groups[f"{one.model} on {one.ranks}"].append(one)
    return {
        name: spearman([one.predicted or 0 for one in group], [one.measured for one in group])
        for name, group in groups.items()
        if len(group) > 2
    }


def is_fsdp(one: Outcome, rows: dict[str, Row]) -> bool:
    """Whether it is a run of torchtitan that shards parameters and splits nothing else."""
    return one.family == "torchtitan" and not {"--tp", "--cp", "--pp"} & set(rows[one.id].argv)


def families(found: Sequence[Outcome]) -> list[list[str]]:
    """Of each family and GPU: rows, those that the interval holds, errors' mean, median and largest; memory's."""
    from trust import coverage

    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in found:
        groups[one.family, one.device].append(one)
    lines = []
    for (family, device), group in sorted(groups.items()):
        errors = [one.error for one in group]
        memory = [one.memory_error for one in group if one.memory_error is not None]
        middle = statistics.median(map(abs, errors))
        line = [
            f"{family}, {device}",
            str(len(group)),
            f"{coverage(group):.0%}",
            f"{mean_absolute(errors):.1%}",
            f"{middle:.1%}",
        ]
        line += [f"{max(errors, key=abs):+.1%}"]
        line += [f"{mean_absolute(memory):.1%}", f"{max(memory, key=abs):+.1%}"] if memory else ["", ""]
        lines.append(line)
    return lines


HEAD = ("family, GPU", "rows", "held", "mean", "median", "largest", "memory, mean", "largest")


LAYOUTS_HEAD = ("family, what is parallel besides data", "runs", "mean", "mean, signed")
FEW_MICRO_BATCHES = 4


def layouts(found: Sequence[Outcome], rows: dict[str, Row]) -> list[list[str]]:
    """Of each family and layout: runs, errors' mean, and their mean with signs, below 0 where forecasts are short."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        argv = rows[one.id].argv
        names = {"--tp": "tensor", "--cp": "context", "--pp": "pipeline"}
        layout = ", ".join(name for option, name in names.items() if option in argv) or "nothing"
        if "--pp" in argv:
            each = rows[one.id].micro_batches // int(rows[one.id].given("pp", "1"))
            layout += f" of {'more than' if each > FEW_MICRO_BATCHES else 'up to'} {FEW_MICRO_BATCHES} micro-batches"
        groups[f"{one.family}: {layout}"].append(one.error)
    return [
        [name, str(len(errors)), f"{mean_absolute(errors):.1%}", f"{statistics.fmean(errors):+.1%}"]
        for name, errors in sorted(groups.items())
    ]


CONTRIBUTORS_HEAD = ("measured by", "runs", "mean", "largest")


def contributors(found: Sequence[Outcome], rows: dict[str, Row]) -> list[list[str]]:
    """Of each contributor: runs, errors' mean and largest."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        groups[rows[one.id].contributor].append(one.error)
    return [
        [name, str(len(errors)), f"{mean_absolute(errors):.1%}", f"{max(errors, key=abs):+.1%}"]
        for name, errors in sorted(groups.items())
    ]


CALIBRATIONS_HEAD = ("measured by", "GPU", "software", "operators", "file of benchmarks/data")


def calibrations(path: Path = CONTRIBUTED) -> list[list[str]]:
    """Of each calibration that was contributed without a run: who measured what, and where it is."""
    from foretrain.device.calibration import load

    found = [(one, load(path.parent / one.calibration)) for one in load_measurements(path).gpus]
    return [
        [one.contributor, each.device, each.stack, str(len(each.measured) + len(each.calls)), one.calibration]
        for one, each in found
    ]


def report(found: Sequence[Outcome], rows: dict[str, Row]) -> dict[str, float]:
    """Prints the table of families; returns the keys of the last line."""
    from trust import FEW, FOLDS_HEAD, PROVENANCE_HEAD, by_provenance, folds, notation

    good = measurements(found)
    show([list(HEAD), *families(good)])
    show([list(LAYOUTS_HEAD), *layouts(good, rows)])
    if others := computed(found):
        print("\ncomputed by another model, and not counted below:")
        show([list(HEAD), *families(others)])
        show([list(LAYOUTS_HEAD), *layouts(others, rows)])
    failed = [one for one in found if one.failure]
    for one in failed:
        print(f"no forecast of {one.id}: {one.failure}")
    for name, value in sorted(rankings(good).items()):
        print(f"ranking of configurations of {name}: {value:.3f}")
    if len(good) > FEW:
        show([list(PROVENANCE_HEAD), *by_provenance(good)])
        show([list(FOLDS_HEAD), *folds(good)])
        print("\nranges that hold 95 % of measurements, for foretrain/device/stacks.toml:", *notation(good), sep="\n  ")
    return keys(good, rows)


def keys(found: Sequence[Outcome], rows: dict[str, Row]) -> dict[str, float]:
    """The keys of the last line, of runs that were measured and have a forecast."""
    from trust import coverage

    memory = [one.memory_error for one in found if one.memory_error is not None]
    by_family = {one.family: [other.error for other in found if other.family == one.family] for one in found}
    return {
        "all_error_mean": mean_absolute([one.error for one in found]),
        "family_error_worst": max(map(mean_absolute, by_family.values()), default=math.nan),
        "torchtitan_fsdp_error_mean": mean_absolute([one.error for one in found if is_fsdp(one, rows)]),
        "torchtitan_error_mean": mean_absolute([one.error for one in found if one.family == "torchtitan"]),
        "context_error_max": max((abs(one.error) for one in found if "--cp" in rows[one.id].argv), default=math.nan),
        "spearman_min": min(rankings(found).values(), default=math.nan),
        "memory_error_mean": mean_absolute(memory),
        "memory_error_max": max(map(abs, memory), default=math.nan),
        "interval_coverage": coverage(found),
    }


def show(lines: Sequence[Sequence[str]]) -> None:
    """Prints a table, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for first, *others in lines:
        cells = (f"{cell:>{width}s}" for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}s}  " + "  ".join(cells))
