"""``foretrain calibrate``: measures operators on this machine's GPU or CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

from foretrain.cli.arguments import JsonFile, check_writable, named, write_status
from foretrain.cli.progress import stages
from foretrain.errors import ConfigError
from foretrain.files import write_json

if TYPE_CHECKING:
    import torch

    from foretrain.device.calibration import Calibration


def calibrate(
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    operators: Path | None = None,
    load: Annotated[str, named("MODULE,...")] | None = None,
    out: Path | None = None,
    merge: Path | None = None,
    quick: bool = False,
    json: JsonFile = None,
    threads: int = 1,
    processes: int = 1,
) -> None:
    """Measure operators on this machine's GPU or CPU, for forecasts.

    foretrain simulate --device FILE reads what was measured. Measures a grid of common operators, or with --operators
    only those that a script launches.

    Args:
        device: device to measure; auto is the GPU where there is one.
        operators: a file written by foretrain simulate --record-operators.
        load: module to import first, which registers operators of its own, e.g. mylib.kernels; several with commas
            between.
        out: the file to write or replace; by default the file of --merge, or calibration.json.
        merge: add to the measurements of this file; new measurements replace old ones.
        quick: a small grid and fewer repetitions; takes some seconds instead of minutes.
        json: write what was measured in numbers: how many operators, their spread, those that failed.
        threads: CPU threads of one operator.
        processes: processes that compute at once while the CPU is measured, as the ranks of one machine do.
    """
    from foretrain.device import calibration, calls
    from foretrain.operator_benchmark.calibrating import calibrated, check_mergeable, is_described, product

    out = out or merge or Path("calibration.json")
    check_writable(out=out, json=json)
    for name, value in (("threads", threads), ("processes", processes)):
        if value < 1:
            raise ConfigError(name, value, "is below 1", "write e.g. 1")
    place = _device(device, threads)
    for name in load.split(",") if load else ():
        _import(name)
    asked = calls.load(operators) if operators else None
    before = calibration.load(merge) if merge else None
    check_mergeable(before, place, processes)
    what = "operators" if asked is None else f"{len(asked)} operator{'s' * (len(asked) > 1)}"
    if asked is not None and not is_described(place, before):
        what += " and those that describe the device,"
    write_status(_announcement(what, product(place), out, quick=quick, replaced=out != merge and out.exists()))
    with stages() as report:
        found = calibrated(place, asked, before, quick=quick, processes=processes, file=operators, told=report)
    calibration.dump(found.calibration, out)
    _print_summary(found.calibration, found.failed, before)
    if json:
        write_json(json, _numbers(found.calibration, found.failed, out))
    sys.stderr.write(f"wrote {out}\n")


def _announcement(what: str, device: str, out: Path, *, quick: bool, replaced: bool) -> str:
    """Return what is measured, what is written, and about how long it takes."""
    there = f", which is replaced (--merge {out} would add to it)" if replaced else ""
    return f"measuring {what} of {device} for {out}{there}; takes some {'seconds' if quick else 'minutes'}"


def _import(name: str) -> None:
    """Import a module, which may lie in the current folder, as with ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ImportError as error:
        problem = f"cannot be imported ({error})"
        raise ConfigError("load", name, problem, "name a module with dots, installed or in this folder") from error


def _device(name: str, threads: int) -> torch.device:
    import torch

    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        remedy = "install a build of PyTorch with CUDA on a machine with a GPU, or write --device cpu"
        raise ConfigError("device", name, "is not available", remedy)
    if name == "cuda" or (name == "auto" and here):
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(threads)
    return torch.device("cpu")


def _spreads(found: Calibration) -> list[float]:
    return [one.spread for one in (*found.measured, *found.calls)]


def _numbers(found: Calibration, failed: tuple[tuple[object, str], ...], out: Path) -> dict[str, object]:
    spreads = _spreads(found)
    return {
        "device": found.device,
        "stack": found.stack,
        "operators": len(spreads),
        "spread_median": median(spreads) if spreads else None,
        "failed": [{"operator": str(call), "reason": reason} for call, reason in failed],
        "file": str(out),
    }


def _print_summary(found: Calibration, failed: tuple[tuple[object, str], ...], before: Calibration | None) -> None:
    spreads = _spreads(found)
    summary = f"{len(spreads)} operators of {found.device} ({found.stack})"
    if spreads:
        summary += f", repetitions spread by {100 * median(spreads):.1f} % (median)"
    if before:
        summary += f"; {len(before.measured) + len(before.calls)} were there before"
    sys.stdout.write(summary + "\n")
    if failed:
        sys.stdout.write(f"{len(failed)} could not be repeated here, and will be modelled:\n")
    for call, reason in failed[:10]:
        sys.stdout.write(f"  {call!s:.100}: {reason:.100}\n")
    if len(failed) > 10:
        sys.stdout.write(f"  and {len(failed) - 10} more\n")
