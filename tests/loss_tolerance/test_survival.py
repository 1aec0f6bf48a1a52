"""Closed forms against two oracles: expectations that propagate through plans, and collectives on real values."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.loss_tolerance import Lossy, Random, budget, surviving
from foretrain.loss_tolerance import execution as exact
from foretrain.loss_tolerance.execution import plan_of, reduced
from foretrain.loss_tolerance.layout import layout

WAYS = ("ring", "halving_doubling", "parameter_server", "transpose")
HALVES = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}


@given(st.sampled_from(WAYS), st.sampled_from([2, 4, 8, 16]), st.floats(0, 1), st.sampled_from(list(HALVES)))
@example("ring", 7, 0.1, "all_reduce")
def test_closed_forms_are_what_propagates_through_the_plan(way, ranks, p, operation):
    plan = plan_of(way, operation, ranks)

    assert surviving(way, p, ranks, halves=HALVES[operation]) == pytest.approx(exact.surviving(plan, p), rel=1e-12)
    assert exact.surviving(plan, p, gap="held") >= exact.surviving(plan, p) * (1 - 1e-12)


def test_published_examples():
    halves = {(way, n): round(surviving(way, 0.01, n, halves=1), 3) for way in WAYS[:2] for n in (8, 64)}

    assert halves == {
        ("ring", 8): 0.966,
        ("halving_doubling", 8): 0.985,
        ("ring", 64): 0.741,
        ("halving_doubling", 64): 0.970,
    }
    assert surviving("parameter_server", 0.1, 7) == pytest.approx(0.81)


class Pattern:
    """One packet a step, lost where a bit is set."""

    def __init__(self, bits):
        self.bits = list(bits)

    def lost(self, transfer, step, packets):
        assert len(packets) == 1
        return np.array([self.bits.pop()])


@pytest.mark.parametrize(
    ("way", "operation", "ranks"),
    [
        ("ring", "reduce_scatter", 3),
        ("ring", "all_reduce", 2),
        ("halving_doubling", "reduce_scatter", 4),
        ("parameter_server", "all_reduce", 4),
        ("transpose", "reduce_scatter", 3),
        ("transpose", "all_reduce", 2),
    ],
)
def test_the_mean_over_every_pattern_of_losses_is_the_closed_form(way, operation, ranks):
    plan, p, mean = plan_of(way, operation, ranks), 0.3, 0.0
    collective = Lossy(plan, layout([plan.blocks], plan.blocks))
    steps = int(plan.steps.sum())
    for bits in product((False, True), repeat=steps):
        holds = ones(plan, 1)
        collective.run(holds, Pattern(bits))
        mean += p ** sum(bits) * (1 - p) ** (steps - sum(bits)) * survived(plan, holds)

    assert mean == pytest.approx(surviving(way, p, ranks, halves=HALVES[operation]), rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("operation", "ranks"), [("reduce_scatter", 4), ("all_reduce", 8)])
def test_real_values_under_random_losses_keep_the_share(way, ranks, operation):
    plan, p = plan_of(way, operation, ranks), 0.1
    collective = Lossy(plan, layout([40_000], plan.blocks, payload=40))
    holds = ones(plan, collective.layout.width)
    collective.run(holds, Random(p, 5))

    # Some thousands of packets for each rank and block; ones without padding, for ranks divide the values.
    assert survived(plan, holds) == pytest.approx(surviving(way, p, ranks, halves=HALVES[operation]), abs=0.01)
    assert collective.tally.share == pytest.approx(p, abs=0.01)


def ones(plan, width):
    holds = np.ones((plan.ranks + plan.helpers, plan.blocks, width), np.float32)
    holds[plan.ranks :] = 0
    return holds


def survived(plan, holds):
    arrived = reduced(plan, holds) if plan.operation == "reduce_scatter" else holds[: plan.ranks]
    return float(arrived.mean(dtype=np.float64)) / plan.ranks


@given(st.sampled_from(WAYS), st.sampled_from([2, 8, 64]), st.floats(0, 0.4), st.sampled_from([1, 2]))
def test_a_budget_is_the_inverse(way, ranks, total, halves):
    p = budget(way, total, ranks, halves=halves)

    assert 1 - surviving(way, p, ranks, halves=halves) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: surviving("ring", 1.5, 4), "p: 1.5 is no probability"),
        (lambda: surviving("halving_doubling", 0.1, 6), "ranks: 6 has no closed form"),
        (lambda: surviving("rnig", 0.1, 6), "did you mean 'ring'"),  # pyright: ignore
        (lambda: surviving("ring", 0.1, 0), "ranks: 0 is below 1"),
        (lambda: budget("ring", 0.9, 4, halves=1), "total: 0.9 is not within 0 and 0.75"),
    ],
)
def test_what_can_be_wrong(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
