"""The bandwidth monitor: what it measures, what it promises, when it reports drift."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.schedule import CostModel, spec
from foretrain.schedule.monitor import Gauge, Monitor, quantile
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import Trainer

BYTE = 1 << 32
"""A cost of one picosecond per byte."""


class Link:
    """Serves a monitor's chunks one after the other, ``slowness`` times as slow as the model says."""

    def __init__(self, cost, monitor):
        self.cost, self.monitor = cost, monitor
        self.slowness = 1
        self.now = self.free = 0
        self.coming = []

    def send(self, size):
        self.monitor.start(self.now, size)
        self.free = max(self.now, self.free) + self.cost.time(size) * self.slowness
        self.coming.append(self.free + self.cost.latency)

    def receive(self):
        self.now = max(self.now, self.coming.pop(0))
        self.monitor.done(self.now)

    def batch(self, sizes):
        """All at once; all but the first find the link busy."""
        for size in sizes:
            self.send(size)
        while self.coming:
            self.receive()
        self.now += 1000


def pair(share=0.1, window=8, latency=0, overhead=10, span=0):
    monitor = Monitor(CostModel(overhead, BYTE, latency), share, window, span)
    return monitor, Link(CostModel(overhead, BYTE, latency), monitor)


@given(st.lists(st.integers(-9, 9), min_size=1), st.integers(0, 16).map(lambda k: k / 16))
def test_quantile_is_the_smallest_that_enough_do_not_exceed(values, share):
    enough = [v for v in values if sum(w <= v for w in values) >= Fraction(share) * len(values)]
    assert quantile(values, share) == min(enough)


def test_a_link_half_as_fast_is_adopted_when_told_to():
    monitor, link = pair()
    link.slowness = 2
    link.batch([90] * 9)
    assert monitor.time(90) == 100
    assert monitor.drifted(0.2)
    monitor.settle()
    assert monitor.time(90) == 200
    assert not monitor.drifted(0.2)


def test_what_fits_is_the_most_that_drains_in_time():
    rng = random.Random(1)
    for _ in range(300):
        cost = CostModel(rng.choice((0, 10, 1000)), rng.randint(1, 10 * BYTE))
        monitor = Monitor(cost, 0.1)
        room = cost.overhead + rng.randint(1, 10**6)
        size = monitor.fits(room)
        assert monitor.time(size) <= room < monitor.time(size + 1)


def test_nothing_fits_in_less_than_an_operation():
    monitor, _ = pair(overhead=100)
    assert monitor.fits(99) < 0
    assert monitor.fits(100) == 0


def test_a_chunk_on_an_idle_link_measures_nothing():
    """It pays the latency that the next one hides."""
    monitor, link = pair(window=2)
    link.slowness = 5
    for _ in range(20):
        link.batch([90])
    monitor.settle()
    assert monitor.time(90) == 100


@pytest.mark.parametrize("latency", [0, 30, 5000])
def test_latency_is_not_taken_for_a_slow_link(latency):
    monitor, link = pair(window=2, latency=latency)
    link.batch([90] * 9)
    assert not monitor.drifted(0)
    monitor.settle()
    assert monitor.time(90) == 100


def test_a_chunk_that_started_while_the_last_was_on_its_way_may_have_found_the_link_idle():
    monitor, link = pair(window=1, latency=5000)
    for _ in range(9):
        link.send(90)
        link.now += 1000
    while link.coming:
        link.receive()
    monitor.settle()
    assert monitor.time(90) == 100


def test_it_promises_a_low_quantile_of_bandwidth():
    """Promising too much delays urgent data; promising too little idles the link a little."""
    monitor, link = pair(share=0.25, window=100)
    for slowness in (1, 3, 2, 4):
        link.slowness = slowness
        link.batch([90] * 26)  # 25 measurements each
    monitor.settle()
    assert monitor.time(90) == 300


def test_a_short_disturbance_is_no_drift():
    monitor, link = pair(window=9)
    link.batch([90] * 10)
    monitor.settle()
    link.slowness = 10
    link.batch([90] * 5)  # 4 of 9: the median stays
    assert not monitor.drifted(0.2)
    link.batch([90] * 2)
    assert monitor.drifted(0.2)


