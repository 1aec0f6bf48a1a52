"""Collectives on real values: exact without losses, and with each loss what the rule says."""

import numpy as np
import pytest

from foretrain.collective import build
from foretrain.loss_tolerance import Lossy, Random, RecordedLosses, Tagging, Tensor, TensorLayout
from foretrain.loss_tolerance.execution import reduced
from foretrain.loss_tolerance.layout import VALUE, layout

SIZES = [37, 5, 400, 1]


def held(plan, collective, seed=0):
    """Random whole numbers, which float32 adds exactly in any order, and zeros on helpers."""
    draw = np.random.default_rng(seed)
    flat = draw.integers(-50, 50, (plan.ranks, sum(SIZES))).astype(np.float32)
    holds = np.zeros((plan.ranks + plan.helpers, plan.blocks, collective.layout.width), np.float32)
    holds[: plan.ranks] = collective.layout.pack(flat)
    return flat, holds


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("ring", 5, {"channels": 2}),
        ("ring", 4, {"bidirectional": True}),
        ("halving_doubling", 6, {}),
        ("halving_doubling", 8, {"first": "far"}),
        ("circulant", 7, {}),
        ("parameter_server", 4, {"servers": 3}),
        ("parameter_server", 4, {"servers": 2, "colocated": True}),
        ("in_network", 6, {"chunks": 2}),
        ("double_tree", 6, {"chunks": 2}),
        ("hierarchical", 8, {"local": 4, "inner": "ring", "outer": "ring"}),
    ],
)
def test_without_losses_every_rank_has_the_sum(name, ranks, options):
    plan = build(name, "all_reduce", ranks, **options)
    collective = Lossy(plan, layout(SIZES, plan.blocks, payload=24))
    flat, holds = held(plan, collective)
    collective.run(holds, Random(0))

    for rank in range(ranks):
        np.testing.assert_array_equal(collective.layout.unpack(holds[rank]), flat.sum(axis=0))
    assert collective.tally.sent == plan.sent(collective.layout.padded().sum()).sum()
    assert collective.tally.lost == 0


def test_a_lost_push_takes_that_workers_part_from_the_sum():
    plan = build("parameter_server", "reduce_scatter", 3)
    collective = Lossy(plan, layout(SIZES, plan.blocks, payload=100))
    flat, holds = held(plan, collective)
    # Worker 1's second packet of tensor 2: values 25 to 49 of its 400, behind 37 + 5 others.
    which = np.zeros(16, np.bool_)
    which[1] = True
    collective.run(holds, RecordedLosses({(2, 1, 0): which}))

    expected = flat.copy()
    expected[1, 42 + 25 : 42 + 50] = 0
    np.testing.assert_array_equal(collective.layout.unpack(reduced(plan, holds)), expected.sum(axis=0))
    assert collective.tally.lost == 25 * VALUE


@pytest.mark.parametrize("gap", ["zero", "held"])
def test_a_lost_pull_leaves_zero_or_what_was_there(gap):
    plan = build("parameter_server", "all_gather", 2)
    collective = Lossy(plan, layout([50], plan.blocks, payload=100), gap=gap)
    holds = np.stack([np.full((1, 50), value, np.float32) for value in (1, 2, 9)])
    collective.run(holds, RecordedLosses.of_ranges({(0, 1, 0): [(99, 101)]}, {(0, 1, 0): 200}, 100))

    np.testing.assert_array_equal(holds[0, 0], 9)
    np.testing.assert_array_equal(holds[1, 0], 0 if gap == "zero" else 2)  # both packets hold a byte of the range


def test_what_a_rank_lost_in_a_ring_it_cannot_pass_on():
    plan = build("ring", "all_gather", 4)
    collective = Lossy(plan, layout([4], 4))
    holds = np.zeros((4, 4, 1), np.float32)
    holds[plan.owner, np.arange(4)] = 1
    collective.run(holds, RecordedLosses({(0, 0, 0): np.array([True])}))  # rank 0 to 1, the block that 0 sends first

    block = int(plan.moved(0, 0)[0])
    assert holds[:, block, 0].tolist() == [1, 0, 0, 0]
    assert np.delete(holds, block, axis=1).all()


def test_of_reliable_tensors_nothing_is_lost():
    plan = build("parameter_server", "reduce_scatter", 3)
    tensors = tuple(Tensor(str(k), size, k, reliable=k in (1, 2)) for k, size in enumerate(SIZES))
    collective = Lossy(plan, TensorLayout(tensors, plan.blocks, 100))
    flat, holds = held(plan, collective)
    collective.run(holds, Random(1.0))

    expected = flat.sum(axis=0)
    expected[:37] = expected[-1:] = 0
    np.testing.assert_array_equal(collective.layout.unpack(reduced(plan, holds)), expected)
    assert collective.lossy == (37 + 1) / sum(SIZES)


def test_the_same_seed_loses_the_same():
    plan = build("halving_doubling", "all_reduce", 4)

    def run():
        collective = Lossy(plan, layout(SIZES, plan.blocks, payload=24), tagging=Tagging("magnitude"))
        results = []
        for number in range(3):
            _, holds = held(plan, collective, number)
            collective.run(holds, Random(0.4, (7, number), important=0.1))
            results.append(holds)
        return np.stack(results).tobytes(), collective.tally

    assert run() == run()
