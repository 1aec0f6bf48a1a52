"""A schedule is data: it prints, parses, is validated, and runs again."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.engine import Engine
from foretrain.errors import ScheduleError
from foretrain.schedule import POLICIES, script
from foretrain.simulation import VirtualWorld, simulate
from foretrain.simulation.links import Pipes
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Chunk, Piece, Ready, StepBegin, Task
from foretrain.workload import zoo
from tests.scenario import replay as replayed

TASKS = (Task(0, "conv.weight", 100, 0), Task(1, "fc [0] + b # é\"'", 50, 1), Task(2, "fc.bias", 7, 2))


def test_text_reads_as_documented():
    text = """
    # the last layer first, in two halves
    all_reduce conv.weight[50:100] + fc.bias   # fused
    reduce_scatter "fc [0] + b # é\\"'"
    all_reduce conv.weight[ 0 : 50 ]
    all_gather "fc [0] + b # é\\"'"
    """
    chunks = script.parse(text, TASKS)
    assert [chunk.op for chunk in chunks] == ["all_reduce", "reduce_scatter", "all_reduce", "all_gather"]
    assert chunks[0] == Chunk("all_reduce", (Piece(0, 50, 50), Piece(2, 0, 7)), 57)
    assert script.parse(script.write(chunks, TASKS), TASKS) == chunks


@st.composite
def schedules(draw: st.DrawFn) -> tuple[tuple[Task, ...], list[Chunk]]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, unique=True))
    tasks = tuple(Task(i, name, draw(st.integers(1, 10**9)), i) for i, name in enumerate(names))
    pieces = []
    for task in tasks:
        cuts = sorted({0, task.size, *draw(st.lists(st.integers(0, task.size), max_size=3))})
        pieces += [Piece(task.index, low, high - low) for low, high in pairwise(cuts)]
    random.Random(draw(st.integers())).shuffle(pieces)
    chunks = []
    while pieces:
        taken = tuple(pieces.pop() for _ in range(min(len(pieces), draw(st.integers(1, 3)))))
        chunks.append(Chunk("all_reduce", taken, sum(piece.size for piece in taken)))
    return tasks, chunks


@given(schedules())
def test_every_schedule_survives_a_round_trip(case: tuple[tuple[Task, ...], list[Chunk]]):
    tasks, chunks = case
    assert list(script.parse(script.write(chunks, tasks), tasks)) == chunks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("all_reduce conv.weight", "bytes [0:50] are never reduced"),
        ("all_reduce conv.weight + conv.weight[3:9]", "byte 3 is reduced twice"),
        ("all_reduce fc.bias[0:8]", "'fc.bias' has bytes [0:7], not [0:8]"),
        ("all_reduce fc.bias[5:5]", "not [5:5]"),
        ("all_reduce fc.bia", "did you mean 'fc.bias'"),
        ("allreduce fc.bias", "did you mean 'all_reduce'"),
        ("all_reduce fc.bias fc.bias", "join tensors with '+'"),
        ("all_reduce", "is not a tensor"),
        ("all_reduce fc.bias +", "is not a tensor"),
        ("all_gather fc.bias\nreduce_scatter fc.bias", "gathered before they are reduced"),
        ("reduce_scatter fc.bias", "never"),
    ],
)
def test_what_does_not_exchange_everything_once_is_refused(text: str, problem: str):
    with pytest.raises(ScheduleError) as caught:
        script.parse(text, TASKS)
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("place", ["4 workers @ 10Gbps", "4 workers @ 10Gbps,ps=2"])
def test_a_policys_steady_state_written_and_read_takes_as_long(name: str, place: str):
    workload = zoo("alexnet", batch=16)
    run = simulate(workload, place, name, steps=2)
    work = job_on(workload, run.cluster)
    plan = script.of_step(run.log, len(run.begins) - 2)
    policy = script.Script(
        script.parse(script.write(plan, work.tasks), work.tasks), work.tasks, barrier=POLICIES[name].barrier
    )
    _, replay, _ = replayed(workload, run.cluster, lambda job: policy)
    again = replay.begins[-1] - replay.begins[-2]
    assert script.of_step(replay.log, 1) == plan
    # Without the original's deliberate waiting (credit, cycles, windows) a given order can only be faster, but for a
    # message that a server has begun when a more urgent one comes.
    message = run.cluster.cost.time(1 << 20) if run.cluster.exchange == "ps" else 0
    assert again <= run.iteration_time + message


def test_an_engine_runs_a_script_only_as_far_as_gradients_exist():
    plan = script.parse('all_reduce conv.weight\nall_reduce fc.bias + "fc [0] + b # é\\"\'"', TASKS)
    world = VirtualWorld(Pipes(simulate(zoo("alexnet"), "4 workers @ 1Gbps", "fifo", steps=1).cluster.routes()))
    engine = Engine(script.Script(plan, TASKS), world, TASKS)
    engine.post(StepBegin(0))
    engine.post(Ready(2))
    assert engine.log == ()
    engine.post(Ready(0))
    assert [decision.chunk for decision in engine.log] == [plan[0]]
    engine.post(Ready(1))
    assert [decision.chunk for decision in engine.log] == list(plan)
