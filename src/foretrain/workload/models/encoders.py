"""Encoders: BERT (Devlin et al., NAACL'19) and Transformer-big (Vaswani et al., NeurIPS'17); norms follow the sums.

BERT is the bare encoder with pooler, named as in Hugging Face's ``BertModel``. Transformer-big is for WMT
English-German, named as in fairseq: one matrix serves both embeddings and the output layer; positions are sinusoids;
every projection has a bias. With 37,000 shared tokens (the paper's "about 37000") that is 214,245,376 parameters; the
paper's Table 3 says 213 million. Source and target are equally long.
"""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

BERT_POSITIONS = 512
_BERT_VOCABULARY = 30522  # bert-base-uncased


def bert_base(sequence: int) -> Architecture:
    """109,482,240 parameters."""
    return _bert(sequence, layers=12, width=768, heads=12)


def bert_large(sequence: int) -> Architecture:
    """335,141,888 parameters."""
    return _bert(sequence, layers=24, width=1024, heads=16)


def _bert(sequence: int, layers: int, width: int, heads: int) -> Architecture:
    net = Net(sequence)
    tables = (("word", _BERT_VOCABULARY), ("position", BERT_POSITIONS), ("token_type", 2))
    for table, rows in tables:
        net.embedding(f"embeddings.{table}_embeddings", rows, width)
    net.elementwise(3)
    net.layer_norm("embeddings.LayerNorm")
    net.elementwise(2)
    for index in range(layers):
        _block(net, f"encoder.layer.{index}", width, heads)
    net.shape = (width,)  # the pooler sees the first token only
    net.linear("pooler.dense", width)
    net.elementwise(2)
    return net.build()


def _block(net: Net, name: str, width: int, heads: int) -> None:
    for projection in ("query", "key", "value"):
        net.linear(f"{name}.attention.self.{projection}", width)
    net.attention(heads, width, keys=net.shape[0])
    net.linear(f"{name}.attention.output.dense", width)
    _residual(net, f"{name}.attention.output.LayerNorm")
    net.linear(f"{name}.intermediate.dense", 4 * width)
    net.elementwise(2)
    net.linear(f"{name}.output.dense", width)
    _residual(net, f"{name}.output.LayerNorm")


def _residual(net: Net, norm: str) -> None:
    net.elementwise(2)  # dropout
    net.elementwise(3)
    net.layer_norm(norm)


_BIG_VOCABULARY = 37000
_WIDTH, _HEADS, _INNER, _LAYERS = 1024, 16, 4096, 6


def transformer_big(sequence: int) -> Architecture:
    """214,245,376 parameters; ``sequence`` tokens on either side."""
    net = Net(sequence)
    net.embedding("encoder.embed_tokens", _BIG_VOCABULARY, _WIDTH)
    net.elementwise(3)
    for index in range(_LAYERS):
        _attention(net, f"encoder.layers.{index}.self_attn")
        _feed_forward(net, f"encoder.layers.{index}")
    net.embedding("decoder.embed_tokens", _BIG_VOCABULARY, _WIDTH, tied=True)
    net.elementwise(3)
    for index in range(_LAYERS):
        _attention(net, f"decoder.layers.{index}.self_attn")
        _attention(net, f"decoder.layers.{index}.encoder_attn")
        _feed_forward(net, f"decoder.layers.{index}")
    net.linear("decoder.output_projection", _BIG_VOCABULARY, tied=True)
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
