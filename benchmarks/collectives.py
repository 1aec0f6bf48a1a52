"""NCCL's collectives: forecasts against published measurements, by system, operation and number of GPUs.

Measured by others: NVIDIA aiconfigurator (A100, H100, H200, B200, GB200; 2, 4, 8 GPUs; 512 B to 512 MiB) and the
Machine Learning Engineering Open Book (H200 and B200 up to 16 GiB, NVLS on and off, four servers over EFA). Nothing is
timed here. An error is that of the time, forecast / measured − 1; that of the bus bandwidth is the same but for second
order. Rows below 1 MiB and from there on are told apart.

Assumed: PyTorch's overhead per call and EFA's latency per hop, one number each (benchmarks/measurements.py).

--fit fits every generation's curves anew and prints them. Without --quick the curves are also fitted with rows left
out, from a start that has seen none of them, and judged on those rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fitting import fit, lines, median_absolute, predictor
from measure import finish, options
from measurements import COMPACT, Measurement, read, write
from scipy.optimize import least_squares

from foretrain.collective.nccl import GPUS, Generation, bus_factor
from foretrain.collective.nccl.generation import AMPERE, BLACKWELL, HOPPER

GENERATIONS = {"AMPERE": AMPERE, "HOPPER": HOPPER, "BLACKWELL": BLACKWELL}
Error = Callable[[Measurement], float]


def own_options(parser: argparse.ArgumentParser) -> None:
    """--data, --fit, --compact."""
    parser.add_argument("--data", type=Path, default=COMPACT, metavar="CSV", help="measurements, compact or long")
    parser.add_argument("--fit", action="store_true", help="fit the curves anew and print them")
    parser.add_argument("--compact", type=Path, metavar="CSV", help="write the measurements as a compact table")


def halves(rows: Sequence[Measurement], error: Error) -> tuple[float, float]:
    """Median error of the rows from 1 MiB on, and of those below."""
    large, small = ([error(row) for row in rows if row.large is half] for half in (True, False))
    return median_absolute(large), median_absolute(small)


def report_groups(rows: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """One line for each system, operation and number of GPUs."""
    groups: dict[tuple[str, str, int, bool], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.system, row.operation, row.ranks, row.large].append(row.error())
    print(
        f"\n{'system':20s}{'operation':16s}{'GPUs':>5s}{'size':>9s}{'rows':>6s}{'median':>9s}{'90 %':>8s}{'worst':>9s}"
    )
    found = {}
    for (system, operation, ranks, large), errors in sorted(groups.items()):
        size = "≥ 1 MiB" if large else "< 1 MiB"
        worst, ninety = max(errors, key=abs), float(np.quantile(np.abs(errors), 0.9))
        middle = median_absolute(errors)
        print(f"{system:20s}{operation:16s}{ranks:5d}{size:>9s}{len(errors):6d}{middle:9.1%}{ninety:8.1%}{worst:+9.1%}")
        found[f"{system} {operation} {ranks} {size}"] = {
            "rows": len(errors),
            "median": middle,
            "ninety": ninety,
            "worst": worst,
        }
    return found


def alpha_beta(rows: Sequence[Measurement]) -> Error:
    """For each system one latency and one bus bandwidth, fitted like the curves."""
    found = {}
    for system in {row.system for row in rows}:
        own = [row for row in rows if row.system == system]
        moved = np.array([bus_factor(row.operation, row.ranks) * row.size for row in own])
        measured = np.array([row.seconds for row in own])

        def residuals(x: np.ndarray, moved: np.ndarray = moved, measured: np.ndarray = measured) -> np.ndarray:
            return np.log((np.exp(x[0]) + moved / np.exp(x[1])) / measured)

        found[system] = np.exp(least_squares(residuals, np.log([1e-5, 3e11]), loss="soft_l1", f_scale=0.05).x)

    def error(row: Measurement) -> float:
        alpha, beta = found[row.system]
        return (alpha + bus_factor(row.operation, row.ranks) * row.size / beta) / row.seconds - 1

    return error


def formula_only(rows: Sequence[Measurement]) -> Error:
    """For each system the median bus bandwidth from 64 MiB on, and no latency (as SimAI's analytical mode)."""
    rates: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.size >= 2**26:
            rates[row.system].append(bus_factor(row.operation, row.ranks) * row.size / row.seconds)

    def error(row: Measurement) -> float:
        return bus_factor(row.operation, row.ranks) * row.size / float(np.median(rates[row.system])) / row.seconds - 1

    return error


def generation_of(row: Measurement) -> Generation:
    """Whose curves forecast the row."""
    return GPUS[row.gpu].generation


def left_out(rows: Sequence[Measurement]) -> dict[str, list[Callable[[Measurement], bool]]]:
    """What is left out, fold by fold. all_to_all has a curve of its own, which no other operation could tell."""
    operations = ("all_gather", "reduce_scatter", "all_reduce")
    systems = sorted({row.system for row in rows if row.source == "coll-aiconfigurator" and row.gpu != "A100"})
    return {
        "every third size": [lambda r, k=k: round(np.log2(r.size)) % 3 == k for k in range(3)],
        "a number of GPUs": [lambda r, n=n: r.ranks == n for n in (2, 4, 8)],
        "an operation": [lambda r, o=o: r.operation == o for o in operations],
        "a system": [lambda r, s=s: r.system == s for s in systems],
    }


def cross_validate(rows: Sequence[Measurement]) -> dict[str, tuple[float, float]]:
    """Errors on rows that the fit has not seen. Where all-reduces are left out NVLS cannot be known, nor is judged."""
    found = {}
    print(f"\n{'left out':20s}{'judged':>8s}{'≥ 1 MiB':>10s}{'< 1 MiB':>10s}")
    for name, folds in left_out(rows).items():
        judged: list[tuple[Measurement, float]] = []
        for hidden in folds:
            for generation in GENERATIONS.values():
                own = [row for row in rows if generation_of(row) is generation]
                seen, unseen = [r for r in own if not hidden(r)], [r for r in own if hidden(r)]
                if not unseen:
                    continue
                error = predictor(fit(seen, generation), generation, sorted({row.gpu for row in own}))
                if not any(row.operation == "all_reduce" for row in seen):
                    unseen = [row for row in unseen if not row.forecast().algorithm.startswith("nvls")]
                judged += [(row, error(row)) for row in unseen]
        errors = {id(row): value for row, value in judged}
        found[name] = halves([row for row, _ in judged], lambda row, errors=errors: errors[id(row)])
        print(f"{name:20s}{len(judged):8d}{found[name][0]:10.1%}{found[name][1]:10.1%}", flush=True)
    return found


def refit(rows: Sequence[Measurement]) -> None:
    """Prints the lines of the table."""
    for name, generation in GENERATIONS.items():
        own = [row for row in rows if generation_of(row) is generation]
        if own:
            values = fit(own, generation)
            large, small = halves(own, predictor(values, generation, sorted({row.gpu for row in own})))
            print(f"\n{name}: median error {large:.1%} from 1 MiB on, {small:.1%} below")
            print(lines(values, generation))
            if any(row.library.startswith("torch") for row in own):
                print(f"PyTorch's overhead {values['overhead']:.1f} µs, EFA's latency {values['efa']:.1f} µs")


def main() -> None:
    """Prints errors by group, the baselines' and what cross-validation says."""
    arguments = options(__doc__ or "", own_options)
    print(__doc__)
    rows = read(arguments.data)
    if arguments.compact:
        write(arguments.compact, rows)
    if arguments.fit:
        refit(rows)
    groups = report_groups(rows)
    print(f"\n{'median error':34s}{'≥ 1 MiB':>10s}{'< 1 MiB':>10s}")
    baselines = {"α–β per system": alpha_beta(rows), "bus bandwidth formula per system": formula_only(rows)}
    errors = {"this model": halves(rows, Measurement.error)}
    errors |= {name: halves(rows, error) for name, error in baselines.items()}
    medians = [[v["median"] for k, v in groups.items() if k.endswith(size)] for size in ("≥ 1 MiB", "< 1 MiB")]
    errors["this model, mean of group medians"] = (float(np.mean(medians[0])), float(np.mean(medians[1])))
    for name, (large, small) in errors.items():
        print(f"{name:34s}{large:10.1%}{small:10.1%}")
    crossed = {} if arguments.quick else cross_validate(rows)
    values = {"error_large_median": errors["this model"][0], "error_small_median": errors["this model"][1]}
    finish(arguments, "collectives", values, {"groups": groups, "medians": errors, "left_out": crossed})


if __name__ == "__main__":
    main()
