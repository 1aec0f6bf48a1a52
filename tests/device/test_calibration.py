import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.device import OperatorModel, calibration, calls, overlap_slowdown, preset
from foretrain.device.calibration import Calibration, MeasuredCall, OperatorTime
from foretrain.device.calls import Meta, OperatorCall, contiguous
from foretrain.device.gpu import Arithmetic, Device
from foretrain.device.work import FORMATS, Attention, Convolution, Gemm, HostCopy, MemoryWork
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND

GEMM = OperatorTime(Gemm(8192, 4096, 4096), 400 * MICROSECOND, 0.01)
PRODUCT = "NVIDIA H100 80GB HBM3"
H100 = Calibration(PRODUCT, "torch 2.13", (GEMM, OperatorTime(MemoryWork(10**9), 3 * MICROSECOND)))

works = st.one_of(
    st.builds(Gemm, *[st.integers(1, 10**6)] * 4, st.sampled_from(FORMATS)),
    st.builds(Attention, *[st.integers(1, 10**6)] * 6, st.booleans(), st.sampled_from(FORMATS), st.booleans()),
    st.builds(Convolution, *[st.integers(1, 10**12)] * 2, st.sampled_from(FORMATS), st.booleans()),
    st.builds(MemoryWork, st.integers(0, 10**12), st.integers(1, 9)),
)
measurements = st.builds(OperatorTime, works, st.integers(1, 10**15), st.floats(0, 1))


@given(measured=st.lists(measurements, unique_by=lambda found: found.work))
def test_a_file_gives_back_what_was_written(tmp_path_factory, measured):
    path = tmp_path_factory.getbasetemp() / "calibration.json"
    written = Calibration("a", "b", tuple(measured))
    calibration.dump(written, path)
    assert calibration.load(path) == written


def test_of_an_operator_measured_twice_the_last_counts():
    later = Calibration(H100.device, H100.stack, (OperatorTime(GEMM.work, 500 * MICROSECOND),))
    merged = calibration.merged([H100, later])
    assert {found.work: found.time for found in merged.measured} == {
        GEMM.work: 500 * MICROSECOND,
        MemoryWork(10**9): 3 * MICROSECOND,
    }
    assert calibration.merged([H100]) == H100


def test_only_what_belongs_together_is_merged():
    with pytest.raises(ConfigError, match=r"stack: 'jax' differs from 'torch 2.13'; merge only"):
        calibration.merged([H100, Calibration(H100.device, "jax", ())])
    with pytest.raises(ConfigError, match="device: 'NVIDIA A100' differs"):
        calibration.merged([H100, Calibration("NVIDIA A100", H100.stack, ())])
    with pytest.raises(ConfigError, match="has no calibration"):
        calibration.merged([])


