"""Calibrated roofline of a GPU and of its software stack: arithmetic or memory traffic, plus a launch.

With one achieved fraction per kind of arithmetic this is within 5 to 8 % of measured GEMM times on data-centre GPUs. It
ignores tile and wave quantisation, clock throttling and what communication costs computation. The stack adds a factor
on kernels, the host's launches, and the slowdown by communication beside them.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from foretrain import errors
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, SECOND, Time

Precision: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16"]
"""Number format of multiplications."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""All of `Precision`."""

Kind: TypeAlias = Literal["conv", "winograd", "gemm", "memory"]
"""Work of an operator: convolve, convolve 3×3 or 5×5 with stride 1, multiply matrices, or only move bytes."""

ACHIEVED_BANDWIDTH = 0.8
"""Part of the datasheet's memory bandwidth that streaming kernels reach (fitted on A100, H100 and B200)."""


KERNEL_OVERHEAD = 3e-6
"""Seconds of a kernel with nothing to do, between two others in a full queue. `Device.launch`, which is larger, is for
models that know no queue: it includes the host's part."""


def element_size(precision: Precision) -> int:
    """Return the bytes of one number: TF32 is a way to multiply, its numbers are stored as fp32."""
    return 4 if precision in ("fp32", "tf32") else 2


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """FLOP/s of one precision.

    Attributes:
        peak: dense FLOP/s of the datasheet.
        conv: part of the peak that convolutions reach, forward and backward together.
        winograd: the same for 3×3 and 5×5 with stride 1. Above 1 where Winograd's algorithm pays, because it
            multiplies up to 2.25 times less than the nominal FLOPs that are counted.
        gemm: part of the peak that matrix products reach.
    """

    peak: float
    conv: float
    winograd: float
    gemm: float

    def achieved(self, kind: Literal["conv", "winograd", "gemm"]) -> float:
        """Return the FLOP/s that this kind of operator achieves."""
        fraction = self.conv if kind == "conv" else self.winograd if kind == "winograd" else self.gemm
        return self.peak * fraction


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU and its place in a server.

    Attributes:
        name: as people call it, e.g. ``"V100"``.
        memory: bytes.
        bandwidth: bytes per second of device memory, as in the datasheet.
        launch: picoseconds that every operator costs on top of its work.
        local_rate: bytes per second, the bus bandwidth of an all-reduce among the GPUs of one server.
        fp32, tf32, fp16, bf16: the arithmetic that exists; None where it does not.
        product: the name the driver gives, as ``torch.cuda.get_device_name`` prints it.
        capability: CUDA's compute capability, major and minor.
        sms: streaming multiprocessors.
        l2: bytes of the second-level cache.
        host_rate: bytes per second of a copy from or to pinned host memory, one direction.
        measured_as: the preset of which `foretrain.device.table` has measured times, this one or its nearest relative,
            whose times are scaled by the two rooflines; None where only the roofline is known.
        serial: operators run one after the other on the thread that calls them, as on a CPU, so that each takes
            ``launch`` besides, and its memory is the host's, so that nothing is copied to it or from it.
        overlap: how much longer it computes while communication is under way, where that was measured.
    """

    name: str
    memory: int
    bandwidth: float
    launch: Time
    local_rate: float
    fp32: Arithmetic
    tf32: Arithmetic | None = None
    fp16: Arithmetic | None = None
    bf16: Arithmetic | None = None
    product: str = ""
    capability: tuple[int, int] = (0, 0)
    sms: int = 0
    l2: int = 0
    host_rate: float = 12e9
    measured_as: str | None = None
    serial: bool = False
    overlap: float | None = None

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions this GPU can train in."""
        return tuple(name for name in PRECISIONS if getattr(self, name) is not None)

    def arithmetic(self, precision: Precision) -> Arithmetic:
        """Return the arithmetic of ``precision``; ConfigError when unknown or not built into this GPU."""
        if precision not in PRECISIONS:
            raise errors.unknown("precision", precision, PRECISIONS)
        found = getattr(self, precision)
        if found is None:
            remedy = f"use {' or '.join(self.precisions)}, or another device"
            raise ConfigError("precision", precision, f"does not exist on {self.name}", remedy)
        return found

    def time(self, kind: Kind, precision: Precision, *, flops: float = 0, moved: float = 0) -> Time:
        """Return the ps of one operator that computes ``flops`` and reads and writes ``moved`` bytes, rounded up."""
        work = moved / (ACHIEVED_BANDWIDTH * self.bandwidth)
        if kind != "memory":
            work = max(work, flops / self.arithmetic(precision).achieved(kind))
        return math.ceil(work * SECOND) + self.launch


