"""Cases at the edge: paths that repeat, rings of nothing, moves in every phase, long runs, histories at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.collective import WHOLE
from foretrain.errors import ConfigError, StallError
from foretrain.network.fluid import Fluid, run
from foretrain.network.fluid import state as c
from foretrain.network.program import Program, joined
from foretrain.units import MILLISECOND, SECOND
from tests.network.fluid.oracle import RATE, fat_tree_paths, paths, program, ring, star, waiting
from tests.network.fluid.test_programs import random_program
from tests.network.ways import interpreted


def test_a_path_that_crosses_a_link_twice_loads_it_twice() -> None:
    network = Fluid(np.array([90.0, 1000.0]), bins=8)
    twice, once = network.add(program([(0, 1, 0)], 30.0)), network.add(program([(0,)], 60.0))
    network.advance(0)
    assert [network.rates(one)[0] for one in (twice, once)] == pytest.approx([30.0, 30.0])
    network.advance()
    # After a second the other one is alone.
    assert (twice.end, once.end) == (SECOND, pytest.approx(SECOND + SECOND / 3))
    assert network.utilisation()[0].sum(axis=1) == pytest.approx([120.0, 30.0])


def test_a_link_that_a_ring_crosses_twice_keeps_it_from_collapsing() -> None:
    base = program([(0, 2, 0), (1, 2)], 1e6, steps=[2, 2])
    whole = waiting(base, [(0, 1, 0), (1, 0, 0)])
    capacity = np.full(3, 1e9)
    assert run(whole, capacity).finish == pytest.approx(run(whole, capacity, full=True).finish, rel=1e-12)


@pytest.mark.parametrize("lag", [0, 1, 2, WHOLE])
def test_who_follows_a_member_of_a_ring_step_by_step_sees_its_steps(lag: int) -> None:
    """A pipeline behind a ring on links of its own, as in a hierarchical all-reduce."""
    whole = joined([ring(4, 1e8, 1e6), program([(8,)], 1e6, steps=[6])])
    base = waiting(whole, [*((i, (i - 1) % 4, 0) for i in range(4)), (4, 2, lag)])
    capacity = np.full(9, RATE)
    assert run(base, capacity).finish == pytest.approx(run(base, capacity, full=True).finish, rel=1e-12)


@pytest.mark.parametrize("when", [0, 1_500_000, 2_000_000, 7_000_000, 9_999_999])
@pytest.mark.parametrize("kind", ["nothing to send", "no links", "one member without links"])
def test_a_ring_of_latencies_alone_can_be_disturbed(kind: str, when: int) -> None:
    """Ten steps of 1 µs, which a flow on its links changes nothing about."""
    n = 6
    lists = {"nothing to send": [(i, n + (i + 1) % n) for i in range(n)], "no links": [()] * n}
    lists["one member without links"] = [(), *lists["nothing to send"][1:]]
    size = 1e6 if kind == "no links" else 0.0
    base = program(lists[kind], size, steps=[10] * n, latency=[1e6] * n)
    network = Fluid(star(n))
    first = network.add(waiting(base, [(i, (i - 1) % n, 0) for i in range(n)]))
    second = network.add(program([(i, n + i) for i in range(n)], 5e4), at=when)
    network.advance()
    assert first.finish == pytest.approx(np.full(n, 10e6), rel=1e-12)
    assert second.end == when + 10**6


def test_many_flows_of_one_instant_are_one_batch() -> None:
    network = Fluid(np.full(50, RATE))
    network.add(program([(link,) for link in range(50) for _ in range(4)], 1e6, latency=[3.0] * 200))
    network.advance()
    assert network.effort["batches"] == 2


def phases() -> tuple[Program, np.ndarray]:
    """Flow 0 is over at 1 ms, 1 sends from 0 to 4 ms, 2 has its latency until 3 ms, 3 waits for flow 1, 4 for 9 ms."""
    base = program(
        [(0,), (1,), (2,), (3,), (4,)],
        [1e6, 4e6, 1e6, 1e6, 1e6],
        latency=[0.0, 0.0, 3e9, 0.0, 0.0],
        release=[0.0, 0.0, 0.0, 0.0, 9e9],
    )
    return waiting(base, [(3, 1, WHOLE)]), np.full(7, 1e9)


@pytest.mark.parametrize(
    ("flow", "faster", "at_once"), [(0, 1.0, 1.0), (1, 3.0, 2.0), (2, 3.5, 3.0), (3, 4.5, 4.0), (4, 9.5, 9.0)]
)
def test_a_flow_is_rerouted_in_every_phase(flow: int, faster: float, at_once: float) -> None:
    """At 2 ms, to links twice as fast, or to none, after which its step ends at once."""
    whole, capacity = phases()
    capacity[5:] *= 2
    for path, end in (((5, 6), faster), ((), at_once)):
        network = Fluid(capacity, bins=16)
        handle = network.add(whole)
        network.pass_to(2 * MILLISECOND)
        network.reroute(handle, np.array([flow]), paths([path]))
        network.advance()
        assert handle.finish[flow] == pytest.approx(end * MILLISECOND)


def test_reroutes_give_back_the_seats_they_leave() -> None:
    network = Fluid(np.full(3, 1e9))
    handle = network.add(program([(0,), (1,)], 1e9))
    for turn in range(100):
        network.reroute(handle, np.array([0, 1]), paths([(turn % 3,), (2, 1)]))
    assert network._state.link[:, c.RESERVED].sum() == 3
    network.advance()
    assert not network._state.link[:, c.RESERVED].any()


@pytest.mark.parametrize(
    ("flows", "message"),
    [
        ([-1], "flows: -1 is no flow; they are 0 to 1"),
        ([2], "flows: 2 is no flow; they are 0 to 1"),
        ([0, 0], r"flows: \[0, 0\] name one twice"),
    ],
)
def test_wrong_reroutes_are_refused(flows: list[int], message: str) -> None:
    network = Fluid(np.array([1e9]))
    handle = network.add(program([(0,), (0,)]))
    with pytest.raises(ConfigError, match=message):
        network.reroute(handle, np.array(flows), paths([(0,)] * len(flows)))


def busy(network: Fluid, seed: int, rounds: int) -> list[float]:
    """Programs come, are cancelled, rerouted, their links changed, at random; when each of them ended."""
    rng = np.random.default_rng(seed)
    n = 6
    capacity = star(n)
    handles = []
    for _ in range(rounds):
        now = network.now + int(rng.integers(0, 3 * MILLISECOND))
        match rng.choice(["ring", "flows", "later", "cancel", "link", "reroute"]):
            case "ring":
                handles.append(network.add(ring(n, rng.choice([0.0, 2e7]), rng.choice([0.0, 1e6])), at=now))
            case "flows":
                pairs = [tuple(rng.choice(n, 2, replace=False)) for _ in range(5)]
                whole = program([(a, n + b) for a, b in pairs], 3e7, latency=[1e6] * 5, steps=[2] * 5)
                handles.append(network.add(waiting(whole, [(1, 0, WHOLE), (2, 1, 1), (3, 0, 0)]), at=now))
            case "later":
                when = now + 5 * MILLISECOND
                handles.append(network.add(program([(0, n + 1)], 1e7, release=[float(when)]), at=now))
            case "cancel":
                network.pass_to(now)
                if network.running:
                    network.cancel(network.running[int(rng.integers(len(network.running)))])
            case "link":
                network.pass_to(now)
                link = int(rng.integers(2 * n))
                network.set_capacity([link], capacity[link] * rng.uniform(0.3, 1.0))
            case "reroute":
                network.pass_to(now)
                if network.running:
                    handle = network.running[int(rng.integers(len(network.running)))]
                    flow = int(rng.integers(len(handle.program)))
                    network.reroute(handle, np.array([flow]), paths([(int(rng.integers(n)), n + int(rng.integers(n)))]))
    network.advance()
    return [handle.end or 0 for handle in handles]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_histories_at_random_are_those_of_the_full_refill(seed: int) -> None:
    ours, full = (busy(Fluid(star(6), full=full), seed, 25) for full in (False, True))
    assert ours == pytest.approx(full, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_compaction_at_any_moment_changes_nothing(seed: int) -> None:
    """Rings that run collapsed or not, flows in their latency, released later or waiting: they are where they were."""

    class Eager(Fluid):
        def add(self, program: Program, at: int | None = None):
            if at is not None:
                self.pass_to(at)
            self._compact()
            return super().add(program)

    assert busy(Eager(star(6)), seed, 25) == busy(Fluid(star(6)), seed, 25)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_a_disturbed_ring_carries_each_byte_once(seed: int, share: float) -> None:
    """Utilisation of a ring that is expanded, in bins that time outgrows."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    capacity = star(n) * rng.uniform(0.2, 1.0, 2 * n)
    one = ring(n, 1e8, 1e6)
    network = Fluid(capacity, bins=8)
    network.add(one)
    network.add(program([(0,)], 1e7), at=int(share * run(one, capacity).finish.max()))
    network.advance()
    expected = np.full(2 * n, 2 * (n - 1) * 1e8 / n)
    expected[0] += 1e7
    assert network.utilisation()[0].sum(axis=1) == pytest.approx(expected, rel=1e-9)


