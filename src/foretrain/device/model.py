"""Times of operators on a GPU, with the source of each estimate.

In this order: what the user measured (`foretrain.device.calibration`), a measured shape of the table
(`foretrain.device.table`), its neighbours, a roofline. An operator nobody knows costs the bytes it touches: none is
free. One factor per software stack (`foretrain.device.gpu`) scales everything that was not measured by the user.

A format without arithmetic of its own is computed in the next that exists. Copies from pinned memory run at the link's
rate; from pageable memory the host copies first.

# Note [Fused attention]
The causal forward pass is measured, and everything else is derived from it. The table is of the best kernel on each
GPU, which on Hopper and Blackwell is not what PyTorch calls by default. Relations come from the figures of
FlashAttention-3 (Shah et al., 2024, §4.1: H100, 16k tokens in all, heads of 64, 128 and 256, lengths 512 to 16k), in
FLOP/s that do not count masked products:

- *Kernels*: FlashAttention-2 reaches 335/616 to 370/648 of FlashAttention-3 forward and 322/561 backward, cuDNN
  539/616 to 595/648 and 516/561. On Ampere both are the best kernel. Memory-efficient attention is about half of
  FlashAttention-2 (Dao, 2023, §4.1: xFormers on A100), and FlashAttention in Triton 1.3 to 1.5 times slower forward and
  about twice backward (the same).
- *Unmasked*: as efficient as causal attention of twice the length, and 7 % more: 467, 565, 625, 638 against causal
  423, 521, 579, 602 from 1k on.
- *Backward*: 0.68, 0.75, 0.80, 0.85, 0.87 and 0.87 of the forward pass's FLOP/s from 512 to 16k; both kernels alike.
- *Heads*: 473/616 with 64 numbers in place of 128 on Hopper, 299/335 with FlashAttention-2.
- *Windows*: as efficient as unmasked attention to as many keys; an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from foretrain.device.gpu import ACHIEVED_BANDWIDTH, KERNEL_OVERHEAD
from foretrain.device.presets import preset
from foretrain.device.work import Attention, Convolution, Gemm, HostCopy, MemoryWork, Nothing, Unknown
from foretrain.errors import ConfigError
from foretrain.units import SECOND, Time

if TYPE_CHECKING:
    from foretrain.device.calibration import Calibration
    from foretrain.device.calls import OperatorCall
    from foretrain.device.gpu import Device
    from foretrain.device.table import Gemms, Prediction
    from foretrain.device.work import Format, Work
from typing import TYPE_CHECKING

from foretrain.device.gpu import Arithmetic
from foretrain.units import MICROSECOND

if TYPE_CHECKING:
    from foretrain.device.gpu import Device
    from foretrain.device.work import Attention, Format


_NARROW = {"fp8": (8, 9), "fp8_block": (8, 9), "int8": (7, 5), "fp4": (10, 0)}
"""The first compute capability with tensor cores for a format of 8 or 4 bits."""
_FASTER = {"fp4": 4.0}
"""How many times as fast they are as for 16 bits, where not twice."""
_ULTRA = (10, 3)
"""Blackwell Ultra's, whose tensor cores for 4 bits are half as fast again (datasheets of DGX B200 and B300)."""

_WIDER: dict[Format, Format] = {
    "fp4": "fp8",
    "int8": "fp16",
    "fp8_block": "fp16",
    "fp8": "fp16",
    "fp16": "fp32",
    "bf16": "fp32",
    "tf32": "fp32",
}

_DOUBLE = {(3, 7): 1 / 3, (6, 0): 1 / 2, (7, 0): 1 / 2, (8, 0): 1.0, (9, 0): 1.0, (10, 0): 1 / 2}
"""FP64 by FP32 FLOP/s of the GPUs built for science, with tensor cores where they have them (datasheets)."""
_DOUBLE_ELSEWHERE = 1 / 32


class Rate(NamedTuple):
    """The format that really computes, and its arithmetic."""

    format: Format
    arithmetic: Arithmetic


def rate(device: Device, wanted: Format) -> Rate:
    """Return the arithmetic for ``wanted``: BF16 without tensor cores for it is computed in FP32, FP8 in FP16, and so
    on."""
    if wanted == "fp64":
        share = _DOUBLE.get(device.capability, _DOUBLE_ELSEWHERE)
        return Rate(wanted, _scaled(device.fp32, share))
    if wanted in _NARROW:
        half = device.fp16 or device.bf16
        if half is not None and device.capability >= _NARROW[wanted]:
            ultra = 1.5 if wanted == "fp4" and device.capability == _ULTRA else 1.0
            return Rate(wanted, _scaled(half, ultra * _FASTER.get(wanted, 2.0)))
    else:
        found = getattr(device, wanted)
        if found is not None:
            return Rate(wanted, found)
    return rate(device, _WIDER[wanted])


