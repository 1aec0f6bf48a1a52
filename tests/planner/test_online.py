"""The tuner of a running job, without one."""

import random
from functools import cache

import pytest

from foretrain.network import cluster
from foretrain.planner import simulator_prior
from foretrain.planner.online import Tuner, What
from foretrain.planner.search import IterationTimes, tune
from foretrain.planner.simulator_prior import JobForecaster
from foretrain.schedule import spec
from foretrain.simulation import simulate
from foretrain.workload import zoo

A, B, C = (spec(f"bytescheduler(partition={k}MB)") for k in (1, 2, 3))
WORK = zoo("vgg16", device="V100")


class Listed:
    """Proposes what it is given, in order."""

    def __init__(self, *specs):
        self.best, self._specs, self.told = specs[0], list(specs), []

    def ask(self):
        return self._specs.pop(0) if self._specs else None

    def tell(self, one, sample):
        self.told.append((one, sample))
        self.best = min(self.told, key=lambda told: told[1].time)[0]


def run(tuner, time, iterations):
    """The knobs in force in each iteration."""
    path = []
    for k in range(iterations):
        path.append(tuner.spec)
        moved = tuner.iterated(time(tuner.spec, k))
        assert (moved is None) == (tuner.spec == path[-1])
    return path


def test_each_is_measured_after_it_has_settled():
    proposer = Listed(A, B, C)
    times = {A: 1.0, B: 0.9, C: 1.05}
    tuner = Tuner(proposer, window=4, settle=2, first=3)
    # What does not count takes ten times as long.
    path = run(tuner, lambda one, k: times[one] * (10 if k < 3 or path_changes(k) else 1), 40)
    assert path[:7] == [A] * 7
    assert path[7:13] == [B] * 6
    assert path[13:19] == [C] * 6
    assert set(path[19:]) == {B}
    assert [(one, sample.time) for one, sample in proposer.told] == [(A, 1.0), (B, 0.9), (C, 1.05)]
    assert [event.what for event in tuner.events] == [What.TRY] * 3 + [What.HOLD]
    assert not tuner.searching
    assert tuner.holds.time == 0.9


def path_changes(k):
    """Iterations right after a change of the test above."""
    return k in (7, 8, 13, 14, 19, 20)


def test_what_is_much_worse_is_taken_back_at_once():
    proposer = Listed(A, B, C)
    times = {A: 1.0, B: 1.5, C: 0.9}
    tuner = Tuner(proposer, window=8, settle=1, first=0)
    path = run(tuner, lambda one, k: times[one], 60)
    assert path.count(B) == 3  # one that settles, and two that tell
    assert path[path.index(B) + 3] == A
    assert path[-1] == C
    assert [event.what for event in tuner.events] == [What.TRY, What.TRY, What.BACK, What.TRY, What.HOLD]


def test_one_slow_iteration_is_forgiven():
    proposer = Listed(A, B)
    tuner = Tuner(proposer, window=6, settle=0, first=0)
    path = run(tuner, lambda one, k: 5.0 if k == 8 else {A: 1.0, B: 0.9}[one], 30)
    assert path[-1] == B
    assert What.BACK not in {event.what for event in tuner.events}


def test_drift_begins_the_search_again():
    asked = []

    def again(one, before, now):
        asked.append((one, before.time, now.time))
        return Listed(C, B)

    tuner = Tuner(Listed(A, B), again, window=4, settle=1, first=0)
    path = run(tuner, lambda one, k: {A: 1.0, B: 0.9, C: 0.8}[one] * (1 if k < 40 else 2), 100)
    ((one, before, now),) = asked
    assert (one, before, now) == (B, 0.9, 1.8)
    assert set(path[:40]) == {A, B}
    assert path[-1] == C
    assert [event.what for event in tuner.events].count(What.AGAIN) == 1


