"""Sums of a shard: resent, absent, late and malformed pushes. `tests.comm.ps.client` pushes in random order."""

import numpy as np
import pytest

from foretrain.comm.ps.frames import Malformed
from foretrain.comm.ps.placement import Declared, ShardPart
from foretrain.comm.ps.server.shard import SumShard

COUNT = 48
SIZE = 4 * COUNT


def shard(workers, **options):
    return SumShard([ShardPart(7, 0, 0, SIZE, 0)], [Declared("layer", SIZE, "float32", 0)], workers, **options)


def push(one, worker, step, values, start=0, end=COUNT):
    payload = None if values is None else memoryview(values[start:end].tobytes())
    return one.push(worker, 7, step, 4 * start, 4 * (end - start), payload)


def alike(deliveries, *workers):
    """The one value that was sent to these workers."""
    assert [worker for worker, _ in deliveries] == list(workers)
    (value,) = {(each.start, each.end): each for _, each in deliveries}.values()
    return value


def test_a_repeated_push_counts_once_and_is_answered_again():
    one, values = shard(2), np.arange(COUNT, dtype=np.float32)
    push(one, 0, 0, values)
    assert push(one, 0, 0, values) == []
    told = alike(push(one, 1, 0, values), 0, 1)
    again = alike(push(one, 0, 0, values, 8, 16), 0)
    assert bytes(again.data) == bytes(told.data[32:64]) == (2 * values[8:16]).tobytes()
    push(one, 0, 1, values)
    later = alike(push(one, 1, 0, values), 1)  # round 0 may still be asked for by who was not told
    assert bytes(later.data) == (2 * values).tobytes()
    push(one, 1, 1, values)
    push(one, 0, 2, values)
    assert push(one, 1, 0, values) == []


def test_a_range_without_any_gradient_is_absent_and_zero_beside_others():
    one, values = shard(2), np.ones(COUNT, np.float32)
    push(one, 0, 0, None)
    told = alike(push(one, 1, 0, None), 0, 1)
    assert told.data is None
    push(one, 0, 1, None)
    told = alike(push(one, 1, 1, values), 0, 1)
    assert bytes(told.data) == values.tobytes()
    push(one, 0, 2, None)
    push(one, 1, 2, values, 0, 8)
    push(one, 1, 2, None, 8, COUNT)
    again = [value for _, value in push(one, 0, 2, None)]
    assert [(value.start, value.end, value.data is None) for value in again] == [(0, 32, False), (32, SIZE, True)]


def test_a_lost_worker_counts_no_more():
    one, values = shard(3), np.ones(COUNT, np.float32)
    push(one, 0, 0, values)
    push(one, 2, 0, 4 * values, 0, 8)
    early = alike(push(one, 1, 0, values, 0, 8), 0, 1, 2)
    assert bytes(early.data) == (6 * values[:8]).tobytes()
    push(one, 1, 0, values, 8, 16)
    freed = alike(one.remove_worker(2), 0, 1)
    # As much as three would have: the mean over workers stays a mean.
    np.testing.assert_array_equal(np.frombuffer(freed.data, np.float32), 1.5 * 2 * values[8:16])
    rest = alike(push(one, 1, 0, values, 16, COUNT), 0, 1)
    assert (rest.start, rest.end) == (64, SIZE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 8, 0, 0, SIZE, None), "part"),
        ((0, 7, 0, 2, 4, None), "range"),
        ((0, 7, 0, 0, 6, None), "range"),
        ((0, 7, 0, 0, 0, None), "range"),
        ((0, 7, 0, SIZE, 4, None), "range"),
        ((0, 7, 0, 8, SIZE, None), "range"),
        ((0, 7, 0, 0, SIZE, memoryview(b"1234")), "size"),
        ((0, 7, 4, 0, SIZE, None), "round"),
    ],
)
def test_malformed_pushes_are_refused(arguments, reason):
    one = shard(2)
    for worker in range(2):
        push(one, worker, 1, np.zeros(COUNT, np.float32))
    with pytest.raises(Malformed) as error:
        one.push(*arguments)
    assert error.value.reason == reason


def test_a_third_round_cannot_begin_before_the_first_is_complete():
    one, values = shard(2), np.ones(COUNT, np.float32)
    push(one, 0, 0, values)
    push(one, 0, 1, values)
    with pytest.raises(Malformed, match="before round 0 is complete"):
        push(one, 0, 2, values)
    assert one.waiting() == [
        f"round 0: part of task 'layer' waits for worker 1 ({SIZE} bytes)",
        f"round 1: part of task 'layer' waits for worker 1 ({SIZE} bytes)",
    ]


def test_held_sums_are_sent_when_they_are_pulled():
    one, values = shard(2), np.ones(COUNT, np.float32)
    assert one.push(0, 7, 0, 0, SIZE, memoryview(values.tobytes()), held=True) == []
    assert one.pull(0, 7, 0, 0, 16) == []
    deliveries = push(one, 1, 0, values, 0, 8)
    assert [(worker, value.start, value.end) for worker, value in deliveries] == [(1, 0, 32), (0, 0, 16)]
    assert [(value.start, value.end) for _, value in one.pull(0, 7, 0, 16, 32)] == [(16, 32)]
    assert [(worker, value.end) for worker, value in push(one, 1, 0, values, 8, COUNT)] == [(1, SIZE), (0, 48)]
    with pytest.raises(Malformed, match="a pull of 4 bytes"):
        one.pull(0, 7, 1, 0, 4)


def test_a_restarted_shard_begins_with_any_round():
    one, values = shard(2, restarted=True), np.ones(COUNT, np.float32)
    assert push(one, 0, 41, values) == []
    told = alike(push(one, 1, 41, 2 * values), 0, 1)
    assert bytes(told.data) == (3 * values).tobytes()
    assert push(one, 1, 40, values) == []
    assert one.blocking_round(0) is None  # though it has not pushed round 40: it need not
    push(one, 1, 42, values)
    assert one.blocking_round(0) == 42
    assert one.blocking_round(1) is None


def test_a_resent_round_that_is_overtaken_is_dropped():
    """Worker 1 says rounds 5 and 6 again, and worker 0 rounds 6 and 7: it has all sums of 6, so nobody lacks 5's."""
    one, values = shard(2, restarted=True), np.ones(COUNT, np.float32)
    push(one, 1, 5, values)
    push(one, 0, 6, values)
    push(one, 0, 7, values)
    assert push(one, 1, 5, values) == []
    told = alike(push(one, 1, 6, 2 * values), 0, 1)
    assert (told.step, bytes(told.data)) == (6, (3 * values).tobytes())
    one = shard(2, restarted=True)
    push(one, 1, 5, values)
    push(one, 0, 7, values)
    assert push(one, 0, 6, values) == []
    assert alike(push(one, 1, 6, values), 0, 1).step == 6
    with pytest.raises(Malformed, match="round 10 of part 7, which is in round 7"):
        push(one, 0, 10, values)