def twins(device: Device, other: Device) -> bool:
    """Return whether what was measured on ``other`` holds for ``device``: equal peaks and bandwidth."""
    return (device.bf16, device.bandwidth) == (other.bf16, other.bandwidth)


def _scaled(arithmetic: Arithmetic, factor: float) -> Arithmetic:
    return Arithmetic(arithmetic.peak * factor, arithmetic.conv, arithmetic.winograd, arithmetic.gemm)


COPY_LATENCY: Time = 10 * MICROSECOND
"""Of a copy of a few bytes, from the call to its end (NVIDIA's bandwidthTest on PCIe machines: 8 to 12 us)."""

PAGEABLE_RATE = 6e9
"""Bytes per second through the driver's staging buffer, which one core of the host fills (estimate: 4 to 8 GB/s)."""


def copy_time(device: Device, size: int, pinned: bool) -> Time:
    """Return the ps of a copy of ``size`` bytes in either direction."""
    rate = device.host_rate if pinned else min(PAGEABLE_RATE, device.host_rate)
    return COPY_LATENCY + math.ceil(size / rate * SECOND)


_CUDNN = {8: 1.0, 9: 0.9, 10: 1.0}
"""FLOP/s of cuDNN's kernel by those of the best one on GPUs of a compute capability; as they are before and after."""
_FLASH = {8: 1.0, 9: 0.57, 10: 0.35}
"""The same of FlashAttention-2. On Blackwell an estimate: it knows no instruction newer than Ampere's and gains but
clock and multiprocessors."""
_EFFICIENT = 0.5
"""FLOP/s of memory-efficient attention by those of FlashAttention-2."""
_TRITON_FORWARD, _TRITON_BACKWARD = 1 / 1.4, 1 / 2
"""The same of FlashAttention in Triton."""

UNMASKED_GAIN = 1.07
SMALL_HEADS = 0.77
"""Efficiency with heads of 64 in place of 128 on Hopper and later; 0.89 with kernels made for Ampere."""
SMALL_HEADS_OLDER = 0.89
WITHOUT_TABLE = 0.6
"""Attention's efficiency as a part of large GEMMs', where nothing was measured (A100: 0.6 of peak against 0.8)."""

_FAR = 1.5


def attention_seconds(
    device: Device, work: Attention
) -> tuple[float, float, Literal["measured", "interpolated", "modelled"]]:
    """Return seconds, relative uncertainty and provenance of ``work``."""
    computed, arithmetic = rate(device, work.dtype)
    if device.measured_as is None or computed not in ("fp16", "bf16", "fp8") or not work.flops:
        compute = work.flops / (arithmetic.achieved("gemm") * WITHOUT_TABLE * kernel_share(device, work))
        compute /= backward_share(work.seen) if work.backward else 1.0
        return max(compute, work.moved / (ACHIEVED_BANDWIDTH * device.bandwidth)) + KERNEL_OVERHEAD, 0.25, "modelled"
    from foretrain.device import table

    measured = table.attention(device.measured_as)
    length = round(math.sqrt(work.queries * work.keys)) * (1 if work.causal else 2)
    if work.seen < work.keys:
        length = min(length, 2 * work.seen)
    shape = (work.batch, length, work.heads, work.kv_heads)
    share = kernel_share(device, work) * head_share(device, work)
    plain = work.causal and work.queries == work.keys == work.seen and not work.backward
    plain = plain and share == 1.0 and computed != "fp8"
    source = preset(device.measured_as)
    if plain and twins(device, source) and (seconds := measured.measured(*shape)) is not None:
        return seconds, 0.02, "measured"
    near = measured.near(shape, rate(source, "bf16").arithmetic.peak, source.bandwidth)
    share *= 1.0 if work.causal else UNMASKED_GAIN
    share *= backward_share(work.seen) if work.backward else 1.0
    roof = max(work.flops / arithmetic.peak / share, work.moved / device.bandwidth) + KERNEL_OVERHEAD
    known = plain and near.distance < _FAR
    sigma = math.hypot(0.04 if known else 0.12, near.spread)
    return roof * math.exp(near.ratio), sigma, "interpolated" if known else "modelled"


def backward_share(length: int) -> float:
    """Return the FLOP/s of the backward pass by those of the forward pass over ``length`` keys; a fit of the values
    above."""
    return 0.87 * length / (length + 170)


