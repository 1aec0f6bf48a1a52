import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain import device
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, SECOND

NAMES = ("K80", "M60", "P100", "V100", "T4", "2080Ti", "RTX3090", "A100-40GB", "A100", "L40S", "H100", "H100-HBM2e")
NAMES += ("H200", "B200", "GB200", "B300", "GB300")


def test_a_preset_is_found_by_its_name_in_any_case():
    assert device.preset_names() == NAMES
    for name in NAMES:
        assert device.preset(name).name == name
        assert device.preset(name.lower()) is device.preset(name.upper()) is device.preset(name)
    for spelling in ("RTX 2080 Ti", "rtx-2080-ti", "rtx2080ti", "2080ti"):
        assert device.preset(spelling).name == "2080Ti"


def test_an_unknown_device_names_its_neighbours():
    with pytest.raises(ConfigError, match=r"device: 'V1000' is unknown; did you mean 'V100'"):
        device.preset("V1000")
    for wrong in ("", None, 100):
        with pytest.raises(ConfigError, match=r"is unknown; .*known: 2080Ti, A100"):
            device.preset(wrong)


def test_rates_are_the_datasheets():
    v100, a100 = device.preset("v100"), device.preset("a100")
    assert (v100.fp32.peak, v100.fp16.peak, v100.bandwidth) == (15.7e12, 125e12, 900e9)
    assert (a100.tf32.peak, a100.bf16.peak, a100.bandwidth) == (156e12, 312e12, 2039e9)


def test_memory_is_what_cuda_says_of_it():
    says = {"V100": 15.78, "A100-40GB": 39.39, "A100": 79.15, "H100": 79.19, "H200": 139.80, "B200": 178.35}
    assert {name: round(device.preset(name).memory / 2**30, 2) for name in says} == says


@pytest.mark.parametrize("name", NAMES)
def test_every_achieved_rate_is_below_the_peak_but_winograds(name):
    gpu = device.preset(name)
    assert "fp32" in gpu.precisions
    for precision in gpu.precisions:
        arithmetic = gpu.arithmetic(precision)
        assert 0 < arithmetic.conv < 1
        assert 0 < arithmetic.gemm < 1
        assert 0 < arithmetic.winograd <= 2.25
    assert 0 < gpu.local_rate < gpu.bandwidth


def test_arithmetic_that_is_not_built_in_is_an_error():
    with pytest.raises(ConfigError, match="precision: 'bf16' does not exist on V100; use fp32 or fp16"):
        device.preset("v100").arithmetic("bf16")
    with pytest.raises(ConfigError, match="precision: 'fp23' is unknown; did you mean"):
        device.preset("v100").arithmetic("fp23")


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    gpu = device.preset("v100")
    computing = gpu.time("gemm", "fp32", flops=15.7e12 * gpu.fp32.gemm, moved=1)
    assert computing - gpu.launch == pytest.approx(SECOND)
    streaming = gpu.time("gemm", "fp32", flops=1, moved=0.8 * 900e9)
    assert streaming - gpu.launch == pytest.approx(SECOND)
    assert gpu.time("memory", "fp32", flops=1e15) == gpu.launch == 5 * MICROSECOND


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.floats(0, 1e15), st.floats(0, 1e12))
def test_more_work_never_takes_less_time(flops, moved, more_flops, more_moved):
    gpu = device.preset("a100")
    less = gpu.time("conv", "tf32", flops=flops, moved=moved)
    assert less <= gpu.time("conv", "tf32", flops=flops + more_flops, moved=moved + more_moved)
