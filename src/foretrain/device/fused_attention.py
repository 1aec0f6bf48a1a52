"""How long fused attention takes: the measured causal forward pass, and how everything else differs from it.

The table is of the best kernel on each GPU, which on Hopper and Blackwell is not what PyTorch calls by default.
Relations come from the figures of FlashAttention-3 (Shah et al., 2024, §4.1: H100, 16k tokens in all, heads of 64, 128
and 256, lengths 512 to 16k), in FLOP/s that do not count masked products:

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
from typing import TYPE_CHECKING, Literal

from foretrain.device.arithmetic import rate, twins
from foretrain.device.gpu import ACHIEVED_BANDWIDTH, KERNEL_OVERHEAD
from foretrain.device.presets import preset

if TYPE_CHECKING:
    from foretrain.device.gpu import Device
    from foretrain.device.work import Algorithm, Attention

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
    """Seconds, relative uncertainty and provenance of ``work``."""
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
    """FLOP/s of the backward pass by those of the forward pass over ``length`` keys; a fit of the values above."""
    return 0.87 * length / (length + 170)


def kernel_share(device: Device, work: Attention) -> float:
    """FLOP/s of this algorithm's kernel by those of the best one on this GPU."""
    major = device.capability[0]
    return (_OLDER if major < 9 else _HOPPER if major < 10 else _BLACKWELL)[work.algorithm]


def head_share(device: Device, work: Attention) -> float:
    """FLOP/s with heads of this size by those with heads of 128: padded to 64, 128 or 256, smaller ones slower."""
    old = device.capability[0] < 9 or work.algorithm in ("flash", "efficient")
    size = max(work.head_dim, 1)
    padded = next((bound for bound in (32, 64, 128, 192, 256) if size <= bound), size)
    slower = (SMALL_HEADS_OLDER if old else SMALL_HEADS) ** max(0.0, math.log2(128 / padded))
    return slower * size / padded
