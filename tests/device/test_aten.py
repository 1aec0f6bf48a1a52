"""Work of ATen operators: closed forms, and PyTorch's own schemas as the oracle of where arguments are."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.device import OperatorModel, matmul, memory_ops, preset
from foretrain.device.aten import _FACTORIZATIONS as RULES
from foretrain.device.aten import BLOCKED, TWO_SIDED, Meta, contiguous, work
from foretrain.device.calls import moved
from foretrain.device.work import Attention, Convolution, Gemm, HostCopy, MemoryWork, Nothing, Unknown


def tensor(*shape: int, dtype: str = "bfloat16", device: str = "cuda:0") -> Meta:
    return contiguous(shape, dtype, device)


def test_matrix_products():
    assert work("aten::mm", (tensor(8, 4), tensor(4, 6)), (tensor(8, 6),)) == Gemm(8, 6, 4)
    assert work("aten::addmm", (tensor(6), tensor(8, 4), tensor(4, 6), 1, 1), (tensor(8, 6),)) == Gemm(8, 6, 4)
    assert work("aten::addmm_", (tensor(8, 6), tensor(8, 4), tensor(4, 6)), (tensor(8, 6),)) == Gemm(8, 6, 4)
    assert work("aten::mm.out", (tensor(8, 4), tensor(4, 6), tensor(8, 6)), (tensor(8, 6),)) == Gemm(8, 6, 4)
    assert work("aten::bmm", (tensor(3, 8, 4), tensor(3, 4, 6)), ()) == Gemm(8, 6, 4, 3)
    assert work("aten::baddbmm", (tensor(1, 1, 6), tensor(3, 8, 4), tensor(3, 4, 6)), ()) == Gemm(8, 6, 4, 3)
    assert work("aten::linear", (tensor(2, 5, 4), tensor(6, 4), None), ()) == Gemm(10, 6, 4)
    single = tensor(8, 4, dtype="float32")
    assert work("aten::mm", (single, tensor(4, 6, dtype="float32")), ()) == Gemm(8, 6, 4, 1, "fp32")
    assert Gemm(8, 6, 4).flops == 2 * 8 * 6 * 4
    assert Gemm(8, 6, 4).moved == 2 * (8 * 4 + 4 * 6 + 8 * 6)
    assert Gemm(8, 6, 4, dtype="fp8").moved == 8 * 4 + 4 * 6 + 2 * 8 * 6


def test_scaled_products_know_scales_of_blocks():
    left, right = tensor(256, 512, dtype="float8_e4m3fn"), tensor(512, 128, dtype="float8_e4m3fn")
    one, rows, blocks = (tensor(*shape, dtype="float32") for shape in ((1,), (256, 1), (256, 4)))
    assert work("aten::_scaled_mm", (left, right, one, one), ()) == Gemm(256, 128, 512, 1, "fp8")
    assert work("aten::_scaled_mm", (left, right, rows, one), ()) == Gemm(256, 128, 512, 1, "fp8", rowwise=True)
    assert work("aten::_scaled_mm", (left, right, blocks, blocks), ()) == Gemm(256, 128, 512, 1, "fp8_block")


def test_two_numbers_of_four_bits_are_one_element():
    left, right = tensor(256, 256, dtype="float4_e2m1fn_x2"), tensor(256, 128, dtype="float4_e2m1fn_x2")
    scales = tensor(256 * 512 // 16, dtype="float8_e4m3fn")
    found = work("aten::_scaled_mm", (left, right, scales, scales), ())
    assert found == Gemm(256, 128, 512, 1, "fp4")
    assert found.moved == (256 + 128) * 512 // 2 + 2 * 256 * 128
    seconds = [OperatorModel(preset(name)).estimate(Gemm(8192, 8192, 8192, 1, "fp4")).time for name in ("B200", "B300")]
    eight = OperatorModel(preset("B200")).estimate(Gemm(8192, 8192, 8192, 1, "fp8")).time
    assert 1.8 < eight / seconds[0] < 2.1
    assert 1.3 < seconds[0] / seconds[1] < 1.7
    hopper = [OperatorModel(preset("H100")).estimate(Gemm(8192, 8192, 8192, 1, dtype)).time for dtype in ("fp4", "fp8")]
    assert hopper[0] == pytest.approx(hopper[1], rel=0.2)


def test_grouped_products_share_rows_or_the_inner_dimension():
    ends = tensor(4, dtype="int32")
    assert work("aten::_grouped_mm", (tensor(100, 8), tensor(4, 8, 6), ends), ()) == Gemm(25, 6, 8, 4)
    assert work("aten::_grouped_mm", (tensor(8, 100), tensor(100, 6), ends), ()) == Gemm(8, 6, 25, 4)
    assert work("aten::_grouped_mm", (tensor(4, 8, 5), tensor(4, 5, 6), None), ()) == Gemm(8, 6, 5, 4)
    assert work("aten::_grouped_mm", (tensor(4, 8, 5), tensor(5, 40), ends), ()) == Gemm(8, 10, 5, 4)


def test_attention_of_all_kernels():
    query, key = tensor(2, 32, 512, 128), tensor(2, 8, 512, 128)
    expected = Attention(2, 32, 8, 512, 512, 128)
    assert work("aten::_scaled_dot_product_flash_attention", (query, key, key, 0.0, True, False), ()) == expected
    found = work("aten::_scaled_dot_product_efficient_attention", (query, key, key, None, True, 0.0, False), ())
    assert found == Attention(2, 32, 8, 512, 512, 128, causal=False, algorithm="efficient")
    found = work("aten::_scaled_dot_product_cudnn_attention", (query, key, key, None, True, 0.0, True), ())
    assert found == Attention(2, 32, 8, 512, 512, 128, algorithm="cudnn")
    short = tensor(2, 8, 512, 64)
    found = work("aten::_scaled_dot_product_cudnn_attention", (query, key, short, None, True, 0.0, True), ())
    assert found == Attention(2, 32, 8, 512, 512, 128, algorithm="cudnn", value_dim=64)
    arguments = (query, query, key, key, query, None, None, None, 512, 512, 0.0, True, None, None)
    found = work("aten::_scaled_dot_product_flash_attention_backward", arguments, ())
    assert found == Attention(2, 32, 8, 512, 512, 128, backward=True)
    swapped, swapped_key = tensor(2, 512, 32, 128), tensor(2, 512, 8, 128)
    arguments = (swapped, swapped_key, swapped_key, None, None, 512, 512, 0.0, True, False)
    assert work("aten::_flash_attention_forward", arguments, ()) == expected
    packed, packed_key = tensor(1024, 32, 128), tensor(1024, 8, 128)
    bounds = tensor(3, dtype="int32")
    arguments = (packed, packed_key, packed_key, bounds, bounds, 512, 512, 0.0, True, False)
    assert work("aten::_flash_attention_forward", arguments, ()) == expected


def test_attention_to_a_window():
    query, key = tensor(2, 512, 32, 128), tensor(2, 512, 8, 128)
    arguments = (query, key, key, None, None, 512, 512, 0.0, True, False, None)
    whole = Attention(2, 32, 8, 512, 512, 128)
    for window in ((None, None), (-1, 0), (None, 0)):
        assert work("aten::_flash_attention_forward", (*arguments, *window), ()) == whole
    near = work("aten::_flash_attention_forward", (*arguments, 127, 0), ())
    assert near == Attention(2, 32, 8, 512, 512, 128, window=128)
    assert near.flops == 4 * 2 * 32 * 128 * (128 * 129 // 2 + 384 * 128)
    assert Attention(2, 32, 8, 512, 512, 128, window=512).flops == whole.flops
    around = (*arguments[:8], False, False, None, 64, 64)
    assert work("aten::_flash_attention_forward", around, ()).flops == 4 * 2 * 32 * 128 * 512 * 129
    backward = (query, query, key, key, query, None, None, None, 512, 512, 0.0, True, None, None, None, 127, 0)
    assert work("aten::_flash_attention_backward", backward, ()) == Attention(
        2, 32, 8, 512, 512, 128, backward=True, window=128
    )


def test_arithmetic_of_attention():
    full = Attention(2, 32, 8, 512, 512, 128, causal=False)
    assert full.flops == 4 * 2 * 32 * 512 * 512 * 128
    assert Attention(2, 32, 8, 512, 512, 128).flops == 4 * 2 * 32 * (512 * 513 // 2) * 128
    assert Attention(2, 32, 8, 4, 2, 128).flops == 4 * 2 * 32 * (3 + 2 * 2) * 128
    backward = Attention(2, 32, 8, 512, 512, 128, causal=False, backward=True)
    assert backward.flops == 2.5 * full.flops
    assert full.moved == 2 * 2 * 128 * 512 * (2 * 32 + 2 * 8)
    short, back = replace(full, value_dim=64), replace(backward, value_dim=64)
    assert (short.flops / full.flops, back.flops / backward.flops) == ((128 + 64) / 256, (3 * 128 + 2 * 64) / 640)
    assert short.moved == full.moved * 3 / 4


CONVOLUTION = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


def test_convolutions():
    source, weight, result = tensor(2, 16, 8, 8), tensor(32, 16, 3, 3), tensor(2, 32, 8, 8)
    flops, size = 2 * 2 * 32 * 64 * 16 * 9, 2 * (2 * 16 * 64 + 32 * 16 * 9 + 2 * 32 * 64)
    expected = Convolution(flops, size, "bf16", True)
    assert work("aten::convolution", (source, weight, None, *CONVOLUTION), (result,)) == expected
    assert work("aten::convolution_overrideable", (source, weight, None, *CONVOLUTION), (result,)) == expected
    cudnn = (source, weight, (1, 1), (1, 1), (1, 1), 1, False, False, True)
    assert work("aten::cudnn_convolution", cudnn, (result,)) == expected
    strided = ((2, 2), *CONVOLUTION[1:])
    small = tensor(2, 32, 4, 4)
    found = work("aten::convolution", (source, weight, None, *strided), (small,))
    assert isinstance(found, Convolution)
    assert (found.flops, found.winograd) == (flops // 4, False)
    depthwise = ((1, 1), (1, 1), (1, 1), False, (0, 0), 16)
    found = work("aten::convolution", (source, tensor(16, 1, 3, 3), None, *depthwise), (source,))
    assert found == MemoryWork(2 * (2 * 2 * 16 * 64 + 16 * 9))


def test_a_transposed_convolution_computes_as_much_as_the_one_it_reverses():
    small, large, weight = tensor(2, 32, 4, 4), tensor(2, 16, 8, 8), tensor(32, 16, 3, 3)
    turned = ((2, 2), (1, 1), (1, 1), True, (1, 1), 1)
    there = work("aten::convolution", (large, weight, None, (2, 2), *CONVOLUTION[1:]), (small,))
    back = work("aten::convolution", (small, weight, None, *turned), (large,))
    assert isinstance(there, Convolution)
    assert isinstance(back, Convolution)
    assert there.flops == back.flops


@pytest.mark.parametrize(("mask", "products_done"), [((True, True, True), 2), ((False, True, False), 1)])
def test_gradients_of_convolutions_as_masked(mask, products_done):
    source, weight, gradient = tensor(2, 16, 8, 8), tensor(32, 16, 3, 3), tensor(2, 32, 8, 8)
    one = 2 * 2 * 32 * 64 * 16 * 9
    found = work("aten::convolution_backward", (gradient, source, weight, (32,), *CONVOLUTION, mask), ())
    assert isinstance(found, Convolution)
    assert found.flops == products_done * one
    assert found == work("aten::convolution_backward_overrideable", (gradient, source, weight, *CONVOLUTION, mask), ())
    only_bias = (gradient, source, weight, (32,), *CONVOLUTION, (False, False, True))
    assert work("aten::convolution_backward", only_bias, ()) == MemoryWork(2 * 2 * 32 * 64)


def test_elementwise_reads_and_writes_and_broadcasts_once():
    big = tensor(64, 128)
    assert work("aten::add.Tensor", (big, big, 1), (big,)) == MemoryWork(3 * 64 * 128 * 2)
    assert work("aten::add_.Tensor", (big, big, 1), (big,)) == MemoryWork(3 * 64 * 128 * 2)
    assert work("aten::add.out", (big, big, 1, big), (big,)) == MemoryWork(3 * 64 * 128 * 2)
    expanded = Meta((64, 128), (0, 1), "bfloat16")
    assert work("aten::mul.Tensor", (big, expanded), (big,)) == MemoryWork((2 * 64 * 128 + 128) * 2)
    assert work("aten::fill_.Scalar", (big, 0), (big,)) == MemoryWork(64 * 128 * 2)
    assert work("aten::cat", ((big, big), 0), (tensor(128, 128),)) == MemoryWork(4 * 64 * 128 * 2)
    assert work("aten::sum", (big, None), (tensor(),)) == MemoryWork(64 * 128 * 2 + 2)


def test_views_and_allocations_do_nothing():
    big = tensor(64, 128)
    for name in ("view", "t", "transpose.int", "expand", "detach", "slice.Tensor", "empty.memory_format"):
        assert work(f"aten::{name}", (big,), (big,)) == Nothing()
    assert work("aten::_unsafe_view", (big,), (big,)) == Nothing()
    assert work("aten::reshape", (big, (128, 64)), (tensor(128, 64),)) == Nothing()
    turned = Meta((128, 64), (1, 128), "bfloat16")
    assert work("aten::reshape", (turned, (8192,)), (tensor(8192),)) == MemoryWork(2 * 8192 * 2)


def test_embeddings_touch_only_their_rows():
    table, indices = tensor(32000, 64), tensor(10, dtype="int64")
    rows = tensor(10, 64)
    assert work("aten::embedding", (table, indices, -1, False, False), (rows,)) == MemoryWork(80 + 2 * 10 * 64 * 2)
    gradient = work("aten::embedding_dense_backward", (rows, indices, 32000, -1, False), (table,))
    assert isinstance(gradient, MemoryWork)
    assert gradient.moved == 2 * (10 * 64 + 32000 * 64) + 2 * 10 * 64 * 2 + 8 * 80
    assert work("aten::index_select", (table, 0, indices), (rows,)) == MemoryWork(80 + 2 * 10 * 64 * 2)
    assert work("aten::index.Tensor", (table, (indices,)), (rows,)) == MemoryWork(80 + 2 * 10 * 64 * 2)


def test_losses_pick_one_logarithm_a_target():
    logarithms, target = tensor(10, 32000, dtype="float32"), tensor(10, dtype="int64")
    one = tensor(dtype="float32")
    assert work("aten::nll_loss_forward", (logarithms, target, None, 1, -100), (one, one)) == MemoryWork(80 + 40 + 8)
    found = work("aten::nll_loss_backward", (one, logarithms, target, None, 1, -100, one), (logarithms,))
    assert found == MemoryWork(10 * 32000 * 4 + 80 + 40, 2)


def test_long_rows_of_a_softmax_are_read_thrice():
    short, long = tensor(4, 1024), tensor(4, 128256)
    assert work("aten::_softmax", (short, -1, False), (short,)) == MemoryWork(2 * 4 * 1024 * 2)
    assert work("aten::_log_softmax", (long, 1, False), (long,)) == MemoryWork(4 * 4 * 128256 * 2)
    assert work("aten::_softmax_backward_data", (long, long, 1, None), (long,)) == MemoryWork(5 * 4 * 128256 * 2)


def test_gradients_of_norms_read_their_inputs_twice():
    source, weight, stats = tensor(100, 64), tensor(64), tensor(100, 1, dtype="float32")
    results = (source, weight, weight)
    arguments = (source, source, (64,), stats, stats, weight, weight, (True, True, True))
    once = 2 * (3 * 6400 + 4 * 64) + 2 * 400
    assert work("aten::native_layer_norm_backward", arguments, results) == MemoryWork(once + 2 * 2 * 6400, 3)


def test_fused_optimizers_stream_their_state():
    weights = tuple(tensor(1000, dtype="float32") for _ in range(3))
    steps = tuple(tensor(dtype="float32") for _ in range(3))
    arguments = (weights, weights, weights, weights, (), steps, 1e-3, 0.9, 0.99, 0.1, 1e-8, False, False, None, None)
    assert work("aten::_fused_adamw_", arguments, ()) == MemoryWork(7 * 3 * 4000)
    with_scale = (*arguments[:-2], tensor(dtype="float32"), None)
    assert work("aten::_fused_adamw_", with_scale, ()) == MemoryWork(8 * 3 * 4000)
    sgd = (weights, weights, (), 0.0, 0.0, 0.1, 0.0, False, False, True, None, None)
    assert work("aten::_fused_sgd_", sgd, ()) == MemoryWork(3 * 3 * 4000)


def test_lists_take_as_many_kernels_as_their_tensors_need():
    few = tuple(tensor(1000) for _ in range(10))
    many = tuple(tensor(10) for _ in range(111))
    assert work("aten::_foreach_mul_.Scalar", (few, 2.0), ()) == MemoryWork(2 * 10 * 2000)
    assert work("aten::_foreach_add.List", (few, few, 1), few) == MemoryWork(3 * 10 * 2000)
    assert work("aten::_foreach_copy_", (few, few, False), ()) == MemoryWork(2 * 10 * 2000)
    assert work("aten::_foreach_zero_", (few,), ()) == MemoryWork(10 * 2000)
    found = work("aten::_foreach_mul_.Scalar", (many, 2.0), ())
    assert isinstance(found, MemoryWork)
    assert found.kernels == 2


def test_copies_across_the_host_are_none_of_memorys():
    host, here = tensor(1000, device="cpu"), tensor(1000)
    assert work("aten::copy_", (here, host, True), (here,)) == HostCopy(2000)
    assert work("aten::copy_", (here, host._replace(pinned=True), True), (here,)) == HostCopy(2000, True)
    assert work("aten::_to_copy", (here, None, None, "cpu"), (host,)) == HostCopy(2000)
    wide = tensor(1000, dtype="float32")
    assert work("aten::copy_", (wide, here, False), (wide,)) == MemoryWork(6000)
    assert work("aten::_local_scalar_dense", (tensor(dtype="float32"),), ()) == HostCopy(4, True)


def test_what_nobody_knows_is_unknown_and_says_its_bytes():
    big = tensor(64, 64, dtype="float32")
    assert work("mylib::magic", (big, 3), (big,)) == Unknown(2 * 64 * 64 * 4)
    assert work("aten::ormqr", (big, big), (big,)) == Unknown(3 * 64 * 64 * 4)
    assert work("aten::a_new_operator", (big,), (big,)) == MemoryWork(2 * 64 * 64 * 4)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4))
def test_bytes_of_a_broadcast_tensor_never_exceed_those_it_shows(dimensions):
    shape = tuple(size for size, _ in dimensions)
    stride = tuple(1 if real else 0 for _, real in dimensions)
    found = work("aten::neg", (Meta(shape, stride, "float32"),), ())
    assert isinstance(found, MemoryWork)
    assert found.moved <= 4 * math.prod(shape)


ORACLE = {
    "_scaled_mm": {2: "scale_a"},
    "_scaled_mm_v2": {2: "scale_a"},
    "_grouped_mm": {2: "offs"},
    "_scaled_grouped_mm": {4: "offs"},
    "_scaled_grouped_mm_v2": {8: "offs"},
    "convolution": {3: "stride", 5: "dilation", 6: "transposed", 8: "groups"},
    "convolution_overrideable": {3: "stride", 5: "dilation", 6: "transposed", 8: "groups"},
    "_convolution": {3: "stride", 5: "dilation", 6: "transposed", 8: "groups"},
    "cudnn_convolution": {3: "stride", 4: "dilation", 5: "groups"},
    "cudnn_convolution_transpose": {4: "stride", 5: "dilation", 6: "groups"},
    "cudnn_convolution_relu": {3: "stride", 5: "dilation", 6: "groups"},
    "cudnn_convolution_add_relu": {5: "stride", 7: "dilation", 8: "groups"},
    "_conv_depthwise2d": {4: "stride", 6: "dilation"},
    "conv_depthwise3d": {4: "stride", 6: "dilation"},
    "convolution_backward": {4: "stride", 6: "dilation", 7: "transposed", 9: "groups", 10: "output_mask"},
    "convolution_backward_overrideable": {3: "stride", 5: "dilation", 6: "transposed", 8: "groups", 9: "output_mask"},
    "_cudnn_rnn": {0: "input", 1: "weight", 7: "hidden_size"},
    "_fused_adamw_": {2: "exp_avgs", 3: "exp_avg_sqs", 4: "max_exp_avg_sqs", 13: "grad_scale", 14: "found_inf"},
    "_fused_sgd_": {2: "momentum_buffer_list", 10: "grad_scale", 11: "found_inf"},
    "_fused_adagrad_": {2: "state_sums", 9: "grad_scale", 10: "found_inf"},
    "embedding_dense_backward": {0: "grad_output", 1: "indices"},
    "nll_loss_backward": {1: "self", 2: "target"},
    "native_layer_norm_backward": {0: "grad_out", 1: "input"},
    "_fused_rms_norm_backward": {0: "grad_out", 1: "input"},
    "index_put_": {1: "indices", 2: "values", 3: "accumulate"},
    "_index_put_impl_": {1: "indices", 2: "values", 3: "accumulate"},
    "scatter_add_": {2: "index", 3: "src"},
    "index_add_": {2: "index", 3: "source"},
    "_softmax_backward_data": {0: "grad_output", 1: "output", 2: "dim"},
    "_embedding_bag": {0: "weight", 1: "indices"},
}


def schemas():
    torch = pytest.importorskip("torch")
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            found.setdefault(schema.name.removeprefix("aten::"), []).append(schema)
    return found


def test_arguments_are_where_pytorch_has_them():
    known = schemas()
    for name, places in ORACLE.items():
        plain = next(schema for schema in known[name] if not schema.overload_name)
        for place, argument in places.items():
            assert plain.arguments[place].name == argument, (name, place)
    for name, places in matmul._ATTENTION.items():
        plain = next(schema for schema in known[name] if not schema.overload_name)
        arguments = [argument.name for argument in plain.arguments]
        assert arguments[places.query] == "query", name
        assert arguments[places.causal] in ("is_causal", "custom_mask_type"), name
        if places.packed is not None:
            assert arguments[places.packed] in ("cum_seq_q", "cu_seqlens_q"), name


def test_every_rule_is_for_an_operator_of_pytorch():
    assert not (matmul.RULES.keys() | memory_ops.RULES.keys()) - schemas().keys()


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
