import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import Disagreement, PeerLost, StallError
from foretrain.live.collectives import CollectiveCall
from foretrain.live.event_log import EVENT, QUERY_EVENT, QUERY_STREAM, STREAM, VALUES
from foretrain.live.p2p import P2PEndpoint
from foretrain.live.streams import StreamEvent
from foretrain.units import SECOND
from tests.live.player import calling, idle, play, shuffled


def test_time_waits_for_a_rank_that_is_slow_to_write():
    # Rank 1's clock stays behind while it works on the host; what it does at 50 comes before what others did at 100.
    def early(rank):
        rank.run(1, 100)
        rank.call(1, "all_reduce", 4, group=0)
        yield rank.frame()
        rank.clock = 1_000_000
        yield rank.frame()
        yield rank.ask(STREAM, stream=1)

    def late(rank):
        for rank.clock in range(0, 50, 5):
            yield rank.frame()
        rank.clock = 50
        rank.run(1, 10)
        rank.call(1, "all_reduce", 4, group=0)
        yield rank.ask(STREAM, stream=1)

    played = play(early, late)
    assert played.log == [(100, "all_reduce", 4, (0, 1), None)]
    assert (played.times(0), played.times(1)) == ([1_000_000], [200])


def test_a_rank_that_waits_is_not_waited_for():
    def waits(rank):
        event = rank.call(1, "all_reduce", 4)
        yield rank.ask(EVENT, a=event)

    def works(rank):
        for rank.clock in range(0, 5000, 1000):
            rank.run(1, 10)
            yield rank.ask(STREAM, stream=1)
        rank.call(2, "all_reduce", 4)

    played = play(waits, works)
    assert played.times(0) == [4010 + 100]
    assert played.times(1) == [10, 1010, 2010, 3010, 4010]


@st.composite
def programs(draw):
    """Ranks that compute, meet in pairs and all together, and ask now and then; cut into frames anyhow."""
    ranks = draw(st.integers(2, 4))
    kinds = st.sampled_from(["compute", "meet", "pair", "ask", "query"])
    steps = draw(st.lists(st.tuples(kinds, st.integers(0, 3)), max_size=12))
    amounts = draw(st.lists(st.integers(0, 40), min_size=8, max_size=8))

    def of(number):
        def program(rank):
            def pick(i):
                return amounts[(i * 3 + number * 5) % 8]

            for i, (what, stream) in enumerate(steps):
                rank.clock += pick(i) % 7
                if what == "compute":
                    rank.run(stream, pick(i + 1))
                    rank.wait((stream + 1) % 4, rank.record(stream))
                elif what == "meet":
                    rank.wait((stream + 1) % 4, rank.call(stream, "all_reduce", 64))
                elif what == "pair":
                    peer = number ^ 1
                    if peer < ranks:
                        rank.message(stream, peer, 8, sends=number < peer, more=True)
                        rank.message(stream, peer, 8, sends=number > peer)
                elif what == "ask" and (number + i) % 2:
                    yield rank.ask(STREAM, stream=stream)
                elif what == "query" and (number + i) % 2:
                    rank.clock += 3
                    yield rank.ask(QUERY_STREAM, stream=stream)
                if pick(i + 2) % 3 == 0:
                    yield rank.frame()
            event = rank.record(0)
            rank.step(0, event)
            yield rank.ask(EVENT, a=event)

        return program

    return [of(number) for number in range(ranks)]


