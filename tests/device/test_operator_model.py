"""Operator times: exact at measured shapes, sane between and beyond them, never free."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain import device
from foretrain.device import table
from foretrain.device.calibration import Calibration, OperatorTime
from foretrain.device.gpu import HOST_LAUNCH, forecast_range, host_launch, overlap_slowdown, stack_factor, stacks
from foretrain.device.model import COPY_LATENCY, OperatorEstimate, OperatorModel, rate
from foretrain.device.work import Attention, Convolution, Gemm, HostCopy, MemoryWork, Nothing, Unknown
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, SECOND

MEASURED = ("A100", "H100", "H200", "B200")
MODELS = {name: OperatorModel(device.preset(name)) for name in device.preset_names()}
sizes = st.integers(1, 1 << 17)
formats = st.sampled_from(("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_block", "fp4", "int8"))


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_product_or_attention_takes_what_was_measured(name):
    gemms, attention = table.gemms(name, "half"), table.attention(name)
    assert gemms is not None
    for row in np.random.default_rng(0).integers(0, len(gemms.shapes), 50):
        m, n, k = map(int, gemms.shapes[row])
        found = MODELS[name].estimate(Gemm(m, n, k))
        assert (found.time, found.provenance) == (pytest.approx(gemms.seconds[row] * SECOND), "measured")
        # The neighbours' average agrees with it: at no distance from a point there is nothing to average.
        near = gemms.near(m, n, k, 1e15, 1e12)
        roof = table.roofline(gemms.shapes[[row]], 2, 1e15, 1e12)[0]
        assert roof * np.exp(near.ratio) == pytest.approx(gemms.seconds[row])
        assert (near.distance, near.spread) == (0, 0)
    for row in np.random.default_rng(0).integers(0, len(attention.shapes), 50):
        batch, length, heads, kv = map(int, attention.shapes[row])
        found = MODELS[name].estimate(Attention(batch, heads, kv, length, length, 128, algorithm="best"))
        assert (found.time, found.provenance) == (pytest.approx(attention.seconds[row] * SECOND), "measured")


def test_large_products_reach_the_rates_that_are_published():
    # TFLOP/s of large bf16 products: A100 230-271, H100 650-800, B200 1,400-1,750.
    for name, low, high in (("A100", 220e12, 275e12), ("H100", 600e12, 800e12), ("B200", 1300e12, 1800e12)):
        work = Gemm(16384, 14336, 4096)
        found = MODELS[name].estimate(work)
        assert low < work.flops / (found.time / SECOND) < high
        assert found.provenance == "interpolated"


def test_flash_attention_is_slower_than_the_best_only_where_it_is_old():
    flash, best = (Attention(1, 32, 8, 8192, 8192, 128, algorithm=name) for name in ("flash", "best"))
    assert MODELS["A100"].estimate(flash) == MODELS["A100"].estimate(best)
    assert MODELS["H100"].estimate(flash).time == pytest.approx(MODELS["H100"].estimate(best).time / 0.57, rel=0.05)


def test_the_backward_pass_of_attention_takes_two_and_a_half_times_the_work_a_little_slower():
    for name in ("V100", *MEASURED):
        there, back = (Attention(2, 32, 32, 4096, 4096, 128, backward=backward) for backward in (False, True))
        assert 2.5 < MODELS[name].estimate(back).time / MODELS[name].estimate(there).time < 3.5


def test_every_provenance_appears():
    model = MODELS["H100"]
    assert model.estimate(Gemm(8192, 4096, 4096)).provenance == "measured"
    assert model.estimate(Gemm(8192, 4096, 4352)).provenance == "interpolated"
    assert model.estimate(Gemm(8192, 4096, 4352, 7)).provenance == "modelled"
    assert model.estimate(Gemm(10**7, 4096, 4096)).provenance == "modelled"
    assert model.estimate(Unknown(10)).provenance == "unknown"
    assert MODELS["V100"].estimate(Gemm(8192, 4096, 4096, dtype="fp16")).provenance == "modelled"


def test_bytes_take_their_time():
    model = MODELS["A100"]
    assert model.estimate(MemoryWork(0)) == OperatorEstimate(3 * MICROSECOND, 0.15, "modelled")
    second = model.estimate(MemoryWork(int(0.8 * 2039e9), kernels=1)).time
    assert second == pytest.approx(SECOND, rel=1e-5)
    assert model.estimate(MemoryWork(0, kernels=5)).time == 15 * MICROSECOND
    assert model.estimate(Unknown(int(0.8 * 2039e9))).time == second
    assert model.estimate(Nothing()).time == 0


def test_copies_take_the_links_time_and_no_factor():
    gpu = device.preset("a100")
    for model in (OperatorModel(gpu), OperatorModel(gpu, factor=2.0)):
        assert model.estimate(HostCopy(int(25e9), True)).time == SECOND + COPY_LATENCY
        assert model.estimate(HostCopy(int(6e9))).time == SECOND + COPY_LATENCY


def test_tf32_is_a_choice_for_products_and_the_default_of_convolutions():
    gpu = device.preset("a100")
    plain, fast = OperatorModel(gpu), OperatorModel(gpu, tf32=True, tf32_convolutions=False)
    product, convolution = Gemm(4096, 4096, 4096, dtype="fp32"), Convolution(10**13, 10**6, "fp32")
    assert plain.estimate(product).time > 5 * fast.estimate(product).time
    assert plain.estimate(convolution).time < fast.estimate(convolution).time
    expected = 10**13 / (156e12 * gpu.arithmetic("tf32").conv) * SECOND + 3 * MICROSECOND
    assert plain.estimate(convolution).time == pytest.approx(expected)


def test_a_format_without_its_own_arithmetic_is_computed_in_a_wider_one():
    assert rate(device.preset("v100"), "bf16").format == "fp32"
    assert rate(device.preset("k80"), "fp8").format == "fp32"
    assert rate(device.preset("a100"), "fp8").format == "fp16"
    assert rate(device.preset("h100"), "fp8").arithmetic.peak == 2 * 989e12
    assert rate(device.preset("t4"), "int8").arithmetic.peak == 2 * 65e12
    assert rate(device.preset("h100"), "fp64").arithmetic.peak == pytest.approx(66.9e12)


@pytest.mark.parametrize("name", MODELS)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64), dtype=formats)
@settings(max_examples=20, deadline=None)
def test_no_product_is_free_or_faster_than_the_peak(name, m, n, k, batch, dtype):
    work, model = Gemm(m, n, k, batch, dtype), MODELS[name]
    found = model.estimate(work)
    assert found.time > MICROSECOND
    assert 0 < found.sigma < 2
    assert work.flops / (found.time / SECOND) < rate(model.device, dtype).arithmetic.peak * 1.05


@pytest.mark.parametrize("name", ["V100", *MEASURED])
@given(
    batch=st.integers(1, 64),
    heads=st.sampled_from([(32, 8), (16, 16), (64, 1)]),
    length=st.integers(1, 1 << 15),
    keys=st.integers(1, 1 << 15),
    size=st.sampled_from([32, 64, 80, 128, 256]),
    causal=st.booleans(),
    backward=st.booleans(),
    algorithm=st.sampled_from(("flash", "cudnn", "efficient", "triton", "best")),
    window=st.sampled_from((0, 128)),
)
@settings(max_examples=40, deadline=None)
def test_no_attention_is_free_or_faster_than_the_peak(
    name, batch, heads, length, keys, size, causal, backward, algorithm, window
):
    work = Attention(batch, *heads, length, keys, size, causal, "fp16", backward, algorithm, window)
    found = MODELS[name].estimate(work)
    assert found.time > MICROSECOND
    assert work.flops / (found.time / SECOND) < rate(MODELS[name].device, "fp16").arithmetic.peak


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_bytes_never_take_less_time(moved, more):
    for kind in (MemoryWork, Unknown, HostCopy):
        assert MODELS["H100"].estimate(kind(moved)).time <= MODELS["H100"].estimate(kind(moved + more)).time


def test_the_stacks_factor_scales_operators():
    slow, plain = OperatorModel(device.preset("h100"), factor=1.5), MODELS["H100"]
    for work in (Gemm(8192, 4096, 4096), MemoryWork(10**8), Attention(1, 32, 8, 4096, 4096, 128), Unknown(5)):
        assert slow.estimate(work).time == pytest.approx(1.5 * plain.estimate(work).time)
    with pytest.raises(ConfigError, match="factor: 0 is not a factor above 0"):
        OperatorModel(device.preset("h100"), factor=0)


def test_the_users_measurements_come_first():
    gpu, work = device.preset("h100"), Gemm(8192, 4096, 4096)
    calibration = Calibration(gpu.product, "torch", (OperatorTime(work, 7 * MICROSECOND, 0.1),))
    model = OperatorModel(gpu, factor=2.0, measured=calibration)
    assert model.estimate(work) == OperatorEstimate(7 * MICROSECOND, 0.1, "measured")
    with pytest.raises(ConfigError, match="device: 'NVIDIA H100 80GB HBM3' was measured, not A100"):
        OperatorModel(device.preset("a100"), measured=calibration)


def test_stacks_and_overlap():
    assert {stack_factor(device.preset("k80"), stack) for stack in stacks()} == {1.0}
    assert all(0.8 < stack_factor(device.preset(name), stack) < 1.5 for name in MODELS for stack in stacks())
    with pytest.raises(ConfigError, match="factor: 'eagre' is unknown; did you mean 'eager'"):
        stack_factor(device.preset("h100"), "eagre")
    assert overlap_slowdown(device.preset("h100")) == pytest.approx(132 / 116)
    assert all(1.1 < overlap_slowdown(model.device) < 1.21 for model in MODELS.values())


def test_forecasts_of_a_stack_never_seen_are_the_least_sure():
    unseen = forecast_range(device.preset("h100"), 1.0, across=False)
    assert forecast_range(device.preset("v100"), "torchtitan", across=True) == unseen
    assert 0 < forecast_range(device.preset("a100"), "torchtitan", across=True) < unseen
    with pytest.raises(ConfigError, match="factor: 'eagre' is unknown"):
        forecast_range(device.preset("h100"), "eagre", across=True)


def test_a_stack_that_does_more_on_its_host():
    assert host_launch(device.preset("h100"), "eager") == host_launch(device.preset("k80"), "compile") == HOST_LAUNCH
    fitted = host_launch(device.preset("a100"), "megatron-deepspeed")
    assert HOST_LAUNCH < fitted < 10 * HOST_LAUNCH
    assert stack_factor(device.preset("a100"), "megatron-deepspeed") == 1.0  # one constant for each stack and GPU
    with pytest.raises(ConfigError, match="factor: 'eagre' is unknown"):
        host_launch(device.preset("h100"), "eagre")


def test_the_table_has_the_gpus_that_presets_name():
    named = {model.device.measured_as for model in MODELS.values()} - {None}
    assert named <= set(table.names())
    for name in table.names():
        assert table.gemms(name, "half") is not None
        assert len(table.attention(name).shapes) > 5000


def test_a_model_is_made_without_loading_numpy_or_torch():
    code = (
        "import sys; from foretrain.device import OperatorModel, preset; OperatorModel(preset('h100')); "
        "sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_relative_with_less_bandwidth_is_slower_only_where_bytes_count():
    computing, streaming = Gemm(8192, 8192, 8192), Gemm(8, 8192, 8192)
    ours, less = MODELS["H100"], MODELS["H100-HBM2e"]
    assert less.estimate(computing).time == pytest.approx(ours.estimate(computing).time)
    assert less.estimate(computing).provenance == "interpolated"
    assert 1.2 < less.estimate(streaming).time / ours.estimate(streaming).time < 3352 / 2400
