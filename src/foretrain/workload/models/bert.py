"""BERT (Devlin et al., NAACL'19): the bare encoder with pooler, named as in Hugging Face's ``BertModel``."""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net

POSITIONS = 512
_VOCABULARY = 30522  # bert-base-uncased


def bert_base(sequence: int) -> Architecture:
    """109,482,240 parameters."""
    return _bert(sequence, layers=12, width=768, heads=12)


def bert_large(sequence: int) -> Architecture:
    """335,141,888 parameters."""
    return _bert(sequence, layers=24, width=1024, heads=16)


def _bert(sequence: int, layers: int, width: int, heads: int) -> Architecture:
    net = Net(sequence)
    tables = (("word", _VOCABULARY), ("position", POSITIONS), ("token_type", 2))
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
