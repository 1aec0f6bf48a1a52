"""Decoders: GPT-2 small (Radford et al. 2019) and Llama 3 8B (Meta 2024), named as in Hugging Face's models for
causal language modelling.

GPT-2's output layer shares its matrix with the token embedding: one gradient, complete when the embedding's backward
is. Llama's attention is fused and causal; its times are those of a replica that computes alone and keeps every
activation: no sharding, no recomputation.
"""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

GPT2_POSITIONS = 1024
_GPT2_VOCABULARY = 50257


def gpt2(sequence: int) -> Architecture:
    """124,439,808 parameters."""
    width, heads, layers = 768, 12, 12
    net = Net(sequence)
    net.embedding("transformer.wte", _GPT2_VOCABULARY, width)
    net.embedding("transformer.wpe", GPT2_POSITIONS, width)
    net.elementwise(3)
    net.elementwise(2)
    for index in range(layers):
        _gpt2_block(net, f"transformer.h.{index}", width, heads)
    net.layer_norm("transformer.ln_f")
    net.linear("lm_head", _GPT2_VOCABULARY, tied=True)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _gpt2_block(net: Net, name: str, width: int, heads: int) -> None:
    net.layer_norm(f"{name}.ln_1")
    net.linear(f"{name}.attn.c_attn", 3 * width)
    net.attention(heads, width, keys=net.shape[0])
    net.linear(f"{name}.attn.c_proj", width)
    net.elementwise(2)
    net.elementwise(3)
    net.layer_norm(f"{name}.ln_2")
    net.linear(f"{name}.mlp.c_fc", 4 * width)
    net.elementwise(2)
    net.linear(f"{name}.mlp.c_proj", width)
    net.elementwise(2)
    net.elementwise(3)


_LLAMA_VOCABULARY = 128256
_WIDTH, _INNER, _LAYERS = 4096, 14336, 32
_HEADS, _HEAD = 32, 128
_SHARED = 8 * _HEAD  # 8 heads of keys and values serve 32 of queries

_REGISTERED = (
    *(f"self_attn.{which}_proj" for which in "qkvo"),
    *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


def llama3_8b(sequence: int) -> Architecture:
    """8,030,261,248 parameters."""
    net = Net(sequence)
    net.embedding("model.embed_tokens", _LLAMA_VOCABULARY, _WIDTH)
    for index in range(_LAYERS):
        _llama_block(net, f"model.layers.{index}")
    net.layer_norm("model.norm", bias=False)
    net.linear("lm_head", _LLAMA_VOCABULARY, bias=False)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _llama_block(net: Net, name: str) -> None:
    net.declare(f"{name}.{module}.weight" for module in _REGISTERED)  # the norms are registered last and run first
    entry = net.shape
    net.layer_norm(f"{name}.input_layernorm", bias=False)
    for which, width in (("q", _WIDTH), ("k", _SHARED), ("v", _SHARED)):
        net.shape = entry
        net.linear(f"{name}.self_attn.{which}_proj", width, bias=False)
        if which in "qk":
            net.elementwise(2)  # rotary positions
    net.attention(_HEADS, _WIDTH, keys=entry[0], fused=True)
    net.linear(f"{name}.self_attn.o_proj", _WIDTH, bias=False)
    net.elementwise(3)
    net.layer_norm(f"{name}.post_attention_layernorm", bias=False)
    for which in ("gate", "up"):
        net.shape = entry
        net.linear(f"{name}.mlp.{which}_proj", _INNER, bias=False)
    net.elementwise(5)  # SiLU, then the product
    net.linear(f"{name}.mlp.down_proj", _WIDTH, bias=False)
    net.elementwise(3)