ENTRY = {"operator": "Gemm", "m": 1, "n": 1, "k": 1, "time": "1us"}
HEAD = {"version": 1, "device": "a", "stack": "b", "measured": []}
CALLED = {"call": "aten::mul", "arguments": [], "time": "1us"}
GOOD = {"name": "CPU", "memory": "1GiB", "bandwidth": "1GB/s", "launch": "1us", "local_rate": "1GB/s",
        "fp32": {"peak": 1, "conv": 1, "winograd": 1, "gemm": 1}}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"calibration: \[\] is not an object"),
        ({}, "version: None is not 1"),
        ({**HEAD, "device": ""}, "device: '' is not a name"),
        ({**HEAD, "measured": {}}, "measured: {} is not a list"),
        ({**HEAD, "measure": []}, "field: 'measure' is unknown; did you mean 'measured'"),
        ({**HEAD, "measured": [ENTRY, {**ENTRY, "operator": "Gem"}]}, r"measured\[1\].operator: 'Gem' .* 'Gemm'"),
        ({**HEAD, "measured": [{**ENTRY, "time": 3}]}, r"measured\[0\].time: 3 is not a time; write"),
        ({**HEAD, "measured": [{**ENTRY, "time": "0us"}]}, r"measured\[0\].time: '0ps' is not above 0"),
        ({**HEAD, "measured": [{**ENTRY, "spread": "x"}]}, r"spread: 'x' is not a number from 0 on"),
        ({**HEAD, "measured": [{**ENTRY, "m": 1.5}]}, r"measured\[0\].m: 1.5 is not a whole number"),
        ({**HEAD, "measured": [{**ENTRY, "m": True}]}, r"measured\[0\].m: True is not a whole number"),
        ({**HEAD, "measured": [{**ENTRY, "dtype": "fp7"}]}, r"measured\[0\].dtype: 'fp7' is unknown; did you mean"),
        ({**HEAD, "measured": [{**ENTRY, "o": 1}]}, r"measured\[0\].field: 'o' is unknown"),
        ({**HEAD, "measured": [{"operator": "Memory", "time": "1us"}]}, r"measured\[0\].moved is missing"),
        ({**HEAD, "measured": ["x"]}, r"measured\[0\].entry: 'x' is not an object"),
        ({**HEAD, "measured": [CALLED | {"arguments": ["float32[", 1]}]}, r"measured\[0\].arguments"),
        ({**HEAD, "measured": [CALLED | {"time": "0us"}]}, r"measured\[0\].time: '0ps' is not above 0"),
        ({**HEAD, "measured": [CALLED | {"m": 3}]}, r"measured\[0\].field: 'm' is unknown"),
        ({**HEAD, "description": {"nam": "x"}}, "field: 'nam' is unknown; did you mean 'name'"),
        ({**HEAD, "description": GOOD | {"memory": 3}}, "memory: 3 is not a size"),
        ({**HEAD, "description": GOOD | {"bandwidth": "1"}}, "bandwidth: '1' is not a rate"),
        ({**HEAD, "description": GOOD | {"fp32": {"peak": 1}}}, r"fp32.conv: None is not a number above 0"),
        ({**HEAD, "description": GOOD | {"fp32": 3}}, "fp32: 3 is not an object"),
        ({**HEAD, "description": GOOD | {"capability": [9]}}, r"capability: \[9\] is not a major and a minor number"),
        ({**HEAD, "description": GOOD | {"serial": 1}}, "serial: 1 is neither true nor false"),
        ({**HEAD, "description": GOOD | {"overlap": -1}}, "overlap: -1 is not a number above 0"),
        ({**HEAD, "description": GOOD | {"name": ""}}, "name: '' is not a name"),
        ({**HEAD, "description": {"name": "CPU"}}, "memory is missing"),
    ],
)
def test_a_wrong_file_says_where_and_what_to_write(tmp_path, content, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as raised:
        calibration.load(path)
    assert "wrong.json" in str(raised.value)


@pytest.mark.parametrize("load", [calibration.load, calls.load])
def test_a_file_that_is_not_there_or_no_json(tmp_path, load):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path / "text.json")


CORE = Device(
    name="CPU",
    memory=16 << 30,
    bandwidth=40e9,
    launch=8 * MICROSECOND,
    local_rate=20e9,
    fp32=Arithmetic(1e11, conv=0.5, winograd=0.6, gemm=0.9),
    product="Some Processor",
    capability=(8, 0),
    sms=1,
    serial=True,
)
CALL = OperatorCall("aten::mul", (contiguous((64, 64), "float32"), 0.5))
FILE = Calibration("Some Processor", "torch", (), (MeasuredCall(CALL, 3 * MICROSECOND, 0.02),), CORE)


def test_a_file_gives_back_device_and_calls(tmp_path):
    for found in (FILE, Calibration(PRODUCT, "torch", (), FILE.calls, None, 5 * MICROSECOND)):
        calibration.dump(found, tmp_path / "file.json")
        assert calibration.load(tmp_path / "file.json") == found


def test_a_device_is_described_by_the_file_or_known_by_its_product():
    assert FILE.described() == CORE
    assert Calibration(PRODUCT, "torch").described() is preset("H100")
    with pytest.raises(ConfigError, match="is no GPU known by name, and the file has no description; add one by"):
        Calibration("GPU of next year", "torch").described()


def test_a_measured_call_is_known_whatever_its_numbers():
    model = OperatorModel(preset("H100"), measured=Calibration(PRODUCT, "torch", (), FILE.calls))
    again = OperatorCall("aten::mul", (contiguous((64, 64), "float32"), 0.25))
    assert model.measured_call(again) == (3 * MICROSECOND, 0.02, "measured")
    assert model.measured_call(OperatorCall("aten::mul", (contiguous((64, 65), "float32"), 0.5))) is None
    assert OperatorModel(preset("H100")).measured_call(again) is None


