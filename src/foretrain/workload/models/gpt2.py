"""GPT-2 small (Radford et al. 2019), named as in Hugging Face's ``GPT2LMHeadModel``.

The output layer shares its matrix with the token embedding: one gradient, complete when the embedding's backward is.
"""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

POSITIONS = 1024
_VOCABULARY = 50257
_WIDTH, _HEADS, _LAYERS = 768, 12, 12


def gpt2(sequence: int) -> Architecture:
    """124,439,808 parameters."""
    net = Net(sequence)
    net.embedding("transformer.wte", _VOCABULARY, _WIDTH)
    net.embedding("transformer.wpe", POSITIONS, _WIDTH)
    net.elementwise(3)
    net.elementwise(2)
    for index in range(_LAYERS):
        _block(net, f"transformer.h.{index}")
    net.layer_norm("transformer.ln_f")
    net.linear("lm_head", _VOCABULARY, tied=True)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _block(net: Net, name: str) -> None:
    net.layer_norm(f"{name}.ln_1")
    net.linear(f"{name}.attn.c_attn", 3 * _WIDTH)
    net.attention(_HEADS, _WIDTH, keys=net.shape[0])
    net.linear(f"{name}.attn.c_proj", _WIDTH)
    net.elementwise(2)
    net.elementwise(3)
    net.layer_norm(f"{name}.ln_2")
    net.linear(f"{name}.mlp.c_fc", 4 * _WIDTH)
    net.elementwise(2)
    net.linear(f"{name}.mlp.c_proj", _WIDTH)
    net.elementwise(2)
    net.elementwise(3)
