"""Llama as torchtitan writes it: plain modules, one head split, complex rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ring_attention import ring_attention
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """What makes one Llama different from another: ``groups`` are heads of keys and values."""

    dim: int
    layers: int
    heads: int
    groups: int
    feed: int
    words: int
    theta: float = 10000.0


SHAPES = {
    # Touvron et al., Llama 2, 2023, table 1 and appendix A.2; 34B is the shape of Code Llama.
    "llama2-7b": Shape(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": Shape(5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": Shape(8192, 48, 64, 8, 22016, 32000),
    "llama2-70b": Shape(8192, 80, 64, 8, 28672, 32000),
    # Llama team, The Llama 3 herd of models, 2024, table 3.
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256, 500000.0),
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256, 500000.0),
    "llama3-405b": Shape(16384, 126, 128, 8, 53248, 128256, 500000.0),
    "debug": Shape(64, 4, 8, 4, 128, 256),
}


class RMSNorm(nn.Module):
    """In float32, operator by operator, as Llama's reference code has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turns (batch, sequence, heads, head) by complex ``angles`` of shape (sequence, head / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2).type_as(x)


def angles_of(positions: Tensor, shape: Shape) -> Tensor:
    """Of unit length, complex, (sequence, head / 2)."""
    head = shape.dim // shape.heads
    frequencies = shape.theta ** -(torch.arange(0, head, 2, device=positions.device).float() / head)
    turns = torch.outer(positions.float(), frequencies)
    return torch.polar(torch.ones_like(turns), turns)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, self.each = shape.dim // shape.heads, shape.heads // shape.groups
        self.context: ProcessGroup | None = None
        self.wq = nn.Linear(shape.dim, shape.heads * self.head, bias=False)
        self.wk = nn.Linear(shape.dim, shape.groups * self.head, bias=False)
        self.wv = nn.Linear(shape.dim, shape.groups * self.head, bias=False)
        self.wo = nn.Linear(shape.heads * self.head, shape.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # (batch, sequence, dim); the heads of this rank
        q, k, v = (weight(x).unflatten(-1, (-1, self.head)) for weight in (self.wq, self.wk, self.wv))
        q, k = turn(q, angles), turn(k, angles)
        if self.each > 1:
            k, v = k.repeat_interleave(self.each, 2), v.repeat_interleave(self.each, 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.context:
            mixed = ring_attention(*(part.contiguous() for part in (q, k, v)), self.context, gathered=True)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.feed, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.feed, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(shape.dim), RMSNorm(shape.dim)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Some layers of a Llama in a row: all of it, or one stage of a pipeline."""

    def __init__(self, shape: Shape, layers: range, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings = nn.Embedding(shape.words, shape.dim) if first else None
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in layers})
        self.norm = RMSNorm(shape.dim) if last else None
        self.output = nn.Linear(shape.dim, shape.words, bias=False) if last else None
        self.register_buffer("angles", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, sequence) or activations (batch, sequence, dim) to activations or logits."""
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for block in self.layers.values():
            x = block(x, self.angles)
        return self.output(self.norm(x)) if self.output is not None else x
