"""A network that lives: programs come and are asked about, cancelled, rerouted; links change; arrays are compacted."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.collective import WHOLE
from foretrain.errors import ConfigError, StallError
from foretrain.network.fluid import Fluid
from foretrain.units import MILLISECOND, SECOND
from tests.network.fluid.oracle import RATE, paths, program, ring, star, waiting


def test_two_flows_that_overlap_in_part() -> None:
    """Two seconds of bytes each on one link, the second 1 s later: the first ends at 3 s, the second at 4 s."""
    network = Fluid(np.array([1e9]))
    first, second = network.add(program([(0,)], 2e9)), network.add(program([(0,)], 2e9), at=SECOND)
    assert network.advance() == (first, second)
    assert (first.end, second.end) == (3 * SECOND, 4 * SECOND)


def test_a_prediction_is_what_happens_if_nothing_comes() -> None:
    network = Fluid(np.array([1e9]))
    first = network.add(program([(0,)], 2e9))
    assert network.predict(first) == 2 * SECOND
    assert network.now == 0
    second = network.add(program([(0,)], 2e9), at=SECOND)
    assert network.predict(first) == 3 * SECOND
    assert network.predict(second) == 4 * SECOND
    network.cancel(second)
    assert network.predict(first) == 2 * SECOND
    network.advance()
    assert network.predict(first) == first.end == 2 * SECOND
    with pytest.raises(ConfigError, match="was cancelled"):
        network.predict(second)


def test_stopping_where_a_program_completes() -> None:
    network = Fluid(np.array([1e9, 1e9]))
    short, long = network.add(program([(0,)], 1e9)), network.add(program([(1,)], 3e9))
    assert network.advance(stop=True) == (short,)
    assert network.now == SECOND
    assert network.advance(2 * SECOND, stop=True) == ()
    assert network.now == 2 * SECOND
    assert network.advance(stop=True) == (long,)
    assert network.running == ()


def test_a_link_that_degrades_fails_and_comes_back() -> None:
    network = Fluid(np.array([1e9]))
    flow = network.add(program([(0,)], 4e9))
    network.pass_to(SECOND)
    network.set_capacity([0], 0.5e9)
    assert network.predict(flow) == 7 * SECOND
    network.pass_to(3 * SECOND)
    network.set_capacity([0], 0)
    network.pass_to(10 * SECOND)
    with pytest.raises(StallError, match=r"flow 0: 2e\+09 bytes of its step 0 wait for link 0, which is down"):
        network.advance()
    network.set_capacity([0], 2e9)
    network.advance()
    assert flow.end == 11 * SECOND


def test_a_rerouted_flow_keeps_what_it_has_sent() -> None:
    network = Fluid(np.array([1e9, 2e9]))
    flow = network.add(program([(0,)], 4e9, steps=[2]))
    network.pass_to(6 * SECOND)
    network.set_capacity([0], 0)
    network.reroute(flow, np.array([0]), paths([(1,)]))
    network.advance()
    assert flow.end == 7 * SECOND


def test_a_cancelled_program_leaves_its_room_to_others() -> None:
    network = Fluid(star(8))
    one, other = network.add(ring(8, 1e8)), network.add(ring(8, 1e8))
    network.cancel(other)
    network.advance()
    assert other.cancelled
    assert other.end is None
    assert one.end == pytest.approx(2 * 7 / 8 * 1e8 / RATE * SECOND, rel=1e-9)
    with pytest.raises(ConfigError, match="has completed"):
        network.cancel(one)


def test_arrays_are_compacted_while_flows_run_on() -> None:
    """Thousands of short programs pass by a long one, a ring, and one that waits."""
    results = []
    for busy in (False, True):
        network = Fluid(np.concatenate([np.full(3, RATE), star(8)]))
        long = network.add(waiting(program([(0,), (1,)], RATE), [(1, 0, WHOLE)]))
        round_ = network.add(ring(8, 40e9, 1e6, offset=3))
        for turn in range(300):
            if busy:
                network.add(program([(2,)] * 64, 1e3), at=turn * MILLISECOND)
        network.advance()
        assert len(network._state.flow) < 20_000
        results.append((long.end, round_.end))
    assert results[0] == results[1]


def test_a_stall_says_who_waits_for_whom_or_for_which_link() -> None:
    network = Fluid(np.array([1e9, 0.0]), classes=2, name="cable {}".format)
    network.add(waiting(program([(0,), (0,)], 1e6, steps=[2, 1]), [(0, 1, 1), (1, 0, WHOLE)]))
    network.add(program([(0,), (0, 1)], 1e9, priority=[1, 0]))
    with pytest.raises(StallError) as caught:
        network.advance()
    text = str(caught.value)
    assert "flow 0: its step 0 waits for 1 steps of flow 1, which has made 0" in text
    assert "flow 1: waits for all 2 steps of flow 0, which has made 0" in text
    assert "cable 1, which is down" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: net.add(program([(5,)])), "links: 5 is no link"),
        (lambda net: net.add(program([(0,)], priority=[1])), "priority: 1 is no class"),
        (lambda net: net.set_capacity([9], 1.0), "links: 9 is no link"),
        (lambda net: net.set_capacity([0], -1.0), "capacity: -1.0 is not a rate"),
        (lambda net: net.utilisation(), "bins: 0 keep"),
        (lambda net: (net.pass_to(9), net.advance(3)), "until: 3 is past"),
        (lambda net: Fluid(np.ones(1), classes=0), "classes: 0"),
        (lambda net: Fluid(np.array([1.0, -1.0])), r"capacity\[1\]: .* is not a rate"),
        (lambda net: Fluid(np.array([1.0, np.nan])), r"capacity\[1\]: .* is not a rate"),
        (lambda net: program([(0,)], -1.0), r"program.size\[0\]: -1.0"),
        (lambda net: program([(0,)], steps=[0]), r"program.steps\[0\]: 0 is below 1"),
    ],
)
def test_what_is_wrong_is_said(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(Fluid(np.array([1e9])))
