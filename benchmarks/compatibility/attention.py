"""Scaled dot-product attention: causal, masks, grouped queries, each kernel, MultiheadAttention, flex."""

import argparse

import torch
from gpt import start
from torch import nn, optim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

parser = argparse.ArgumentParser()
parser.add_argument(
    "kind",
    choices=(
        "causal",
        "mask",
        "bool",
        "grouped",
        "flash",
        "efficient",
        "math",
        "cudnn",
        "fp32",
        "module",
        "encoder",
        "flex",
    ),
)
kind = parser.parse_args().kind
device = start()
batch, heads, length, width = 4, 16, 2048, 64
dtype = torch.float32 if kind in ("fp32", "module", "encoder") else torch.bfloat16
linear = nn.Linear(heads * width, 3 * heads * width, device=device, dtype=dtype)
module = nn.MultiheadAttention(heads * width, heads, batch_first=True, device=device)
encoder = nn.TransformerEncoderLayer(heads * width, heads, batch_first=True, device=device)
parameters = {"module": module, "encoder": encoder}.get(kind, linear).parameters()
optimizer = optim.AdamW(parameters, lr=1e-3)
kernels = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attend(x: torch.Tensor) -> torch.Tensor:
    if kind == "module":
        return module(x, x, x, need_weights=False)[0]
    if kind == "encoder":
        return encoder(
            x, src_mask=nn.Transformer.generate_square_subsequent_mask(length, device=device), is_causal=True
        )
    q, k, v = linear(x).view(batch, length, 3, heads, width).permute(2, 0, 3, 1, 4)
    if kind in kernels:
        with sdpa_kernel(kernels[kind]):
            return scaled_dot_product_attention(q, k, v, is_causal=True)
    if kind == "mask":
        return scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(length, length, device=device, dtype=dtype))
    if kind == "bool":
        return scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(length, length, device=device).tril().bool())
    if kind == "grouped":
        return scaled_dot_product_attention(q, k[:, :4], v[:, :4], is_causal=True, enable_gqa=True)
    if kind == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
        return flex_attention(q, k, v, block_mask=mask)
    return scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


for _ in range(3):
    attend(torch.randn(batch, length, heads * width, device=device, dtype=dtype)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
