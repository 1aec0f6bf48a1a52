import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.collective import ALGORITHMS, build, steps_on_critical_path, verify
from foretrain.collective.circulant import circle
from foretrain.collective.trees import two_trees
from foretrain.collective.verification import expect, play
from foretrain.errors import ConfigError
from tests.collective.plans import HALVES, SIZES, STAGES, plans


# Odd and even, powers of two and their neighbours; the next test draws others.
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16, 17])
def test_every_rank_ends_with_what_is_promised(ranks):
    for name, plan in plans(ranks):
        try:
            verify(plan, seed=ranks)
        except Exception as error:
            error.add_note(name)
            raise


@settings(max_examples=40)
@given(ranks=st.integers(2, 12), seed=st.integers(0, 10**6))
def test_whatever_the_order_in_which_steps_end(ranks, seed):
    choice = list(plans(ranks))
    _, plan = choice[seed % len(choice)]
    expect(plan, play(plan, seed=seed))


@pytest.mark.parametrize(("ranks", "local"), [(12, 2), (12, 3), (12, 4), (12, 6)])
def test_servers_may_use_any_algorithms_inside_and_between(ranks, local):
    named = [name for name, offer in ALGORITHMS.items() if set(HALVES) <= set(offer.operations)]
    plain = [name for name in named if name not in ("hdrm", "hierarchical", "parameter_server")]
    for operation in HALVES:
        for inner in [*plain, *STAGES]:
            verify(build("hierarchical", operation, ranks, local=local, inner=inner, outer="halving_doubling"))
        for outer in [*plain, *STAGES]:
            verify(build("hierarchical", operation, ranks, local=local, inner="ring", outer=outer))
    for outer in ("double_tree", "parameter_server"):
        verify(build("hierarchical", "all_reduce", ranks, local=local, outer=outer))


@pytest.mark.parametrize("ranks", [*SIZES, 63, 64, 1000, 1024])
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "circulant"])
def test_no_more_bytes_than_the_bound_and_the_published_number_of_rounds(name, ranks):
    rounds = ranks - 1 if name == "ring" else math.ceil(math.log2(ranks))
    for operation, times in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        plan = build(name, operation, ranks)
        assert plan.sent(1.0) == pytest.approx(np.full(ranks, times * (ranks - 1) / ranks), rel=1e-12)
        if ranks <= 64:
            # Rounds of a circle that do not wait for each other may coincide.
            steps = steps_on_critical_path(plan)
            assert steps <= times * rounds
            if name == "ring" or ranks & (ranks - 1) == 0:
                assert steps == times * rounds


@pytest.mark.parametrize("ranks", SIZES)
def test_no_plan_beats_the_bound(ranks):
    for name, plan in plans(ranks):
        total = plan.sent(1.0).sum()
        if plan.operation == "all_to_all":
            assert total == pytest.approx(ranks - 1)
        elif plan.name == "in_network":  # who reduces on the way is not bound by what ranks can do
            assert plan.sent(1.0)[:ranks].max() <= 1 + 1e-12
        elif "inner=in_network" not in name:
            assert total >= (2 if plan.operation == "all_reduce" else 1) * (ranks - 1) * (1 - 1e-12), name


def test_a_pipeline_takes_one_step_for_each_hop_and_chunk():
    for ranks in (2, 3, 9):
        for chunks in (1, 2, 7):
            plan = build("ring", "broadcast", ranks, chunks=chunks)
            assert steps_on_critical_path(plan) == ranks - 2 + chunks
            assert plan.sent(1.0) == pytest.approx([1.0] * (ranks - 1) + [0.0])
            assert steps_on_critical_path(build("in_network", "all_reduce", ranks, chunks=chunks)) == 1 + chunks
            plan = build("in_network", "all_reduce", ranks, chunks=chunks, radix=2)
            assert steps_on_critical_path(plan) == 3 + chunks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 15, 16, 31, 100, 1023])
def test_nobody_forwards_more_than_a_binary_tree_in_both_together(size):
    first, second = two_trees(size)
    children = [np.bincount(parents[parents >= 0], minlength=size) for parents in (first, second)]
    assert (first < 0).sum() == (second < 0).sum() == 1
    assert (children[0] + children[1]).max() <= 2
    both = (children[0] > 0) & (children[1] > 0)
    assert both.sum() <= size % 2


