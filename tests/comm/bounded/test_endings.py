"""LTP's Early Close, OptiReduce's timeouts and transform, and error feedback, over sockets that lose packets."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.bounded import HISTORY, NEVER, Hint, early_close, optireduce
from foretrain.comm.bounded.optireduce import FIRST, transform
from foretrain.comm.buffers import widen
from tests.comm.bounded.group import group
from tests.comm.bounded.relay import Network, losing, losing_data
from tests.comm.collectives.test_ring import inputs, nothing_is_left_behind, run

__all__ = ["nothing_is_left_behind"]

LENGTHS = st.integers(1, 5000)


class Ending:
    """A rule on a history of its own."""

    def __init__(self, rule):
        self._rule, self._history = rule, (ctypes.c_int64 * HISTORY)()

    def note(self, took, got=100, size=100):
        self._rule.note.ctypes(self._history, took, got, size)

    def over(self, enough=True, last=-1):
        return self._rule.over.ctypes(self._history, enough, last)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.booleans()), min_size=1, max_size=60))
def test_the_threshold_of_early_close_is_the_fastest_whole_array_of_the_epoch_before(arrays):
    ending = Ending(early_close)
    for took, whole in arrays:
        ending.note(took, 100 if whole else 99)
    epochs = len(arrays) // early_close.EPOCH
    last = arrays[(epochs - 1) * early_close.EPOCH : epochs * early_close.EPOCH] if epochs else []
    fastest = min((took for took, whole in last if whole), default=None)
    assert ending.over(enough=True) == (NEVER if fastest is None else fastest)
    assert ending.over(enough=False) == (NEVER if fastest is None else fastest + early_close.SLACK)


@given(st.lists(st.integers(0, 10**9), min_size=FIRST, max_size=FIRST), st.integers(0, 10**9))
def test_the_adaptive_timeout_is_the_95th_percentile_or_a_tenth_of_the_expected_time_after_the_last_packets(
    times, last
):
    ending = Ending(optireduce)
    for took in times:
        assert ending.over(last=0) == NEVER
        ending.note(took)
    bound = int(np.percentile(times, 95, method="inverted_cdf"))
    assert ending.over() == ending.over(enough=False) == bound
    assert ending.over(last=last) == min(bound, last + sorted(times)[FIRST // 2] * 10 // 100)


def test_the_grace_of_the_adaptive_timeout_follows_losses_and_its_expected_time_what_arrays_take():
    ending = Ending(optireduce)
    for _ in range(FIRST):
        ending.note(10_000)
    graces = []
    for got in (99_000, 99_000, 99_000, 99_950, 100_000, 100_000):
        ending.note(10_000 * got // 100_000, got, 100_000)  # as fast as expected
        graces.append(ending.over(last=0))
    assert graces == [2000, 4000, 5000, 5000, 4900, 4800]
    ending.note(5000)
    assert ending.over(last=0) == (19 * 5000 + 10_000) // 20 * 47 // 100
    ending.note(10_000, 1, 100)  # it timed out
    assert ending.over(last=0) == (19 * 10_000 + (19 * 5000 + 10_000) // 20) // 20 * 50 // 100


@given(LENGTHS, st.integers(0, 1000), st.sampled_from([np.float32, np.float64]))
def test_the_transform_is_orthogonal_and_linear_for_any_length(count, seed, dtype):
    rng = np.random.default_rng(count)
    one, other = (rng.standard_normal(count).astype(dtype) for _ in range(2))
    tolerance = 1e3 * np.finfo(dtype).eps
    forward = [values.copy() for values in (one, other, one + other)]
    for values in forward:
        transform(values, seed, False)
    np.testing.assert_allclose(np.linalg.norm(forward[0]), np.linalg.norm(one), rtol=tolerance)
    np.testing.assert_allclose(np.dot(forward[0], forward[1]), np.dot(one, other), atol=tolerance * count)
    np.testing.assert_allclose(forward[0] + forward[1], forward[2], atol=tolerance)
    transform(forward[0], seed, True)
    np.testing.assert_allclose(forward[0], one, atol=tolerance)


@given(st.integers(9, 12), st.data())
def test_a_packet_that_is_lost_is_a_small_error_of_all_values(power, data):
    count = data.draw(st.integers(1 << power, (1 << power + 1) - 1))
    first = data.draw(st.integers(0, count - 64))
    values = np.random.default_rng(count).standard_normal(count)
    lost = values.copy()
    transform(lost, 1, False)
    energy = float(np.square(lost[first : first + 64]).sum())
    lost[first : first + 64] = 0
    transform(lost, 1, True)
    error = lost - values
    np.testing.assert_allclose(np.square(error).sum(), energy)  # no more, no less than without
    assert np.abs(error).max() < 8 * np.sqrt(energy / (1 << power - 1))  # and nowhere much of it


@pytest.mark.parametrize("ending", ["early_close", "adaptive_timeout"])
def test_an_ending_loses_nothing_at_first_and_then_what_the_network_loses(ending):
    """All ranks get the same, and know what is missing in it; what is vital always arrives."""
    ranks, count = 2, 200_000
    vital = np.array([[0, 40_000]], np.int64)
    with Network(losing(0.1)) as network, group(ranks, tolerance=0.4, ending=ending, network=network) as members:
        lost = []
        for _ in range(FIRST + 10):
            arrays = [np.ones(count, np.float32) for _ in range(ranks)]
            works = [one.all_reduce(a, hint=Hint(vital=vital)) for one, a in zip(members, arrays, strict=True)]
            assert all(work.wait(300) for work in works)
            expected = np.full(count, ranks, np.float32)
            for loss in (loss for work in works for loss in work.losses):
                expected[loss.place // 4 : (loss.place + loss.size) // 4] -= 1
            for values in arrays:
                np.testing.assert_array_equal(values, expected)
            assert (expected[:10_000] == ranks).all()
            lost.append(int((expected < ranks).sum()))
    first = early_close.EPOCH if ending == "early_close" else FIRST
    assert sum(lost[:first]) == 0
    assert sum(lost) > 0


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_transformed_sums_are_those_of_the_values(kind):
    ranks, brief = 3, kind == "bfloat16"
    hint = Hint(3, vital=np.array([[0, 4000]], np.int64))
    atol = 1e-3 if kind == "float32" else 1.0
    with group(ranks, hadamard=True) as members:  # without tolerance: a busy machine loses packets, too
        for together in (True, False):
            arrays, total = inputs(kind, ranks, 30_000)
            if together:
                run(members, "all_reduce", arrays, bfloat16=brief, hint=hint)
            else:  # in flight at the same time
                works = [
                    one.reduce_scatter(a, bfloat16=brief, hint=hint) for one, a in zip(members, arrays, strict=True)
                ]
                run(members, "all_gather", arrays, bfloat16=brief)
                assert all(work.wait(0) for work in works)
            wanted, found = (widen(each) if brief else each for each in (total, arrays[0]))
            vital = slice(4000 // arrays[0].itemsize)
            np.testing.assert_array_equal(found[vital], wanted[vital])
            np.testing.assert_allclose(found, wanted, atol=atol)
            for values in arrays[1:]:
                np.testing.assert_array_equal(values.view(np.uint8), arrays[0].view(np.uint8))


@pytest.mark.parametrize("hadamard", [False, True])
def test_what_is_lost_of_a_contribution_is_in_the_next_one(hadamard):
    """All sums together are all contributions: nothing is lost for good."""
    ranks, count, steps = 2, 200_000, 8

    options = {"feedback": True, "hadamard": hadamard}
    with Network(losing_data(0.2)) as network, group(ranks, network=network, **options) as members:
        wanted, found, lost = np.zeros(count), np.zeros(count), 0
        rng = np.random.default_rng(0)
        for step in range(steps):
            hint = Hint(tolerance=0.4 if step < steps - 1 else 0.0)
            arrays = [rng.standard_normal(count).astype(np.float32) for _ in range(ranks)]
            wanted += np.sum(arrays, axis=0)
            works = [one.all_reduce(values, hint=hint) for one, values in zip(members, arrays, strict=True)]
            assert all(work.wait(300) for work in works)
            found += arrays[0]
            lost += sum(loss.size for work in works for loss in work.losses)
    assert lost > 0
    np.testing.assert_allclose(found, wanted, atol=1e-3)
