"""What a device is, as far as measuring tells: for one that nobody has described, such as a core of a CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch

from foretrain.device.aten import work
from foretrain.device.calibration import MeasuredCall, OperatorTime
from foretrain.device.gpu import ACHIEVED_BANDWIDTH, Arithmetic, Device
from foretrain.device.tensors import contiguous
from foretrain.device.work import Convolution, Gemm, MemoryWork
from foretrain.units import SECOND

_LARGE: Final = 0.5
"""Products that do at least this part of the most arithmetic of all count for the usual efficiency."""


def product(device: torch.device) -> str:
    """What the driver calls the GPU, or the system the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def stack(device: torch.device, processes: int = 1) -> str:
    """What computes: the release, and on a CPU how many share it, because times hold only for as many."""
    release = f"torch {torch.__version__}"
    if device.type == "cuda":
        return release
    threads = torch.get_num_threads()
    return f"{release}, {threads} thread{'s' * (threads > 1)}, {processes} of them at once on {cores()} cores"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def described(
    device: torch.device, measured: Sequence[OperatorTime], calls: Sequence[MeasuredCall], launch: float
) -> Device:
    """The device by a grid of measurements.

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
    """FLOP/s of convolutions forward; 0 where there are none."""
    found = []
    for one in calls:
        if one.call.operator == "aten::convolution":
            image, weight, *_ = one.call.arguments
            result = contiguous((image.shape[0], weight.shape[0], *image.shape[2:]), image.dtype)
            what = work(one.call.operator, one.call.arguments, (result,))
            if isinstance(what, Convolution) and what.winograd == winograd:
                found.append(what.flops / one.time * SECOND)
    return median(found) if found else 0.0
