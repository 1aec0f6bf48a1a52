"""Rates of a GPU: arithmetic by number format, copies between host and GPU, and fused attention.

A format without arithmetic of its own is computed in the next that exists. Copies from pinned memory run at the link's
rate; from pageable memory the host copies first.

# Note [Fused attention]
The causal forward pass is measured, and everything else is derived from it. The table is of the best kernel on each
GPU, which on Hopper and Blackwell is not what PyTorch calls by default. Relations come from the figures of
FlashAttention-3 (Shah et al., 2024, §4.1: H100, 16k tokens in all, heads of 64, 128 and 256, lengths 512 to 16k), in
FLOP/s that do not count masked products:

- *Kernels*: FlashAttention-2 reaches 335/616 to 370/648 of FlashAttention-3 forward and 322/561 backward, cuDNN
  539/616 to 595/648 and 516/561. On Ampere both are the best kernel. Memory-efficient attention is about half of
  FlashAttention-2 (Dao, 2023, §4.1: xFormers on A100).
- *Unmasked*: as efficient as causal attention of twice the length, and 7 % more: 467, 565, 625, 638 against causal
  423, 521, 579, 602 from 1k on.
- *Backward*: 0.68, 0.75, 0.80, 0.85, 0.87 and 0.87 of the forward pass's FLOP/s from 512 to 16k; both kernels alike.
- *Heads*: 473/616 with 64 numbers in place of 128 on Hopper, 299/335 with FlashAttention-2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from foretrain.device.gpu import ACHIEVED_BANDWIDTH, KERNEL_OVERHEAD, Arithmetic
from foretrain.device.presets import preset
from foretrain.units import MICROSECOND, SECOND, Time

if TYPE_CHECKING:
    from foretrain.device.gpu import Device
    from foretrain.device.work import Algorithm, Attention, Format

_EIGHT_BITS = {"fp8": (8, 9), "fp8_block": (8, 9), "int8": (7, 5)}
"""The first compute capability with tensor cores for a format of 8 bits; they are twice as fast as for 16."""

_WIDER: dict[Format, Format] = {
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
    if wanted in _EIGHT_BITS:
        half = device.fp16 or device.bf16
        if half is not None and device.capability >= _EIGHT_BITS[wanted]:
            return Rate(wanted, _scaled(half, 2.0))
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


_HOPPER: dict[Algorithm, float] = {"best": 1.0, "flash": 0.57, "cudnn": 0.9, "efficient": 0.29}
_BLACKWELL: dict[Algorithm, float] = {"best": 1.0, "flash": 0.35, "cudnn": 1.0, "efficient": 0.18}
"""Estimate: FlashAttention-2 knows no instruction newer than Ampere's and gains but clock and multiprocessors."""
_OLDER: dict[Algorithm, float] = {"best": 1.0, "flash": 1.0, "cudnn": 1.0, "efficient": 0.5}

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
        compute /= backward_share(work.keys) if work.backward else 1.0
        return max(compute, work.moved / (ACHIEVED_BANDWIDTH * device.bandwidth)) + KERNEL_OVERHEAD, 0.25, "modelled"
    from foretrain.device import table

    measured = table.attention(device.measured_as)
    length = round(math.sqrt(work.queries * work.keys)) * (1 if work.causal else 2)
    shape = (work.batch, length, work.heads, work.kv_heads)
    share = kernel_share(device, work) * head_share(device, work)
    plain = work.causal and work.queries == work.keys and not work.backward and share == 1.0 and computed != "fp8"
    source = preset(device.measured_as)
    if plain and twins(device, source) and (seconds := measured.measured(*shape)) is not None:
        return seconds, 0.02, "measured"
    near = measured.near(shape, rate(source, "bf16").arithmetic.peak, source.bandwidth)
    share *= 1.0 if work.causal else UNMASKED_GAIN
    share *= backward_share(work.keys) if work.backward else 1.0
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
    major = device.capability[0]
    return (_OLDER if major < 9 else _HOPPER if major < 10 else _BLACKWELL)[work.algorithm]


def head_share(device: Device, work: Attention) -> float:
    """Return the FLOP/s with heads of this size by those with 128: padded to 64, 128 or 256, smaller ones slower."""
    old = device.capability[0] < 9 or work.algorithm in ("flash", "efficient")
    size = max(work.head_dim, 1)
    padded = next((bound for bound in (32, 64, 128, 192, 256) if size <= bound), size)
    slower = (SMALL_HEADS_OLDER if old else SMALL_HEADS) ** max(0.0, math.log2(128 / padded))
    return slower * size / padded
