import json

from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.event_log import ANNOTATION, COST, MEMORY, NAME, STREAM, WARNING
from foretrain.live.rank_trace import HOST, Activity, StepBreakdown, covered
from tests.live.player import play


def training(steps):
    def program(rank):
        for step in range(steps):
            rank.kernels(1, 60, 40)
            forward = rank.record(1)
            rank.run(1, 200)
            rank.wait(2, forward)
            reduced = rank.call(2, "all_reduce", 32)
            rank.wait(1, reduced)
            rank.run(1, 10)
            rank.step(step, rank.record(1))
            yield rank.ask(STREAM, stream=1)
            rank.clock += 5

    return program


def test_every_instant_of_a_step_is_accounted_for_once():
    # 300 computed; 350 ps of communication from 100, of which 150 exposed; then 10 computed; then 5 for the host.
    steps = play(training(3), duration=350).trace.rank_traces[0].steps
    assert steps[0] == StepBreakdown(0, 0, 460, 310, 350, 150, 0, 0)
    assert steps[1:] == [StepBreakdown(i, 465 * i - 5, 465 * i + 460, 310, 350, 150, 0, 5) for i in (1, 2)]


def test_waiting_for_others_is_not_communication():
    def program(rank):
        rank.run(1, 100 if rank.number else 30)
        rank.call(1, "all_reduce", 8)
        rank.step(0, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    rank_traces = play(program, program, duration=50).trace.rank_traces
    assert rank_traces[0].steps == [StepBreakdown(0, 0, 150, 30, 50, 50, 70, 0)]
    assert rank_traces[1].steps == [StepBreakdown(0, 0, 150, 100, 50, 50, 0, 0)]


def test_what_is_under_way_at_a_mark_is_split():
    def program(rank):
        rank.run(1, 30)
        rank.step(0, rank.record(1))
        rank.run(2, 100, copied=100)
        rank.wait(1, rank.record(2))
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    steps = play(program).trace.rank_traces[0].steps
    assert [(step.end, step.compute, step.idle) for step in steps] == [(30, 30, 0), (100, 70, 0)]


def test_kernels_are_kept_where_asked_for():
    played = play(training(4), kept=None)
    activities = list(played.trace.rank_traces[0].activities())
    assert [(a.name, a.start, a.end) for a in activities[:4]] == [
        ("kernel 0", 0, 60),
        ("kernel 1", 60, 100),
        ("1 kernels", 100, 300),
        ("1 kernels", 300, 310),
    ]
    calls = [a for a in activities if a.kind == "communication"]
    assert calls[0] == Activity("communication", 2, "all_reduce", 100, 100, 200, 32, (0,))
    assert len(calls) == 4
    last = play(training(4), kept=2).trace.rank_traces[0]
    assert [a for a in last.activities() if a.kind == "communication"] == calls[2:]
    assert last.since == last.steps[-2].begin
    assert len([stop for stop in last.stops if stop.answered > last.since]) == len(last.stops) == 2
    assert not list(play(training(4)).trace.rank_traces[0].activities())


def test_slowed_kernels_are_stretched():
    def program(rank):
        rank.call(2, "all_reduce", 8)
        rank.kernels(1, 10, 30)
        yield rank.ask(STREAM, stream=1)

    played = play(program, slowdown=2.0, kept=None)
    spans = [(a.start, a.end) for a in played.trace.rank_traces[0].activities() if a.kind == "kernel"]
    assert spans == [(0, 20), (20, 80)]


def test_notes_are_remembered():
    def program(rank):
        rank.note(NAME, a=0, payload=b"gemm")
        rank.note(ANNOTATION, a=1, payload=b"forward")
        rank.kernels(1, 10)
        rank.clock = 8
        rank.note(ANNOTATION, a=1, payload=b"inner")
        rank.clock = 9
        rank.note(ANNOTATION, a=1, b=2, payload=b"backward")
        rank.note(ANNOTATION)
        rank.note(ANNOTATION)
        rank.clock = 12
        rank.note(ANNOTATION, b=2)
        for peak in (5, 7):
            rank.note(MEMORY, payload=json.dumps({"peak": peak}).encode())
        for step in (1, 2):
            rank.note(COST, a=step, payload=b'{"measured": %d}' % step)
        rank.note(WARNING, payload=b"not real")
        rank.note(WARNING, payload=b"not real")
        yield rank.leave(3)

    rank_trace = play(program, kept=None).trace.rank_traces[0]
    assert (rank_trace.status, rank_trace.memory) == (3, {"peak": 7})
    assert [rank_trace.cost(step) for step in (1, 2)] == [{"measured": 1}, {"measured": 2}]
    assert rank_trace.warnings == {"not real": 2}
    activities = [(a.kind, a.stream, a.name, a.start, a.end) for a in rank_trace.activities()]
    assert activities == [
        ("kernel", 1, "gemm", 0, 10),
        ("annotation", HOST, "inner", 8, 9),
        ("annotation", HOST, "forward", 0, 9),
        ("annotation", HOST - 2, "backward", 9, 12),
    ]


def test_ranges_are_kept_with_the_steps_that_were_launched_in_them():
    def program(rank):
        """Its host is two steps ahead of its GPU."""
        rank.note(ANNOTATION, a=1, payload=b"epoch")
        for step in range(1, 6):
            rank.note(ANNOTATION, a=1, payload=b"step %d" % step)
            rank.clock += 1
            rank.kernels(1, 100)
            rank.step(step, rank.record(1))
            rank.note(ANNOTATION)
        rank.note(ANNOTATION)
        yield rank.frame()

    rank_trace = play(program, kept=2).trace.rank_traces[0]
    assert [a.name for a in rank_trace.activities() if a.kind == "annotation"] == ["step 4", "step 5", "epoch"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=10))
def test_what_spans_cover_is_counted_once(spans):
    flat = [bound for start, length in spans for bound in (start, start + length)]
    covering = {at for start, length in spans for at in range(start, start + length)}
    assert covered(flat, 5, 30) == len(covering & set(range(5, 30)))


def test_a_script_that_marks_no_steps_is_accounted_for_bit_by_bit(monkeypatch):
    expected = play(training(8), duration=350, slowdown=1.3).trace.rank_traces[0].steps
    monkeypatch.setattr("foretrain.live.rank_trace._LONG", 3)
    assert play(training(8), duration=350, slowdown=1.3).trace.rank_traces[0].steps == expected


def test_what_the_host_did_is_told():
    def program(rank):
        rank.clock = 3
        rank.kernels(1, 60, 40, every=2)
        rank.clock = 7
        rank.step(1, rank.record(1))
        rank.call(2, "all_reduce", 8)
        yield rank.ask(STREAM, stream=1)
        yield rank.ask(STREAM, stream=1)  # done already: no stop

    rank_trace = play(program, kept=None).trace.rank_traces[0]
    launches = [(a.name, a.launch) for a in rank_trace.activities()]
    assert launches == [("kernel 0", 3), ("kernel 1", 5), ("all_reduce", 7)]
    assert rank_trace.marks == {1: 7}
    assert rank_trace.stops == [(STREAM, 7, 103)]
    assert rank_trace.since == 0
    untraced = play(program).trace.rank_traces[0]
    assert (untraced.stops, untraced.marks) == ([], {1: 7})
