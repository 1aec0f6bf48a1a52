"""Numbers of 4 bits in blocks of 16 with a scale each (NVFP4; NVIDIA, "Pretraining LLMs with NVFP4", 2025, §2).

A row of k numbers is 9 k / 16 bytes: two numbers in one, of which the first has the lower bits (e2m1), and behind them
the scales (e4m3), which are multiples of one of the whole tensor. Departs from Transformer Engine in that gradients are
rounded to the nearest number, not at random, and in that no Hadamard transform spreads outliers; where both are, they
are in the kernel that casts.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
LARGEST = 6.0
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours among 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


# `fuse` makes one kernel of each of the three.
def pack(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` of shape (rows, columns), whose greatest absolute value is ``largest``, and what to multiply it by."""
    factor = largest.clamp(min=1e-12) / (LARGEST * torch.finfo(torch.float8_e4m3fn).max)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / (LARGEST * factor)).clamp(min=2**-6).to(torch.float8_e4m3fn)
    numbers = blocks / (scales.float() * factor).unsqueeze(-1)
    size = numbers.abs()
    codes = sum((size > bound).to(torch.uint8) for bound in BOUNDS) + 8 * (numbers < 0).to(torch.uint8)
    codes = codes.flatten(-2)
    return torch.cat((codes[..., ::2] + 16 * codes[..., 1::2], scales.view(torch.uint8)), -1), factor


def pack_and_turn(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`pack`, and the first result of ``x`` transposed."""
    found, factor = pack(x, largest)
    return found, factor, pack(x.t(), largest)[0]


def join(parts: Tensor, pieces: int) -> Tensor:
    """What `pack` gives of all columns, of what it gave of each rank's: (ranks, rows, bytes), some of each piece."""
    sides = parts.tensor_split((parts.shape[-1] * 8 // 9,), dim=-1)
    return torch.cat([side.unflatten(-1, (pieces, -1)).permute(1, 2, 0, 3).flatten(1) for side in sides], -1)


def unpack(packed: Tensor, factor: Tensor) -> Tensor:
    """The numbers of `pack`, (rows, columns)."""
    pairs, scales = parts(packed)
    codes = torch.stack((pairs % 16, pairs // 16), -1).flatten(-2).long()
    values = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), device=packed.device)
    numbers = torch.where(codes < 8, 1, -1) * values[codes % 8]
    return (numbers.unflatten(-1, (-1, BLOCK)) * scales.float().unsqueeze(-1) * factor).flatten(-2)


def parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of numbers, as bytes, and the blocks' scales."""
    pairs, scales = packed.tensor_split((packed.shape[-1] * 8 // 9,), dim=-1)
    return pairs, scales.contiguous().view(torch.float8_e4m3fn)


def multiply(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: Tensor) -> None:
    """Writes ``a @ b.T`` of two results of `pack`, with their factors, to ``out``."""
    if not a.is_cuda:
        out.copy_(unpack(a, of_a) @ unpack(b, of_b).t())
        return
    (left, of_left), (right, of_right) = parts(a), parts(b)
    left, right = (each.view(torch.float4_e2m1fn_x2) for each in (left, right))
    torch._scaled_mm(left, right.t(), of_left.flatten(), of_right.flatten(), out_dtype=out.dtype, out=out)


def fuse() -> None:
    """Lets the compiler make one kernel of each of the three functions above, for every shape that a model has."""
    for function in (pack, pack_and_turn, join):
        globals()[function.__name__] = torch.compile(function, recompile_limit=64)
