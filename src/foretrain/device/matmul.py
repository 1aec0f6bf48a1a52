"""ATen operators that compute: matrix products, fused attention, convolutions, recurrent networks.

A rule takes arguments in the order of the operator's schema (PyTorch 2.13) and its results, and returns the `Work`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from foretrain.device.calls import Meta, elements, moved, number_format, tensors_in
from foretrain.device.work import Algorithm, Attention, Convolution, Gemm, MemoryWork, Work

Values: TypeAlias = tuple[Any, ...]
Rule: TypeAlias = Callable[[Values, Values], Work]


def _product(left: Meta, right: Meta) -> Gemm:
    """Return ``(..., m, k) @ (..., k, n)``, dimensions before the last two being a batch."""
    *batch, m, k = left.shape
    dtype = number_format(left)
    return Gemm(m, right.shape[-1], 2 * k if dtype == "fp4" else k, math.prod(batch), dtype)


def _matrices(first: int) -> Rule:
    """Return the rule for the product of two arguments from ``first`` on; more arguments are added for free."""
    return lambda arguments, _: _product(arguments[first], arguments[first + 1])


def _scaled_product(arguments: Values, _: Values) -> Gemm:
    """Return a product with scales: of blocks if there are more than one a row of the left factor, else of rows."""
    left, right, scale = arguments[:3]
    work = _product(left, right)
    scales = sum(elements(tensor) for tensor in tensors_in(scale))
    if work.dtype != "fp8" or scales < 2:
        return work
    return replace(work, dtype="fp8_block") if scales > work.m else replace(work, rowwise=True)


def _linear(arguments: Values, _: Values) -> Gemm:
    """Return ``input (..., k)`` by ``weight (n, k)``."""
    source, weight = arguments[:2]
    k = source.shape[-1]
    n = weight.shape[0] if len(weight.shape) == 2 else 1
    return Gemm(elements(source) // max(k, 1), n, k, 1, number_format(source))


def _grouped(offsets: int) -> Rule:
    """Return the rule for one product per expert, whose rows end at the offsets; all as long as the mean."""

    def rule(arguments: Values, _: Values) -> Gemm:
        left, right = arguments[:2]
        ends = arguments[offsets] if len(arguments) > offsets else None
        groups = max(1, elements(ends)) if isinstance(ends, Meta) else 1
        work = _product(left, right)
        if len(left.shape) == 3:  # either a batch of both, or columns of the right factor in groups
            return work if len(right.shape) == 3 else replace(work, n=math.ceil(work.n / groups))
        if len(right.shape) == 3:  # rows of the left factor in groups
            return replace(work, m=math.ceil(work.m / groups), batch=groups)
        return replace(work, k=math.ceil(work.k / groups), batch=groups)

    return rule


class _Places(NamedTuple):
    """Positions of an attention operator's arguments.

    Attributes:
        query: position of the queries; keys and values follow.
        causal: position of the flag, or of the efficient kernel's mask type, 0 for none.
        heads_first: ``(batch, heads, length, size)`` rather than ``(batch, length, heads, size)``.
        packed: position of the sequences' bounds, and after those of keys of the greatest lengths.
        window: position of how many keys before its own a query sees, and then of how many after it.
    """

    query: int
    causal: int
    algorithm: Algorithm
    heads_first: bool = True
    packed: int | None = None
    window: int | None = None


_ATTENTION = {
    "_scaled_dot_product_flash_attention": _Places(0, 4, "flash"),
    "_scaled_dot_product_flash_attention_backward": _Places(1, 11, "flash"),
    "_flash_attention_forward": _Places(0, 8, "flash", False, 3, 11),
    "_flash_attention_backward": _Places(1, 11, "flash", False, 6, 15),
    "_scaled_dot_product_efficient_attention": _Places(0, 6, "efficient"),
    "_scaled_dot_product_efficient_attention_backward": _Places(1, 11, "efficient"),
    "_efficient_attention_forward": _Places(0, 9, "efficient", False, 4),
    "_efficient_attention_backward": _Places(1, 14, "efficient", False, 6),
    "_scaled_dot_product_cudnn_attention": _Places(0, 6, "cudnn"),
    "_scaled_dot_product_cudnn_attention_backward": _Places(1, 14, "cudnn"),
    "_cudnn_attention_forward": _Places(0, 10, "cudnn", True, 4),
    "_cudnn_attention_backward": _Places(1, 14, "cudnn", True, 9),
    "_scaled_dot_product_fused_attention_overrideable": _Places(0, 5, "flash"),
    "_scaled_dot_product_fused_attention_overrideable_backward": _Places(1, 13, "flash"),
}


def _attention(places: _Places, backward: bool) -> Rule:
    def rule(arguments: Values, _: Values) -> Attention:
        query, key, value = arguments[places.query : places.query + 3]
        causal = len(arguments) > places.causal and bool(arguments[places.causal])
        bounds = arguments[places.packed] if places.packed is not None else None
        dtype = number_format(query)
        if isinstance(bounds, Meta):  # sequences one behind the other, taken to be of equal length
            batch = max(1, elements(bounds) - 1)
            heads, size = query.shape[-2:]
            queries, keys = (math.ceil(math.prod(tensor.shape[:-2]) / batch) for tensor in (query, key))
            shape = (batch, heads, key.shape[-2], queries, keys, size)
        elif places.heads_first:
            batch, heads, queries, size = query.shape
            shape = (batch, heads, key.shape[-3], queries, key.shape[-2], size)
        else:
            batch, queries, heads, size = query.shape
            shape = (batch, heads, key.shape[-2], queries, key.shape[-3], size)
        window = _window(arguments, places, causal)
        of_value = value.shape[-1] if value.shape[-1] != size else 0
        return Attention(*shape, causal, dtype, backward, places.algorithm, window, of_value)

    return rule


def _window(arguments: Values, places: _Places, causal: bool) -> int:
    """Return how many keys a query sees; 0 for all."""
    if places.window is None or len(arguments) <= places.window + 1:
        return 0
    before, after = arguments[places.window : places.window + 2]
    after = 0 if causal else after
    unbounded = any(side is None or side < 0 for side in (before, after))
    return 0 if unbounded else before + 1 + after


def _winograd(weight: Meta, stride: Values, dilation: Values, groups: int) -> bool:
    square = weight.shape[2:] in ((3, 3), (5, 5))
    return square and set(stride) == {1} and set(dilation) == {1} and groups == 1


def _tap_flops(weight: Meta, dense: Meta) -> int:
    """Return multiplications and additions: each position of ``dense`` meets the weights of one of its channels.

    ``dense`` is the result of a convolution, the source of a transposed one: the first dimension of the weights
    counts its channels either way.
    """
    return 2 * elements(dense) * (elements(weight) // max(weight.shape[0], 1))


def _depthwise(weight: Meta, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _convolved(weight: Meta, flops: int, size: int, winograd: bool, groups: int) -> Work:
    # A channel of its own per group leaves tensor cores nothing to multiply: such kernels stream.
    if _depthwise(weight, groups):
        return MemoryWork(size)
    return Convolution(flops, size, number_format(weight), winograd)


def _convolution(stride: int, dilation: int, transposed: int | bool, groups: int | None) -> Rule:
    """Return the rule for a convolution with such argument positions; a bool says what ``transposed`` is."""

    def rule(arguments: Values, results: Values) -> Work:
        source, weight = arguments[:2]
        (result,) = tensors_in(results[:1])
        turned = transposed if isinstance(transposed, bool) else bool(arguments[transposed])
        split = weight.shape[0] if groups is None else arguments[groups]
        flops = _tap_flops(weight, source if turned else result)
        winograd = _winograd(weight, arguments[stride], arguments[dilation], split)
        return _convolved(weight, flops, moved(source, weight, result), winograd, split)

    return rule


def _convolution_backward(first: int) -> Rule:
    """Return the rule for gradients of a convolution; ``first`` is the position of the stride."""

    def rule(arguments: Values, _: Values) -> Work:
        gradient, source, weight = arguments[:3]
        stride, _padding, dilation, transposed, _output, groups, mask = arguments[first : first + 7]
        flops = _tap_flops(weight, source if transposed else gradient)
        size = moved(gradient) if mask[2] else 0
        if mask[0]:
            size += moved(gradient, weight, source)
        if mask[1]:
            size += moved(gradient, source, weight)
        if not (mask[0] or mask[1]):
            return MemoryWork(size)
        wanted = bool(mask[0]) + bool(mask[1])
        return _convolved(weight, flops * wanted, size, _winograd(weight, stride, dilation, groups), groups)

    return rule


def _recurrent(arguments: Values, _: Values) -> Gemm:
    """Return all steps as one product with all weights: right in its arithmetic, but blind to the wait for the last
    step."""
    source, weights = arguments[:2]
    hidden = max(1, arguments[7])
    steps = elements(source) // max(source.shape[-1], 1)
    return Gemm(steps, max(1, sum(map(elements, tensors_in(weights))) // hidden), hidden, 1, number_format(source))


_STRIDED = _convolution(3, 5, 6, 8)

RULES: dict[str, Rule] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "matmul": _matrices(0),
    "_int_mm": _matrices(0),
    "addmm": _matrices(1),
    "_addmm_activation": _matrices(1),
    "baddbmm": _matrices(1),
    "addbmm": _matrices(1),
    "linear": _linear,
    "_scaled_mm": _scaled_product,
    "_scaled_mm_v2": _scaled_product,
    "_grouped_mm": _grouped(2),
    "_scaled_grouped_mm": _grouped(4),
    "_scaled_grouped_mm_v2": _grouped(8),
    "convolution": _STRIDED,
    "convolution_overrideable": _STRIDED,
    "_convolution": _STRIDED,
    "cudnn_convolution": _convolution(3, 4, False, 5),
    "cudnn_convolution_transpose": _convolution(4, 5, True, 6),
    "cudnn_convolution_relu": _convolution(3, 5, False, 6),
    "cudnn_convolution_add_relu": _convolution(5, 7, False, 8),
    "_conv_depthwise2d": _convolution(4, 6, False, None),
    "conv_depthwise3d": _convolution(4, 6, False, None),
    "convolution_backward": _convolution_backward(4),
    "convolution_backward_overrideable": _convolution_backward(3),
    "_cudnn_rnn": _recurrent,
} | {name: _attention(places, "backward" in name) for name, places in _ATTENTION.items()}
"""The rules by operator name."""
