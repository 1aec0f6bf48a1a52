"""One order for workers that have a scheduler each: what a policy does where all is as expected."""

import random
from dataclasses import replace

from foretrain.schedule import POLICIES, CostModel, Job, Spec
from foretrain.schedule.prophet import PlannedOrder, rehearse
from foretrain.tasks import Chunk, Done, Piece, Ready, Start, StepBegin, Task
from foretrain.units import COST_SHIFT
from tests.scenario import Trainer, random_spec, random_workload

PLAN = tuple(Chunk("all_reduce", (Piece(task, offset, 50),), 50) for task, offset in ((2, 0), (1, 0), (0, 0), (2, 50)))
"""Of tasks 0 and 1, of 50 bytes, and of task 2, of 100, whose second half the others overtake."""


def follower(plan=lambda job: PLAN, slower=1, beside=False):
    """Tasks come at 0, 100 and 200 ps, the last first; a byte takes ``slower`` ps."""
    tasks = tuple(Task(i, f"w{i}", size, i) for i, size in enumerate((50, 50, 100)))
    cost = CostModel(0, slower << COST_SHIFT)
    job = Job(tasks, (0, 1, 2), (200, 100, 0), (0, 0, 0), (1, 1, 1), 200, cost, separate=True, beside=beside)
    return PlannedOrder(job, plan)


def started(policy, event, now=0):
    return [action.chunk for action in policy.handle(event, now) if isinstance(action, Start)]


def test_a_rehearsal_is_what_the_policy_does_on_a_link_that_is_as_expected():
    rng = random.Random(3)
    for name in sorted(POLICIES.keys() - {"dear", "tictac"}):  # whose gathers wait for the forward pass
        for _ in range(6):
            workload = random_workload(rng)
            plan = random_spec(rng, name, workload.size)
            trainer = Trainer(workload, plan, overhead=rng.choice((0, 200)))
            for _ in range(trainer.engine._policy.warmup + 1):
                sent = trainer.step(trainer.job.releases)
            assert rehearse(plan.build(trainer.job), trainer.job) == tuple(chunk for _, chunk in sent), name


def test_while_something_is_under_way_the_order_is_the_plans_whatever_comes_when():
    """So workers that are apart, or have gradients in another order, push the same bytes in the same order."""
    rng = random.Random(5)
    for _ in range(20):
        policy, sent = follower(), []
        policy.handle(StepBegin(0), 0)
        order = [2, *rng.sample((0, 1), 2)]
        for place, task in enumerate(order):
            sent += started(policy, Ready(task), rng.randint(100 * place, 100 * place + 99))
        assert sent == list(PLAN)


def test_an_idle_link_gets_the_next_chunk_that_is_ready():
    policy = follower()
    policy.handle(StepBegin(0), 0)
    assert started(policy, Ready(2), 0) == [PLAN[0]]
    assert started(policy, Done(PLAN[0]), 50) == [PLAN[3]]
    assert started(policy, Ready(0), 60) == []  # it is task 1's turn
    assert started(policy, Ready(1), 70) == [PLAN[1], PLAN[2]]
    assert started(policy, Done(PLAN[3]), 100) == []


def test_links_that_change_for_good_are_planned_for_anew():
    """A link within 20 % of as fast is not; what is planned for is by steps, so that workers find the same. A host that
    hears of everything at once, or late once, changes nothing."""
    seen = []

    def plan(job):
        seen.append(round(job.cost.per_byte / (1 << COST_SHIFT), 3))
        return PLAN

    def run(slowness, burst=False, beside=False):
        seen.clear()
        policy, now = follower(plan, beside=beside), 0
        for step in range(8):
            policy.handle(StepBegin(step), now)
            chunks = [chunk for task in (2, 1, 0) for chunk in started(policy, Ready(task), now)]
            ends = [now + int(50 * slowness(step) * (k + 1)) for k in range(len(chunks))]
            for chunk, end in zip(chunks, ends, strict=True):
                now = ends[-1] if burst else end
                policy.handle(Done(chunk), now)
        return seen

    assert run(lambda step: 1.0) == run(lambda step: 1.15) == [1.0]
    assert run(lambda step: 2.0) == run(lambda step: 2.1) == run(lambda step: 2.0, burst=True) == [1.0, 2.0]
    assert run(lambda step: 0.5, burst=True) == [1.0, 0.5]
    assert run(lambda step: 9.0 if step == 4 else 1.0) == run(lambda step: 1.0, burst=True) == [1.0]
    assert run(lambda step: 2.0 if step < 4 else 1.0) == [1.0, 2.0, 1.0]
    assert run(lambda step: 2.0, beside=True) == [1.1, 2.2]


def test_prophet_plans_where_each_worker_has_a_scheduler_of_its_own():
    rng = random.Random(7)
    workload = random_workload(rng)
    job = Job.of(workload, CostModel(100, 1 << COST_SHIFT), separate=True)
    ours, papers = (Spec("prophet", {"planned": planned}).build(job) for planned in (1, 0))
    assert (ours.warmup, papers.warmup) == (0, 3)
    alone = replace(job, separate=False)
    ours.handle(StepBegin(0), 0)
    sent = [chunk for task in job.by_release for chunk in started(ours, Ready(task))]
    assert set(sent) == set(rehearse(Spec("prophet").build(alone), alone))
