"""Hyperparameters: from which round on, and as they were said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.consistency import Hyperparameters, decode_groups, encode_groups, finite
from foretrain.comm.ps.frames import Malformed

numbers = st.one_of(st.integers(-5, 10**6), st.floats(allow_nan=False, allow_infinity=False))
settings = st.one_of(numbers, st.booleans(), st.none(), st.tuples(numbers, numbers))


@given(st.lists(st.dictionaries(st.sampled_from(["lr", "betas", "eps", "fused"]), settings), max_size=3))
def test_hyperparameters_are_decoded_to_the_last_bit(groups):
    heard = decode_groups(encode_groups(groups))
    assert repr(heard) == repr(tuple(groups))


@given(st.lists(st.integers(0, 20), max_size=8).map(sorted), st.integers(0, 20))
def test_the_latest_hyperparameters_up_to_a_round_hold_in_it(rounds, later):
    rules = Hyperparameters(2)
    for number, step in enumerate(rounds):
        rules.say(1, step, ({"lr": number},))
        since = [place for place, each in enumerate(rounds[: number + 1]) if each <= step]
        assert rules.of(1, step) == ({"lr": since[-1]},)
        assert rules.of(1, step + later) == rules.of(1, step)
        assert rules.of(1, rounds[0] - 1) is None
    assert rules.of(0, later) is None


def test_a_state_restores():
    rules, other = Hyperparameters(2), Hyperparameters(2)
    rules.say(1, 3, ({"lr": 0.1, "betas": (0.9, 0.99)},))
    other.restore(rules.state())
    assert other.state() == rules.state() == [[], [(3, [{"lr": 0.1, "betas": (0.9, 0.99)}])]]
    assert other.of(1, 3) == rules.of(1, 3)


@pytest.mark.parametrize("text", [b"", b"{}", b'[{"lr": "x"}]', b'[{"lr": {}}]', b'[{"lr": [["x"]]}]', b"[1]"])
def test_malformed_hyperparameters_are_refused(text):
    with pytest.raises(Malformed):
        decode_groups(text)


def test_only_finite_hyperparameters_can_be_encoded():
    assert all(map(finite, (1.0, None, True, (0.9, 1.0))))
    assert not any(map(finite, (math.inf, (1, math.nan))))
