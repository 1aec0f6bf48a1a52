"""Bayesian optimisation that begins with forecasts."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.planner.search import IterationTimes, Space
from foretrain.planner.simulator_prior import SimulatorPrior
from foretrain.schedule import spec
from foretrain.workload import zoo

WORK = zoo("vgg16", device="V100")
SPACE = Space.of(spec("bytescheduler"), WORK)


def valley(partition, credit):
    """A time whose least, 1, is at these knobs: 5 % more at ten times or a tenth."""

    def time(one):
        off = math.log10(one.settings["partition"] / partition), math.log10(one.settings["credit"] / credit)
        return 1 + 0.05 * (off[0] ** 2 + off[1] ** 2) + 0.01 * (one.settings["fuse"] > 1)

    return time


def search(proposer, truth, noise=0.0, seed=0):
    source = random.Random(seed)
    tried = []
    while (one := proposer.ask()) is not None:
        time = truth(one) * (1 + source.gauss(0, noise))
        proposer.tell(one, IterationTimes(time, noise * time, 8))
        tried.append(one)
    return tried


def informed(forecast, **options):
    return SimulatorPrior(SPACE, forecast, [(one, forecast(one)) for one in SPACE.grid(4)], **options)


def test_a_forecast_that_is_right_needs_one_sample():
    forecast = valley(2e6, 8e6)
    proposer = informed(forecast)
    first = proposer.ask()
    assert first == proposer.best
    assert forecast(first) <= min(forecast(one) for one in SPACE.grid(4))
    search(proposer, lambda one: 3.7 * forecast(one))  # a level that is wrong is no matter
    assert forecast(proposer.best) <= forecast(first)


@settings(max_examples=20, deadline=None)
@given(st.floats(5.8, 6.8), st.floats(6.8, 7.8), st.integers(0, 1000))
def test_a_forecast_that_is_wrong_is_put_right(partition, credit, seed):
    truth = valley(10**partition, 10**credit)
    proposer = informed(valley(2e6, 2e7))
    tried = search(proposer, truth, 0.01, seed)
    assert len(tried) <= 12
    assert truth(proposer.best) <= 1.03 * min(truth(one) for one in SPACE.grid(4))
    assert truth(proposer.best) <= truth(tried[0]) * 1.02


def test_it_takes_no_more_samples_than_it_may():
    assert len(search(informed(valley(2e6, 2e7), most=3, worth=0.0), valley(1e5, 1e8), 0.1)) == 3


def test_it_begins_with_what_it_is_given():
    start = SPACE.at(partition=123_000, credit=456_000, fuse=0.0)
    proposer = informed(valley(2e6, 2e7), start=start)
    assert proposer.ask() == proposer.best == start


def test_what_was_learnt_before_a_change_is_believed_for_the_most_part():
    """The forecast is wrong in the same way on a link that is twice as slow: then one sample is enough."""
    forecast, truth = valley(2e6, 2e7), valley(4e5, 4e6)
    before = informed(forecast, most=20)
    search(before, truth, 0.002)
    after = SimulatorPrior(
        SPACE, lambda one: 2 * forecast(one), [(one, 2 * forecast(one)) for one in SPACE.grid(4)], learnt=before.learnt
    )
    new = informed(forecast)
    assert truth(after.ask()) <= 1.002 * truth(before.best)
    assert truth(after.ask()) < truth(new.ask()) - 0.01
    assert {each.age for each in after.learnt} == {1}
    search(after, lambda one: 3 * truth(one), 0.002)
    assert {each.age for each in after.learnt} == {0, 1}
    assert truth(after.best) <= 1.005 * truth(before.best)