def test_where_host_and_device_are_one_an_operator_takes_both_and_nothing_is_copied():
    gemm = OperatorTime(Gemm(64, 64, 64, dtype="fp32"), 9 * MICROSECOND, 0.0)
    model = OperatorModel(CORE, measured=dataclasses.replace(FILE, measured=(gemm,)))
    found = model.measured_call(CALL)
    assert found is not None
    assert found.time == 11 * MICROSECOND
    assert model.estimate(gemm.work).time == 17 * MICROSECOND
    assert model.estimate(HostCopy(10**9)).time == 0
    apart = OperatorModel(dataclasses.replace(CORE, serial=False))
    assert model.estimate(MemoryWork(10**9)).time == apart.estimate(MemoryWork(10**9)).time + CORE.launch


def test_of_several_files_the_last_counts_description_included():
    later = Calibration(
        FILE.device, FILE.stack, (), (MeasuredCall(CALL, 4 * MICROSECOND),), dataclasses.replace(CORE, overlap=1.3)
    )
    merged = calibration.merged([FILE, later])
    assert [found.time for found in merged.calls] == [4 * MICROSECOND]
    assert overlap_slowdown(merged.described()) == 1.3
    assert calibration.merged([later, dataclasses.replace(FILE, description=None)]).described() == later.description


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.one_of(
    st.builds(contiguous, shapes, st.sampled_from(["float32", "bfloat16", "int64", "float8_e4m3fn"])),
    st.builds(contiguous, shapes, st.just("int64"), st.just("cpu")),
    shapes.map(lambda shape: Meta(shape, tuple(range(len(shape))), "bool")),
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.sampled_from(["none", "tanh"])
)
arguments = st.lists(st.one_of(tensors, plain, st.lists(tensors, max_size=3).map(tuple)), max_size=5).map(tuple)


@given(given_=arguments)
def test_a_call_is_read_as_it_was_written(given_):
    call = OperatorCall("aten::anything", given_)
    told = json.loads(json.dumps(call.to_json(), allow_nan=False))
    assert OperatorCall.from_json(told["call"], told["arguments"]) == call


def test_a_call_as_people_write_it():
    call = OperatorCall.from_json("aten::addmm", ["float32[512]", "float32[64, 256]", "float32[256, 512]:1,256", 1, 1])
    assert call.arguments[2] == Meta((256, 512), (1, 256), "float32")
    assert str(call) == "addmm(float32[512], float32[64, 256], float32[256, 512]:1,256, 1, 1)"
    assert OperatorCall.from_json("aten::add_", ["int64[]", "host int64[]", 1]).arguments[1].device == "cpu"


def test_numbers_that_change_from_step_to_step_make_no_other_call():
    weight = (contiguous((64,)),)
    assert (
        OperatorCall("aten::_foreach_mul_", (weight, 0.9)).key
        == OperatorCall("aten::_foreach_mul_", (weight, 0.81)).key
    )
    assert OperatorCall("aten::sum", (weight[0], (0,))).key != OperatorCall("aten::sum", (weight[0], (1,))).key
    assert OperatorCall("aten::mul", (weight[0], 2)).key != OperatorCall("aten::mul", (weight[0], 3)).key


def test_a_file_gives_back_each_call_once(tmp_path):
    one, same = (OperatorCall("aten::mul_", (contiguous((8,)), factor)) for factor in (0.5, 0.25))
    other = OperatorCall("aten::relu", (contiguous((8, 8)),))
    calls.dump([one, other, same], tmp_path / "calls.json")
    assert calls.load(tmp_path / "calls.json") == (one, other)


RELU = {"call": "aten::relu", "arguments": ["float32[8]"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list 'operators'; record them with"),
        ('{"version": 2, "operators": []}', "is of version 2, not 1"),
        (json.dumps({"version": 1, "operators": [RELU, "x"]}), r"operators\[1\].entry: 'x' is not an object"),
        (json.dumps({"version": 1, "operators": [{}]}), r"operators\[0\].call: None is not an operator"),
        (json.dumps({"version": 1, "operators": [{"call": "aten::relu"}]}), r"arguments: None is not a list"),
        (json.dumps({"version": 1, "operators": [RELU | {"arguments": ["float32[8"]}]}), "is not a tensor; write"),
        (json.dumps({"version": 1, "operators": [RELU | {"arguments": ["f32[8]:1,1"]}]}), "is not a tensor"),
        (json.dumps({"version": 1, "operators": [RELU | {"arguments": [{"a": 1}]}]}), "is no argument"),
    ],
)
def test_a_wrong_file_of_calls_says_where(tmp_path, text, message):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        calls.load(path)
    assert "wrong.json" in str(raised.value)
