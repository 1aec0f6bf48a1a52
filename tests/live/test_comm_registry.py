import pytest

from foretrain.live.collectives import ranks_text, who
from foretrain.live.event_log import EVENT, STREAM, VALUES
from tests.live.player import folding_of, idle, play, shuffled


def test_a_collective_begins_when_the_last_has_come():
    def program(rank):
        rank.run(1, 100 * rank.number)
        rank.clock = 250 if rank.number == 1 else 0
        rank.call(1, "reduce_scatter", 64)
        yield rank.ask(STREAM, stream=1)

    played = play(program, program, program)
    assert played.log == [(250, "reduce_scatter", 64, (0, 1, 2), None)]
    assert [played.times(rank) for rank in range(3)] == [[350]] * 3


def test_groups_of_the_same_ranks_are_not_the_same():
    def program(rank):
        one, two = rank.group(0, 1), rank.group(0, 1)
        first, second = (one, two) if rank.number else (two, one)
        rank.call(1, "all_reduce" if first == one else "all_gather", 8, group=first)
        rank.call(2, "all_reduce" if second == one else "all_gather", 8, group=second)
        yield rank.ask(STREAM, stream=1)

    played = play(program, program)
    assert sorted(what[1] for what in played.log) == ["all_gather", "all_reduce"]


def test_a_group_has_the_same_members_under_any_number():
    def program(rank):
        if rank.number:
            rank.group(0, 2)
        pair = rank.group(1, 0)
        rank.call(1, "broadcast", 8, group=pair, root=1)
        yield rank.ask(STREAM, stream=1)

    played = play(program, program, idle)
    assert played.log == [(0, "broadcast", 8, (1, 0), None)]


def test_what_begins_together_is_ordered_by_rank_and_log():
    def program(rank):
        low, high = rank.group(0, 1), rank.group(2, 3)
        group = low if rank.number < 2 else high
        rank.call(1, "all_gather", rank.number // 2 + 1, group=group)
        rank.call(2, "all_reduce", rank.number // 2 + 3, group=group)
        yield rank.ask(STREAM, stream=1)

    ordered = [("all_gather", 1), ("all_reduce", 3), ("all_gather", 2), ("all_reduce", 4)]
    for seed in range(20):
        assert [what[1:3] for what in shuffled(seed, *[program] * 4).log] == ordered


def test_uneven_all_to_alls_tell_who_sends_what():
    def program(rank):
        rank.call(1, "all_to_all", 12, splits=(4, 8) if rank.number else None)
        rank.call(1, "all_to_all", 12)
        yield rank.ask(STREAM, stream=1)

    uneven, even = play(program, program).log
    assert uneven[4] == {0: (6, 6), 1: (4, 8)}
    assert even[4] is None


def test_values_take_no_virtual_time():
    # The collective begins at 1,000 when rank 1's stream comes; its record is there before.
    def program(rank):
        rank.run(1, 1000 * rank.number)
        event = rank.call(1, "all_gather", 2, payload=b"a%d" % rank.number)
        reply = yield rank.ask(VALUES, a=event)
        assert reply.values() == [(0, 1, b"a0"), (1, 1, b"a1")]
        yield rank.ask(EVENT, a=event)

    played = play(program, program)
    assert [played.times(rank) for rank in range(2)] == [[0, 1100]] * 2


def test_values_are_not_real_if_one_gives_none_but_of_a_broadcast_only_the_roots_counts():
    def program(rank):
        event = rank.call(1, "all_reduce", 2, payload=b"x" if rank.number else b"")
        assert (yield rank.ask(VALUES, a=event)).payload == b""
        event = rank.call(1, "broadcast", 2, payload=b"root" if rank.number == 1 else b"", root=1)
        assert (yield rank.ask(VALUES, a=event)).values() == [(0, 1, b""), (1, 1, b"root")]

    play(program, program)


def test_live_members_stand_for_others():
    def program(rank):
        event = rank.call(1, "all_reduce", 2, payload=b"v%d" % rank.number)
        assert (yield rank.ask(VALUES, a=event)).values() == [(0, 2, b"v0"), (2, 3, b"v2")]
        event = rank.call(1, "broadcast", 2, payload=b"v%d" % rank.number, root=4)
        assert (yield rank.ask(VALUES, a=event)).values() == [(0, 2, b""), (2, 3, b"v2")]
        yield rank.ask(STREAM, stream=1)

    played = play(program, program, folding=folding_of(0, 0, 2, 2, 2))
    assert played.log[0] == (0, "all_reduce", 2, (0, 1, 2, 3, 4), None)


def test_messages_match_in_their_order():
    def sends(rank):
        for size in (1, 2, 3):
            event = rank.message(1, 1, size, sends=True, payload=b"%d" % size)
        assert (yield rank.ask(VALUES, a=event)).values() == [(0, 1, b"3")]
        yield rank.ask(STREAM, stream=1)

    def receives(rank):
        rank.run(1, 500)
        events = [rank.message(1, 0, size, sends=False) for size in (1, 2, 3)]
        assert (yield rank.ask(VALUES, a=events[1])).values() == [(0, 1, b"2")]
        yield rank.ask(STREAM, stream=1)

    played = play(sends, receives)
    assert played.log == [(500 + 100 * i, "messages", ((0, 1, i + 1),)) for i in range(3)]
    assert played.times(0) == [0, 800]


def test_messages_of_an_nccl_group_proceed_together():
    def program(rank):
        """Both send and receive at once, which would stall one after the other; all ends are the last one's."""
        peer = 1 - rank.number
        rank.run(1, 50 * rank.number)
        sent = rank.message(1, peer, 8 + rank.number, sends=True, more=True)
        received = rank.message(1, peer, 8 + peer, sends=False)
        yield rank.ask(EVENT, a=sent)
        yield rank.ask(EVENT, a=received)
        yield rank.ask(STREAM, stream=1)

    played = play(program, program, duration=lambda _, size: 10 * size)
    assert played.log == [(50, "messages", ((0, 1, 8), (1, 0, 9)))]
    assert played.times(0) == played.times(1) == [140] * 3


@pytest.mark.parametrize(
    ("peers", "folding", "log"),
    [((0, 0), None, []), ((1, 3), folding_of(0, 0, 0, 0), [(0, "messages", ((0, 1, 8),))])],
    ids=["to oneself", "in a ring of alike ranks"],
)
def test_a_message_to_oneself_crosses_no_network_and_one_to_a_like_rank_is_received_from_another(peers, folding, log):
    def program(rank):
        rank.message(1, peers[0], 8, sends=True, more=True)
        rank.message(1, peers[1], 8, sends=False)
        yield rank.ask(STREAM, stream=1)

    played = play(program, folding=folding)
    assert (played.log, played.times()) == (log, [100 * len(log)])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1), "[0, 1]"),
        (range(8), "[0..7]"),
        (range(0, 64, 8), "[0, 8 .. 56]"),
        ((3, 1, 7), "[3, 1, 7]"),
        ((9, *range(9)), "[9, 0, 1, 2, 3, 4, 5, 6, … 10 ranks]"),
    ],
)
def test_ranks_are_written_for_people(ranks, text):
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([3, 4, 5], "ranks 3, 4 and 5"), (range(12), "ranks 0, 1, 2, 3, 4, 5 and 6 more")],
)
def test_ranks_are_the_subject_of_a_sentence(ranks, text):
    assert who(ranks) == text
