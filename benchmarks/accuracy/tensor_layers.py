"""Layers split over a tensor-parallel group, as in Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

Activations are (sequence, batch, hidden). With sequence parallelism, norms and dropout see a part of the sequence, and
the two all-reduces of a block become all-gathers and reduce-scatters.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import float8_layers
import torch
import torch.distributed as dist
from tensor_exchange import (
    Pending,
    done,
    gather,
    gather_and_multiply,
    multiply_and_scatter,
    own,
    scatter_sum,
    total,
    wait,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine_memory import added


class Alone:
    """A group of this rank: what is split over it is whole, and nothing is exchanged."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class Split:
    """How layers are split, and how they multiply.

    Attributes:
        group: the tensor-parallel group.
        sequence: whether norms and dropout are split along the sequence.
        overlap: whether gradients of inputs travel while those of weights are computed.
        float8: whether the products run in float8, with scales of the micro-batch before or of the tensor at hand, or
            in blocks of 4 bits.
        pieces: of a sequence that travel beside products; 1 for all at once.
        reproducible: whether initial values are the same however layers are split, which costs the whole tensor.
    """

    group: ProcessGroup
    sequence: bool = False
    overlap: bool = False
    float8: Literal["delayed", "current", "nvfp4"] | None = None
    pieces: int = 1
    reproducible: bool = False

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def reduce(self, x: Tensor) -> Pending:
        """Sums partial results, to this rank's part of the sequence where that is split."""
        return scatter_sum(x, self.group, self.pieces) if self.sequence else total(x, self.group)

    def own(self, x: Tensor) -> Tensor:
        """What this rank has of all, along the sequence."""
        return own(x, self.group, self.pieces) if self.sequence else x


