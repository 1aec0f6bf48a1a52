import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.device import calibration
from foretrain.device.calibration import Calibration, OperatorTime
from foretrain.device.work import FORMATS, Attention, Convolution, Gemm, MemoryWork
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND

GEMM = OperatorTime(Gemm(8192, 4096, 4096), 400 * MICROSECOND, 0.01)
H100 = Calibration("NVIDIA H100 80GB HBM3", "torch 2.13", (GEMM, OperatorTime(MemoryWork(10**9), 3 * MICROSECOND)))

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
HEAD = {"version": 1, "device": "a", "stack": "b"}


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
        ({**HEAD, "measured": [{"operator": "Memory", "time": "1us"}]}, r"measured\[0\].moved: None is missing"),
        ({**HEAD, "measured": ["x"]}, r"measured\[0\].entry: 'x' is not an object"),
    ],
)
def test_a_wrong_file_says_where_and_what_to_write(tmp_path, content, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as raised:
        calibration.load(path)
    assert "wrong.json" in str(raised.value)


def test_a_file_that_is_not_there_or_no_json(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        calibration.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ConfigError, match="is not JSON"):
        calibration.load(tmp_path / "text.json")
