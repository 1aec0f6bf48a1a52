"""ATen operators of dense linear algebra: how many multiplications and additions a factorization takes at least.

Counts are those of LAPACK's algorithms to the leading order (Golub and Van Loan, "Matrix Computations", 4th ed., 2013:
§3.2 LU, §4.2 Cholesky, §5.2 QR, §8.3 symmetric eigenvalues, §8.6 singular values, §7.5 eigenvalues). How near a GPU
comes to its peak is assumed, not measured, so the work stays `Unknown`.

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
from typing import Any, TypeAlias

from foretrain.device.memory_ops import reads_and_writes
from foretrain.device.tensors import Meta, number_format
from foretrain.device.work import Unknown

BLOCKED = 1 / 5
TWO_SIDED = 1 / 50
"""Parts of the peak; see Note [Efficiency of factorizations]."""

Values: TypeAlias = tuple[Any, ...]
Rule: TypeAlias = Callable[[Values, Values], Unknown]
Count: TypeAlias = Callable[[int, int], float]
"""Of a matrix ``(m, n)``, m ≥ n."""


def _factorization(count: Count, efficiency: float = BLOCKED) -> Rule:
    """Of each ``(..., m, n)`` in the first argument, lying or standing."""

    def rule(arguments: Values, results: Values) -> Unknown:
        *batch, m, n = arguments[0].shape
        flops = math.prod(batch) * count(max(m, n), min(m, n))
        return _work(flops, arguments[0], arguments, results, efficiency)

    return rule


def _solution(per_column: Count, factor: int, right: int, count: Count = lambda m, n: 0) -> Rule:
    """With as many right-hand sides as the argument at position ``right`` has columns, after a factorization."""

    def rule(arguments: Values, results: Values) -> Unknown:
        matrix, sides = arguments[factor], arguments[right]
        *batch, _, n = matrix.shape
        # Times as many as there are of the side that is shared; a vector is one column.
        columns = max(1, math.prod(sides.shape) // max(1, n * math.prod(batch)))
        return _work(math.prod(batch) * (count(n, n) + columns * per_column(n, n)), matrix, arguments, results)

    return rule


def _eigenvalues(bare: Count, vectors: Count, flag: int) -> Rule:
    """With vectors if the argument at position ``flag`` says so."""

    def rule(arguments: Values, results: Values) -> Unknown:
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


RULES: dict[str, Rule] = {
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
"""The rules by operator name."""
