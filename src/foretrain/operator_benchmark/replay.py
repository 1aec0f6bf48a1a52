"""Replay of operator calls: the same shapes, strides and types as in the script, with made-up values.

GPU operators that a CPU lacks are replaced: fused attention has a name of its own on each. The names and arguments are
those of PyTorch 2.13's schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from foretrain.device.calls import Meta, OperatorCall, contiguous, tensors_in

_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def substitute(call: OperatorCall) -> OperatorCall:
    """Return the call that a CPU makes instead; ``call`` itself where it makes the same."""
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
    gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any,
    dropout: float, causal: bool, mask: Any, scale: Any,
) -> OperatorCall:  # fmt: skip
    # Efficient attention pads its sums to a multiple of 32 queries; the CPU's has one for each.
    fitting = sums._replace(shape=(*query.shape[:-1],), stride=contiguous(query.shape[:-1]).stride)
    return OperatorCall(f"{_CPU}_backward", (gradient, query, key, value, out, fitting, dropout, causal, mask, scale))


_BOUNDS: Final[dict[str, Callable[[Any], int]]] = {
    "embedding": lambda given: given[0].shape[0],
    "embedding_dense_backward": lambda given: given[2],
    "nll_loss_forward": lambda given: given[0].shape[1],
    "nll_loss_backward": lambda given: given[1].shape[1],
    "nll_loss2d_forward": lambda given: given[0].shape[1],
    "nll_loss2d_backward": lambda given: given[1].shape[1],
    "gather": lambda given: given[0].shape[given[1]],
    "scatter": lambda given: given[0].shape[given[1]],
    "scatter_": lambda given: given[0].shape[given[1]],
    "scatter_add": lambda given: given[0].shape[given[1]],
    "scatter_add_": lambda given: given[0].shape[given[1]],
    "index_select": lambda given: given[0].shape[given[1]],
    "index_add": lambda given: given[0].shape[given[1]],
    "index_add_": lambda given: given[0].shape[given[1]],
    "index": lambda given: min(given[0].shape),
    "index_put": lambda given: min(given[0].shape),
    "index_put_": lambda given: min(given[0].shape),
    "_index_put_impl_": lambda given: min(given[0].shape),
    "max_pool2d_with_indices_backward": lambda given: given[1].shape[-1] * given[1].shape[-2],
}
"""Below what the indices among an operator's arguments must be. Others are 0, which is an index of everything: what is
out of range on a GPU ends the process's use of it."""

_LOW, _HIGH = 0.5, 1.5
"""Range of made-up numbers: roots and logarithms of them exist, and products of many neither overflow nor vanish."""

SCALAR_TYPES: Final = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
"""Types by their number in the dispatcher."""


class Unrepeatable(Exception):
    """Raised for a call that cannot be made here, with the reason."""


@dataclass(frozen=True, slots=True)
class OperatorReplay:
    """A call that can be made any number of times.

    Attributes:
        call: what it replays.
        run: makes the call, with the next of its sets of arguments.
        size: bytes of all tensors made for it.
    """

    call: OperatorCall
    run: Callable[[], object]
    size: int


