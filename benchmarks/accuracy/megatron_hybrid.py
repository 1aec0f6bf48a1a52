"""Layers of one kind each, as in Nemotron 3 (NVIDIA, 2025): Mamba-2, attention without positions, or experts.

In 4 bits are Mamba's first products and experts; its last ones are in float8, and attention, the first layer and the
last 14 in full precision, as in Megatron-Bridge's recipe (te_quant.cfg, ``num_layers_at_end_in_bf16``).

Mamba-2 (Dao, Gu, 2024, §7) as Megatron-Core's `MambaMixer` trains it, with the kernels of mamba_ssm: heads and the
groups that share B and C are split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron_experts import Mixed
from megatron_model import Attention, Norm, Shape, Way, again
from tensor_layers import Column, Row, Split, parameter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 128
"""Positions of a sequence whose products are computed together (``chunk_size``)."""
ENDS = 14
"""Last layers in full precision where others multiply in 4 bits."""


class Mamba(nn.Module):
    """Gates, scanned values, their keys and queries (B and C) and steps of all heads: (sequence, batch, hidden)."""

    def __init__(self, split: Split, name: str, shape: Shape) -> None:
        super().__init__()
        scan = shape.scan
        assert scan is not None
        inner, shared = scan.heads * scan.width, scan.groups * scan.state
        self.heads, self.groups = scan.heads // split.ranks, scan.groups // split.ranks
        self.width, self.state = scan.width, scan.state
        sizes = (inner, inner, shared, shared, scan.heads)
        self.inputs = Column(split, f"{name}.in", shape.hidden, sum(sizes), bias=False)
        self.inputs.weight.data = _whole(split, f"{name}.in", sizes, (shape.hidden,))
        self.filters = parameter(split, f"{name}.filters", (inner + 2 * shared, 4), 0, 0.02)
        self.filters.data = _whole(split, f"{name}.filters", sizes[1:4], (4,))
        self.offsets = parameter(split, f"{name}.offsets", (inner + 2 * shared,), 0, 0.02)
        self.offsets.data = _whole(split, f"{name}.offsets", sizes[1:4], ())
        self.steps, self.decay, self.skip = (
            parameter(split, f"{name}.{part}", (scan.heads,), 0, 0.02) for part in ("steps", "decay", "skip")
        )
        self.norm = parameter(split, f"{name}.norm", (inner,), 0, 0.02)
        outer = replace(split, float8="delayed") if split.float8 == "nvfp4" else split
        self.output = Row(outer, f"{name}.out", inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.inputs(x).transpose(0, 1).contiguous()
        scanned = self._scanned_on_gpu(mixed) if x.is_cuda else self._scanned(mixed)
        grouped = scanned.transpose(0, 1).contiguous().unflatten(-1, (self.groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], eps=1e-5).flatten(2) * self.norm
        return self.output(normed)

    def _scanned_on_gpu(self, mixed: Tensor) -> Tensor:
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

        return mamba_split_conv1d_scan_combined(
            mixed, self.filters, self.offsets, self.steps.float(), -self.decay.float().exp(), self.skip, CHUNK,
            headdim=self.width, ngroups=self.groups, norm_before_gate=False,
        )  # fmt: skip

    def _scanned(self, mixed: Tensor) -> Tensor:
        """The same, position by position: (batch, sequence, heads × width)."""
        inner, shared = self.heads * self.width, self.groups * self.state
        gate, rest, steps = mixed.split((inner, inner + 2 * shared, self.heads), -1)
        padded = functional.pad(rest.transpose(1, 2), (3, 0))
        rest = functional.conv1d(padded, self.filters.unsqueeze(1), self.offsets, groups=len(self.filters))
        values, keys, queries = functional.silu(rest).transpose(1, 2).split((inner, shared, shared), -1)
        values = values.unflatten(-1, (self.heads, self.width))
        each = self.heads // self.groups
        keys, queries = (
            part.unflatten(-1, (self.groups, self.state)).repeat_interleave(each, 2) for part in (keys, queries)
        )
        steps = functional.softplus(steps + self.steps)
        keep = (-self.decay.exp() * steps).exp()
        state, outputs = torch.zeros(*values[:, 0].shape, self.state), []
        for k in range(values.shape[1]):
            came = (steps[:, k].unsqueeze(-1) * values[:, k]).unsqueeze(-1) * keys[:, k].unsqueeze(-2)
            state = keep[:, k, :, None, None] * state + came
            outputs.append((state * queries[:, k].unsqueeze(-2)).sum(-1) + self.skip.unsqueeze(-1) * values[:, k])
        return torch.stack(outputs, 1).flatten(2) * functional.silu(gate)


def _whole(split: Split, name: str, sizes: Sequence[int], rest: tuple[int, ...]) -> Tensor:
    """This rank's part of each of several parameters, one after another."""
    return torch.cat([parameter(split, f"{name}.{k}", (size, *rest), 0, 0.02).data for k, size in enumerate(sizes)])


class HybridLayer(nn.Module):
    """The layer ``number`` of a hybrid model, or another one of a ``kind``: M, * or E."""

    def __init__(self, split: Split, number: int | str, shape: Shape, way: Way, kind: str) -> None:
        super().__init__()
        self.kind, self.recompute = kind, way.recompute
        ends = isinstance(number, int) and not 0 < number < shape.layers - ENDS
        if split.float8 == "nvfp4" and (ends or kind == "*"):
            split = replace(split, float8=None)
        self.norm = Norm(split, shape)
        if kind == "M":
            self.mixer: nn.Module = Mamba(split, f"{number}.mamba", shape)
        elif kind == "*":
            self.mixer = Attention(split, f"{number}.attention", shape, way)
        else:
            self.mixer = Mixed(split, str(number), shape, way)

    def forward(self, x: Tensor, turn: None = None) -> Tensor:
        normed, where = again(self.recompute in ("activations", "experts"), self.norm, x)
        if self.kind == "E" and self.recompute == "experts":
            return x + checkpoint(self.mixer, normed, use_reentrant=False)
        with where:
            return x + (self.mixer(normed, None) if self.kind == "*" else self.mixer(normed))
