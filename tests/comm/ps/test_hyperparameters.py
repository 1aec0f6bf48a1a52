"""Hyperparameters: from which round on, and as they were said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.frames import Malformed
from foretrain.comm.ps.hyperparameters import Hyperparameters, decode, encode, finite

numbers = st.one_of(st.integers(-5, 10**6), st.floats(allow_nan=False, allow_infinity=False))
settings = st.one_of(numbers, st.booleans(), st.none(), st.tuples(numbers, numbers))


@given(st.lists(st.dictionaries(st.sampled_from(["lr", "betas", "eps", "fused"]), settings), max_size=3))
def test_what_is_said_is_heard_to_the_last_bit(groups):
    heard = decode(encode(groups))
    assert repr(heard) == repr(tuple(groups))


@given(st.lists(st.integers(0, 20), max_size=8).map(sorted), st.integers(0, 20))
def test_the_last_that_is_not_of_a_later_round_counts(rounds, later):
    rules = Hyperparameters(2)
    for number, step in enumerate(rounds):
        rules.say(1, step, ({"lr": number},))
        since = [place for place, each in enumerate(rounds[: number + 1]) if each <= step]
        assert rules.of(1, step) == ({"lr": since[-1]},)
        assert rules.of(1, step + later) == rules.of(1, step)
    assert rules.of(0, later) is None


def test_what_was_pushed_before_a_change_goes_by_what_was_said_before():
    rules = Hyperparameters(1)
    for step in (0, 4, 7):
        rules.say(0, step, ({"lr": step},))
        rules.say(0, step, ({"lr": step},))
    assert [rules.of(0, step) for step in (4, 6, 7, 9)] == [({"lr": step},) for step in (4, 4, 7, 7)]
    assert rules.of(0, 3) is None


def test_a_state_restores():
    rules, other = Hyperparameters(2), Hyperparameters(2)
    rules.say(1, 3, ({"lr": 0.1, "betas": (0.9, 0.99)},))
    other.restore(rules.state())
    assert other.state() == rules.state() == [[], [(3, [{"lr": 0.1, "betas": (0.9, 0.99)}])]]
    assert other.of(1, 3) == rules.of(1, 3)


@pytest.mark.parametrize("text", [b"", b"{}", b'[{"lr": "x"}]', b'[{"lr": {}}]', b'[{"lr": [["x"]]}]', b"[1]"])
def test_what_does_not_read(text):
    with pytest.raises(Malformed):
        decode(text)


def test_what_can_be_said():
    assert all(map(finite, (1.0, None, True, (0.9, 1.0))))
    assert not any(map(finite, (math.inf, (1, math.nan))))
