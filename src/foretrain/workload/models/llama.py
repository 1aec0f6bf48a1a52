"""Llama 3 8B (Meta 2024), named as in Hugging Face's ``LlamaForCausalLM``; attention is fused and causal.

Times are those of a replica that computes alone and keeps every activation: no sharding, no recomputation.
"""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

_VOCABULARY = 128256
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
    net.embedding("model.embed_tokens", _VOCABULARY, _WIDTH)
    for index in range(_LAYERS):
        _block(net, f"model.layers.{index}")
    net.layer_norm("model.norm", bias=False)
    net.linear("lm_head", _VOCABULARY, bias=False)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _block(net: Net, name: str) -> None:
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
