"""Calibration of a device: measures operators, beside busy processes if wanted; merges with earlier measurements.

A device without a preset, such as a core of a CPU, is first described by its measured rates.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, TypeAlias

import torch

from foretrain.device.aten import work
from foretrain.device.calibration import Calibration, MeasuredCall, OperatorTime, merged
from foretrain.device.calls import OperatorCall, contiguous
from foretrain.device.gpu import ACHIEVED_BANDWIDTH, Arithmetic, Device
from foretrain.device.presets import preset_of_product
from foretrain.device.work import Convolution, Gemm, MemoryWork
from foretrain.errors import ConfigError
from foretrain.operator_benchmark import grid
from foretrain.operator_benchmark.host import dispatch, others
from foretrain.operator_benchmark.session import MeasuredOperators, MeasuringSession
from foretrain.units import SECOND

_LARGE: Final = 0.5
"""Products that do at least this part of the most arithmetic of all count for the usual efficiency."""


def product(device: torch.device) -> str:
    """Return the driver's name of the GPU, or the system's of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def stack(device: torch.device, processes: int = 1) -> str:
    """Describe the software: the release, and on a CPU how many share it, because times hold only for as many."""
    release = f"torch {torch.__version__}"
    if device.type == "cuda":
        return release
    threads = torch.get_num_threads()
    return f"{release}, {threads} thread{'s' * (threads > 1)}, {processes} of them at once on {cores()} cores"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def described(
    device: torch.device, measured: Sequence[OperatorTime], calls: Sequence[MeasuredCall], launch: float
) -> Device:
    """Describe the device by a grid of measurements.

    Peaks are the most that any product reached, and bandwidth is such that what was reached is the usual part of it.

    Args:
        device: where it was measured.
        measured: products of matrices, and operators that only move bytes.
        calls: convolutions.
        launch: seconds of the host for one operator.
    """
    products = [(found.work, found.time / SECOND) for found in measured if isinstance(found.work, Gemm)]
    formats = {
        found.dtype: _arithmetic([one for one in products if one[0].dtype == found.dtype], calls)
        for found, _ in products
    }
    bandwidth = max(found.work.moved / found.time * SECOND for found in measured if isinstance(found.work, MemoryWork))
    serial = device.type == "cpu"
    properties = None if serial else torch.cuda.get_device_properties(device)
    return Device(
        name="CPU" if properties is None else properties.name,
        memory=properties.total_memory if properties else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        bandwidth=bandwidth / ACHIEVED_BANDWIDTH,
        launch=round(launch * SECOND),
        local_rate=bandwidth,
        fp32=formats["fp32"],
        tf32=None,
        fp16=formats.get("fp16"),
        bf16=formats.get("bf16"),
        product=product(device),
        capability=(properties.major, properties.minor) if properties else (8, 0),
        sms=properties.multi_processor_count if properties else torch.get_num_threads(),
        l2=properties.L2_cache_size if properties else 0,
        serial=serial,
    )


def _arithmetic(products: Sequence[tuple[Gemm, float]], calls: Sequence[MeasuredCall]) -> Arithmetic:
    rates = [one.flops / seconds for one, seconds in products]
    peak = max(rates)
    most = max(one.flops for one, _ in products)
    large = [rate / peak for rate, (one, _) in zip(rates, products, strict=True) if one.flops >= _LARGE * most]
    plain, winograd = (_convolved(calls, kind) / peak for kind in (False, True))
    return Arithmetic(peak, conv=plain or winograd or 1.0, winograd=winograd or plain or 1.0, gemm=median(large))


def _convolved(calls: Sequence[MeasuredCall], winograd: bool) -> float:
    """Return the FLOP/s of convolutions forward; 0 where there are none."""
    found = []
    for one in calls:
        if one.call.operator == "aten::convolution":
            image, weight, *_ = one.call.arguments
            result = contiguous((image.shape[0], weight.shape[0], *image.shape[2:]), image.dtype)
            what = work(one.call.operator, one.call.arguments, (result,))
            if isinstance(what, Convolution) and what.winograd == winograd:
                found.append(what.flops / one.time * SECOND)
    return median(found) if found else 0.0


