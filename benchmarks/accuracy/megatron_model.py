"""GPT as Megatron-LM builds it, from layers split over tensor-parallel ranks and cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import float8_layers
import ring_attention
import torch
import transformer_engine_memory
from megatron_servers import Servers
from megatron_turns import Turns
from tensor_layers import Alone, Column, Row, Split, VocabularyEmbedding, cross_entropy, parameter
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformer_engine_memory import fused_cross_entropy


@dataclass(frozen=True)
class Mixture:
    """Experts in place of a layer's feed-forward network; see megatron_experts.py.

    Attributes:
        experts: how many there are.
        top: experts that a token goes to.
        feed: hidden size of each.
        shared: hidden size of a network beside them that sees all tokens; 0 for none.
        dense: layers at the beginning that have none.
        drop: whether each expert takes as many tokens as if all got equally many: the others are dropped, and what
            lacks is padded (``moe_expert_capacity_factor`` 1, ``moe_pad_expert_input_to_capacity``).
        grouped: whether products of all experts are one operator (``moe_grouped_gemm``).
        narrow: size of the vectors that experts see in place of tokens (``moe_latent_size``); 0 for the tokens.
    """

    experts: int
    top: int
    feed: int
    shared: int = 0
    dense: int = 0
    drop: bool = False
    grouped: bool = True
    narrow: int = 0


@dataclass(frozen=True)
class Scan:
    """Layers of one kind each; see megatron_hybrid.py.

    Attributes:
        pattern: a letter for each layer: M for Mamba-2, * for attention, E for experts.
        heads: of Mamba-2, each of ``width`` numbers, and of a state of ``state`` times as many.
        groups: of heads that share what they write and read states by.
    """

    pattern: str
    heads: int
    width: int = 64
    groups: int = 8
    state: int = 128


@dataclass(frozen=True)
class Latent:
    """Sizes of short vectors that queries, and keys and values, are made from; see megatron_latent.py.

    Attributes:
        turned: size of the part of a head that positions turn, beside `Shape.head`.
    """

    queries: int
    values: int
    turned: int


@dataclass(frozen=True)
class Shape:
    """What makes one GPT different from another.

    Attributes:
        groups: heads of keys and values.
        feed: hidden size of the feed-forward network.
        learned: whether positions are learned and added to the words; else rotary ones turn queries and keys.
        predict: how many words after the next one are predicted, one by one; see `Ahead`.
        size: of a head; 0 for an equal part of ``hidden``.
        norms: whether queries and keys are normalized, head by head.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    feed: int
    words: int
    activation: Literal["gelu", "swiglu", "relu2", "geglu", "quick-geglu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    bias: bool = True
    learned: bool = True
    tied: bool = True
    size: int = 0
    norms: bool = False
    mixture: Mixture | None = None
    latent: Latent | None = None
    scan: Scan | None = None
    predict: int = 0

    @property
    def head(self) -> int:
        return self.size or self.hidden // self.heads


def gpt(layers: int, hidden: int, heads: int, words: int = 51200) -> Shape:
    return Shape(layers, hidden, heads, heads, 4 * hidden, words)


def llama(layers: int, hidden: int, heads: int, feed: int, words: int = 128256) -> Shape:
    return Shape(layers, hidden, heads, 8, feed, words, "swiglu", "rms", bias=False, learned=False, tied=False)


def nemotron(layers: int, hidden: int, heads: int, words: int = 256000) -> Shape:
    return Shape(layers, hidden, heads, 8, 4 * hidden, words, "relu2", "layer", bias=False, learned=False, tied=False)


def qwen3(layers: int, hidden: int, heads: int, feed: int) -> Shape:
    shape = replace(llama(layers, hidden, heads, 0, 151936), size=128, norms=True, groups=4)
    return replace(shape, mixture=Mixture(128, 8, feed))


def grok() -> Shape:
    """NVIDIA's recipe: with Llama's words, experts one by one (dgxc-benchmarking@v25.01, grok1_314b.yaml)."""
    shape = replace(llama(64, 6144, 48, 0), activation="geglu")
    return replace(shape, mixture=Mixture(8, 2, 32768, grouped=False))


def gpt_oss() -> Shape:
    """OpenAI's model card, 2025: 128 experts, four for each token; all products have biases."""
    shape = replace(llama(36, 2880, 64, 0, 201088), activation="quick-geglu", bias=True, size=64)
    return replace(shape, mixture=Mixture(128, 4, 2880))


def deepseek(layers: int, hidden: int, feed: int, words: int, mixture: Mixture) -> Shape:
    shape = replace(llama(layers, hidden, 128, feed, words), groups=128, size=128)
    return replace(shape, mixture=mixture, latent=Latent(1536, 512, 64))


def nemotron3(hidden: int, heads: int, pattern: str, mixture: Mixture) -> Shape:
    shape = Shape(len(pattern), hidden, 32, 2, 0, 131072, "relu2", "rms", bias=False, learned=False, tied=False)
    return replace(shape, size=128, mixture=mixture, scan=Scan(pattern, heads))


NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


SHAPES = {
    "gpt3-175b": gpt(96, 12288, 96),  # Brown et al., 2020
    "megatron-22b": gpt(48, 6144, 64),  # Korthikanti et al., 2022, table 3
    "mt-nlg-530b": gpt(105, 20480, 128),
    "llama3-8b": llama(32, 4096, 32, 14336),  # Llama 3, 2024, table 3
    "llama3-70b": llama(80, 8192, 64, 28672),
    "llama3-405b": llama(126, 16384, 128, 53248),
    "nemotron4-15b": nemotron(32, 6144, 48),  # Parmar et al., 2024, table 1
    "nemotron4-340b": nemotron(96, 18432, 96),  # Nemotron-4 340B technical report, 2024, table 1
    "grok1": grok(),
    "qwen3-30b-a3b": qwen3(48, 2048, 32, 768),  # Qwen3 technical report, 2025, table 2
    "qwen3-235b-a22b": qwen3(94, 4096, 64, 1536),
    "gpt-oss-120b": gpt_oss(),
    "deepseek-v2": deepseek(60, 5120, 12288, 102400, Mixture(160, 6, 1536, 3072, dense=1)),  # report, 2024, §3.1.2
    "deepseek-v3": deepseek(61, 7168, 18432, 129280, Mixture(256, 8, 2048, 2048, dense=3)),  # report, 2024, §4.2
    "nemotron-3-nano": nemotron3(2688, 64, NANO, Mixture(128, 6, 1856, 3712)),  # its config.json, 2025
    "nemotron-3-super": nemotron3(4096, 128, SUPER, Mixture(512, 22, 2688, 5376, narrow=1024)),  # 2026
}


@dataclass(frozen=True)
class Way:
    """How a GPT is computed.

    Attributes:
        attention: ``core`` forms the matrix of scores, as Megatron did before FlashAttention; ``flash`` does not, nor
            does ``cudnn``, which Transformer Engine prefers from Hopper on.
        recompute: what the backward pass computes again: nothing, the core of attention, norms before products and
            experts' activations (``recompute_modules`` layernorm and moe_act), what attention makes of its latents
            (mla_up_proj), norms, experts and the core of attention (layernorm, moe, core_attn), or each layer.
        context: the ranks that a sequence is spread over, zigzag; None for one.
        experts: the ranks that share a layer's experts; None for one.
        parts: the ranks that each expert is split over; None for one.
        servers: the servers that ``experts`` are in, where a token travels to each once; None where to each expert.
        fused_loss: whether the loss is Transformer Engine's.
        turns: of passes that are beside one another while tokens travel; None where each is alone.
    """

    attention: Literal["core", "flash", "cudnn"] = "core"
    recompute: Literal["none", "selective", "activations", "latents", "experts", "full"] = "none"
    dropout: float = 0.0
    context: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    parts: ProcessGroup | None = None
    servers: Servers | None = None
    fused_loss: bool = False
    turns: Turns | None = None


# Megatron has kernels of its own for these four; `fuse` makes kernels of them here.
def scores_to_shares(scores: Tensor, scale: float) -> Tensor:
    """Softmax over the keys before each query: (batch × heads, queries, keys)."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(later, -10000.0).softmax(-1)


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return activation(x if bias is None else x + bias, kind)


def activation(x: Tensor, kind: str) -> Tensor:
    """What a network does between its products."""
    if "glu" in kind:
        return gated_unit(x, kind)
    return functional.relu(x).square() if kind == "relu2" else functional.gelu(x, approximate="tanh")


def gated_unit(x: Tensor, kind: str) -> Tensor:
    """A gate's activation times a value, of (..., gate and value)."""
    gate, value = x.chunk(2, dim=-1)
    if kind == "swiglu":
        return functional.silu(gate) * value
    gate = gate * torch.sigmoid(1.702 * gate) if kind == "quick-geglu" else functional.gelu(gate, approximate="tanh")
    return gate * value


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float) -> Tensor:
    x = x if bias is None else x + bias
    return residual + (functional.dropout(x, dropout) if dropout else x)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns (sequence, batch, heads, head) by the angles of its positions, (sequence, 1, 1, head)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


