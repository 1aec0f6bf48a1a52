from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.event_log import DEVICE, ELAPSED, EVENT, QUERY_EVENT, QUERY_STREAM, STREAM
from tests.live.player import play


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_a_gpu_waits_for_its_host(slowdown):
    # Kernels of 10 launched every 30: the last is launched at 60.
    def program(rank):
        rank.kernels(1, 10, 10, 10, every=30)
        rank.clock = 60
        yield rank.ask(STREAM, stream=1)

    played = play(program, slowdown=slowdown, kept=None)
    assert played.times() == [70]
    spans = [(span.start, span.end) for span in played.trace.rank_traces[0].activities()]
    assert spans == [(0, 10), (30, 40), (60, 70)]


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_a_stream_waits_for_an_event_of_another(slowdown):
    def program(rank):
        rank.run(1, 200)
        first = rank.record(1)
        rank.run(2, 30, copied=30)
        rank.wait(2, first)
        rank.forget(first)  # it is waited for all the same
        first = rank.record(1)
        rank.run(2, 30)
        second = rank.record(2)
        yield rank.ask(EVENT, a=second)
        assert (yield rank.ask(ELAPSED, a=first, b=second)).value == 30
        yield rank.ask(DEVICE)

    assert play(program, slowdown=slowdown).times() == [230, 230, 230]


def test_what_was_done_before_is_answered_with_the_hosts_clock():
    def program(rank):
        rank.run(1, 10)
        event = rank.record(1)
        rank.clock = 500
        yield rank.ask(EVENT, a=event)
        rank.clock = 600
        yield rank.ask(STREAM, stream=1)
        yield rank.ask(STREAM, stream=7)
        yield rank.ask(DEVICE, stream=1 << 16)

    assert play(program).times() == [500, 600, 600, 600]


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_a_query_sees_what_has_happened_by_now(slowdown):
    def program(rank):
        rank.run(1, 100)
        event = rank.record(1)
        seen = []
        for clock in (0, 99, 100, 101):
            rank.clock = clock
            seen.append((yield rank.ask(QUERY_EVENT, a=event)).value)
            assert rank.clock == clock
        assert seen == [0, 0, 1, 1]
        rank.run(1, 100)
        seen = []
        for clock in (200, 201):
            rank.clock = clock
            seen.append((yield rank.ask(QUERY_STREAM, stream=1)).value)
        assert seen == [0, 1]

    assert play(program, slowdown=slowdown).times() == [0, 99, 100, 101, 200, 201]


@pytest.mark.parametrize(("slowdown", "end"), [(1.0, 1000), (1.5, 1100)])
def test_communication_slows_computing_piecewise(slowdown, end):
    def program(rank):
        rank.run(1, 1000)
        rank.run(2, 200, copied=200)
        rank.call(2, "all_reduce", 8)
        yield rank.ask(STREAM, stream=2)
        yield rank.ask(STREAM, stream=1)

    # 200 at full pace, 300 ps at 2/3 of it are 200 of work, 600 remain.
    assert play(program, duration=300, slowdown=slowdown).times() == [500, end]


@pytest.mark.parametrize(
    ("operations", "floor", "end"),
    [
        (("all_reduce",), 0, 500),  # 300 ps at half the pace are 150 of work, and take 100 more
        (("all_reduce", "all_gather"), 0, 500),  # no slower than with one, whatever ends before
        (("all_reduce",), 650, 650),  # begins after it
    ],
)
def test_a_run_is_slow_while_anything_communicates(operations, floor, end):
    def program(rank):
        for stream, operation in enumerate(operations, 2):
            rank.call(stream, operation, 8)
        rank.run(1, 350, floor=floor)
        yield rank.ask(STREAM, stream=1)

    took = {"all_reduce": 300, "all_gather": 100}
    assert play(program, duration=lambda operation, _: took[operation], slowdown=2.0).times() == [end]


def test_gpus_of_one_rank_share_nothing():
    """Neither what computes, nor what communication takes from it."""

    def program(rank):
        other = 1 << 16
        rank.run(1, 1000)
        rank.run(other, 1000)
        rank.call(other + 1, "all_reduce", 8)
        yield rank.ask(DEVICE)
        yield rank.ask(DEVICE, stream=other)

    assert play(program, slowdown=1.5, duration=300).times() == [1000, 1100]


def test_copies_leave_the_gpu_to_others():
    def program(rank):
        rank.run(1, 100)
        rank.run(2, 80, copied=80)
        yield rank.ask(STREAM, stream=2)
        yield rank.ask(STREAM, stream=1)

    assert play(program).times() == [80, 100]


def shared(runs):
    """When each of ``runs``, (begin, work), ends on a GPU that all under way share equally: exact."""
    left, now, ends = {i: Fraction(work) for i, (_, work) in enumerate(runs)}, Fraction(0), {}
    while left:
        flowing = [i for i in left if runs[i][0] <= now]
        later = [runs[i][0] for i in left if runs[i][0] > now]
        after = [now + min(left[i] for i in flowing) * len(flowing)] if flowing else []
        then = Fraction(min(later + after))
        for i in flowing:
            left[i] -= (then - now) / len(flowing)
            if not left[i]:
                ends[i] = then
                del left[i]
        now = then
    return [ends[i] for i in range(len(runs))]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=5))
def test_streams_share_their_gpu_equally(runs):
    def program(rank):
        zero = rank.record(9)
        for stream, (begin, work) in enumerate(runs):
            rank.run(stream, work, floor=begin + work)
        events = [rank.record(stream) for stream in range(len(runs))]
        yield rank.ask(DEVICE)
        for event, end in zip(events, shared(runs), strict=True):
            elapsed = yield rank.ask(ELAPSED, a=zero, b=event)
            assert abs(elapsed.value - end) <= 4 * len(runs) ** 2  # each change of pace may round a stream by 1 ps

    play(program)


def test_a_log_that_goes_back_in_time_is_our_bug():
    def program(rank):
        rank.run(1, 100)
        yield rank.ask(STREAM, stream=1)
        rank.clock = 0
        rank.run(2, 10)
        yield rank.ask(STREAM, stream=2)

    with pytest.raises(AssertionError, match="rank 0 sent kernels of 0 ps"):
        play(program, slowdown=1.5)
