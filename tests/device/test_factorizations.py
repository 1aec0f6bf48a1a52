"""What factorizations take: closed forms."""

import pytest

from foretrain.device import OperatorModel, preset
from foretrain.device.aten import _FACTORIZATIONS as RULES
from foretrain.device.aten import BLOCKED, TWO_SIDED, contiguous, work
from foretrain.device.calls import moved
from foretrain.device.work import Unknown


def test_multiplications_and_additions_of_a_batch() -> None:
    matrix, sides = contiguous((5, 60, 60), "float32"), contiguous((5, 60, 7), "float32")
    third = 60**3 // 3
    for operator, arguments, expected in (
        ("aten::linalg_cholesky_ex", (matrix,), third),
        ("aten::linalg_lu_factor_ex", (matrix,), 2 * third),
        ("aten::linalg_inv_ex", (matrix,), 6 * third),
        ("aten::linalg_qr", (matrix,), 8 * third),
        ("aten::_linalg_eigh", (matrix, "L", False), 4 * third),
        ("aten::_linalg_eigh", (matrix, "L", True), 27 * third),
        ("aten::_linalg_svd", (matrix,), 78 * third),
        ("aten::_linalg_solve_ex", (matrix, sides), 2 * third + 2 * 60**2 * 7),
        ("aten::linalg_solve_triangular", (matrix, sides), 60**2 * 7),
        ("aten::triangular_solve", (sides, matrix), 60**2 * 7),
    ):
        found = work(operator, arguments, ())
        tensors = [argument for argument in arguments if not isinstance(argument, str | bool)]
        efficiency = TWO_SIDED if operator.endswith(("eigh", "svd")) else BLOCKED
        assert found == Unknown(moved(*tensors), 5 * expected, "fp32", efficiency), operator


@pytest.mark.parametrize("operator", ["linalg_qr", "_linalg_svd", "linalg_lu_factor_ex"])
def test_lying_and_standing_matrices_take_the_same(operator: str) -> None:
    lying, standing = (RULES[operator]((contiguous(shape, "float64"),), ()) for shape in ((30, 90), (90, 30)))
    assert lying == standing
    assert lying.dtype == "fp64"


def test_arithmetic_bounds_their_time() -> None:
    model = OperatorModel(preset("H100"))
    single, double = (model.estimate(Unknown(8, 10**12, dtype)) for dtype in ("fp32", "fp64"))
    assert single.time >= 10**12 / model.device.fp32.peak * 10**12
    assert double.time >= single.time > model.estimate(Unknown(8)).time
    assert single.provenance == "unknown"
    slow = model.estimate(Unknown(8, 10**12, "fp32", TWO_SIDED))
    assert slow.time == pytest.approx(single.time / TWO_SIDED)
