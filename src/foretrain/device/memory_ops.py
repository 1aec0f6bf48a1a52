"""ATen operators that only move bytes: the traffic of their kernels, where that is not all arguments and results.

A rule takes arguments in the order of the operator's schema (PyTorch 2.13) and its results, and returns the `Work`.
What has no rule reads its arguments once and writes its results once.
"""

from __future__ import annotations

import math
from typing import Any

from foretrain.device.calls import Meta, element_bytes, elements, moved, tensors_in
from foretrain.device.matmul import Rule, Values
from foretrain.device.work import HostCopy, MemoryWork, Work

_SHARED_ROW = 48 * 1024
"""Bytes of a row up to which a softmax kernel keeps it in shared memory, instead of reading it again."""

_LIST_LIMITS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of one launch by how many lists a multi-tensor kernel walks, and the elements of its 320 blocks."""
_LIST_ELEMENTS = 320 * 65536

_SORT_KERNELS = 8


def reads_and_writes(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of all arguments read and all results written."""
    return MemoryWork(moved(*tensors_in(arguments), *tensors_in(results)))


def _writes(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of results alone, that of an operator in place being its first argument."""
    return MemoryWork(moved(*(tuple(tensors_in(results)) or (arguments[0],))))


def _rows(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of indices, of the rows that they pick, and of results."""
    indices = [tensor for tensor in tensors_in(arguments[1:]) if tensor.dtype in ("int64", "int32", "bool", "uint8")]
    return MemoryWork(moved(*indices) + 2 * moved(*tensors_in(results[:1])))


def _summed_rows(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of ``_embedding_bag``: every row that an index names is read, sums are written."""
    weight, indices = arguments[:2]
    width = weight.shape[-1] * element_bytes(weight)
    return MemoryWork(moved(indices, *tensors_in(results)) + elements(indices) * width)


def _rows_put(in_place: bool) -> Rule:
    """Return the rule for values put to indexed places; where it adds, indices are sorted and places read as well."""

    def rule(arguments: Values, results: Values) -> MemoryWork:
        target, indices, values = arguments[:3]
        adds = len(arguments) > 3 and bool(arguments[3])
        size = moved(*tensors_in(indices)) + (3 if adds else 2) * moved(values)
        if not in_place:
            size += moved(target, *tensors_in(results))
        return MemoryWork(size, _SORT_KERNELS if adds else 1)

    return rule


def _scattered(in_place: bool) -> Rule:
    """Return the rule for ``scatter`` and ``index_add`` (self, dim, index, source); places are read too, in case it
    adds."""

    def rule(arguments: Values, results: Values) -> MemoryWork:
        target, _, index, source = arguments[:4]
        size = moved(index)
        if isinstance(source, Meta):
            size += 3 * moved(source)
        else:
            size += elements(index) * element_bytes(target)
        return MemoryWork(size) if in_place else MemoryWork(size + moved(target, *tensors_in(results)), 2)

    return rule


def _embedding_gradient(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic: gradient read, table of gradients zeroed, its rows read and written; indices sorted first."""
    gradient, indices = arguments[:2]
    (table,) = tensors_in(results[:1])
    wide = elements(gradient) * element_bytes(table)
    return MemoryWork(moved(gradient, table) + 2 * wide + 8 * moved(indices), _SORT_KERNELS)


def _softmax(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of one read, or three where a row is too long for shared memory: greatest, sum, quotient."""
    source, axis = arguments[:2]
    long = bool(source.shape) and source.shape[axis] * element_bytes(source) > _SHARED_ROW
    return MemoryWork((3 if long else 1) * moved(source) + moved(*tensors_in(results)))


def _softmax_gradient(arguments: Values, results: Values) -> MemoryWork:
    gradient, output, axis = arguments[:3]
    long = bool(output.shape) and output.shape[axis] * element_bytes(output) > _SHARED_ROW
    return MemoryWork((2 if long else 1) * moved(gradient, output) + moved(*tensors_in(results)))


def _picked_loss(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of one logarithm per target."""
    source, target = arguments[:2]
    return MemoryWork(moved(target, *tensors_in(results)) + elements(target) * element_bytes(source))


def _picked_loss_gradient(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of zeros and a number per target; the logarithms themselves are not read."""
    target = arguments[2]
    (gradient,) = tensors_in(results[:1])
    return MemoryWork(moved(gradient, target) + elements(target) * element_bytes(gradient), 2)


def _again(positions: tuple[int, ...], kernels: int) -> Rule:
    """Return the rule for all arguments and results, and the arguments at ``positions`` twice, for a second kernel."""

    def rule(arguments: Values, results: Values) -> MemoryWork:
        again = moved(*tensors_in(tuple(arguments[at] for at in positions)))
        return MemoryWork(reads_and_writes(arguments, results).moved + again, kernels)

    return rule


def _sorted(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of a radix sort: a pass over keys and positions for every 8 bits of the key, to and fro."""
    source = next(tensors_in(arguments))
    passes = element_bytes(source)
    return MemoryWork(passes * 2 * (moved(source) + 8 * elements(source)) + moved(*tensors_in(results)), passes + 1)


def _selected(arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of ``topk``: a pass for every 8 bits of the key finds the threshold, one more collects."""
    source = next(tensors_in(arguments))
    return MemoryWork((element_bytes(source) + 1) * moved(source) + moved(*tensors_in(results)), 2)


def _copied(arguments: Values, _: Values) -> Work:
    """Return the work of ``copy_``(target, source)."""
    target, source = arguments[:2]
    return _between(source, target) if isinstance(source, Meta) else MemoryWork(moved(target))


def _converted(arguments: Values, results: Values) -> Work:
    """Return the work of ``_to_copy`` and ``clone``: of one tensor into a new one, perhaps elsewhere."""
    (target,) = tensors_in(results[:1])
    return _between(arguments[0], target)


def _copied_from(arguments: Values, _: Values) -> Work:
    return _between(arguments[0], arguments[1])


def _between(source: Meta, target: Meta) -> Work:
    hosts = [tensor for tensor in (source, target) if tensor.device.startswith("cpu")]
    if len(hosts) == 1:
        return HostCopy(elements(target) * element_bytes(target), hosts[0].pinned)
    return MemoryWork(moved(source, target))


def _read_out(arguments: Values, _: Values) -> HostCopy:
    """Return the work of ``item()``: the driver copies one number to pinned memory of its own."""
    return HostCopy(element_bytes(arguments[0]), True)


def lists(name: str, arguments: Values, results: Values) -> MemoryWork:
    """Return the traffic of a ``_foreach_`` operator: all lists read, results or the first list written; kernels
    take many tensors each.
    """
    members = [tuple(tensors_in(argument)) for argument in arguments if isinstance(argument, tuple)]
    members = [member for member in members if member]
    written = tuple(tensors_in(results)) or (members[0] if name.endswith("_") and members else ())
    read = tuple(tensors_in(arguments))
    if name in ("_foreach_copy_", "_foreach_zero_") and members:
        read = read[len(members[0]) :]
    return MemoryWork(moved(*read, *written), launches(members))


def launches(members: list[tuple[Meta, ...]]) -> int:
    """Return the kernels that a multi-tensor operator over these lists starts."""
    if not members:
        return 1
    limit = _LIST_LIMITS[min(len(members), max(_LIST_LIMITS))]
    count = max(len(member) for member in members)
    return max(1, math.ceil(count / limit), math.ceil(sum(map(elements, members[0])) / _LIST_ELEMENTS))


def _optimizer(states: int) -> Rule:
    """Return the rule for a fused step: parameters, gradients and ``states`` lists read, all but gradients written."""

    def rule(arguments: Values, _: Values) -> MemoryWork:
        members = [tuple(tensors_in(argument)) for argument in arguments[: 2 + states]]
        scale: Any = arguments[-2] if len(arguments) > 2 else None  # with one, gradients are unscaled in place
        written = members if isinstance(scale, Meta) else [members[0], *members[2:]]
        size = sum(moved(*member) for member in members) + sum(moved(*member) for member in written)
        return MemoryWork(size, launches([member for member in members if member]))

    return rule


# fmt: off
_CREATION = (
    "fill_", "zero_", "fill", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "arange", "linspace", "eye", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
    "randint_like", "tril_indices", "triu_indices",
)
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(_CREATION, _writes),
    "copy_": _copied,
    "_to_copy": _converted,
    "clone": _converted,
    "_copy_from": _copied_from,
    "_copy_from_and_resize": _copied_from,
    "_local_scalar_dense": _read_out,
    "embedding": _rows,
    "index": _rows,
    "_unsafe_index": _rows,
    "index_select": _rows,
    "gather": _rows,
    "take": _rows,
    "_embedding_bag": _summed_rows,
    "embedding_dense_backward": _embedding_gradient,
    "index_put_": _rows_put(True),
    "_index_put_impl_": _rows_put(True),
    "index_put": _rows_put(False),
    "scatter": _scattered(False),
    "scatter_": _scattered(True),
    "scatter_add": _scattered(False),
    "scatter_add_": _scattered(True),
    "scatter_reduce": _scattered(False),
    "scatter_reduce_": _scattered(True),
    "index_add": _scattered(False),
    "index_add_": _scattered(True),
    "index_copy_": _scattered(True),
    "index_copy": _scattered(False),
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_gradient,
    "_log_softmax_backward_data": _softmax_gradient,
    "nll_loss_forward": _picked_loss,
    "nll_loss2d_forward": _picked_loss,
    "nll_loss_backward": _picked_loss_gradient,
    "nll_loss2d_backward": _picked_loss_gradient,
    "native_layer_norm_backward": _again((0, 1), 3),
    "_fused_rms_norm_backward": _again((0, 1), 3),
    "native_group_norm": _again((0,), 2),
    "native_group_norm_backward": _again((0, 1), 3),
    "native_batch_norm": _again((0,), 2),
    "_native_batch_norm_legit": _again((0,), 2),
    "_batch_norm_with_update": _again((0,), 2),
    "cudnn_batch_norm": _again((0,), 1),
    "native_batch_norm_backward": _again((0, 1), 2),
    "batch_norm_backward": _again((0, 1), 2),
    "cudnn_batch_norm_backward": _again((0, 1), 1),
    "sort": _sorted,
    "argsort": _sorted,
    "topk": _selected,
    "_fused_adam_": _optimizer(3),
    "_fused_adamw_": _optimizer(3),
    "_fused_sgd_": _optimizer(1),
    "_fused_adagrad_": _optimizer(1),
}
"""The rules by operator name."""