def test_a_few_measurements_tell_a_change_however_long_the_window():
    """The old ones would keep the median for hundreds of chunks, and what is promised for longer."""
    monitor, link = pair(window=128)
    link.batch([90] * 129)
    monitor.settle()
    link.slowness = 2
    link.batch([90] * 9)
    assert not monitor.drifted(0.2)
    link.batch([90] * 2)
    assert monitor.drifted(0.2)
    monitor.forget(0.2)
    monitor.settle()
    assert monitor.time(90) == 200
    link.slowness = 1
    link.batch([90] * 18)
    assert monitor.drifted(0.2)
    monitor.forget(0.2)
    monitor.settle()
    assert monitor.time(90) == 100


def test_free_at_is_when_the_link_has_drained():
    monitor, link = pair()
    assert monitor.free_at == 0
    link.now = 50
    link.send(90)
    assert monitor.free_at == 150
    link.send(40)
    assert monitor.free_at == 200
    link.receive()
    assert monitor.free_at == 200
    link.receive()
    assert monitor.free_at == 200
    link.slowness = 3
    link.send(90)
    assert monitor.free_at == 300
    link.receive()  # idle again: what happened counts, not what was expected
    assert monitor.free_at == 500


def test_behind_a_smaller_chunk_nothing_is_measured_where_there_are_several_pipes():
    """On two pipes of one picosecond a byte each, 900 bytes behind 100 arrive 1700 after them, 100 behind 900 100."""
    cost = CostModel(0, BYTE, 0, elsewhere=BYTE)
    monitor = Monitor(cost, 0.1, window=2)
    for size in (100, 900, 100):
        monitor.start(0, size)
    for time in (200, 1900, 2000):
        monitor.done(time)
    monitor.settle()
    assert monitor.time(1000) == 1000


def test_jitter_of_single_chunks_averages_out_before_a_quantile_is_taken():
    """Chunks delivered late and early in turn: the link is as fast as it was."""
    promised = {}
    for span in (0, 1000):
        monitor = Monitor(CostModel(10, BYTE), 0.1, 64, span)
        now = 0
        for _ in range(100):
            for _ in range(20):
                monitor.start(now, 90)
            for index in range(20):
                monitor.done(now + 100 * (index + 1) + (80 if index % 2 else 0))
            now += 5000
        monitor.settle()
        promised[span] = monitor.time(90)
    assert promised[0] == 180
    assert promised[1000] <= 120


@pytest.mark.parametrize("slowness", [2, 3])
def test_each_arrival_corrects_when_the_link_will_be_free(slowness):
    monitor, link = pair()
    link.slowness = slowness
    for _ in range(4):
        link.send(90)
    assert monitor.free_at == 400
    for arrived in range(1, 4):
        link.receive()
        assert monitor.free_at == 100 * slowness * arrived + 100 * (4 - arrived)
    link.receive()
    assert monitor.free_at == 400 * slowness


SCHEDULED = "bytescheduler(partition=1MB,credit=4MB)"
EVEN = Workload("even", 1, (Layer("l", 1, 1),), tuple(Gradient(f"t{k}", 4_000_000, 0, 0) for k in range(8)))


def told(plan, slownesses, take=True):
    """Return what a gauge says after each step over a link that is so slow, under any policy; and the gauge."""
    gauge = Gauge(CostModel(0, BYTE))
    trainer, found = Trainer(EVEN, spec(plan), watch=gauge.watch), []
    for slowness in slownesses:
        trainer.link.slowness = slowness
        trainer.step([0] * 8)
        found.append(gauge.taken() if take else None)
    return found, gauge


@pytest.mark.parametrize("plan", ["fifo", SCHEDULED, "largest_tail_first"])
@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_a_gauge_reports_a_lasting_change_once(plan, slower):
    found, _ = told(plan, [1.3] * 12 + [1.3 * slower] * 12)
    assert [each for each in found if each is not None] == [pytest.approx(slower, rel=0.01)]
    assert found.index(next(filter(None, found))) <= 12 + 5


def test_a_gauge_reports_no_change_where_the_link_varies():
    assert set(told(SCHEDULED, [1 + 0.1 * (k % 3) for k in range(60)])[0]) == {None}


def test_changes_that_were_not_taken_multiply():
    _, gauge = told(SCHEDULED, [1.0] * 3 + [2.0] * 6 + [4.0] * 6, take=False)
    assert gauge.taken() == pytest.approx(4, rel=0.01)
    assert gauge.taken() is None
