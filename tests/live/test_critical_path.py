import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.event_log import NAME, STREAM
from foretrain.live.forecast import PathSegment, critical_path, title
from foretrain.live.rank_trace import Activity
from tests.live.player import play


def path_of(*programs, kept=None, **how):
    return critical_path(play(*programs, kept=kept, **how).trace.rank_traces)


def test_a_kernel_after_a_communication_after_a_kernel():
    def program(rank):
        rank.note(NAME, a=0, payload=b"gemm")
        rank.kernels(1, 60)
        forward = rank.record(1)
        rank.kernels(1, 200)
        rank.wait(2, forward)
        reduced = rank.call(2, "all_reduce", 32)
        rank.wait(1, reduced)
        rank.kernels(1, 10)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    path = path_of(program, program, duration=350)
    assert path.pieces == (
        PathSegment(0, "kernel", "gemm", 0, 60),
        PathSegment(0, "communication", "all_reduce of 2 ranks", 60, 410),
        PathSegment(0, "kernel", "gemm", 410, 420),
    )
    assert path.shares() == {"all_reduce of 2 ranks": 350 / 420, "gemm": 70 / 420}
    assert path.kinds() == {"communication": 350 / 420, "kernel": 70 / 420}
    # Where the communication is short, the other kernel binds.
    assert [piece.name for piece in path_of(program, duration=20).pieces] == ["gemm", "gemm", "gemm"]


def test_it_goes_to_the_rank_that_came_last():
    def program(rank):
        rank.kernels(1, 100 if rank.number else 30)
        rank.call(1, "all_reduce", 8)
        if not rank.number:
            rank.kernels(1, 5)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    assert [piece[:1] + piece[3:] for piece in path_of(program, program, duration=50).pieces] == [
        (1, 0, 100),
        (0, 100, 150),
        (0, 150, 155),
    ]


def test_a_message_leads_to_its_sender():
    def program(rank):
        if not rank.number:
            rank.kernels(1, 70)
        rank.message(1, 1 - rank.number, 8, sends=not rank.number)
        if rank.number:
            rank.kernels(1, 20)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    pieces = path_of(program, program, duration=9).pieces
    assert [(piece.rank, piece.name, piece.end) for piece in pieces] == [
        (0, "kernel 0", 70),
        (1, "send/recv", 79),
        (1, "kernel 0", 99),
    ]


def test_a_late_launch_leads_to_the_host_and_on_to_what_it_stopped_for():
    def program(rank):
        rank.kernels(1, 40)
        rank.kernels(2, 15, copied=15)
        yield rank.ask(STREAM, stream=1)  # goes on at 40
        rank.clock += 7
        rank.kernels(2, 3)
        rank.kernels(2, 2)
        rank.clock += 20
        rank.kernels(2, 1)
        rank.step(1, rank.record(2))
        yield rank.ask(STREAM, stream=2)

    pieces = path_of(program).pieces
    # Kernels between 47 and 52 did not bind: the host launched the last no earlier than 67.
    assert [(piece.kind, piece.begin, piece.end) for piece in pieces] == [
        ("kernel", 0, 40),
        ("host", 40, 67),
        ("kernel", 67, 68),
    ]


def test_only_the_last_step_counts_and_none_without_activities():
    def program(rank):
        for step in (1, 2):
            rank.kernels(1, 10 * step)
            rank.step(step, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    path = path_of(program)
    assert (path.begin, path.end) == (10, 30)
    assert [piece[3:] for piece in path.pieces] == [(10, 30)]
    assert critical_path(play(program).trace.rank_traces) is None
    assert critical_path({}) is None


def test_time_before_the_kept_activities_is_unseen():
    def program(rank):
        rank.kernels(1, 100 if rank.number else 10)
        rank.step(1, rank.record(1))
        rank.call(1, "all_reduce", 8)
        if not rank.number:
            rank.kernels(1, 7)
        rank.step(2, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    assert [piece[:2] + piece[3:] for piece in path_of(program, program, duration=50, kept=1).pieces] == [
        (1, "unseen", 10, 100),
        (0, "communication", 100, 150),
        (0, "kernel", 150, 157),
    ]


@pytest.mark.parametrize(
    ("name", "group", "text"),
    [
        ("all_reduce", (0, 1, 2, 3), "all_reduce of 4 ranks"),
        ("all_reduce", (1, 9, 17), "all_reduce of 3 ranks, 1 in 8"),
        ("all_gather", (0, 1, 4, 5), "all_gather of 4 ranks"),
        ("recv", (3, 4), "send/recv"),
    ],
)
def test_communications_are_summed_by_operation_and_kind_of_group(name, group, text):
    assert title(Activity("communication", 1, name, 0, 0, 1, 8, group)) == text


KINDS = st.sampled_from(["kernels", "wait", "all_reduce", "think", "stop"])
OPERATIONS = st.lists(st.tuples(KINDS, st.integers(1, 2), st.integers(1, 90)), min_size=1, max_size=25)


@given(OPERATIONS, st.sampled_from([1.0, 1.5]), st.data())
def test_the_pieces_fill_the_step(operations, slowdown, data):
    speeds = data.draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))

    def program(rank):
        for what, stream, amount in operations:
            if what == "kernels":
                rank.kernels(stream, amount * speeds[rank.number], amount, every=2)
                rank.clock += 3
            elif what == "wait":
                rank.wait(stream, rank.record(3 - stream))
            elif what == "all_reduce":
                rank.call(stream, "all_reduce", amount)
            elif what == "think":
                rank.clock += amount
            else:
                yield rank.ask(STREAM, stream=stream)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)

    trace = play(program, program, program, duration=40, slowdown=slowdown, kept=None).trace
    path = critical_path(trace.rank_traces)
    if path is None:
        assert all(rank_trace.steps[-1].end == 0 for rank_trace in trace.rank_traces.values())
        return
    bounds = [path.begin, *(piece.end for piece in path.pieces)]
    assert bounds == sorted(bounds)
    assert bounds[:-1] == [piece.begin for piece in path.pieces]
    assert bounds[-1] == path.end == max(rank_trace.steps[-1].end for rank_trace in trace.rank_traces.values())
    assert abs(sum(path.shares().values()) - 1) < 1e-9
    assert "unseen" not in path.kinds()