@settings(max_examples=100)
@given(programs(), st.sampled_from([1.0, 1.37]), st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_the_order_in_which_frames_come_does_not_tell(made, slowdown, seeds):
    outcomes = [shuffled(seed, *made, slowdown=slowdown, duration=17, kept=None).outcome() for seed in seeds]
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_sockets_give_the_same_as_no_sockets():
    def program(rank):
        for step in range(5):
            rank.run(1, 300 + 10 * rank.number)
            event = rank.record(1)
            rank.wait(2, event)
            done = rank.call(2, "all_reduce", 1000)
            rank.clock += 20
            yield rank.frame()
            rank.wait(1, done)
            rank.step(step, rank.record(1))
            yield rank.ask(STREAM, stream=1)

    made = [program] * 4
    assert play(*made, kept=None).outcome() == shuffled(1, *made, kept=None).outcome()


def test_memory_does_not_grow_with_the_iterations():
    def program(iterations):
        def of(rank):
            for _ in range(iterations):
                rank.run(1, 30)
                event = rank.record(1)
                rank.wait(2, event)
                ends = [rank.call(2, "all_reduce", 8, payload=b"x")]
                yield rank.ask(VALUES, a=ends[0])
                ends.append(rank.message(3, 1 - rank.number, 8, sends=True, more=True))
                ends.append(rank.message(3, 1 - rank.number, 8, sends=False))
                rank.wait(1, ends[-1])
                rank.forget(event, *ends)
                yield rank.ask(STREAM, stream=1)

        return of

    def left(iterations):
        gc.collect()
        gc.disable()
        try:
            play(program(iterations), program(iterations))
            return sum(
                issubclass(type(thing), CollectiveCall | P2PEndpoint | StreamEvent) for thing in gc.get_objects()
            )
        finally:
            gc.enable()

    assert left(50) == left(5)


def test_a_stall_names_who_waits_for_whom():
    def waits(rank):
        for _ in range(2):
            rank.call(1, "all_reduce", 4)
        yield rank.ask(STREAM, stream=1)

    def leaves(rank):
        rank.call(1, "all_reduce", 4)
        yield rank.frame()

    with pytest.raises(StallError) as caught:
        play(waits, waits, leaves, waits)
    assert caught.value.waits == ("ranks 0, 1 and 3 wait in all_reduce #2 of group [0..3] for rank 2, which has ended",)


def trains(*steps):
    """Programs of ranks that reduce and mark as many steps, and never wait for their GPUs."""

    def program(rank):
        for step in range(steps[rank.number]):
            rank.wait(0, rank.call(1, "all_reduce", 4))
            rank.step(step + 1, rank.record(0))
            yield rank.frame()

    return [program] * len(steps)


def test_what_outlives_all_ranks_is_a_stall():
    with pytest.raises(StallError, match="all ranks have ended, but not all that they launched can") as caught:
        play(*trains(6, 4, 6))
    waits = ("ranks 0 and 2 wait in all_reduce #5 of group [0..2] for rank 1, which has ended",)
    assert caught.value.waits == waits
    with pytest.raises(StallError) as caught:
        play(*trains(6, 4, 6), steps=6)
    assert caught.value.waits == waits


def test_who_is_ended_on_purpose_may_leave_calls_behind():
    def goes_on(rank):
        yield from trains(4, 4)[0](rank)
        rank.call(1, "all_reduce", 4)

    played = play(goes_on, trains(4, 4)[1], steps=4)
    assert [len(rank_trace.steps) for rank_trace in played.trace.rank_traces.values()] == [4, 4]
    with pytest.raises(StallError):
        play(goes_on, trains(4, 4)[1])


def test_polling_what_never_happens_is_a_stall():
    def polls_for_a_day(rank):
        rank.wait(0, rank.call(1, "all_reduce", 4))
        event = rank.record(0)
        while not (yield rank.ask(QUERY_EVENT, a=event)).failed:
            assert rank.clock <= 24 * 3600 * SECOND
            rank.clock += 3600 * SECOND

    with pytest.raises(StallError, match=r"rank 0 has asked its GPU for a day") as caught:
        play(polls_for_a_day, idle)
    assert caught.value.waits == ("rank 0 waits in all_reduce #1 of group [0, 1] for rank 1, which has ended",)


def test_polling_for_long_while_somebody_computes_is_none():
    def polls(rank):
        done = rank.call(1, "all_reduce", 4)
        while not (yield rank.ask(QUERY_EVENT, a=done)).value:
            rank.clock += 3600 * SECOND
        yield rank.ask(EVENT, a=done)

    def computes(rank):
        rank.clock += 23 * 3600 * SECOND
        rank.call(1, "all_reduce", 4)
        yield rank.ask(STREAM, stream=1)

    play(polls, computes)


def test_a_stall_of_messages():
    def receives(rank):
        rank.message(1, 1 - rank.number, 8, sends=False)
        yield rank.ask(STREAM, stream=1)

    with pytest.raises(StallError) as caught:
        play(receives, receives)
    assert caught.value.waits == tuple(f"rank {n} waits in recv #1 from rank {1 - n} for rank {1 - n}" for n in (0, 1))


def test_a_stall_over_values():
    def asks(rank):
        event = rank.call(1, "all_gather", 8, payload=b"x")
        yield rank.ask(VALUES, a=event)

    def other(rank):
        rank.message(1, 0, 8, sends=True)
        yield rank.ask(STREAM, stream=1)

    with pytest.raises(StallError, match=r"rank 0 waits for the values of all_gather #1 of group .0, 1. for rank 1"):
        play(asks, other)


def test_a_rank_that_waits_for_what_never_comes_is_told():
    answers = []

    def waits(rank):
        rank.call(1, "all_reduce", 4)
        answers.append((yield rank.ask(STREAM, stream=1)))

    with pytest.raises(StallError):
        play(waits, idle)
    assert answers[0].failed
    assert b"which has ended" in answers[0].payload


def test_ranks_that_call_different_things_are_named_even_if_others_do_not_come():
    one, other = calling("all_reduce", 4096, clock=2_000_000), calling("all_gather", 8192, clock=1_000_000)
    with pytest.raises(Disagreement) as caught:
        play(one, one, other)
    text = str(caught.value)
    assert "collective #1 of group [0..2] is not the same on all its ranks" in text
    assert "ranks 0 and 1 call all_reduce of 4,096 B, 2.00 us after the start" in text
    assert "rank 2 calls all_gather of 8,192 B, 1.00 us after the start" in text
    with pytest.raises(Disagreement, match="rank 1 calls broadcast of 4 B"):
        play(calling("all_reduce"), calling("broadcast"), idle)


def test_messages_of_different_sizes_are_named():
    def program(rank):
        rank.message(1, 1 - rank.number, 8 + 8 * rank.number, sends=not rank.number)
        yield rank.ask(STREAM, stream=1)

    with pytest.raises(
        Disagreement, match="rank 0 calls send #1 to rank 1 with 8 B, but rank 1 calls recv #1 from rank 0 with 16 B"
    ):
        play(program, program)


def test_a_rank_that_ends_early_is_named():
    def crashes(rank):
        rank.clock = 3_000_000
        yield rank.frame()
        raise ConnectionResetError

    with pytest.raises(PeerLost, match=r"rank 1 ended early, .* heard of 3\.00 us after its start"):
        play(calling("barrier"), crashes)
