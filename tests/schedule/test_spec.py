"""Policies with their knobs as text, and the knobs themselves."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.schedule import POLICIES, Spec, spec
from tests.scenario import specs


@pytest.mark.parametrize(
    ("text", "name", "knobs"),
    [
        ("fifo", "fifo", {}),
        ("DDP", "ddp", {}),
        ("largest-tail-first", "largest_tail_first", {}),
        (" bytescheduler ( partition = 1MB , credit=4MiB ) ", "bytescheduler", {"partition": 10**6, "credit": 4 << 20}),
        ("fusion(cycle=2.5ms)", "fusion", {"cycle": 2_500_000_000}),
        ("prophet(factor=0.5, profile=7)", "prophet", {"factor": 0.5, "profile": 7}),
        ("p3(slice=160kB,)", "p3", {"slice": 160_000}),
    ],
)
def test_notation(text, name, knobs):
    assert spec(text) == Spec(name, knobs)


def test_a_spec_is_its_own_notation():
    plan = Spec("p3")
    assert spec(plan) is plan


@given(specs())
def test_a_spec_survives_text_exactly(plan):
    again = spec(str(plan))
    assert again == plan
    assert str(again) == str(plan)
    assert {key: type(value) for key, value in again.knobs.items()} == {k: type(v) for k, v in plan.knobs.items()}


def test_text_shows_only_what_differs_and_in_which_unit():
    plan = Spec("bytescheduler", {"partition": 25 << 20})
    assert str(plan) == "bytescheduler(partition=25MiB)"
    assert plan.settings == {"partition": 25 << 20, "credit": 16_000_000, "fuse": 0.0}
    assert str(Spec("fusion", {"cycle": 10**9})) == "fusion(cycle=1ms)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("byte-scheduler", "schedule: 'byte-scheduler' is unknown; did you mean 'bytescheduler'?"),
        ("tictak", "did you mean 'tictac'?"),
        ("", "is not a schedule; write e.g. 'bytescheduler(partition=1MB"),
        ("ddp(bucket=1MB", "is not a schedule"),
        ("ddp(bucket)", "schedule ddp: 'bucket' is not knob=value; write e.g. 'partition=1MB'"),
        ("ddp(buckt=1MB)", "schedule ddp: knob: 'buckt' is unknown; did you mean 'bucket'?"),
        ("fifo(bucket=1MB)", "schedule fifo: knob: 'bucket' is unknown"),
        ("ddp(bucket=1MB, bucket=2MB)", "schedule ddp.bucket: '2MB' contradicts the value before it"),
        ("ddp(bucket=25)", "schedule ddp.bucket: '25' is not a size; write e.g. '25MB'"),
        ("ddp(bucket=)", "schedule ddp.bucket: '' is not a size"),
        ("ddp(bucket=1B)", "schedule ddp.bucket: '1B' is out of range; allowed: 1KiB to 16GiB"),
        ("ddp(bucket=1e40B)", "is out of range"),
        ("fusion(cycle=1MB)", "schedule fusion.cycle: '1MB' is not a time"),
        ("prophet(factor=nan)", "schedule prophet.factor: 'nan' is out of range"),
        ("prophet(factor=two)", "schedule prophet.factor: 'two' is not a number; write e.g. '2.0'"),
        ("prophet(profile=1.5)", "schedule prophet.profile: '1.5' is not a number"),
        ("prophet(cut=2)", "schedule prophet.cut: '2' is out of range; allowed: 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError) as caught:
        spec(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 5, ["ddp"], b"ddp"])
def test_only_text_is_a_text(wrong):
    with pytest.raises(ConfigError, match="is not a schedule"):
        spec(wrong)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 1.5, True, "1MB", None, -1, 0, 10**400, 1e300, [1]]
)
def test_values_that_no_knob_takes(value):
    with pytest.raises(ConfigError, match=r"schedule ddp\.bucket: .* is (out of range|not a number of this knob)"):
        Spec("ddp", {"bucket": value})


def test_names_that_nothing_has():
    with pytest.raises(ConfigError, match="schedule: 'nope' is unknown"):
        Spec("nope")
    with pytest.raises(
        ConfigError, match=r"schedule ddp\.knob: 'partition' is unknown; known: bucket, buckets, find_unused, first"
    ):
        Spec("ddp", {"partition": 1})


def test_whole_floats_become_whole_numbers():
    value = Spec("ddp", {"bucket": 2e6}).knobs["bucket"]
    assert (value, type(value)) == (2_000_000, int)


@given(
    st.one_of(st.text(), st.lists(st.sampled_from(["ddp", "(", ")", "bucket", "=", "1MB", ",", " ", "²"])).map("".join))
)
def test_any_text_is_a_schedule_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert spec(text).name in POLICIES
