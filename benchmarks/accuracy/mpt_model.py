"""MPT as llm-foundry builds it: learned positions, biases, tied word vectors, layer norms in low precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    dim: int
    layers: int
    heads: int
    words: int = 50368


# llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml
SHAPES = {
    "125m": Shape(768, 12, 12),
    "350m": Shape(1024, 24, 16),
    "760m": Shape(1536, 24, 12),
    "1b": Shape(2048, 24, 16),
    "3b": Shape(2560, 32, 20),
    "7b": Shape(4096, 32, 32),
    "13b": Shape(5120, 40, 40),
    "30b": Shape(7168, 48, 56),
    "70b": Shape(8192, 80, 64),
    "debug": Shape(64, 2, 4, 256),
}


class LowPrecisionNorm(nn.LayerNorm):
    """In the dtype of its input, where autocast would choose float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.LayerNorm's name)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, sequence, heads, width); on GPUs FlashAttention in Triton, as MPT was trained."""
    if not q.is_cuda:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    from flash_attn.flash_attn_triton import flash_attn_func

    return flash_attn_func(q, k, v, None, True)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = LowPrecisionNorm(shape.dim), LowPrecisionNorm(shape.dim)
        self.qkv, self.out = nn.Linear(shape.dim, 3 * shape.dim), nn.Linear(shape.dim, shape.dim)
        self.up, self.down = nn.Linear(shape.dim, 4 * shape.dim), nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, dim)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(shape.words, shape.dim), nn.Embedding(length, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = LowPrecisionNorm(shape.dim)
        for layer in self.modules():
            if isinstance(layer, (nn.Embedding, nn.Linear)):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, sequence) -> (batch, sequence, words)
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)
