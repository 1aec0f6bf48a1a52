"""Clocks: who may go on, in any interleaving of workers and parts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.ps.consistency import Clocks, consistency
from foretrain.errors import ConfigError


@given(st.data(), st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=40)
def test_no_worker_begins_a_step_more_than_the_bound_ahead_of_another(data, workers, bound):
    parts = [3, 7]
    clocks = Clocks(parts, workers, bound)
    step, pushed = [0] * workers, [set() for _ in range(workers)]
    for _ in range(60):
        able = [worker for worker in range(workers) if len(pushed[worker]) < len(parts)]
        assert able
        worker = data.draw(st.sampled_from(able))
        part = data.draw(st.sampled_from([part for part in parts if part not in pushed[worker]]))
        clocks.tick(worker, part)
        pushed[worker].add(part)
        for other in range(workers):
            if len(pushed[other]) == 2 and all(clocks.may_go_on(other, each, step[other]) for each in parts):
                step[other] += 1
                pushed[other] = set()
        assert max(step) - min(step) <= bound
        assert max(clocks.done(w, p) for w in range(workers) for p in parts) <= min(step) - 1 + bound + 1


def test_no_worker_waits_for_one_that_has_left():
    clocks = Clocks([0], 3, 1, lost=[2])
    for _ in range(2):
        clocks.tick(0, 0)
    assert not clocks.may_go_on(0, 0, 1)
    assert clocks.behind(0, 1) == [1]
    clocks.leave(1)
    clocks.leave(1)
    assert clocks.may_go_on(0, 0, 1)
    assert not clocks.may_go_on(0, 0, 2)
    clocks.leave(0)
    assert clocks.may_go_on(0, 0, 1)


def test_without_a_bound_no_worker_waits():
    clocks = Clocks([0], 2, math.inf)
    for step in range(9):
        assert not clocks.may_go_on(0, 0, step)
        clocks.tick(0, 0)
        assert clocks.may_go_on(0, 0, step)


def test_a_state_is_plain_and_restores():
    one, other = Clocks([1, 2], 2, 1), Clocks([1, 2], 2, 1)
    one.tick(0, 1)
    one.leave(1)
    assert one.state() == {"present": [0], "done": {1: [0, -1], 2: [-1, -1]}}
    other.restore(one.state())
    assert other.state() == one.state()
    one.tick(0, 1)
    assert other.done(0, 1) == 0


def test_a_consistency_is_parsed_or_refused():
    assert consistency("bsp") == (False, 0)
    assert consistency("async") == (True, math.inf)
    assert [consistency(f"ssp({bound})") for bound in (0, 12)] == [(True, 0), (True, 12)]
    for text in ("", "ssp", "ssp()", "ssp(-1)", "ssp(x)", "BSP", "ssp(3) "):
        with pytest.raises(ConfigError, match="is unknown"):
            consistency(text)