def kernel_share(device: Device, work: Attention) -> float:
    """Return the FLOP/s of this algorithm's kernel by those of the best one on this GPU."""
    generation = min(max(device.capability[0], min(_FLASH)), max(_FLASH))
    match work.algorithm:
        case "best":
            return 1.0
        case "cudnn":
            return _CUDNN[generation]
        case "flash":
            return _FLASH[generation]
        case "efficient":
            return _FLASH[generation] * _EFFICIENT
        case "triton":
            return _FLASH[generation] * (_TRITON_BACKWARD if work.backward else _TRITON_FORWARD)


def head_share(device: Device, work: Attention) -> float:
    """Return the FLOP/s with heads of this size by those with 128: padded to 64, 128 or 256, smaller ones slower."""
    old = device.capability[0] < 9 or work.algorithm in ("flash", "efficient", "triton")
    size = max(work.head_dim, 1)
    padded = next((bound for bound in (32, 64, 128, 192, 256) if size <= bound), size)
    slower = (SMALL_HEADS_OLDER if old else SMALL_HEADS) ** max(0.0, math.log2(128 / padded))
    return slower * size / padded


Provenance: TypeAlias = Literal["measured", "interpolated", "modelled", "unknown"]
"""Source of an operator's time: its own measurement, measurements of other sizes, a formula, or a lower bound."""
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)
"""In the order in which simulated ranks number them."""

FAR = 1.0
"""Distance (`Prediction.distance`) from which the table only lends its efficiency: a size is e times beyond it."""

MEASURED_SIGMA = 0.02
NEAR_SIGMA = 0.03
GEMM_SIGMA = 0.15
MEMORY_SIGMA = 0.15
CONVOLUTION_SIGMA = 0.2
COPY_SIGMA = 0.3
UNKNOWN_SIGMA = 1.0

ROWWISE = 0.74
"""FLOP/s of FP8 products with a scale for each row by those with one for each tensor, on Hopper, with what it takes to
find the scales: torchtitan's commit 7a04053 reports 6,424 and 7,186 tokens/s of Llama 3 8B on 8 H100s, and the products
are a third of the step."""
ROWWISE_SIGMA = 0.1


class OperatorEstimate(NamedTuple):
    """Estimated time of an operator.

    Attributes:
        time: picoseconds, above 0 unless there is no kernel at all.
        sigma: relative standard deviation of the time, 0.1 for ±10 %.
        provenance: how it is known; ``"interpolated"`` between measured shapes, ``"modelled"`` by a roofline.
    """

    time: Time
    sigma: float
    provenance: Provenance


class Seconds(NamedTuple):
    """An `OperatorEstimate` before the stack's factor."""

    seconds: float
    sigma: float
    provenance: Provenance


