"""Transformers: BERT, Transformer-big, GPT-2 and Llama 3.

BERT (Devlin et al., NAACL'19) is the bare encoder with pooler, GPT-2 (Radford et al. 2019) the small one, Llama 3
(Meta 2024) that of 8B; they are named as in Hugging Face's models. GPT-2's output layer shares its matrix with the
token embedding: one gradient, complete when the embedding's backward is. Llama's attention is fused and causal; its
times are those of a replica that computes alone and keeps every activation: no sharding, no recomputation.

Transformer-big (Vaswani et al., NeurIPS'17) is for WMT English-German, named as in fairseq: one matrix serves both
embeddings and the output layer; positions are sinusoids; norms follow the sums; every projection has a bias. With
37,000 shared tokens (the paper's "about 37000") that is 214,245,376 parameters; the paper's Table 3 says 213 million.
Source and target are equally long.
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
_BIG_WIDTH, _BIG_HEADS, _BIG_INNER, _BIG_LAYERS = 1024, 16, 4096, 6


def transformer_big(sequence: int) -> Architecture:
    """214,245,376 parameters; ``sequence`` tokens on either side."""
    net = Net(sequence)
    net.embedding("encoder.embed_tokens", _BIG_VOCABULARY, _BIG_WIDTH)
    net.elementwise(3)
    for index in range(_BIG_LAYERS):
        _attention(net, f"encoder.layers.{index}.self_attn")
        _feed_forward(net, f"encoder.layers.{index}")
    net.embedding("decoder.embed_tokens", _BIG_VOCABULARY, _BIG_WIDTH, tied=True)
    net.elementwise(3)
    for index in range(_BIG_LAYERS):
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
        net.linear(f"{name}.{which}_proj", _BIG_WIDTH)
    net.attention(_BIG_HEADS, _BIG_WIDTH, keys=net.shape[0])
    net.linear(f"{name}.out_proj", _BIG_WIDTH)
    _residual(net, f"{name}_layer_norm")


def _feed_forward(net: Net, name: str) -> None:
    net.linear(f"{name}.fc1", _BIG_INNER)
    net.elementwise(2)
    net.linear(f"{name}.fc2", _BIG_WIDTH)
    _residual(net, f"{name}.final_layer_norm")


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
_LLAMA_WIDTH, _LLAMA_INNER, _LLAMA_LAYERS = 4096, 14336, 32
_LLAMA_HEADS, _LLAMA_HEAD = 32, 128
_LLAMA_SHARED = 8 * _LLAMA_HEAD  # 8 heads of keys and values serve 32 of queries

_LLAMA_REGISTERED = (
    *(f"self_attn.{which}_proj" for which in "qkvo"),
    *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


def llama3_8b(sequence: int) -> Architecture:
    """8,030,261,248 parameters."""
    net = Net(sequence)
    net.embedding("model.embed_tokens", _LLAMA_VOCABULARY, _LLAMA_WIDTH)
    for index in range(_LLAMA_LAYERS):
        _llama_block(net, f"model.layers.{index}")
    net.layer_norm("model.norm", bias=False)
    net.linear("lm_head", _LLAMA_VOCABULARY, bias=False)
    net.elementwise(4)  # log-softmax and cross-entropy
    return net.build()


def _llama_block(net: Net, name: str) -> None:
    net.declare(
        f"{name}.{module}.weight" for module in _LLAMA_REGISTERED
    )  # the norms are registered last and run first
    entry = net.shape
    net.layer_norm(f"{name}.input_layernorm", bias=False)
    for which, width in (("q", _LLAMA_WIDTH), ("k", _LLAMA_SHARED), ("v", _LLAMA_SHARED)):
        net.shape = entry
        net.linear(f"{name}.self_attn.{which}_proj", width, bias=False)
        if which in "qk":
            net.elementwise(2)  # rotary positions
    net.attention(_LLAMA_HEADS, _LLAMA_WIDTH, keys=entry[0], fused=True)
    net.linear(f"{name}.self_attn.o_proj", _LLAMA_WIDTH, bias=False)
    net.elementwise(3)
    net.layer_norm(f"{name}.post_attention_layernorm", bias=False)
    for which in ("gate", "up"):
        net.shape = entry
        net.linear(f"{name}.mlp.{which}_proj", _LLAMA_INNER, bias=False)
    net.elementwise(5)  # SiLU, then the product
    net.linear(f"{name}.mlp.down_proj", _LLAMA_WIDTH, bias=False)
    net.elementwise(3)
