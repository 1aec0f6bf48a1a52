import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.collective import build
from foretrain.errors import ConfigError
from foretrain.loss_tolerance import Tagging, Tensor, TensorLayout
from foretrain.loss_tolerance.layout import VALUE, layout
from foretrain.loss_tolerance.tagging import Tagger, concentrated

SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 9), st.integers(4, 400))
def test_packing_loses_nothing(sizes, blocks, payload):
    made = layout(sizes, blocks, payload=payload)
    flat = np.arange(2 * made.values, dtype=np.float32).reshape(2, -1)

    np.testing.assert_array_equal(made.unpack(made.pack(flat)), flat)


@given(SIZES, st.sampled_from([("ring", 5), ("halving_doubling", 4), ("parameter_server", 3)]), st.integers(1, 60))
def test_steps_have_the_packets_that_the_bytes_of_the_plan_need(sizes, where, values):
    plan = build(where[0], "all_reduce", where[1])
    made = layout(sizes, plan.blocks, payload=values * VALUE)
    for count in set(plan.count.tolist()):
        cut = made.cut(count)
        transfer = plan.count.tolist().index(count)
        for message, padded in enumerate(made.padded().tolist()):
            mine = cut.size[cut.message == message]
            size = int(plan.size(padded)[transfer])
            assert mine.sum() == size
            assert len(mine) == -(-size // made.payload)
        held = np.bincount(cut.packet.reshape(-1), minlength=len(cut.size))
        np.testing.assert_array_equal(held * VALUE, cut.size)


def test_packets_hold_whole_values():
    assert layout([10], 1, payload=11).cut(1).size.tolist() == [8, 8, 8, 8, 8]


@pytest.mark.parametrize(("sizes", "payload"), [([], 1460), ([0], 1460), ([5], 3)])
def test_what_cannot_be_cut(sizes, payload):
    with pytest.raises(ConfigError):
        layout(sizes, 2, payload=payload)


def tensors(*layers):
    return TensorLayout(tuple(Tensor(str(layer), 100, layer) for layer in layers), 1, 100)


def test_front_layers_go_first_and_may_be_dropped():
    made = tensors(0, 1, 2, 3)
    tagger = Tagger(Tagging("layer", share=0.5), made)
    packets = tagger.tag(0, made.cut(1), np.zeros((1, 400), np.float32))

    assert packets.queue[::4].tolist() == [0, 2, 4, 6]  # ⌊layer · 8 / 4⌋
    assert packets.droppable[::4].tolist() == [True, True, False, False]
    assert tagger.droppable(made) == 0.5


@pytest.mark.parametrize("by", ["packet", "layer", "magnitude"])
def test_of_reliable_tensors_nothing_may_be_dropped_and_shares_are_of_the_others(by):
    made = TensorLayout(tuple(Tensor(str(k), 100, k, reliable=k % 2 == 0) for k in range(4)), 1, 100)
    tagger = Tagger(Tagging(by, share=0.5), made)
    data = np.repeat(np.array([0, 1, 0, 2], np.float32), 100)[None]
    tagger.tag(0, made.cut(1), data)
    tagger.turn()

    droppable = tagger.tag(0, made.cut(1), data).droppable.reshape(4, 4).all(axis=1)
    assert droppable.tolist() == [False, True, False, by == "packet"]
    assert tagger.droppable(made) == (1.0 if by == "packet" else 0.5)


def test_small_packets_may_be_dropped_in_comparison_with_the_round_before():
    made = tensors(0, 1)
    tagger = Tagger(Tagging("magnitude", share=0.5), made)
    data = np.repeat(np.arange(8, dtype=np.float32), 25)[None]

    assert not tagger.tag(0, made.cut(1), data).droppable.any()
    tagger.turn()
    assert tagger.tag(0, made.cut(1), -data).droppable.tolist() == [True] * 4 + [False] * 4
    assert not tagger.tag(1, made.cut(1), data).droppable.any()  # of another round of the collective


@given(st.floats(0, 1), st.floats(0.01, 0.99))
def test_losses_move_to_droppable_packets_and_stay_as_many(p, share):
    droppable, important = concentrated(p, share)

    assert share * droppable + (1 - share) * important == pytest.approx(p, abs=1e-12)
    assert important == 0 or droppable == 1
