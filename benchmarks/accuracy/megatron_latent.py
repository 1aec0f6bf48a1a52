"""Attention to keys and values that are made from a short latent vector of each token (DeepSeek-V2, 2024, §2.1).

As Megatron-Core's `MLASelfAttention` trains it: latents are normalized and widened to all heads, of which rotary
positions turn a part; that part of the keys is one for all heads.
"""

from __future__ import annotations

import torch
from megatron_model import HeadNorm, Shape, Way, again
from tensor_layers import Column, Row, Split
from torch import Tensor, nn
from torch.nn import functional


# Megatron has kernels for these two (``apply_rope_fusion``); `fuse` makes kernels of them here.
def turn_queries(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns the last part of each head: (sequence, batch, heads, head), by angles of (sequence, 1, 1, part)."""
    still = x.shape[-1] - cosine.shape[-1]
    return torch.cat((x[..., :still], rotate(x[..., still:], cosine, sine)), -1)


def keys_and_values(x: Tensor, part: Tensor, cosine: Tensor, sine: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of (sequence, batch, heads, size and size of values), with the turned ``part`` for each head."""
    turned = rotate(part.unsqueeze(2), cosine, sine).expand(-1, -1, x.shape[2], -1)
    return torch.cat((x[..., :size], turned), -1), x[..., size:].contiguous()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


def fuse() -> None:
    """Lets the compiler make one kernel of each of the two functions above."""
    for function in (turn_queries, keys_and_values):
        globals()[function.__name__] = torch.compile(function)


class LatentAttention(nn.Module):
    def __init__(self, split: Split, name: str, shape: Shape, way: Way) -> None:
        super().__init__()
        assert shape.latent is not None
        if split.ranks > 1 or way.context:
            raise SystemExit("latents are not split here: --tp and --cp need attention of another kind")
        latent, hidden, heads = shape.latent, shape.hidden, shape.heads
        self.latent, self.heads, self.size, self.way = latent, heads, shape.head, way
        self.to_queries = Column(split, f"{name}.to_queries", hidden, latent.queries, bias=False)
        self.of_queries = HeadNorm(split, latent.queries)
        self.queries = Column(
            split, f"{name}.queries", latent.queries, heads * (shape.head + latent.turned), bias=False
        )
        self.to_values = Column(split, f"{name}.to_values", hidden, latent.values + latent.turned, bias=False)
        self.of_values = HeadNorm(split, latent.values)
        self.values = Column(split, f"{name}.values", latent.values, heads * 2 * shape.head, bias=False)
        self.output = Row(split, f"{name}.out", heads * shape.head, hidden, bias=False)

    def _widen(
        self, queries: Tensor, values: Tensor, part: Tensor, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, (sequence, batch, heads, head), of normalized latents."""
        q = self.queries(queries).unflatten(-1, (self.heads, self.size + self.latent.turned))
        wide = self.values(values).unflatten(-1, (self.heads, 2 * self.size))
        return turn_queries(q, *turn), *keys_and_values(wide, part, *turn, self.size)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # cuDNN takes values shorter than keys, for which PyTorch never asks it.
        if q.is_cuda and self.way.attention == "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        latent = self.latent
        short, part = self.to_values(x).split((latent.values, latent.turned), dim=-1)
        latents = self.of_queries(self.to_queries(x)), self.of_values(short), part, turn
        widened, where = again(self.way.recompute == "latents", self._widen, *latents)
        with where:
            mixed = self._mix(*(each.permute(1, 2, 0, 3) for each in widened))
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))
