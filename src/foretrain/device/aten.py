"""Work of ATen operators, from an operator and the metadata of its tensors.

    work("aten::mm", (contiguous((8192, 4096)), contiguous((4096, 4096))), (contiguous((8192, 4096)),))

Knows PyTorch 2.13's operators. What computes is in `foretrain.device.matmul`, what moves bytes in an unusual way in
`foretrain.device.memory_ops`; other ATen operators read their arguments and write their results. Decompositions of
linear algebra and operators of other libraries are `Unknown`: the bytes they touch are the least they cost.

# Note [Factorizations]
The multiplications and additions that a factorization takes at least: counts are those of LAPACK's algorithms to the
leading order (Golub and Van Loan, "Matrix Computations", 4th ed., 2013: §3.2 LU, §4.2 Cholesky, §5.2 QR, §8.3 symmetric
eigenvalues, §8.6 singular values, §7.5 eigenvalues). How near a GPU comes to its peak is assumed, not measured, so the
work stays `Unknown`.

# Note [Efficiency of factorizations]
Panels of a blocked factorization (LU, Cholesky, QR) go column by column, and the products between them are narrow.
Half the arithmetic of what is reduced from both sides (eigenvalues, singular values) is products of a matrix with a
vector, which memory bounds (Dongarra, Hammarling and Sorensen, "Block reduction of matrices to condensed forms", 1989),
and what follows, iterations on a band, hardly runs in parallel. So a fifth and a fiftieth of the peak are assumed:
right for matrices of some thousand rows, and too much for small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from foretrain.device import matmul, memory_ops
from foretrain.device.calls import Meta, contiguous, number_format, tensors_in
from foretrain.device.matmul import Rule, Values
from foretrain.device.memory_ops import lists, reads_and_writes
from foretrain.device.work import Nothing, Unknown, Work

BLOCKED = 1 / 5
TWO_SIDED = 1 / 50
"""Parts of the peak; see Note [Efficiency of factorizations]."""

Count: TypeAlias = Callable[[int, int], float]
"""Of a matrix ``(m, n)``, m ≥ n."""


def _factorization(count: Count, efficiency: float = BLOCKED) -> Rule:
    """Return the rule for a factorization of each ``(..., m, n)`` in the first argument, wide or tall."""

    def rule(arguments: Values, results: Values) -> Unknown:
        *batch, m, n = arguments[0].shape
        flops = math.prod(batch) * count(max(m, n), min(m, n))
        return _work(flops, arguments[0], arguments, results, efficiency)

    return rule


def _solution(per_column: Count, factor: int, right: int, count: Count = lambda m, n: 0) -> Rule:
    """Return the rule for solving as many right-hand sides as the argument at ``right`` has columns, after a
    factorization."""

    def rule(arguments: Values, results: Values) -> Unknown:
        matrix, sides = arguments[factor], arguments[right]
        *batch, _, n = matrix.shape
        # Times as many as there are of the side that is shared; a vector is one column.
        columns = max(1, math.prod(sides.shape) // max(1, n * math.prod(batch)))
        return _work(math.prod(batch) * (count(n, n) + columns * per_column(n, n)), matrix, arguments, results)

    return rule


def _eigenvalues(bare: Count, vectors: Count, flag: int) -> Rule:
    """Return the rule for eigenvalues, with vectors if the argument at position ``flag`` says so."""

    def rule(arguments: Values, results: Values) -> Work:
        wanted = len(arguments) <= flag or bool(arguments[flag])
        return _factorization(vectors if wanted else bare, TWO_SIDED)(arguments, results)

    return rule


def _work(flops: float, matrix: Meta, arguments: Values, results: Values, efficiency: float = BLOCKED) -> Unknown:
    dtype = number_format(matrix)
    return Unknown(reads_and_writes(arguments, results).moved, round(flops), dtype, efficiency)


def _cholesky(m: int, n: int) -> float:
    return n**3 / 3


def _lu(m: int, n: int) -> float:
    return n**2 * (m - n / 3)


def _qr(m: int, n: int) -> float:
    return 2 * n**2 * (m - n / 3)


def _square(factor: float) -> Count:
    return lambda m, n: factor * n**2


def _cube(factor: float) -> Count:
    return lambda m, n: factor * n**3


_FACTORIZATIONS: dict[str, Rule] = {
    "cholesky": _factorization(_cholesky),
    "linalg_cholesky_ex": _factorization(_cholesky),
    "cholesky_inverse": _factorization(_cube(2 / 3)),
    "cholesky_solve": _solution(_square(2), 1, 0),
    "_cholesky_solve_helper": _solution(_square(2), 1, 0),
    "linalg_ldl_factor_ex": _factorization(_cholesky),
    "linalg_ldl_solve": _solution(_square(2), 0, 2),
    "linalg_lu": _factorization(_lu),
    "linalg_lu_factor_ex": _factorization(_lu),
    "linalg_lu_solve": _solution(_square(2), 0, 2),
    "_linalg_det": _factorization(_lu),
    "_linalg_slogdet": _factorization(_lu),
    "linalg_inv_ex": _factorization(_cube(2)),
    "_linalg_solve_ex": _solution(_square(2), 0, 1, _lu),
    "linalg_solve_triangular": _solution(_square(1), 0, 1),
    "triangular_solve": _solution(_square(1), 1, 0),
    "geqrf": _factorization(_qr),
    "linalg_qr": _factorization(lambda m, n: 2 * _qr(m, n)),
    "linalg_householder_product": _factorization(_qr),
    "linalg_lstsq": _solution(_square(4), 0, 1, _qr),
    "linalg_eig": _factorization(_cube(25), TWO_SIDED),
    "linalg_eigvals": _factorization(_cube(10), TWO_SIDED),
    "_linalg_eigvals": _factorization(_cube(10), TWO_SIDED),
    "_linalg_eigh": _eigenvalues(_cube(4 / 3), _cube(9), 2),
    "_linalg_svd": _eigenvalues(lambda m, n: 2 * m * n**2 + 2 * n**3, lambda m, n: 6 * m * n**2 + 20 * n**3, 2),
}
"""The rules of factorizations by operator name."""


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
    """Return the work of ``operator``.

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
    if rule := _FACTORIZATIONS.get(name):
        return rule(arguments, results)
    if name.startswith(_UNKNOWN_PREFIXES) and name not in _UNKNOWN_EXCEPT:
        return Unknown(reads_and_writes(arguments, results).moved)
    if name in _SAME_AS_RESHAPED:
        return _perhaps_copied(arguments, results)
    return reads_and_writes(arguments, results)


def _rule(name: str) -> matmul.Rule | None:
    """Return the rule of the operator, or of the product it is the in-place variant of (``addmm_``)."""
    return matmul.RULES.get(name) or memory_ops.RULES.get(name) or matmul.RULES.get(name.removesuffix("_"))


def _without_output(arguments: Values, results: Values) -> tuple[Values, Values]:
    """Split the outputs, the last tensors given, from the arguments; they are written, not read."""
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
