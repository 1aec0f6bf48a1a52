import numpy as np
import pytest

from foretrain.errors import ConfigError
from foretrain.loss_tolerance import Bursty, OnLinks, Protected, Random, RecordedLosses, Tagged
from foretrain.loss_tolerance.losses import packets_in


def packets(count, droppable=True, message=0):
    columns = np.full(count, message, np.int32), np.full(count, 1460, np.int32)
    return Tagged(*columns, np.zeros(count, np.int8), np.broadcast_to(np.asarray(droppable), (count,)))


MANY = packets(100_000)


@pytest.mark.parametrize("losses", [Random(0.05, 1), Bursty(0.05, 10, 1), OnLinks([[3, 4]], {3: 0.02, 4: 0.03}, 1)])
def test_the_share_that_is_lost(losses):
    assert losses.lost(0, 0, MANY).mean() == pytest.approx(0.05, abs=0.008)


def test_classes_have_losses_of_their_own():
    half = np.arange(100_000) % 2 == 0
    lost = Random(0.2, 1, important=0.01).lost(0, 0, packets(100_000, half))

    assert lost[half].mean() == pytest.approx(0.2, abs=0.01)
    assert lost[~half].mean() == pytest.approx(0.01, abs=0.003)
    assert not Protected(Random(1.0)).lost(0, 0, packets(9, False)).any()


def test_what_is_lost_at_a_low_p_is_lost_at_every_higher_one():
    few, more = (Random(p, (1, 2)).lost(0, 0, MANY) for p in (0.01, 0.1))

    assert (more | ~few).all()


def test_runs_have_the_length_that_was_asked_for():
    lost = Bursty(0.1, 5, 3).lost(0, 0, MANY)
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[False], lost, [False]]).astype(int)))).tolist()[::2]

    assert np.mean(runs) == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("p", [0, 1])
def test_nothing_and_everything_may_be_lost(p):
    assert Bursty(p, 3).lost(0, 0, packets(50)).tolist() == [bool(p)] * 50


def test_a_record_says_what_was_lost_of_each_message():
    both = packets(5)
    both.message[3:] = 1
    record = RecordedLosses({(1, 0, 2): np.array([False, True]), (0, 0, 3): np.array([True] * 3)})

    assert record.lost(0, 2, both).tolist() == [False] * 4 + [True]
    assert record.lost(0, 3, both).tolist() == [True] * 3 + [False] * 2
    assert not record.lost(1, 2, both).any()
    with pytest.raises(ConfigError, match=r"transfer 0, step 3\]: 3 is not one for each of 4 packets"):
        record.lost(0, 3, packets(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Random(-0.1), "p: -0.1 is no probability"),
        (lambda: Bursty(0.1, 0.5), "burst: 0.5 is below one packet"),
        (lambda: Bursty(0.9, 2), "burst: 2 is too short for a loss of 90%; write at least 9"),
        (lambda: OnLinks([[0]], {0: 2}), r"rates\[0\]: 2 is no probability"),
        (lambda: OnLinks([[0]], {0: 0.1}).lost(1, 0, MANY), "lack transfer 1"),
        (lambda: packets_in([(0, 300)], 200, 100), "is not a range within 200 bytes"),
    ],
)
def test_what_can_be_wrong(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
