"""Other layer times for the same step: as spread as asked, the same for a seed, and never a contradiction."""

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.workload import Gradient, Layer, Workload, zoo
from foretrain.workload.step import jittered

RESNET = zoo("resnet50")

layers = st.lists(st.builds(Layer, st.just("a"), *[st.integers(0, 10**9)] * 3), min_size=1, max_size=6)


@st.composite
def workloads(draw):
    found = draw(layers.filter(lambda step: sum(one.forward + one.backward for one in step)))
    backward = sum(one.backward for one in found)
    releases = draw(st.lists(st.integers(0, backward), min_size=1, max_size=6))
    gradients = tuple(Gradient(str(index), 1, 0, release) for index, release in enumerate(releases))
    return Workload("any", 1, tuple(found), gradients)


@given(workloads(), st.floats(0, 1), st.integers(0, 9))
def test_releases_stay_in_order_and_within_the_backward_pass(workload, sigma, seed):
    other = jittered(workload, sigma, seed)

    assert all(0 <= one.release <= other.backward for one in other.gradients)
    before = sorted(range(len(workload.gradients)), key=lambda index: workload.gradients[index].release)
    after = [other.gradients[index].release for index in before]
    assert after == sorted(after)
    assert [one.size for one in other.gradients] == [one.size for one in workload.gradients]


def test_a_release_at_the_end_of_a_layer_stays_there():
    layers = tuple(Layer(name, 10, backward) for name, backward in (("first", 300), ("last", 100)))
    work = Workload("two", 1, layers, (Gradient("first", 4, 0, 400), Gradient("last", 4, 1, 100)))

    other = jittered(work, 0.5, 1)

    assert other.gradients[1].release == other.layers[1].backward
    assert other.gradients[0].release == other.backward


def test_the_spread_is_as_asked_and_the_mean_stays():
    factors = [
        math.log(new.backward / old.backward)
        for seed in range(40)
        for new, old in zip(jittered(RESNET, 0.1, seed).layers, RESNET.layers, strict=True)
        if old.backward > 1000
    ]

    assert pstdev(factors) == pytest.approx(0.1, rel=0.05)
    assert fmean(map(math.exp, factors)) == pytest.approx(1, abs=0.005)


def test_a_seed_decides_and_no_spread_changes_nothing():
    assert jittered(RESNET, 0.1, 3) == jittered(RESNET, 0.1, 3) != jittered(RESNET, 0.1, 4)
    assert jittered(RESNET, 0, 3) is RESNET


@pytest.mark.parametrize("sigma", [-0.1, 1.1, math.nan, True, "0.1"])
def test_what_is_no_spread_is_refused(sigma):
    with pytest.raises(ConfigError, match="jitter"):
        jittered(RESNET, sigma, 0)
