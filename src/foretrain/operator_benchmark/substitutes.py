"""What a CPU calls where a GPU has operators that a CPU has not: fused attention has a name of its own on each.

Read off the schemas of PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

from foretrain.device.calls import OperatorCall

_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def substitute(call: OperatorCall) -> OperatorCall:
    """The call that a CPU makes instead; ``call`` itself where it makes the same."""
    name, given = call.operator.removeprefix("aten::"), call.arguments
    if name == "_scaled_dot_product_efficient_attention":
        query, key, value, mask, _, dropout, causal, scale = given
        return _forward(query, key, value, dropout, causal, mask, scale)
    if name == "_scaled_dot_product_flash_attention":
        query, key, value, dropout, causal, _, scale, *_ = given
        return _forward(query, key, value, dropout, causal, None, scale)
    if name == "_scaled_dot_product_efficient_attention_backward":
        gradient, query, key, value, mask, out, sums, _, _, dropout, _, causal, scale = given
        return _backward(gradient, query, key, value, out, sums, dropout, causal, mask, scale)
    if name == "_scaled_dot_product_flash_attention_backward":
        gradient, query, key, value, out, sums, _, _, _, _, dropout, causal, _, _, scale, *_ = given
        return _backward(gradient, query, key, value, out, sums, dropout, causal, None, scale)
    return call


def _forward(query: Any, key: Any, value: Any, dropout: float, causal: bool, mask: Any, scale: Any) -> OperatorCall:
    return OperatorCall(_CPU, (query, key, value, dropout, causal, mask, scale))


def _backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    sums: Any,
    dropout: float,
    causal: bool,
    mask: Any,
    scale: Any,
) -> OperatorCall:
    # Efficient attention pads its sums to a multiple of 32 queries; the CPU's has one for each.
    fitting = sums._replace(shape=(*query.shape[:-1],), stride=_rows(query.shape[:-1]))
    return OperatorCall(f"{_CPU}_backward", (gradient, query, key, value, out, fitting, dropout, causal, mask, scale))


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    from foretrain.device.tensors import contiguous

    return contiguous(shape).stride