HOST_LAUNCH: Time = 6 * MICROSECOND
"""Host time of one operator of eager PyTorch with a small kernel; between 5 and 10 us on the hosts of GPU servers."""

COMMUNICATION_SMS = 16
"""Multiprocessors that NCCL's kernel takes from computation: one a channel, 16 to 32 channels with NVLink and fewer
where the network is the bound (DeepSeek-V3's own kernels take 20 of 132)."""


def overlap_slowdown(device: Device) -> float:
    """Return how much longer computation takes while a collective runs beside it.

    Large GEMMs lose the multiprocessors the collective holds: 1.14 on H100, 1.17 on A100, 1.12 on B200. Echo (2025)
    measured 1.38 as the mean over all kernels, small ones that share the memory's bandwidth included; what a
    transformer spends its time on is large GEMMs, hence the smaller number. 1.15 where the device does not say.
    """
    if device.overlap:
        return device.overlap
    if not device.sms:
        return 1.15
    held = min(COMMUNICATION_SMS, device.sms // 6)  # small GPUs are on links that fewer channels fill
    return device.sms / (device.sms - held)


def stack_factor(device: Device, stack: str | float) -> float:
    """Return the factor of ``stack``'s operator times over the table's on this GPU; 1 where nothing was fitted.

    ``stack`` may be the number itself. Raises ConfigError for a stack that ``stacks.toml`` does not have.
    """
    if (factor := _number(stack)) is None:
        factors = _of(str(stack))
        factor = float(factors.get(device.name, factors.get("default", 1.0)))
    if not 0 < factor < math.inf:
        raise errors.ConfigError("factor", stack, "is not a factor above 0", "write e.g. 1.1 for 10 % slower")
    return factor


def host_launch(device: Device, stack: str | float) -> Time:
    """Return the host time of one operator of ``stack`` with a small kernel, on the servers that have this GPU.

    `HOST_LAUNCH` where nothing was fitted: a framework that does more in Python around each kernel (hooks of
    parameters, states of random numbers kept for recomputation, checks) has a ``host`` factor in ``stacks.toml``.
    Nor is it known where ``stack`` is but a number. Raises ConfigError for a stack that ``stacks.toml`` does not have.
    """
    if _number(stack) is not None:
        return HOST_LAUNCH
    return round(HOST_LAUNCH * float(_of(str(stack)).get("host", {}).get(device.name, 1.0)))


def forecast_range(device: Device, stack: str | float, across: bool) -> float:
    """Return w, where 95 % of iterations measured on this GPU took between exp(-w) and exp(w) times the forecast.

    This is over published runs of ``stack`` on one server or ``across`` servers (docs/live/accuracy.md), and as wide as
    that of a stack never seen where there are few of them, none on this GPU, or ``stack`` is but a number. Raises
    ConfigError for a stack that ``stacks.toml`` does not have.
    """
    known = {} if _number(stack) is not None else _of(str(stack)).get("across" if across else "within", {})
    return float(known.get(device.name, _of("eager")["range"]))


def _number(stack: str | float) -> float | None:
    """Return ``stack`` as a number; None if it is a name."""
    try:
        return float(stack)
    except ValueError:
        return None


def stacks() -> tuple[str, ...]:
    """Return the stacks `stack_factor` knows."""
    return tuple(_factors())


def _of(stack: str) -> dict[str, Any]:
    factors = _factors()
    if stack not in factors:
        raise errors.unknown("factor", stack, factors)
    return factors[stack]


@cache
def _factors() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("stacks.toml").read_text("utf-8"))
