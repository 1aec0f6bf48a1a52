"""Calibrations that describe their device, or know operators by their arguments."""

import dataclasses
import json

import pytest

from foretrain.device import OperatorModel, calibration, overlap_slowdown, preset
from foretrain.device.calibration import Calibration, MeasuredCall, OperatorTime
from foretrain.device.calls import OperatorCall, contiguous
from foretrain.device.gpu import Arithmetic, Device
from foretrain.device.work import Gemm, HostCopy, MemoryWork
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND

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
H100 = "NVIDIA H100 80GB HBM3"


def test_a_file_gives_back_device_and_calls(tmp_path):
    for found in (FILE, Calibration(H100, "torch", (), FILE.calls, None, 5 * MICROSECOND)):
        calibration.dump(found, tmp_path / "file.json")
        assert calibration.load(tmp_path / "file.json") == found


def test_a_device_is_described_by_the_file_or_known_by_its_product():
    assert FILE.described() == CORE
    assert Calibration(H100, "torch").described() is preset("H100")
    with pytest.raises(ConfigError, match="is no GPU known by name, and the file has no description; add one by"):
        Calibration("GPU of next year", "torch").described()


def test_a_measured_call_is_known_whatever_its_numbers():
    model = OperatorModel(preset("H100"), measured=Calibration(H100, "torch", (), FILE.calls))
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


HEAD = {"version": 1, "device": "a", "stack": "b", "measured": []}
GOOD = {"name": "CPU", "memory": "1GiB", "bandwidth": "1GB/s", "launch": "1us", "local_rate": "1GB/s",
        "fp32": {"peak": 1, "conv": 1, "winograd": 1, "gemm": 1}}  # fmt: skip


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"nam": "x"}, "field: 'nam' is unknown; did you mean 'name'"),
        (GOOD | {"memory": 3}, "memory: 3 is not a size"),
        (GOOD | {"bandwidth": "1"}, "bandwidth: '1' is not a rate"),
        (GOOD | {"fp32": {"peak": 1}}, r"fp32.conv: None is not a number above 0"),
        (GOOD | {"fp32": 3}, "fp32: 3 is not an object"),
        (GOOD | {"capability": [9]}, r"capability: \[9\] is not a major and a minor number"),
        (GOOD | {"serial": 1}, "serial: 1 is neither true nor false"),
        (GOOD | {"overlap": -1}, "overlap: -1 is not a number above 0"),
        (GOOD | {"name": ""}, "name: '' is not a name"),
        ({"name": "CPU"}, "memory: None is missing"),
    ],
)
def test_a_wrong_description_says_what_to_write(tmp_path, description, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(HEAD | {"description": description}))
    with pytest.raises(ConfigError, match=message):
        calibration.load(path)


def test_a_wrong_call_says_which(tmp_path):
    path = tmp_path / "wrong.json"
    for entry, message in (
        ({"call": "aten::mul", "arguments": ["float32[", 1], "time": "1us"}, r"measured\[0\].arguments"),
        ({"call": "aten::mul", "arguments": [], "time": "0us"}, r"measured\[0\].time: '0ps' is not above 0"),
        ({"call": "aten::mul", "arguments": [], "time": "1us", "m": 3}, r"measured\[0\].field: 'm' is unknown"),
    ):
        path.write_text(json.dumps(HEAD | {"measured": [entry]}))
        with pytest.raises(ConfigError, match=message):
            calibration.load(path)