def test_what_a_busy_link_carries_does_not_drift() -> None:
    """Two long flows keep it busy while 200,000 short ones of odd weights come and go."""
    rng = np.random.default_rng(0)
    short = program(
        [(0,)] * 200 + [(0, 1)] * 200, rng.uniform(1e5, 3e5, 400), steps=[500] * 400, weight=rng.uniform(0.1, 7.0, 400)
    )
    network = Fluid(np.array([RATE, RATE / 3]))
    network.add(program([(0,), (0, 1)], 1e15))
    network.add(short)
    network.advance(20 * SECOND)
    assert network.effort["events"] > 200_000
    state = network._state
    rates = state.fluid[:402, c.RATE]
    crossing = np.concatenate([[1, 1], np.ones(400)]) * rates, np.concatenate([[0, 1], np.repeat([0, 1], 200)]) * rates
    load = [one.sum() for one in crossing]
    assert state.share[:, c.USED] == pytest.approx(load, rel=1e-12)
    assert (np.array(load) <= state.share[:, c.CAPACITY] * (1 + 1e-12)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_predictions_come_true_and_leave_no_trace(seed: int) -> None:
    whole, capacity, _ = random_program(seed)
    outcomes = []
    for asking in (False, True):
        network = Fluid(capacity, bins=16)
        handles = [network.add(whole, at=turn * 10**6) for turn in range(3)]
        asked = [network.predict(one) for one in (*reversed(handles), *handles)] if asking else []
        network.advance()
        ends = [one.end for one in handles]
        assert asked in ([], ends[::-1] + ends)
        outcomes.append((ends, network.utilisation()[0].tobytes()))
    assert outcomes[0] == outcomes[1]


def outcomes() -> str:
    """Ends of random programs, of a ring and of random histories, to the last bit."""
    ends = [run(*random_program(seed, 20)[:2]).finish for seed in range(6)]
    ends.append(run(ring(6, 1e8, 1e6), star(6) * np.linspace(0.5, 1.0, 12)).finish)
    ends += [np.array(busy(Fluid(star(6), bins=4), seed, 12)) for seed in range(8)]
    return " ".join(float(end).hex() for end in np.concatenate(ends))


def test_interpreted_kernels_find_the_same_bits_and_stay_within_their_arrays() -> None:
    """Compiled kernels do not look whether an index is inside; numpy does."""
    assert interpreted("from tests.network.fluid.test_edges import outcomes; print(outcomes())") == outcomes()


@pytest.mark.parametrize("seed", range(10))
def test_rounding_feeds_nobody(seed: int) -> None:
    """A link fails under flows of two classes: what then has no way is said to have none, however many came before."""
    rng = np.random.default_rng(seed)
    lists, links = fat_tree_paths(rng, 12, 30)
    network = Fluid(RATE * rng.uniform(0.25, 1.5, links), classes=2)
    sizes, priority = rng.uniform(1e6, 1e9, len(lists)), rng.integers(0, 2, len(lists))
    handle = network.add(program(lists, sizes, priority=priority))
    network.pass_to(10**9)
    network.set_capacity([lists[0][0]], 0)
    through = np.array([lists[0][0] in path for path in lists])
    unfinished = through & (network.progress(handle) < 1)
    if unfinished.any():
        with pytest.raises(StallError, match="which is down"):
            network.advance()
        assert (network.rates(handle)[unfinished] == 0).all()