@pytest.mark.parametrize("ranks", [2, 3, 8, 33, 64])
def test_each_of_two_trees_carries_half(ranks):
    plan = build("double_tree", "all_reduce", ranks, chunks=4)
    assert plan.sent(1.0).max() <= 2 + 1e-12
    assert plan.sent(1.0).sum() == pytest.approx(2 * (ranks - 1))
    received = np.bincount(plan.target, plan.size(1.0) * plan.steps)
    assert received.max() <= 2 + 1e-12
    depth = steps_on_critical_path(build("double_tree", "all_reduce", ranks, chunks=1))
    assert depth <= 2 * math.ceil(math.log2(ranks)) + 1


def test_a_parameter_server_is_reached_by_its_share_of_every_byte():
    plan = build("parameter_server", "all_reduce", 6, servers=3)
    assert plan.sent(1.0) == pytest.approx([1.0] * 6 + [2.0] * 3)
    beside = build("parameter_server", "all_reduce", 6, servers=6, colocated=True)
    assert beside.sent(1.0) == pytest.approx([2 * 5 / 6] * 6)


@pytest.mark.parametrize(("local", "servers"), [(8, 4), (4, 3)])
def test_a_hierarchy_sends_no_more_than_a_ring_and_little_of_it_outside(local, servers):
    ranks = local * servers
    plan = build("hierarchical", "all_reduce", ranks, local=local, inner="ring", outer="halving_doubling")
    assert plan.sent(1.0) == pytest.approx(np.full(ranks, 2 * (ranks - 1) / ranks))
    outside = plan.source // local != plan.target // local
    sent = np.bincount(plan.source[outside], (plan.size(1.0) * plan.steps)[outside])
    assert sent == pytest.approx(np.full(ranks, 2 * (servers - 1) / servers / local))


def test_circles_with_odd_skips_take_one_more_round_at_most():
    for size in range(2, 600, 2):
        least = math.ceil(math.log2(size))
        free, odd = circle(size), circle(size, odd=True)
        assert len(free.rounds) == least
        assert len(odd.rounds) <= least + 1
        assert all(one.skip % 2 for one in odd.rounds)
        for one in (*free.rounds, *odd.rounds):
            assert one.sent <= one.skip <= one.left - one.sent


def test_rings_may_have_orders_of_their_own():
    rng = random.Random(1)
    orders = [rng.sample(range(9), 9) for _ in range(3)]
    plan = build("ring", "all_reduce", 9, orders=orders)
    assert sorted(set(plan.channel.tolist())) == [0, 1, 2]
    verify(plan)
    for channel, order in enumerate(orders):
        mine = plan.channel == channel
        assert plan.source[mine].tolist() == order
    with pytest.raises(ConfigError, match=r"orders\[1\].*name each of 0 to 2 once"):
        build("ring", "all_reduce", 3, orders=[[0, 1, 2], [0, 1, 1]])


@pytest.mark.parametrize(
    ("name", "operation", "ranks", "options", "words"),
    [
        ("rnig", "all_reduce", 4, {}, "did you mean 'ring'"),
        ("ring", "all_redcue", 4, {}, "did you mean 'all_reduce'"),
        ("ring", "all_to_all", 4, {}, "use one of: direct, pairwise"),
        ("ring", "all_reduce", 1, {}, "at least 2"),
        ("ring", "all_reduce", 4, {"chanels": 2}, "did you mean 'channels'"),
        ("ring", "all_reduce", 4, {"channels": 0}, "at least 1"),
        ("ring", "broadcast", 4, {"root": 4}, "ranks are 0 to 3"),
        ("halving_doubling", "all_reduce", 4, {"first": "nearest"}, "did you mean 'near'"),
        ("hdrm", "all_reduce", 4, {"hosts": 4}, "give switches="),
        ("hdrm", "all_reduce", 4, {"hosts": 4, "switches": 3}, "an even number"),
        ("hdrm", "all_reduce", 40, {"hosts": 4, "switches": 4}, "are not 2 to 16"),
        ("hierarchical", "all_reduce", 8, {"local": 3}, "does not divide 8"),
        ("hierarchical", "all_reduce", 8, {"local": 4, "outer": "rign"}, "did you mean 'ring'"),
        ("hierarchical", "all_reduce", 8, {"local": 4, "inner": "double_tree"}, "does not offer reduce_scatter"),
        ("hierarchical", "all_reduce", 8, {"local": 4, "inner": "parameter_server"}, "leaves sums on helpers"),
        ("parameter_server", "all_reduce", 4, {"colocated": True, "servers": 5}, "at most 4"),
    ],
)
def test_what_is_impossible_is_refused_with_a_remedy(name, operation, ranks, options, words):
    with pytest.raises(ConfigError, match=words):
        build(name, operation, ranks, **options)
