"""The wall world owns its threads, keeps time and order, and fails loudly."""

import threading

import pytest

from foretrain.errors import ForetrainError, ScheduleError
from foretrain.network import Hop
from foretrain.plugins.torch import WallWorld
from foretrain.tasks import Chunk, Piece
from foretrain.units import MICROSECOND, MILLISECOND, per_byte

FREE = Hop("wire", 0)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("foretrain")}


def chunk(size: int) -> Chunk:
    return Chunk("all_reduce", (Piece(0, 0, size),), size)


def test_timers_run_in_the_order_of_their_times():
    seen, finished = [], threading.Event()
    with WallWorld(FREE) as world:
        now = world.now()
        world.call_at(now + 30 * MILLISECOND, lambda: (seen.append("late"), finished.set()))
        world.call_at(now + 10 * MILLISECOND, lambda: seen.append("early"))
        world.call_at(0, lambda: seen.append("at once"))
        world.run_until(finished, timeout=10)
    assert seen == ["at once", "early", "late"]


def test_chunks_arrive_in_the_order_of_starting_and_never_early():
    arrived, finished = [], threading.Event()
    hop = Hop("wire", per_byte(1e6), overhead=100 * MICROSECOND, latency=MILLISECOND)
    with WallWorld(hop) as world:
        began = world.now()

        def done(sent: Chunk) -> None:
            arrived.append((sent.size, world.now() - began))
            if len(arrived) == 3:
                finished.set()

        for size in (5_000, 1_000, 3_000):
            world.start(chunk(size), done)
        world.run_until(finished, timeout=10)
    assert [size for size, _ in arrived] == [5_000, 1_000, 3_000]
    least = hop.latency
    for size, time in arrived:
        least += hop.occupancy(size)
        assert time >= least


def test_no_thread_outlives_the_world_even_with_work_under_way():
    before = threads()

    def interrupted() -> None:
        with WallWorld(Hop("wire", per_byte(1.0))) as world:
            world.start(chunk(1_000_000), lambda _: None)
            world.call_at(world.now() + 10**18, lambda: None)
            assert threads() - before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threads() == before


def test_what_a_callback_raises_is_raised_where_one_waits():
    def fail() -> None:
        raise ZeroDivisionError("of the test")

    with WallWorld(FREE) as world:
        world.call_at(0, fail)
        with pytest.raises(ForetrainError) as caught:
            world.run_until(threading.Event(), timeout=10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_waiting_for_what_never_comes_ends():
    with WallWorld(FREE) as world, pytest.raises(TimeoutError, match="did not finish"):
        world.run_until(threading.Event(), timeout=0.05)


def test_what_the_pipe_raises_is_raised_too():
    with WallWorld(FREE) as world:
        world.start(None, lambda _: None)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ForetrainError, match="AttributeError"):
            world.run_until(threading.Event(), timeout=10)


def test_our_own_errors_keep_their_type():
    def fail() -> None:
        raise ScheduleError("of the test")

    with WallWorld(FREE) as world:
        world.call_at(0, fail)
        with pytest.raises(ScheduleError, match="of the test"):
            world.run_until(threading.Event(), timeout=10)


def test_a_timer_years_ahead_does_not_break_the_loop():
    finished = threading.Event()
    with WallWorld(FREE) as world:
        world.call_at(10**30, lambda: None)
        world.call_at(world.now() + MILLISECOND, finished.set)
        world.run_until(finished, timeout=10)
        assert finished.is_set()
