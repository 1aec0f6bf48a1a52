"""From an ATen operator and the metadata of its tensors to the work a GPU does for it.

    work("aten::mm", (contiguous((8192, 4096)), contiguous((4096, 4096))), (contiguous((8192, 4096)),))

Knows PyTorch 2.13's operators. What computes is in `foretrain.device.matmul`, what moves bytes in an unusual way in
`foretrain.device.memory_ops`; other ATen operators read their arguments and write their results. Decompositions of
linear algebra (`foretrain.device.factorizations`) and operators of other libraries are `Unknown`: the bytes they touch
are the least they cost.
"""

from __future__ import annotations

from foretrain.device import factorizations, matmul, memory_ops
from foretrain.device.matmul import Values
from foretrain.device.memory_ops import lists, reads_and_writes
from foretrain.device.tensors import Meta, contiguous, tensors_in
from foretrain.device.work import Nothing, Unknown, Work

__all__ = ["Meta", "contiguous", "work"]

# fmt: off
_NOTHING = frozenset({
    # Views: another shape of the same memory.
    "_conj", "_fw_primal", "_indices", "_neg_view", "_nested_view_from_buffer", "_nested_view_from_jagged",
    "_reshape_alias", "_unsafe_view", "_values", "adjoint", "alias", "as_strided", "as_strided_", "broadcast_to",
    "chunk", "conj", "detach", "detach_", "diagonal", "expand", "expand_as", "flatten", "hsplit", "imag", "lift",
    "lift_fresh", "linalg_diagonal", "mH", "mT", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "positive",
    "real", "reshape_as", "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze",
    "squeeze_", "swapaxes", "swapdims", "t", "t_", "tensor_split", "transpose", "transpose_", "unbind", "unflatten",
    "unfold", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "unsqueeze_", "values", "view",
    "view_as", "view_as_complex", "view_as_real", "vsplit",
    # Memory that nobody writes yet, and questions the host answers by itself.
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_",
    "set_", "set_data", "_resize_output_", "size", "stride", "numel", "dim", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "storage_offset", "is_pinned", "is_contiguous", "is_same_size", "is_nonzero", "record_stream",
    "requires_grad_", "_version", "_has_same_storage_numel", "_assert_async", "_assert_tensor_metadata",
    "_cudnn_init_dropout_state", "result_type", "can_cast", "_is_zerotensor",
})

_UNKNOWN_PREFIXES = (
    "linalg_", "_linalg_", "lu_", "cholesky", "svd", "geqrf", "ormqr", "triangular_solve", "_fft_", "stft",
)
# fmt: on
"""Far more arithmetic than their bytes tell."""
_UNKNOWN_EXCEPT = frozenset({"linalg_vector_norm", "linalg_diagonal", "linalg_cross"})

_SAME_AS_RESHAPED = frozenset({"reshape", "contiguous", "_reshape_copy", "ravel"})
"""Views where they can be, copies where they cannot."""


def work(operator: str, arguments: Values, results: Values) -> Work:
    """What ``operator`` does.

    Args:
        operator: name with its namespace, ``"aten::mm"``; an overload behind a dot is understood: ``"aten::add.out"``.
        arguments: in the order of the schema, those with defaults and by keyword included as far as they are known. A
            tensor is a `Meta`, a list a tuple, an absent optional None.
        results: what it returns, a tuple even of one.
    """
    namespace, _, rest = operator.rpartition("::")
    name, _, overload = rest.partition(".")
    if namespace not in ("", "aten"):
        return Unknown(reads_and_writes(arguments, results).moved)
    if name in _NOTHING:
        return Nothing()
    if overload.endswith("out") or name.endswith("_out"):
        arguments, results = _without_output(arguments, results)
        name = name.removesuffix("_out")
    if rule := _rule(name):
        return rule(arguments, results)
    if (name.startswith(("_foreach_", "_amp_foreach_", "_fused_")) and name.endswith("_")) or name.startswith(
        "_foreach_"
    ):
        return lists(name, arguments, results)
    if rule := factorizations.RULES.get(name):
        return rule(arguments, results)
    if name.startswith(_UNKNOWN_PREFIXES) and name not in _UNKNOWN_EXCEPT:
        return Unknown(reads_and_writes(arguments, results).moved)
    if name in _SAME_AS_RESHAPED:
        return _perhaps_copied(arguments, results)
    return reads_and_writes(arguments, results)


def _rule(name: str) -> matmul.Rule | None:
    """That of the operator, or of the product it is the in-place variant of (``addmm_``)."""
    return matmul.RULES.get(name) or memory_ops.RULES.get(name) or matmul.RULES.get(name.removesuffix("_"))


def _without_output(arguments: Values, results: Values) -> tuple[Values, Values]:
    """Outputs are the last tensors given; they are written, not read."""
    count = max(1, len(tuple(tensors_in(results))))
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Meta)][-count:]
    outputs = tuple(arguments[place] for place in places)
    read = tuple(None if place in places else argument for place, argument in enumerate(arguments))
    return read, results or outputs


def _perhaps_copied(arguments: Values, results: Values) -> Work:
    source, result = arguments[0], next(tensors_in(results), None)
    if result is None or source == result or source.stride == contiguous(source.shape).stride:
        return Nothing()
    return reads_and_writes((source,), (result,))