def replay(call: OperatorCall, device: torch.device, *, beyond: int = 0, most: int = 1 << 30) -> OperatorReplay:
    """Make a replay of ``call`` on ``device``, tried once.

    Args:
        call: of an operator, or a copy between host and GPU.
        device: where its tensors are, but those in the host's memory.
        beyond: bytes that the sets of arguments should exceed together, so that no cache of that size holds them.
        most: bytes that they may have.

    Raises:
        Unrepeatable: there is no such operator here, or it does not take these arguments.
    """
    copies = call.operator.startswith("Memcpy")
    if not copies and "::" not in call.operator:
        raise Unrepeatable("only its library knows how to call it; say what it takes by foretrain simulate --costs")
    size = sum(_bytes(tensor) for tensor in tensors_in(call.arguments))
    if size > most:
        raise Unrepeatable(f"needs {size / 1e9:.1f} GB")
    sets = 1 if not size else max(1, min(beyond // size + 1, most // size, 32))
    try:
        calls = _copies(call, device, sets) if copies else _calls(call, device, sets)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        raise Unrepeatable(str(error).partition("\n")[0] or type(error).__name__) from None
    following = itertools.cycle(calls).__next__
    return OperatorReplay(call, lambda: following()(), size * sets)


def _bytes(tensor: Meta) -> int:
    return _extent(tensor) * torch.empty((), dtype=_dtype(tensor.dtype)).element_size()


def _calls(call: OperatorCall, device: torch.device, sets: int) -> list[Callable[[], object]]:
    """Return one call for each set of arguments."""
    if device.type == "cpu":
        call = substitute(call)
    first: list[Any] | None = None
    reason = "no such operator"
    for overload in _overloads(call):
        try:
            first = _made(call, device)
            run = _bound(overload, first, device)
            with torch.no_grad():
                run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # What goes wrong there would else be told of another call.
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            continue
        return [run, *(_bound(overload, _made(call, device), device) for _ in range(sets - 1))]
    raise Unrepeatable(reason)


def _copies(call: OperatorCall, device: torch.device, sets: int) -> list[Callable[[], object]]:
    """Return the copy between host and GPU, from or to pinned memory where its name says so."""
    if device.type == "cpu":
        raise Unrepeatable("a CPU has no memory of its own to copy to")
    target, source = call.arguments
    out = "DtoH" in call.operator
    pinned = "Pinned" in call.operator

    def one() -> Callable[[], object]:
        ours, theirs = _tensor(source if out else target, device, 0), _tensor(target if out else source, None, 0)
        if pinned:
            theirs = theirs.pin_memory()
        to, what = (theirs, ours) if out else (ours, theirs)
        return lambda: to.copy_(what, non_blocking=pinned)

    return [one() for _ in range(sets)]


def _overloads(call: OperatorCall) -> Iterator[Any]:
    """Return the overloads that take such arguments, mostly one: the dispatcher's log does not tell which it was."""
    space, _, name = call.operator.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        taken = found._schema.arguments
        if len(taken) == len(call.arguments) and all(map(_fits, taken, call.arguments)):
            yield found


def _fits(taken: Any, value: Any) -> bool:
    """Return whether an argument of the schema may be ``value``."""
    kind = str(taken.type)
    if kind.startswith("Optional["):
        if value is None:
            return True
        kind = kind[len("Optional[") : -1]
    if value is None:
        return kind in ("Device", "Generator", "Tensor", "Stream")
    if kind.startswith("List["):
        inner = kind[len("List[") : -1].removeprefix("Optional[").removesuffix("]")
        return isinstance(value, tuple) and all(one is None or _is(inner, one) for one in value)
    return _is(kind, value)


def _is(kind: str, value: Any) -> bool:
    if kind == "Tensor":
        return isinstance(value, Meta)
    if kind in ("number", "Scalar"):
        return isinstance(value, int | float)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "float":
        return isinstance(value, float)
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, int) and not isinstance(value, bool)


def _bound(overload: Any, values: list[Any], device: torch.device) -> Callable[[], object]:
    """Bind these values, by name where the schema asks for that."""
    plain, named = [], {}
    for taken, value in zip(overload._schema.arguments, values, strict=True):
        kind = str(taken.type)
        if value is None and kind == "Device":
            value = device
        if "ScalarType" in taken.real_type.__class__.__name__ or (taken.name in ("dtype", "input_dtype")):
            value = SCALAR_TYPES.get(value, value) if isinstance(value, int) else value
        if taken.kwarg_only:
            named[taken.name] = value
        else:
            plain.append(value)
    return lambda: overload(*plain, **named)


def _made(call: OperatorCall, device: torch.device) -> list[Any]:
    name = call.operator.partition("::")[2]
    bound = _BOUNDS[name](call.arguments) if name in _BOUNDS else 0
    return [_value(value, device, bound) for value in call.arguments]


def _value(value: Any, device: torch.device, bound: int) -> Any:
    if isinstance(value, Meta):
        return _tensor(value, None if value.device == "cpu" else device, bound)
    if isinstance(value, tuple):
        return [_value(one, device, bound) for one in value]
    return value


def _tensor(meta: Meta, device: torch.device | None, bound: int) -> Tensor:
    """Build a tensor of the given layout, whose overlapping elements overlap; on the host if ``device`` is None."""
    dtype, extent = _dtype(meta.dtype), _extent(meta)
    where = device or torch.device("cpu")
    if dtype == torch.bool:
        flat = torch.rand(extent, device=where) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.empty(extent, device=where).uniform_(_LOW, _HIGH).to(dtype)
    elif bound > 1:
        flat = torch.randint(bound, (extent,), device=where).to(dtype)
    else:
        flat = torch.zeros(extent, dtype=dtype, device=where)
    return flat.as_strided(meta.shape, meta.stride)


def _extent(meta: Meta) -> int:
    """Return the elements from the first to the last."""
    if 0 in meta.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unrepeatable(f"unknown type {name}")
    return found
