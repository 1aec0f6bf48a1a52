"""Transformer-big (Vaswani et al., NeurIPS'17) for WMT English-German, named as in fairseq.

One matrix serves both embeddings and the output layer; positions are sinusoids; norms come after the sums; every
projection has a bias. With 37,000 shared tokens (the paper's "about 37000") that is 214,245,376 parameters; the
paper's Table 3 says 213 million. Source and target are equally long.
"""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

_VOCABULARY = 37000
_WIDTH, _HEADS, _INNER, _LAYERS = 1024, 16, 4096, 6


def transformer_big(sequence: int) -> Architecture:
    """214,245,376 parameters; ``sequence`` tokens on either side."""
    net = Net(sequence)
    net.embedding("encoder.embed_tokens", _VOCABULARY, _WIDTH)
    net.elementwise(3)
    for index in range(_LAYERS):
        _attention(net, f"encoder.layers.{index}.self_attn")
        _feed_forward(net, f"encoder.layers.{index}")
    net.embedding("decoder.embed_tokens", _VOCABULARY, _WIDTH, tied=True)
    net.elementwise(3)
    for index in range(_LAYERS):
        _attention(net, f"decoder.layers.{index}.self_attn")
        _attention(net, f"decoder.layers.{index}.encoder_attn")
        _feed_forward(net, f"decoder.layers.{index}")
    net.linear("decoder.output_projection", _VOCABULARY, tied=True)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _attention(net: Net, name: str) -> None:
    # fairseq registers k, v, q and computes q, k, v.
    net.declare(f"{name}.{which}_proj.{kind}" for which in "kvq" for kind in ("weight", "bias"))
    for which in "qkv":
        net.linear(f"{name}.{which}_proj", _WIDTH)
    net.attention(_HEADS, _WIDTH, keys=net.shape[0])
    net.linear(f"{name}.out_proj", _WIDTH)
    _residual(net, f"{name}_layer_norm")


def _feed_forward(net: Net, name: str) -> None:
    net.linear(f"{name}.fc1", _INNER)
    net.elementwise(2)
    net.linear(f"{name}.fc2", _WIDTH)
    _residual(net, f"{name}.final_layer_norm")


def _residual(net: Net, norm: str) -> None:
    net.elementwise(2)  # dropout
    net.elementwise(3)
    net.layer_norm(norm)
