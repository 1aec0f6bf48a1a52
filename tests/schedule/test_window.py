"""The window: units in pieces, and units of several tasks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from foretrain.schedule.window import Window, cut
from foretrain.tasks import Done, Piece, Ready, Start, StepBegin, Task


def tasks_of(sizes):
    return [Task(i, f"w{i}", size, i) for i, size in enumerate(sizes)]


def chunks(starts: list[Start]):
    return [start.chunk for start in starts]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.data())
def test_cut_pieces_cover_just_the_bytes_asked_for(lengths, data):
    unit = [(10 + i, length) for i, length in enumerate(lengths)]
    offset = data.draw(st.integers(0, sum(lengths) - 1))
    size = data.draw(st.integers(1, sum(lengths) - offset))
    laid = [(task, byte) for task, length in unit for byte in range(length)]
    found = cut(unit, offset, size)
    assert [(p.task, b) for p in found for b in range(p.offset, p.offset + p.size)] == laid[offset : offset + size]
    assert all(piece.size > 0 for piece in found)
    assert len({piece.task for piece in found}) == len(found)


def test_a_unit_leaves_when_its_last_task_is_ready():
    window = Window(tasks_of([30, 20, 10]), [[0, 2], [1]], 1000, 1000)
    assert chunks(window.handle(Ready(0))) == []
    (alone,) = chunks(window.handle(Ready(1)))
    assert alone.pieces == (Piece(1, 0, 20),)
    (fused,) = chunks(window.handle(Ready(2)))
    assert (fused.pieces, fused.size) == ((Piece(0, 0, 30), Piece(2, 0, 10)), 40)


def test_a_fused_unit_is_cut_across_its_tasks():
    window = Window(tasks_of([30, 20]), [[1, 0]], 25, 1000)
    window.ready(0)
    window.ready(1)
    assert [chunk.pieces for chunk in chunks(window.fill())] == [
        (Piece(1, 0, 20), Piece(0, 0, 5)),
        (Piece(0, 5, 25),),
    ]


def test_units_of_the_next_step_are_whole_again():
    window = Window(tasks_of([30, 20]), [[0, 1]], 1000, 1000)
    for _ in range(3):
        assert window.handle(StepBegin(0)) == []
        assert window.handle(Ready(1)) == []
        (chunk,) = chunks(window.handle(Ready(0)))
        assert chunk.size == 50
        assert window.handle(Done(chunk)) == []


def test_credit_comes_back_with_every_arrival_in_any_order():
    rng = random.Random(1)
    for _ in range(300):
        sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 10))]
        order = rng.sample(range(len(sizes)), len(sizes))
        cuts = sorted(rng.sample(range(1, len(sizes)), rng.randint(0, len(sizes) - 1)))
        units = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
        partition, credit = rng.randint(1, 80), rng.randint(1, 200)
        window = Window(tasks_of(sizes), units, partition, credit)
        moved, under_way = [[] for _ in sizes], []
        waiting = rng.sample(range(len(sizes)), len(sizes))
        while waiting or under_way:
            if waiting and (not under_way or rng.random() < 0.5):
                event = Ready(waiting.pop())
            else:
                event = Done(under_way.pop(rng.randrange(len(under_way))))
            under_way += chunks(window.handle(event))
            assert sum(chunk.size for chunk in under_way) < credit + partition
            for chunk in under_way:
                for piece in chunk.pieces:
                    if piece not in moved[piece.task]:
                        moved[piece.task].append(piece)
        for task, size in enumerate(sizes):
            spans = sorted((piece.offset, piece.offset + piece.size) for piece in moved[task])
            assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), size]
