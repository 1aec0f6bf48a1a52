"""DDP's buckets against PyTorch's own assignment, and the order in which they leave."""

import random

import pytest

from foretrain.network import Cluster
from foretrain.schedule import Spec
from foretrain.schedule.window import Buckets, by_size
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Ready, StepBegin, Task
from tests.scenario import EXACT, by_step, layered, random_cluster, random_workload, replay


def tasks_of(sizes):
    return [Task(i, f"w{i}", size, i) for i, size in enumerate(sizes)]


def buckets_of(chunks):
    return [tuple(piece.task for piece in chunk.pieces) for chunk in chunks]


def test_buckets_are_pytorchs():
    torch = pytest.importorskip("torch")
    assign = torch.distributed._compute_bucket_assignment_by_size
    rng = random.Random(1)
    for _ in range(1000):
        sizes = [rng.choice((1, 7, 100, rng.randint(1, 1000))) for _ in range(rng.randint(1, 40))]
        order = rng.sample(range(len(sizes)), len(sizes))
        caps = rng.choice(([rng.randint(1, 3000)], [rng.randint(1, 500), rng.randint(1, 3000)]))
        tensors = [torch.empty(sizes[i], dtype=torch.uint8) for i in order]
        expected, _ = assign(tensors, caps, [], order)
        assert by_size(order, tasks_of(sizes), caps) == [tuple(bucket) for bucket in expected]


def test_one_bucket_is_rebuilt_once_in_the_order_of_readiness():
    rng = random.Random(3)
    for _ in range(200):
        workload = random_workload(rng)
        bucket = max(1024, int(workload.size * rng.uniform(0.05, 0.5)))
        first = rng.choice((1024, bucket, 2 * bucket))
        watched, run, _ = replay(workload, random_cluster(rng), Spec("ddp", {"bucket": bucket, "first": first}), 4)
        ready = [seen.event.task for seen in watched.seen if isinstance(seen.event, Ready)]
        tasks = tasks_of([gradient.size for gradient in workload.gradients])
        expected = by_size(ready[: len(tasks)], tasks, [min(first, bucket), bucket])
        steps = by_step(run.log)
        assert buckets_of(steps[0]) == [tuple(range(len(tasks)))]  # the first step overlaps nothing
        for step in (1, 2, 3):
            assert buckets_of(steps[step]) == expected


def test_another_order_of_readiness_in_a_later_step_rebuilds_nothing():
    policy = Spec("ddp", {"bucket": 1024}).build(job_on(layered((1, 1, 1), (1, 1, 1), (2048, 2048, 2048)), EXACT))
    started = []
    for step, order in enumerate(((1, 2, 0), (0, 1, 2), (2, 0, 1))):
        policy.handle(StepBegin(step), 0)
        started.append([buckets_of(start.chunk for start in policy.handle(Ready(task), 0)) for task in order])
    assert started == [[[], [], [(0, 1, 2)]], [[], [(1,)], [(2,), (0,)]], [[], [], [(1,), (2,), (0,)]]]


def test_the_first_bucket_holds_a_mebibyte_and_the_others_25():
    mib = 1 << 20
    sizes = [mib] * 60  # released last to first
    run = simulate(layered([1] * 60, [1] * 60, sizes), Cluster(2), "ddp")
    assert [chunk.size // mib for chunk in by_step(run.log)[1]] == [1, 25, 25, 9]
    assert buckets_of(by_step(run.log)[1])[:2] == [(59,), tuple(range(58, 33, -1))]


def test_a_bucket_waits_for_those_before_it():
    """Ready in another order than the buckets were rebuilt in: they still leave in theirs."""
    rng = random.Random(4)
    for _ in range(300):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        buckets = Buckets(tasks_of(sizes), by_size(range(len(sizes)), tasks_of(sizes), [rng.randint(1, 20)]))
        arrived, started = set(), []
        for task in rng.sample(range(len(sizes)), len(sizes)):
            arrived.add(task)
            started += buckets_of(start.chunk for start in buckets.ready(task))
            complete = [set(bucket) <= arrived for bucket in buckets.buckets]
            assert len(started) == (complete.index(False) if False in complete else len(complete))
        assert tuple(started) == buckets.buckets


def test_the_optimizer_waits_for_all_buckets():
    # Layer 0 could run forward when its gradient has landed, but all is sent first, then updated, then run.
    run = simulate(layered((5, 7), (1, 1), (2048, 2048), (3, 4)), EXACT, "ddp(bucket=1KiB, first=1KiB)")
    assert run.iteration_time == 1 + 2 * 2048 + (3 + 4) + (5 + 7)


def test_with_find_unused_parameters_it_takes_the_reverse_of_registration_and_keeps_it():
    torch = pytest.importorskip("torch")
    rng = random.Random(5)
    for _ in range(100):
        workload = random_workload(rng)
        bucket = max(1024, int(workload.size * rng.uniform(0.05, 0.5)))
        knobs = {"bucket": bucket, "first": 1024, "find_unused": 1}
        _, run, _ = replay(workload, random_cluster(rng), Spec("ddp", knobs), 3)
        tensors = [torch.empty(gradient.size, dtype=torch.uint8) for gradient in workload.gradients]
        assigned, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [1024, bucket])
        expected = [tuple(tasks) for tasks in reversed(assigned)]
        for step in range(3):
            assert buckets_of(by_step(run.log)[step]) == expected