def test_drift_in_the_middle_of_a_search_is_not_taken_for_the_knobs():
    asked = []

    def again(one, before, now):
        asked.append(one)
        return Listed(A)

    tuner = Tuner(Listed(A, B, C), again, window=4, settle=1, first=0)
    run(tuner, lambda one, k: 1.0 if k < 6 else 2.0, 40)
    assert asked == [A]


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_a_large_change_is_told_after_four_iterations(factor):
    asked = []
    tuner = Tuner(Listed(A), lambda *told: asked.append(told) or Listed(C), window=12, settle=1, first=0)
    run(tuner, lambda one, k: 1.0 if k < 40 else factor, 44)
    assert [(one, before.time, now.time) for one, before, now in asked] == [(A, 1.0, factor)]


def test_where_the_link_has_changed_it_is_measured_anew():
    asked = []
    tuner = Tuner(Listed(A, B), lambda *told: asked.append(told) or Listed(C), window=6, settle=1, first=0)
    run(tuner, lambda one, k: {A: 1.0, B: 1.1}[one], 30)
    assert tuner.relinked(2.0) is None
    path = run(tuner, lambda one, k: {A: 1.1, C: 0.9}[one], 20)
    assert path[:5] == [A, A, A, A, C]
    assert [(one, before.time, now.time) for one, before, now in asked] == [(A, 1.0, 1.1)]
    assert [event.what for event in tuner.events][2:5] == [What.HOLD, What.LOOK, What.AGAIN]


def test_noise_is_no_drift():
    source = random.Random(0)
    tuner = Tuner(Listed(A, B), lambda *_: Listed(A), first=0)
    run(tuner, lambda one, k: source.gauss(1, 0.03) * (2 if source.random() < 0.02 else 1), 3000)
    assert What.AGAIN not in {event.what for event in tuner.events}


def test_knobs_that_are_known_are_kept_while_they_take_what_they_took():
    known = IterationTimes(1.0, 0.01, 8)
    tuner = Tuner(Listed(A, B), lambda *_: Listed(C), known=known, first=2)
    assert set(run(tuner, lambda one, k: 1.01, 50)) == {A}
    assert tuner.holds == known
    tuner = Tuner(Listed(A, B), lambda *_: Listed(C), known=known, first=2)
    assert run(tuner, lambda one, k: 1.3, 50)[-1] == C


@cache
def told(place, text):
    return simulate(WORK, place, text, trace=False).iteration_time * 1e-12


def forecast(place, one):
    return told(place, str(one))


def test_in_a_virtual_job_that_is_as_forecast_nothing_is_lost():
    plan, place = spec("bytescheduler"), cluster("8xV100@10Gbps")
    tuner = Tuner(JobForecaster(WORK, place, plan).informed())
    path = run(tuner, lambda one, k: forecast(place, one), 200)
    best = forecast(place, tune(WORK, place, plan))
    assert forecast(place, path[-1]) <= 1.002 * best
    assert sum(forecast(place, one) for one in path) <= 1.01 * len(path) * best


def test_after_a_step_of_bandwidth_forecasts_are_put_right():
    place, plan = cluster("8xV100@10Gbps"), spec("bytescheduler")
    slow = place.scaled(0.5)
    virtual = JobForecaster(WORK, place, plan)
    tuner = Tuner(virtual.informed(), virtual.again)
    run(tuner, lambda one, k: forecast(place if k < 150 else slow, one), 250)
    assert virtual.place.up == pytest.approx(slow.up, rel=0.05)
    assert forecast(slow, tuner.spec) <= 1.005 * forecast(slow, tune(WORK, slow, plan))


def test_after_a_change_the_search_is_as_careful_as_before(monkeypatch):
    asked = []

    def searched(*arguments, careful, **options):
        asked.append(careful)
        return tune(*arguments, careful=careful, **options)

    monkeypatch.setattr(simulator_prior, "tune", searched)
    virtual = JobForecaster(WORK, cluster("8xV100@10Gbps"), spec("bytescheduler"))
    first = virtual.informed(evaluations=5, careful=True)
    virtual.again(first.best, IterationTimes(1.0, 0.01, 5), IterationTimes(1.5, 0.01, 5))
    assert asked == [True, True]