@dataclass(frozen=True, slots=True, eq=False)
class OperatorModel:
    """Operator times of one GPU under one software stack.

    Attributes:
        device: the GPU.
        factor: of the software stack, above 1 where it is slower than the table's; see `foretrain.device.gpu`.
        tf32: whether products of FP32 matrices may use TF32 (``torch.backends.cuda.matmul.allow_tf32``).
        tf32_convolutions: the same of convolutions (``torch.backends.cudnn.allow_tf32``).
        measured: what was measured on such a GPU; preferred, and not scaled.
    """

    device: Device
    factor: float = 1.0
    tf32: bool = False
    tf32_convolutions: bool = True
    measured: Calibration | None = None
    _times: dict[Work, OperatorEstimate] = field(default_factory=dict, init=False, repr=False)
    _calls: dict[Any, OperatorEstimate] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigError("factor", self.factor, "is not a factor above 0", "write e.g. 1.1 for 10 % slower")
        if self.measured is not None:
            self.measured.check(self.device)
            self._times.update(
                (found.work, self._launched(OperatorEstimate(found.time, found.spread or MEASURED_SIGMA, "measured")))
                for found in self.measured.measured
            )
            self._calls.update(
                (
                    found.call.key,
                    self._launched(OperatorEstimate(found.time, found.spread or MEASURED_SIGMA, "measured")),
                )
                for found in self.measured.calls
            )

    def estimate(self, work: Work) -> OperatorEstimate:
        """Return the time of ``work`` on an otherwise idle GPU, without the host's launch. Remembered."""
        known = self._times.get(work)
        if known is None:
            known = self._times[work] = self._estimate(work)
        return known

    def measured_call(self, call: OperatorCall) -> OperatorEstimate | None:
        """Return the time of ``call`` if just that was measured."""
        return self._calls.get(call.key) if self._calls else None

    def _launched(self, found: OperatorEstimate) -> OperatorEstimate:
        """Add the host's launch, where host and device are one."""
        return found._replace(time=found.time + self.device.launch) if self.device.serial else found

    def _estimate(self, work: Work) -> OperatorEstimate:
        if isinstance(work, Nothing) or (self.device.serial and isinstance(work, HostCopy)):
            return OperatorEstimate(0, 0.0, "modelled")
        return self._launched(self._modelled(work))

    def _modelled(self, work: Work) -> OperatorEstimate:
        match work:
            case Nothing():
                return OperatorEstimate(0, 0.0, "modelled")
            case HostCopy():
                # Not scaled: the link is no part of the software stack.
                return OperatorEstimate(copy_time(self.device, work.moved, work.pinned), COPY_SIGMA, "modelled")
            case Gemm():
                found = self._gemm(work)
                if work.rowwise and self.device.capability[0] < 10:
                    found = Seconds(found.seconds / ROWWISE, math.hypot(found.sigma, ROWWISE_SIGMA), "modelled")
            case Attention():
                found = Seconds(*attention_seconds(self.device, work))
            case Convolution():
                found = Seconds(self._convolution(work), CONVOLUTION_SIGMA, "modelled")
            case MemoryWork():
                seconds = self._streaming(work.moved, work.kernels)
                if work.rate:
                    seconds = max(seconds, work.moved / work.rate + work.kernels * KERNEL_OVERHEAD)
                found = Seconds(seconds, MEMORY_SIGMA, "modelled")
            case Unknown():
                achieved = rate(self.device, work.dtype).arithmetic.peak * work.efficiency
                least = max(self._streaming(work.moved), work.flops / achieved)
                found = Seconds(least, UNKNOWN_SIGMA, "unknown")
        return OperatorEstimate(max(1, math.ceil(found.seconds * self.factor * SECOND)), found.sigma, found.provenance)

    def _streaming(self, moved: float, kernels: int = 1) -> float:
        """Return the seconds of kernels that only move bytes."""
        return moved / (ACHIEVED_BANDWIDTH * self.device.bandwidth) + kernels * KERNEL_OVERHEAD

    def _convolution(self, work: Convolution) -> float:
        wanted = "tf32" if work.dtype == "fp32" and self.tf32_convolutions else work.dtype
        achieved = rate(self.device, wanted).arithmetic.achieved("winograd" if work.winograd else "conv")
        return max(work.flops / achieved + KERNEL_OVERHEAD, self._streaming(work.moved))

    def _gemm(self, work: Gemm) -> Seconds:
        if min(work.m, work.n, work.k, work.batch) < 1:  # an empty product still launches a kernel or two
            return Seconds(self._streaming(work.moved), MEMORY_SIGMA, "modelled")
        wanted: Format = "tf32" if work.dtype == "fp32" and self.tf32 else work.dtype
        computed, arithmetic = rate(self.device, wanted)
        table = self._table(computed)
        if table is None:
            compute = work.flops / arithmetic.achieved("gemm") + KERNEL_OVERHEAD
            return Seconds(max(compute, self._streaming(work.moved)), GEMM_SIGMA, "modelled")
        name, gemms = table
        source = preset(self.device.measured_as or self.device.name)
        own = computed == work.dtype and name == "own" and work.batch == 1
        if own and twins(self.device, source) and (seconds := gemms.measured(work.m, work.n, work.k)) is not None:
            return Seconds(seconds, MEASURED_SIGMA, "measured")
        peak = rate(source, "bf16" if gemms.size == 2 else "fp8").arithmetic.peak
        near = gemms.near(work.m * work.batch, work.n, work.k, peak, source.bandwidth)
        roof = max(work.flops / arithmetic.peak, work.moved / self.device.bandwidth) + KERNEL_OVERHEAD
        seconds = roof * math.exp(near.ratio)
        if own and near.distance < FAR:
            return Seconds(seconds, interpolation_sigma(near), "interpolated")
        return Seconds(seconds, math.hypot(GEMM_SIGMA, near.spread), "modelled")

    def _table(self, computed: Format) -> tuple[Literal["own", "borrowed"], Gemms] | None:
        """Return measured GEMMs in this format, or in the nearest of tensor cores, to borrow their efficiency."""
        if self.device.measured_as is None or computed in ("fp32", "fp64"):
            return None
        from foretrain.device import table

        if computed in ("fp16", "bf16"):
            found = table.gemms(self.device.measured_as, "half")
            return ("own", found) if found else None
        if computed in ("fp8", "fp8_block") and (found := table.gemms(self.device.measured_as, computed)):
            return "own", found
        if computed == "fp4" and (found := table.gemms(self.device.measured_as, "fp8")):
            return "borrowed", found
        found = table.gemms(self.device.measured_as, "half")
        return ("borrowed", found) if found else None


def interpolation_sigma(near: Prediction) -> float:
    """Return the relative uncertainty between measured shapes: at least their scatter."""
    return math.hypot(NEAR_SIGMA, near.spread)
