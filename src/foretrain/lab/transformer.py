"""A small GPT that trains for real on a CPU: 26 million parameters, so that a step takes about as long to compute on
one core as to exchange on a 1 Gb/s link.

What it learns is a random walk over its vocabulary in which most steps are determined, so that the loss falls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 1000, 512, 8, 8, 64
_CERTAIN = 0.9


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a norm, beside a residual; (batch, length, width) both ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(functional.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens (batch, length) to the loss of predicting each one's successor, given as ``targets`` of the same shape."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, HEADS) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def transformer(seed: int = 0, width: int = WIDTH, depth: int = DEPTH) -> Transformer:
    """The model, with the same parameters for the same ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(width, depth)


def batches(size: int, rank: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``size`` sequences and their targets without end, others on every ``rank``."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    while True:
        jumps = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        certain = torch.rand((size, LENGTH + 1), generator=generator) < _CERTAIN
        walk = [jumps[:, 0]]
        for place in range(1, LENGTH + 1):
            walk.append(torch.where(certain[:, place], successor[walk[-1]], jumps[:, place]))
        tokens = torch.stack(walk, dim=1)
        yield tokens[:, :-1], tokens[:, 1:]
