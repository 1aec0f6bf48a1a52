import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.device import calls
from foretrain.device.calls import Meta, OperatorCall, contiguous
from foretrain.errors import ConfigError

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


ENTRY = {"call": "aten::relu", "arguments": ["float32[8]"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list 'operators'; record them with"),
        ('{"version": 2, "operators": []}', "is of version 2, not 1"),
        (json.dumps({"version": 1, "operators": [ENTRY, "x"]}), r"operators\[1\].entry: 'x' is not an object"),
        (json.dumps({"version": 1, "operators": [{}]}), r"operators\[0\].call: None is not an operator"),
        (json.dumps({"version": 1, "operators": [{"call": "aten::relu"}]}), r"arguments: None is not a list"),
        (json.dumps({"version": 1, "operators": [ENTRY | {"arguments": ["float32[8"]}]}), "is not a tensor; write"),
        (json.dumps({"version": 1, "operators": [ENTRY | {"arguments": ["f32[8]:1,1"]}]}), "is not a tensor"),
        (json.dumps({"version": 1, "operators": [ENTRY | {"arguments": [{"a": 1}]}]}), "is no argument"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, text, message):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        calls.load(path)
    assert "wrong.json" in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        calls.load(tmp_path / "none.json")
