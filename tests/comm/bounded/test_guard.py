"""The guard of an automatic tolerance: it rises while nothing changes, and is zero at once when something does."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.bounded.guard import FIRST, MOST, ROUND, Guard
from foretrain.errors import ConfigError


def norms(guard, steps, norm, first=0):
    for step in range(first, first + steps):
        guard.observe(step, "norm", norm(step, guard.of_step(step)))


def test_it_begins_without_losses_and_doubles_up_to_the_most():
    guard = Guard(10)
    assert {guard.of_step(step) for step in range(ROUND)} == {0.0}

    norms(guard, ROUND, lambda *_: 1.0)
    assert [guard.of_step(ROUND + k) for k in range(4)] == [FIRST, FIRST, FIRST, 0.0]

    norms(guard, ROUND, lambda *_: 1.0, ROUND)
    assert guard.tolerance == 2 * FIRST
    norms(guard, 20 * ROUND, lambda *_: 1.0, 2 * ROUND)
    assert guard.tolerance == MOST
    assert not guard.alarms


def test_a_norm_that_losses_raise_is_an_alarm_and_each_takes_twice_as_long():
    guard = Guard(0)
    lossless = []
    for step in range(40 * ROUND):
        if guard.tolerance == 0.0:
            lossless.append(step)
        guard.observe(step, "norm", 1.0 if guard.of_step(step) < 3 * FIRST else 2.0)

    runs = [1 + sum(1 for _ in run) for run in _runs(lossless)]
    assert [round(run / ROUND) for run in runs[:4]] == [1, 1, 2, 4]
    assert "the norm is" in guard.alarms[0]


def _runs(steps):
    run = []
    for before, after in zip(steps, [*steps[1:], math.inf], strict=True):
        if after == before + 1:
            run.append(after)
        else:
            yield run
            run = []


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9])
def test_a_norm_out_of_all_measure_is_an_alarm_at_once(value):
    guard = Guard(0)
    norms(guard, ROUND + 1, lambda *_: 1.0)
    assert guard.tolerance == FIRST
    guard.observe(ROUND + 1, "norm", value)
    assert guard.tolerance == 0.0
    assert f"step {ROUND + 1}, tolerance 0.50%" in guard.alarms[0]


def test_a_loss_that_rises_is_an_alarm():
    guard = Guard(0)
    for step in range(3 * ROUND):
        guard.observe(step, "loss", 1.0 if step < ROUND else 1.0 + 0.1 * (step - ROUND))
        guard.observe(step, "norm", 1.0)
    assert "the loss is" in guard.alarms[0]


def test_a_loss_that_rises_slowly_while_something_is_lost_is_an_alarm():
    guard, loss = Guard(10), 1.0
    for step in range(1500):
        loss *= 1.003 if guard.of_step(step) else 1.0
        guard.observe(step, "loss", loss)
        guard.observe(step, "norm", 1.0)
        if step < 200:
            risen = loss
    assert "the loss is at least" in guard.alarms[0]
    assert risen < 1.4
    assert loss < 3


def test_a_loss_that_stays_high_keeps_the_tolerance_low_until_a_long_pause_has_shown_it():
    guard, lossy = Guard(0), 0
    for step in range(60 * ROUND):
        guard.observe(step, "loss", 1.0 if step < 4 * ROUND else 3.0)
        guard.observe(step, "norm", 1.0)
        lossy += 5 * ROUND <= step < 16 * ROUND and guard.tolerance > 0.0
    assert 1 <= len(guard.alarms) <= 3
    assert lossy <= 2 * ROUND
    assert guard.tolerance == MOST


@pytest.mark.parametrize("of_lossless", [0.3, 3.0])
def test_norms_may_be_neither_smaller_nor_larger_than_those_without_losses(of_lossless):
    guard, random = Guard(10), Random(1)
    norms(guard, 60, lambda _, tolerance: (of_lossless if tolerance else 1.0) * math.exp(random.gauss(0, 0.05)))
    assert f"the norm is {'6' if of_lossless < 1 else '2'}" in guard.alarms[0]
    assert ("below" if of_lossless < 1 else "above") in guard.alarms[0]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("alike", [0.0, 0.8], ids=["independent", "correlated"])
def test_noise_that_stays_the_same_is_hardly_ever_an_alarm(noise, alike):
    """Twenty jobs of 5,000 steps; losses may be correlated as moving averages are."""
    alarms = 0
    for seed in range(20):
        random, guard, level = Random(seed), Guard(10), 0.0
        for step in range(5000):
            level = alike * level + math.sqrt(1 - alike**2) * random.gauss(0, noise)
            guard.observe(step, "loss", math.exp(level))
            guard.observe(step, "norm", math.exp(random.gauss(0, noise)))
        alarms += len(guard.alarms)
    assert alarms <= (6 if alike else 0)


@given(st.integers(0, 2**32), st.floats(0.01, 0.5))
def test_noise_and_training_are_no_alarm(seed, noise):
    random = Random(seed)
    guard = Guard(10)
    for step in range(20 * ROUND):
        guard.observe(step, "loss", 2.0 * math.exp(-step / 200 + random.gauss(0, noise)))
        guard.observe(step, "norm", math.exp(-step / 500 + random.gauss(0, noise)))
    assert not guard.alarms
    assert guard.tolerance == MOST


def test_when_gradients_become_others_norms_are_compared_with_later_ones_and_the_rest_goes_on():
    guard = Guard(0)
    norms(guard, 6 * ROUND, lambda *_: 1.0)
    before = guard.tolerance
    assert before > FIRST
    guard.begin_anew(6 * ROUND)
    assert {guard.of_step(6 * ROUND + k) for k in range(ROUND)} == {0.0}
    norms(guard, 6 * ROUND, lambda *_: 100.0, 6 * ROUND)
    assert guard.tolerance >= before
    assert not guard.alarms


def test_only_what_it_knows_is_compared():
    with pytest.raises(ConfigError, match="name: 'accuracy' is nothing that a guard compares"):
        Guard(0).observe(0, "accuracy", 1.0)


def test_losses_of_another_kind_are_compared_among_themselves():
    guard = Guard(0)
    for step in range(10 * ROUND):
        if step == 5 * ROUND:
            guard.forget_losses()
        guard.observe(step, "loss", 1.0 if step < 5 * ROUND else 7.0)
        guard.observe(step, "norm", 1.0)
    assert guard.tolerance == MOST
    assert not guard.alarms
