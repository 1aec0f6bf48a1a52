"""``foretrain calibrate``: measures operators on the GPU, or the CPU, at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from foretrain.cli.arguments import check_writable
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from foretrain.device.calibration import Calibration
    from foretrain.operator_benchmark.calibrating import Told


def calibrate(
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    operators: Path | None = None,
    out: Path | None = None,
    merge: Path | None = None,
    quick: bool = False,
    threads: int = 1,
    processes: int = 1,
) -> None:
    """Measure operators on the GPU or CPU at hand, for forecasts: foretrain simulate --device FILE.

    Measures a grid of the usual operators, or with --operators just those that a script launches.

    Args:
        device: what to measure; auto is the GPU where there is one.
        operators: what foretrain simulate --record-operators wrote.
        out: the file to write; calibration.json, or the one that is merged with.
        merge: adds to the measurements of this file; what is in both counts as measured now.
        quick: a small grid, and fewer repetitions; some seconds.
        threads: of the CPU that one operator uses.
        processes: that compute at once while the CPU is measured, as the ranks of one machine do.
    """
    from foretrain.device import calibration, calls
    from foretrain.operator_benchmark.calibrating import calibrated, check_mergeable

    out = out or merge or Path("calibration.json")
    check_writable(out=out)
    for name, value in (("threads", threads), ("processes", processes)):
        if value < 1:
            raise ConfigError(name, value, "is below 1", "write e.g. 1")
    place = _device(device, threads)
    asked = calls.load(operators) if operators else None
    before = calibration.load(merge) if merge else None
    check_mergeable(before, place, processes)
    with _progress() as told:
        found = calibrated(place, asked, before, quick=quick, processes=processes, file=operators, told=told)
    calibration.dump(found.calibration, out)
    _say(found.calibration, found.failed, before)
    sys.stderr.write(f"wrote {out}\n")


def _device(name: str, threads: int) -> torch.device:
    import torch

    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        remedy = "install a build of PyTorch with CUDA on a machine with a GPU, or write --device cpu"
        raise ConfigError("device", name, "is not here", remedy)
    if name == "cuda" or (name == "auto" and here):
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(threads)
    return torch.device("cpu")


@contextmanager
def _progress() -> Iterator[Told]:
    """Shows what is measured, how far it is, and how long it will take, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {}

        def told(what: str, done: int, every: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=every)

        yield told


def _say(found: Calibration, failed: tuple[tuple[object, str], ...], before: Calibration | None) -> None:
    from statistics import median

    spreads = [one.spread for one in (*found.measured, *found.calls)]
    told = f"{len(spreads)} operators of {found.device} ({found.stack})"
    if spreads:
        told += f", repetitions spread by {100 * median(spreads):.1f} % (median)"
    if before:
        told += f"; {len(before.measured) + len(before.calls)} were there before"
    sys.stdout.write(told + "\n")
    if failed:
        sys.stdout.write(f"{len(failed)} could not be repeated here, and will be modelled:\n")
    for call, reason in failed[:10]:
        sys.stdout.write(f"  {call!s:.100}: {reason:.100}\n")
    if len(failed) > 10:
        sys.stdout.write(f"  and {len(failed) - 10} more\n")