def fuse() -> None:
    """Lets the compiler make one kernel of each of the four functions above, and of what other modules say."""
    float8_layers.fuse()
    ring_attention.fuse()
    transformer_engine_memory.fuse()
    for function in (scores_to_shares, bias_activation, bias_dropout_add, rotate):
        globals()[function.__name__] = torch.compile(function)


def has_softmax_kernel(batch: int, heads: int, length: int) -> bool:
    """Return whether Megatron's kernel of the softmax takes these shapes: at most 2,048 keys, and four heads at once
    (``attn_batch_size % 4`` in its FusedScaleMaskSoftmax)."""
    return length <= 2048 and length % 4 == batch * heads % 4 == 0


def plain_scores_to_shares(scores: Tensor, scale: float) -> Tensor:
    """Return what `scores_to_shares` does, operator by operator in float32, as Megatron where its kernel cannot."""
    later = _later(scores.shape[-1], scores.device)
    return (scores.float() * scale).masked_fill_(later, -10000.0).softmax(-1).to(scores.dtype)


@cache
def _later(length: int, device: torch.device) -> Tensor:
    """Whether a key comes after a query: (queries, keys)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def again(wanted: bool, function: Callable[..., Any], *inputs: Any) -> tuple[Any, AbstractContextManager]:
    """What ``function`` gives, and where to use it so that it is not kept but computed again in the backward pass.

    As Megatron-Core's ``CheckpointWithoutOutput``.
    """
    found = function(*inputs)
    if not wanted:
        return found, nullcontext()
    outputs = found if isinstance(found, tuple) else (found,)
    places = {one.untyped_storage().data_ptr(): number for number, one in enumerate(outputs)}
    made: list[Tensor] = []

    def pack(kept: Tensor) -> Tensor | tuple[Any, ...]:
        number = places.get(kept.untyped_storage().data_ptr())
        return kept if number is None else (number, kept.shape, kept.stride(), kept.storage_offset())

    @torch.no_grad()
    def unpack(kept: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not made:
            outputs = function(*inputs)
            made.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        number, *view = kept
        return made[number].as_strided(*view)

    return found, torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Norm(nn.Module):
    def __init__(self, split: Split, shape: Shape) -> None:
        super().__init__()
        self.weight = parameter(split, "norm", (shape.hidden,), None, 0)
        self.bias = parameter(split, "norm", (shape.hidden,), None, 0) if shape.norm == "layer" else None
        for values in self.parameters():
            values.partial = split.sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class HeadNorm(nn.Module):
    """Normalizes each head: (..., head)."""

    def __init__(self, split: Split, size: int) -> None:
        super().__init__()
        self.weight = parameter(split, "norm", (size,), None, 0)
        self.weight.partial = True  # each rank sees its own heads

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, split: Split, name: str, shape: Shape, way: Way) -> None:
        super().__init__()
        self.shape, self.way = shape, way
        self.groups = shape.groups // split.ranks
        self.inputs = Column(
            split, f"{name}.qkv", shape.hidden, (shape.heads + 2 * shape.groups) * shape.head, bias=shape.bias
        )
        self.output = Row(split, f"{name}.out", shape.heads * shape.head, shape.hidden, bias=shape.bias)
        if shape.norms:
            self.queries, self.keys = HeadNorm(split, shape.head), HeadNorm(split, shape.head)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mixes values: (sequence, batch, heads, head) each."""
        length, batch, heads, head = q.shape
        q, k, v = (part.flatten(1, 2).transpose(0, 1) for part in (q, k, v))
        share = scores_to_shares if has_softmax_kernel(batch, heads, length) else plain_scores_to_shares
        shares = share(torch.bmm(q, k.transpose(1, 2)), head**-0.5)
        if self.way.dropout:
            shares = functional.dropout(shares, self.way.dropout)
        return torch.bmm(shares, v).transpose(0, 1).reshape(length, batch, heads * head)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        if self.way.context:
            mixed = ring_attention.ring_attention(
                q, k, v, self.way.context, "cudnn" if self.way.attention == "cudnn" else "flash"
            )
        else:
            first = SDPBackend.CUDNN_ATTENTION if self.way.attention == "cudnn" else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel([first, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                mixed = functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=self.way.dropout, is_causal=True, enable_gqa=grouped
                )
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        shape, each = self.shape, self.shape.heads // self.shape.groups
        mixed = self.inputs(x)
        if self.inputs.bias is not None:
            mixed = mixed + self.inputs.bias
        q, k, v = mixed.unflatten(-1, (self.groups, each + 2, shape.head)).split((each, 1, 1), dim=-2)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if shape.norms:
            q, k = self.queries(q), self.keys(k)
        if turn:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if each > 1 and (self.way.attention == "core" or not q.is_cuda):
            k, v = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
        core = self._core if self.way.attention == "core" else self._flash
        recompute = self.way.recompute in ("selective", "experts") and torch.is_grad_enabled()
        return self.output(checkpoint(core, q, k, v, use_reentrant=False) if recompute else core(q, k, v))


def blocks(shape: Shape) -> int:
    """Of outputs of the first product of a feed-forward network: value and perhaps gate."""
    return 2 if "glu" in shape.activation else 1


class Layer(nn.Module):
    def __init__(self, split: Split, number: int, shape: Shape, way: Way) -> None:
        super().__init__()
        self.shape, self.way = shape, way
        self.before, self.between = Norm(split, shape), Norm(split, shape)
        self.attention = attention_of(split, f"{number}.attention", shape, way)
        many = blocks(shape)
        self.up = Column(split, f"{number}.up", shape.hidden, many * shape.feed, many, bias=shape.bias)
        self.down = Row(split, f"{number}.down", shape.feed, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        mixed = self.attention(self.before(x), turn)
        x = bias_dropout_add(mixed, self.attention.output.bias, x, self.way.dropout)
        wide = bias_activation(self.up(self.between(x)), self.up.bias, self.shape.activation)
        return bias_dropout_add(self.down(wide), self.down.bias, x, self.way.dropout)


def attention_of(split: Split, name: str, shape: Shape, way: Way) -> nn.Module:
    if shape.latent is None:
        return Attention(split, name, shape, way)
    from megatron_latent import LatentAttention

    return LatentAttention(split, name, shape, way)


def layer_of(split: Split, number: int, shape: Shape, way: Way) -> nn.Module:
    """The layer ``number``, perhaps with experts."""
    if shape.scan:
        from megatron_hybrid import HybridLayer

        return HybridLayer(split, number, shape, way, shape.scan.pattern[number])
    if shape.mixture is None or number < shape.mixture.dense:
        return Layer(split, number, shape, way)
    from megatron_experts import ExpertLayer

    return ExpertLayer(split, number, shape, way)


class Ahead(nn.Module):
    """Layers that predict words after the next one from the last layer's output and the words before them.

    DeepSeek-V3, 2024, §2.2, and Megatron-Core's `MultiTokenPredictionLayer`: one layer of the model's kind; of hybrid
    models attention and experts, in full precision, passed once for each word (``mtp_use_repeated_layer``). Words'
    vectors are those of the first stage, of which another one has a copy.
    """

    def __init__(self, split: Split, shape: Shape, way: Way, words: VocabularyEmbedding | None) -> None:
        super().__init__()
        if words is None:
            self.words = VocabularyEmbedding(split, shape.words, shape.hidden)
        self.first = [] if words is None else [words]  # in a list: it is another module's
        split = replace(split, float8=None) if shape.scan else split
        self.of_words, self.of_layer = Norm(split, shape), Norm(split, shape)
        whole = replace(split, group=Alone(), sequence=False, pieces=1)
        self.join = Column(whole, "ahead.join", 2 * shape.hidden, shape.hidden, bias=False)
        self.join.weight.partial = split.sequence
        self.layers = nn.ModuleList(_layers_ahead(split, shape, way))
        self.norm = Norm(split, shape)

    def forward(self, x: Tensor, following: Tensor, turn: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Of (sequence, batch, hidden) and the words that follow, (batch, sequence): the same of one word later."""
        words = self.first[0] if self.first else self.words
        x = self.join(torch.cat((self.of_words(words(following)), self.of_layer(x)), -1))
        for layer in self.layers:
            x = layer(x, turn)
        return x, self.norm(x)


def _layers_ahead(split: Split, shape: Shape, way: Way) -> list[nn.Module]:
    if not shape.scan:
        return [layer_of(split, shape.layers, shape, way)]
    from megatron_hybrid import HybridLayer

    return [HybridLayer(split, f"ahead.{kind}", shape, way, kind) for kind in "*E"]


class Stage(nn.Module):
    """Some of a GPT's layers in a row: the first stage embeds tokens, the last one computes the loss.

    Args:
        positions: of the tokens that this rank has, (sequence here,).
    """

    def __init__(
        self,
        split: Split,
        shape: Shape,
        way: Way,
        layers: range,
        positions: Tensor,
        length: int,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.split, self.shape, self.way, self.first, self.last = split, shape, way, first, last
        if first:  # in the order of the forward pass, in which parameters are gathered
            self.words = VocabularyEmbedding(split, shape.words, shape.hidden)
            if shape.learned:
                self.places = parameter(split, "positions", (length, shape.hidden), None, 0.02)
                self.places.partial = split.sequence
        self.layers = nn.ModuleList(layer_of(split, number, shape, way) for number in layers)
        if last:
            self.norm = Norm(split, shape)
            self.head = Column(
                replace(split, float8=None), "words" if shape.tied else "head", shape.hidden, shape.words, bias=False
            )
            if first and shape.tied:
                self.head.weight = self.words.weight
        self.ahead = Ahead(split, shape, way, self.words if first else None) if last and shape.predict else None
        self.register_buffer("positions", positions)
        size = shape.latent.turned if shape.latent else shape.head
        angles = positions.unsqueeze(1) / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), -1)[:, None, None]
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Tokens (batch, sequence) or activations (sequence, batch, hidden) to activations or the mean loss."""
        if self.first:
            x = self.words(x)
            if self.shape.learned:
                places = self.places[self.positions].unsqueeze(1)
                x = x + self.split.own(places)
            x = functional.dropout(x, self.way.dropout) if self.way.dropout else x
        turn = None if self.shape.learned or self.shape.scan else (self.cosine, self.sine)
        for layer in self.layers:
            if self.way.recompute == "full":
                x = checkpoint(layer, x, turn, use_reentrant=True, preserve_rng_state=self.way.dropout > 0)
            else:
                x = layer(x, turn)
        if not self.last:
            return x
        assert targets is not None
        loss = self._loss(self.norm(x), targets)
        for _ in range(self.shape.predict):
            assert self.ahead is not None
            x, normed = self.ahead(x, targets, turn)
            # The last word has none after the next one: Megatron masks it, which costs the same as any target.
            targets = targets.roll(-1, 1)
            loss = loss + 0.1 * self._loss(normed, targets)
        return loss

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        targets = targets.t()
        # No name for the logits: they take much memory, and are to go as soon as they have been read.
        if self.way.fused_loss:
            return fused_cross_entropy(self.head(x), targets, self.split.group).mean()
        return cross_entropy(self.head(x).float(), targets, self.split).mean()
