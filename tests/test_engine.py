import pytest

from foretrain.engine import Decision, Engine
from foretrain.errors import ScheduleError
from foretrain.tasks import Chunk, Done, Piece, Ready, Start, StepBegin, Task, Wake, WakeAt

TASKS = (Task(0, "first", 10, 0), Task(1, "second", 20, 1))


class Bench:
    """A world whose clock and network are moved by hand."""

    def __init__(self):
        self.time = 0
        self.under_way = []
        self.timers = []

    def now(self):
        return self.time

    def call_at(self, when, call):
        self.timers.append((when, call))

    def start(self, chunk, done):
        self.under_way.append((chunk, done))

    def arrive(self):
        chunk, done = self.under_way.pop(0)
        done(chunk)


class Says:
    """A policy that answers the n-th event with the n-th answer, then nothing; remembers what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def handle(self, event, now):
        self.asked.append((now, event))
        return self.answers.pop(0) if self.answers else ()


def send(op, *pieces):
    return Start(Chunk(op, tuple(Piece(*piece) for piece in pieces), sum(piece[2] for piece in pieces)))


def build(*answers):
    world, policy, landed = Bench(), Says(*answers), []
    return world, policy, landed, Engine(policy, world, TASKS, landed.append)


def test_a_task_lands_when_all_its_bytes_have_arrived():
    world, policy, landed, engine = build([], [send("all_reduce", (0, 0, 4)), send("all_reduce", (0, 4, 6))])
    engine.post(StepBegin(0))
    engine.post(Ready(0))
    world.arrive()
    assert landed == []
    world.arrive()
    assert landed == [0]
    assert [event for _, event in policy.asked[2:]] == [Done(decision.chunk) for decision in engine.log]


def test_the_policy_hears_of_an_arrival_before_the_framework_does():
    world, policy, landed = Bench(), Says([send("all_reduce", (0, 0, 10))]), []
    engine = Engine(policy, world, TASKS, lambda task: landed.append((task, len(policy.asked))))
    engine.post(Ready(0))
    world.arrive()
    assert landed == [(0, 2)]


def test_split_operations_land_when_gathered():
    world, _, landed, engine = build([send("reduce_scatter", (0, 0, 10))], [send("all_gather", (0, 0, 10))])
    engine.post(Ready(0))
    world.arrive()
    assert landed == []
    world.arrive()
    assert landed == [0]


def test_a_wake_comes_when_asked_for():
    world, policy, _, engine = build([WakeAt(5)])
    engine.post(StepBegin(0))
    ((when, call),) = world.timers
    assert when == 5
    world.time = 5
    call()
    assert policy.asked[-1] == (5, Wake())


REDUCED, SCATTERED, GATHERED = (send(op, (0, 0, 10)) for op in ("all_reduce", "reduce_scatter", "all_gather"))


@pytest.mark.parametrize(
    ("answer", "event", "words"),
    [
        ([REDUCED, REDUCED], Ready(0), "10 bytes too many"),
        ([send("all_reduce", (0, 0, 10), (0, 9, 1))], Ready(0), "1 bytes too many"),
        ([REDUCED], StepBegin(0), "10 bytes too many"),  # before it is ready
        ([GATHERED], Ready(0), r"all_gather of \[0, 10\)"),
        ([SCATTERED, GATHERED], Ready(0), r"all_gather of \[0, 10\)"),  # which is still under way
        ([SCATTERED, REDUCED], Ready(0), "10 bytes too many"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_named_with_the_task(answer, event, words):
    _, _, _, engine = build(answer)
    with pytest.raises(ScheduleError, match=f"task 'first': .*{words}"):
        engine.post(event)


def test_each_step_counts_its_own_bytes_and_a_gradient_comes_again_only_after_it_has_landed():
    world, policy, landed, engine = build([], [send("all_reduce", (0, 0, 10))])
    engine.post(StepBegin(7))
    world.time = 42
    engine.post(Ready(0))
    world.arrive()
    assert (landed, engine.log) == ([0], (Decision(42, 7, Chunk("all_reduce", (Piece(0, 0, 10),), 10)),))
    policy.answers = [[send("all_reduce", (0, 0, 10))]]
    with pytest.raises(ScheduleError, match="'first'"):  # what was sent in the last step does not count in this
        engine.post(StepBegin(8))
    engine.post(Ready(1))
    with pytest.raises(ScheduleError, match="task 'second' is ready again before its last step landed"):
        engine.post(Ready(1))


def test_waiting_says_what_is_missing():
    world, _, _, engine = build([], [send("reduce_scatter", (1, 0, 15))])
    engine.post(Ready(0))
    engine.post(Ready(1))
    world.arrive()
    assert engine.waiting() == (
        "task 'first': 10 of 10 bytes have not landed (10 never started, 0 reduced but not gathered)",
        "task 'second': 20 of 20 bytes have not landed (5 never started, 15 reduced but not gathered)",
    )
