"""Which arithmetic computes a number format on a GPU, and at what rate: the format's own, or the next that exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from foretrain.device.gpu import Arithmetic

if TYPE_CHECKING:
    from foretrain.device.gpu import Device
    from foretrain.device.work import Format

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
    """The arithmetic for ``wanted``: BF16 without tensor cores for it is computed in FP32, FP8 in FP16, and so on."""
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
    """Whether what was measured on ``other`` holds for ``device``: equal peaks and bandwidth."""
    return (device.bf16, device.bandwidth) == (other.bf16, other.bandwidth)


def _scaled(arithmetic: Arithmetic, factor: float) -> Arithmetic:
    return Arithmetic(arithmetic.peak * factor, arithmetic.conv, arithmetic.winograd, arithmetic.gemm)
