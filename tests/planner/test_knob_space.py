"""Settings as points of a space, and iteration times measured at them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network import Cluster
from foretrain.planner.search import Space, robust, tune
from foretrain.schedule import POLICIES, spec
from foretrain.simulation import simulate
from foretrain.units import MILLISECOND
from foretrain.workload import zoo
from foretrain.workload.step import Gradient, Layer, Workload

WORK = zoo("resnet50", device="V100")
SPACES = {name: Space.of(spec(name), WORK, running=True) for name in POLICIES}
FREE = [name for name, space in SPACES.items() if space.free]


@pytest.mark.parametrize("name", FREE)
def test_what_is_proposed_is_within_what_makes_a_difference(name):
    space, source = SPACES[name], random.Random(name)
    for one in (*(space.random(source) for _ in range(20)), *space.grid(2)):
        for knob in space.free:
            low, high = space.limits(knob)
            value = one.settings[knob.name]
            assert value in knob.grid if knob.grid else 0.9 * low <= value <= 1.1 * high


@given(st.sampled_from(FREE), st.integers(), st.sampled_from([2.0, 4.0]))
def test_neighbours_differ_in_one_knob_by_one_stride(name, seed, stride):
    space = SPACES[name]
    here = space.random(random.Random(seed))
    for place, knob in enumerate(space.free):
        for near in space.neighbours(here, knob, stride):
            apart = [abs(a - b) for a, b in zip(space.point(here), space.point(near), strict=True)]
            assert all(not far for other, far in enumerate(apart) if other != place)
            assert 0 < apart[place] <= math.log(stride) + 0.2


@pytest.mark.parametrize(("name", "fuse"), [("partition", 0.0), ("partition", 4.0), ("credit", 0.0)])
def test_a_size_that_is_too_large_to_matter_moves_from_the_largest_that_does(name, fuse):
    space = Space.of(spec("bytescheduler"), WORK)
    knob = next(knob for knob in space.free if knob.name == name)
    most = space.largest if name == "partition" and not fuse else space.total
    far = [one.settings[name] for one in space.neighbours(space.at(**{name: 100 * most, "fuse": fuse}), knob, 4.0)]
    assert min(far) == pytest.approx(most / 4, rel=0.05)
    assert max(far) <= 1.1 * most


@pytest.mark.parametrize(
    ("schedule", "of_several"),
    [
        ("bytescheduler", True),
        ("bytescheduler(fuse=0)", False),
        ("bytescheduler(fuse=4)", True),
        ("prophet(fuse=0)", False),
        ("prophet", True),
        ("pace", True),
        ("p3", False),
    ],
)
def test_a_partition_may_be_larger_than_the_largest_tensor_where_tensors_are_fused(schedule, of_several):
    space = Space.of(spec(schedule), WORK)
    knob = next(knob for knob in space.free if knob.name in ("partition", "slice"))
    assert space.limits(knob)[1] == (space.total if of_several else space.largest)


def test_the_search_finds_partitions_of_several_tensors():
    """Forty equal layers, whose tensors are small beside what an operation costs."""
    layers = tuple(Layer(f"layer{k}", MILLISECOND, 2 * MILLISECOND) for k in range(40))
    gradients = tuple(Gradient(f"layer{k}.weight", 100_000, k, 2 * (40 - k) * MILLISECOND) for k in range(40))
    work = Workload("alike", 1, layers, gradients)
    place = Cluster(2, up=1e8, down=1e8, overhead=4 * MILLISECOND)
    found = tune(work, place, "prophet")
    assert found.settings["partition"] > 100_000
    alone = simulate(work, place, spec("prophet(partition=100kB)"), trace=False)
    assert simulate(work, place, found, trace=False).iteration_time < alone.iteration_time


def test_knobs_that_are_set_are_kept():
    space = Space.of(spec("bytescheduler(credit=1MB)"), WORK)
    assert [knob.name for knob in space.free] == ["partition", "fuse"]
    assert all(one.settings["credit"] == 1_000_000 for one in space.grid(3))
    assert len(space.grid(3)) == 3 * 4


def test_what_only_noise_gives_a_meaning_is_searched_in_running_jobs():
    assert "quantile" not in {knob.name for knob in Space.of(spec("prophet"), WORK).free}
    assert "quantile" in {knob.name for knob in Space.of(spec("prophet"), WORK, running=True).free}


TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=40)


@given(TIMES)
def test_it_is_among_what_was_measured_whatever_the_order(times):
    sample = robust(times)
    assert min(times) <= sample.time <= max(times)
    assert sample == robust(sorted(times))
    assert sample.error >= 0
    assert sample.iterations == len(times)


def test_outliers_do_not_count():
    times = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98, 9.0, 30.0]
    assert robust(times).time == pytest.approx(1.0, abs=0.011)
    assert robust(times).error < 0.02


def test_the_error_is_that_of_a_median():
    source = random.Random(0)
    found = [robust([source.gauss(1, 0.03) for _ in range(101)]) for _ in range(300)]
    off = math.sqrt(sum((sample.time - 1) ** 2 for sample in found) / len(found))
    assert sum(sample.error for sample in found) / len(found) == pytest.approx(off, rel=0.15)