def parameter(split: Split, name: str, shape: tuple[int, ...], dim: int | None, deviation: float) -> nn.Parameter:
    """A parameter of which this rank has its part along ``dim``, or all where None; normal around 0, or ones for 0."""
    here = [size // split.ranks if axis == dim else size for axis, size in enumerate(shape)]
    values = torch.ones(here)
    if deviation and split.reproducible:
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
        with torch.device("cpu"):
            whole = torch.randn(shape, generator=generator) * deviation
        values = whole if dim is None else whole.chunk(split.ranks, dim)[split.rank]
        values = values.contiguous().to(torch.empty(0).device)
    elif deviation:
        values.normal_(std=deviation)
    made = nn.Parameter(values)
    made.split = dim is not None
    return made


def accumulate(weight: nn.Parameter, gradient: Tensor, x: Tensor) -> Tensor | None:
    """Adds the weight's gradient to its ``main_grad`` in the product itself where it has one; else returns it."""
    gradient, x = gradient.flatten(0, 1), x.flatten(0, 1)
    main = getattr(weight, "main_grad", None)
    if main is None:
        return gradient.t().matmul(x)
    add_product(main, gradient, x)
    return added(weight)


def add_product(main: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds ``gradient.T @ x`` of (rows, outputs) and (rows, inputs), in the product itself where it can."""
    if main.dtype == x.dtype:
        main.addmm_(gradient.t(), x)
    elif main.is_cuda:
        torch.addmm(main, gradient.t(), x, out_dtype=main.dtype, out=main)
    else:
        main.add_(gradient.t().matmul(x))


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, split: Split) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.split = weight, split
        if not split.sequence:
            return torch.matmul(x, weight.t())
        out = x.new_empty(x.shape[0] * split.ranks, x.shape[1], weight.shape[0])
        gather_and_multiply(x, split.group, split.pieces, lambda a, to: torch.matmul(a, weight.t(), out=to), out)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), split, weight = ctx.saved_tensors, ctx.split, ctx.weight
        again = gather(x, split.group, split.pieces) if split.sequence else None
        of_input = gradient.matmul(weight)
        whole = done(again) if again else x
        reduced = split.reduce(of_input)
        if not split.overlap:
            wait(reduced)
        of_weight = accumulate(weight, gradient, whole)
        return done(reduced), of_weight, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, split: Split) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.split = weight, split
        if not split.sequence:
            return done(total(torch.matmul(x, weight.t()), split.group))
        out = x.new_empty(*x.shape[:2], weight.shape[0])
        multiply = lambda a, to: torch.matmul(a, weight.t(), out=to)  # noqa: E731
        return multiply_and_scatter(x, split.group, split.pieces, multiply, out)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), split, weight = ctx.saved_tensors, ctx.split, ctx.weight
        if not split.sequence:
            gradient = gradient.contiguous()
            return gradient.matmul(weight), accumulate(weight, gradient, x), None
        out = torch.empty_like(x)
        multiply = lambda a, to: torch.matmul(a, weight, out=to)  # noqa: E731
        whole = gather_and_multiply(gradient, split.group, split.pieces, multiply, out)
        return out, accumulate(weight, whole, x), None


def scaled(split: Split) -> float8_layers.Scaled | None:
    if split.float8 == "nvfp4":
        return float8_layers.Packed()
    return float8_layers.Scaled(split.float8 == "delayed") if split.float8 else None


class Column(nn.Module):
    """A matrix split by its outputs: (blocks of outputs × inputs); the bias is the caller's to add.

    ``blocks`` outputs that belong together (gate and value of a gated unit) are split each for itself.
    """

    def __init__(self, split: Split, name: str, inputs: int, outputs: int, blocks: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.split, self.scaled = split, scaled(split)
        weight = parameter(split, name, (blocks, outputs // blocks, inputs), 1, 0.02)
        weight.data = weight.data.flatten(0, 1)
        self.weight = weight
        self.bias = parameter(split, f"{name}.bias", (outputs,), 0, 0.02) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled:
            return float8_layers.Column.apply(x, self.weight, self.split, self.scaled)
        return _Column.apply(x, self.weight, self.split)


class Row(nn.Module):
    """A matrix split by its inputs, whose partial products are summed; the bias is the caller's to add."""

    def __init__(self, split: Split, name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.split, self.scaled = split, scaled(split)
        self.weight = parameter(split, name, (outputs, inputs), 1, 0.02)
        self.bias = parameter(split, f"{name}.bias", (outputs,), None, 0.02) if bias else None
        if self.bias is not None:
            self.bias.partial = split.sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled:
            return float8_layers.Row.apply(x, self.weight, self.split, self.scaled)
        return _Row.apply(x, self.weight, self.split)


class _Whole(torch.autograd.Function):
    """Sums what ranks have, to all of the sequence or to a part; backward, the opposite."""

    @staticmethod
    def forward(ctx, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return done(split.reduce(x))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        split = ctx.split
        return (done(gather(gradient, split.group, split.pieces)) if split.sequence else gradient), None


class VocabularyEmbedding(nn.Module):
    """Word vectors split by words: (batch, sequence) to (sequence or a part of it, batch, hidden)."""

    def __init__(self, split: Split, words: int, hidden: int) -> None:
        super().__init__()
        self.split = split
        self.weight = parameter(split, "words", (words, hidden), 0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.weight.shape[0] * self.split.rank
        here = tokens - first
        elsewhere = (here < 0) | (here >= self.weight.shape[0])
        vectors = nn.functional.embedding(here.masked_fill(elsewhere, 0), self.weight)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0).transpose(0, 1)
        return _Whole.apply(vectors, self.split)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, split: Split) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, split.group)
        shifted = logits - largest.unsqueeze(-1)
        here = targets - logits.shape[-1] * split.rank
        elsewhere = (here < 0) | (here >= logits.shape[-1])
        here = here.masked_fill(elsewhere, 0)
        wanted = shifted.gather(-1, here.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        dist.all_reduce(wanted, group=split.group)
        shares = shifted.exp_()
        whole = shares.sum(-1)
        dist.all_reduce(whole, group=split.group)
        shares.div_(whole.unsqueeze(-1))
        ctx.save_for_backward(shares, here, elsewhere)
        return whole.log() - wanted

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares, here, elsewhere = ctx.saved_tensors
        shares.scatter_add_(-1, here.unsqueeze(-1), elsewhere.to(shares.dtype).unsqueeze(-1) - 1)
        return shares.mul_(gradient.unsqueeze(-1)), None, None


def cross_entropy(logits: Tensor, targets: Tensor, split: Split) -> Tensor:
    """Of float32 logits split by words, (..., words here), to targets of shape (...); both lose their content."""
    return _CrossEntropy.apply(logits, targets, split)
