"""Silence counts while who listens is awake."""

import pytest

from foretrain.comm import event_loop
from foretrain.comm.event_loop import SilenceDetector


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(event_loop.time, "monotonic", lambda: now[0])
    return now


def silence(clock, gaps, allowed=8.0):
    """Seconds until somebody has been silent for too long, with ``gaps`` between rounds; None if nobody has."""
    listener, heard = SilenceDetector(allowed), clock[0]
    for gap in gaps:
        clock[0] += gap
        listener.tick()
        if (found := listener.exceeded(heard)) is not None:
            assert found > allowed
            return clock[0] - heard
    return None


def test_who_listens_all_the_time_counts_every_second(clock):
    assert silence(clock, [1.0] * 20) == 9


def test_rounds_of_a_quarter_are_no_nap(clock):
    assert silence(clock, [2.0] * 20) == 10


@pytest.mark.parametrize("nap", [2.1, 50.0])
def test_after_a_nap_all_have_their_time_again(clock, nap):
    assert silence(clock, [1.0] * 7 + [nap] + [1.0] * 20) == pytest.approx(7 + nap + 9)


def test_whom_one_heard_after_a_nap_counts_from_there(clock):
    listener = SilenceDetector(8.0)
    clock[0] += 50
    listener.tick()
    heard = clock[0] + 4
    for _ in range(13):
        clock[0] += 1
        listener.tick()
    assert listener.exceeded(heard) == 9
    assert listener.exceeded(heard + 1) is None
