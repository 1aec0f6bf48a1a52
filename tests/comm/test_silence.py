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


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([1.0] * 20, 9),
        ([2.0] * 20, 10),
        ([1.0] * 7 + [2.1] + [1.0] * 20, 7 + 2.1 + 9),
        ([1.0] * 7 + [50.0] + [1.0] * 20, 7 + 50 + 9),
    ],
    ids=["all the time", "every quarter", "after a nap", "after a long nap"],
)
def test_silence_counts_from_the_last_time_the_listener_slept(clock, gaps, expected):
    assert silence(clock, gaps) == pytest.approx(expected)


def test_silence_of_a_peer_heard_after_a_nap_counts_from_there(clock):
    listener = SilenceDetector(8.0)
    clock[0] += 50
    listener.tick()
    heard = clock[0] + 4
    for _ in range(13):
        clock[0] += 1
        listener.tick()
    assert listener.exceeded(heard) == 9
    assert listener.exceeded(heard + 1) is None