Told: TypeAlias = Callable[[str, int, int], None]
"""Called with what is measured, how many operators of it are, and of how many."""

_NOTHING: Final = MeasuredOperators((), ())
_ROUNDS: Final = 25
_QUICK_ROUNDS: Final = 8


class CalibrationResult(NamedTuple):
    """A calibration, and the calls that could not be repeated, with the reason."""

    calibration: Calibration
    failed: tuple[tuple[OperatorCall, str], ...]


def check_mergeable(before: Calibration | None, device: torch.device, processes: int) -> None:
    """Raise ConfigError, before anything is measured, if ``before`` is of another device or stack."""
    if before is not None:
        merged([Calibration(product(device), stack(device, processes)), before])


def is_described(device: torch.device, before: Calibration | None) -> bool:
    """Return whether a preset or ``before`` says what the device is."""
    return bool(preset_of_product(product(device)) or (before and before.description))


def calibrated(
    device: torch.device,
    calls: Sequence[OperatorCall] | None,
    before: Calibration | None = None,
    *,
    quick: bool = False,
    processes: int = 1,
    file: Path | None = None,
    told: Told = lambda what, done, every: None,
) -> CalibrationResult:
    """Measure ``calls``, or a grid of the usual operators where they are None.

    The grid is measured as well where neither a preset nor ``before`` says what the device is.

    Args:
        device: the GPU, or the CPU with as many threads as PyTorch is set to.
        calls: of a script.
        before: a calibration of the same device and stack; its measurements are kept where there are no new ones.
        quick: a small grid, and fewer repetitions.
        processes: that compute at once, this one included; CPU only.
        file: where ``calls`` came from, for the other processes to compute; by default they train a little.
        told: how far it is.

    Raises:
        ConfigError: ``before`` is of another device or stack, or a GPU was to be shared.
    """
    if processes > 1 and device.type == "cuda":
        raise ConfigError("processes", processes, "share a GPU", "measure a GPU alone, or write --device cpu")
    check_mergeable(before, device, processes)
    if calls is not None and device.type == "cpu":  # It has no memory of its own to copy to.
        calls = [call for call in calls if not call.operator.startswith("Memcpy")]
    session = MeasuringSession(device, _QUICK_ROUNDS if quick else _ROUNDS, _budget(device), shared=processes > cores())
    with others(processes - 1, file):
        found = CalibrationResult(Calibration(product(device), stack(device, processes)), ())
        if calls is None or not is_described(device, before):
            found = _grid(session, processes, quick or calls is not None, told)
        if calls is not None:
            measured, failed = _reporting(session, "operators", told).calls(calls)
            found = CalibrationResult(
                merged([found.calibration, _of(session, processes, calls=MeasuredOperators(measured, ()))]), failed
            )
    return found._replace(calibration=merged([*([before] if before else []), found.calibration]))


def _grid(session: MeasuringSession, processes: int, quick: bool, told: Told) -> CalibrationResult:
    device = session.device
    measured = _reporting(session, "operators of the grid", told).probes(grid.probes(device, quick))
    calls = _reporting(session, "convolutions and operators of optimizers", told).calls(grid.calls(device, quick))
    launch = dispatch(session)
    found = _of(session, processes, measured, calls)
    if preset_of_product(found.device):
        return CalibrationResult(_with_launch(found, launch), calls.failed)
    whole = described(device, measured, calls.calls, launch)
    return CalibrationResult(Calibration(found.device, found.stack, found.measured, found.calls, whole), calls.failed)


def _with_launch(found: Calibration, launch: float) -> Calibration:
    return Calibration(found.device, found.stack, found.measured, found.calls, None, round(launch * SECOND))


def _of(
    session: MeasuringSession,
    processes: int,
    measured: tuple[OperatorTime, ...] = (),
    calls: MeasuredOperators = _NOTHING,
) -> Calibration:
    return Calibration(product(session.device), stack(session.device, processes), measured, calls.calls)


def _reporting(session: MeasuringSession, what: str, told: Told) -> MeasuringSession:
    return MeasuringSession(session.device, session.rounds, session.budget, session.shared, partial(told, what))


def _budget(device: torch.device) -> int:
    """Return half of the free memory of a GPU; 2 GiB of the host's, as other processes may need as much."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 << 30
