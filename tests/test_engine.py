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


def test_landed_is_called_once_per_step_per_task():
    world, policy, landed, engine = build()
    for step in range(3):
        policy.answers = [[], [], [send("all_reduce", (0, 0, 10), (1, 0, 5)), send("all_reduce", (1, 5, 15))]]
        engine.post(StepBegin(step))
        engine.post(Ready(0))
        engine.post(Ready(1))
        world.arrive()
        world.arrive()
    assert landed == [0, 1] * 3
    assert [decision.step for decision in engine.log] == [0, 0, 1, 1, 2, 2]


def test_the_policy_hears_of_an_arrival_before_the_framework_does():
    world, policy, landed = Bench(), Says([send("all_reduce", (0, 0, 10))]), []
    engine = Engine(policy, world, TASKS, lambda task: landed.append((task, len(policy.asked))))
    engine.post(Ready(0))
    world.arrive()
    assert landed == [(0, 2)]


def test_the_log_says_when_in_which_step_and_what():
    world, _, _, engine = build([], [send("all_reduce", (0, 0, 10))])
    engine.post(StepBegin(7))
    world.time = 42
    engine.post(Ready(0))
    assert engine.log == (Decision(42, 7, Chunk("all_reduce", (Piece(0, 0, 10),), 10)),)


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


@pytest.mark.parametrize(
    ("answers", "event", "words"),
    [
        pytest.param(
            [[send("all_reduce", (0, 0, 10)), send("all_reduce", (0, 0, 10))]],
            Ready(0),
            "10 bytes too many",
            id="twice",
        ),
        pytest.param([[send("all_reduce", (0, 0, 10), (0, 9, 1))]], Ready(0), "1 bytes too many", id="a byte twice"),
        pytest.param([[send("all_reduce", (0, 0, 10))]], StepBegin(0), "10 bytes too many", id="before it is ready"),
        pytest.param([[send("all_gather", (0, 0, 10))]], Ready(0), r"all_gather of \[0, 10\)", id="gathered unreduced"),
        pytest.param(
            [[send("reduce_scatter", (0, 0, 10)), send("all_gather", (0, 0, 10))]],
            Ready(0),
            r"all_gather of \[0, 10\)",
            id="gathered while reducing",
        ),
        pytest.param(
            [[send("reduce_scatter", (0, 0, 10)), send("all_reduce", (0, 0, 10))]],
            Ready(0),
            "10 bytes too many",
            id="reduced in both ways",
        ),
    ],
)
def test_a_policy_that_breaks_a_rule_is_named_with_the_task(answers, event, words):
    _, _, _, engine = build(*answers)
    with pytest.raises(ScheduleError, match=f"task 'first': .*{words}"):
        engine.post(event)


def test_what_was_sent_in_the_last_step_does_not_count_in_this():
    world, policy, _, engine = build([send("all_reduce", (0, 0, 10))])
    engine.post(Ready(0))
    world.arrive()
    policy.answers = [[send("all_reduce", (0, 0, 10))]]
    with pytest.raises(ScheduleError, match="'first'"):
        engine.post(StepBegin(1))


def test_a_gradient_that_comes_again_before_it_has_landed_is_refused():
    _, _, _, engine = build()
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
