"""When gradients arrive: the profile of the last steps and the blocks it shows."""

import pytest

from foretrain.schedule.arrivals import Arrivals, blocks


def observed(*steps, keep=None):
    """Steps of arrival times, each step beginning at another time."""
    arrivals, now = Arrivals(len(steps[0]), keep or len(steps)), 0
    for step in steps:
        arrivals.begin(now)
        for task, time in enumerate(step):
            if time is not None:
                arrivals.note(task, now + time)
        now += 12_345
    arrivals.begin(now)
    return arrivals


def test_it_is_complete_when_all_steps_were_seen():
    assert not observed((1, 2), keep=2).complete
    assert observed((1, 2), (1, 2), keep=2).complete


def test_a_step_in_which_a_gradient_is_missing_does_not_count():
    arrivals = observed((1, 2), (1, None), (3, 4), keep=2)
    assert arrivals.complete
    assert arrivals.medians() == [2, 3]


def test_the_step_under_way_does_not_count():
    arrivals = observed((1, 2))
    arrivals.note(0, 10**9)
    assert arrivals.medians() == [1, 2]


def test_medians_are_of_the_last_steps_and_since_the_step_began():
    assert observed((10, 20), (12, 90), (11, 30)).medians() == [11, 30]
    assert observed((99, 99), (10, 20), (12, 90), (11, 30), keep=3).medians() == [11, 30]


@pytest.mark.parametrize(("tolerance", "off"), [(0.19, True), (0.2, False), (0.21, False)])
def test_off_takes_all_arrivals_together(tolerance, off):
    # Moved by 20 + 20 of 100 + 100.
    assert observed((120, 80)).off([100, 100], tolerance) is off


def test_blocks_are_those_of_the_median_step():
    steps = [(0, 1, 2, 100, 101, 102), (5, 6, 7, 110, 111, 112), (900, 901, 902, 903, 904, 905)]
    found = observed(*steps).blocks(2.0, 0.0)
    expected = blocks(observed(*steps).medians(), 2.0)
    assert expected == ((0, 1, 2), (3, 4, 5))
    assert found.of == (0, 0, 0, 1, 1, 1)
    assert found.sizes == (3, 3)


def test_blocks_are_numbered_as_they_arrive_and_not_as_tasks():
    found = observed((102, 101, 100, 2, 1, 0)).blocks(2.0, 0.0)
    assert found.of == (1, 1, 1, 0, 0, 0)


def test_intervals_and_durations_are_low_quantiles_over_the_steps():
    # Last of the first block to first of the second: 98, 92, 95. First to last: 2, 8, 5.
    steps = [(0, 1, 2, 100, 101, 102), (0, 1, 8, 100, 101, 108), (0, 1, 5, 100, 101, 105)]
    lowest, median, highest = (observed(*steps).blocks(2.0, share) for share in (0.0, 0.5, 1.0))
    assert [b.intervals for b in (lowest, median, highest)] == [(92,), (95,), (98,)]
    assert [b.durations for b in (lowest, median, highest)] == [(2, 2), (5, 5), (8, 8)]


def test_an_interval_is_never_negative():
    # In the second step the first block's last gradient comes after the second block's first.
    steps = [(0, 1, 2, 100, 101, 102), (0, 1, 150, 100, 101, 102), (0, 1, 2, 100, 101, 102)]
    assert observed(*steps).blocks(2.0, 0.0).intervals == (0,)
