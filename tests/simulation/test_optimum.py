"""Simulated policies against T*: none beats it, the optimal one reaches it, and the comparators are what they say."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.network import Cluster
from foretrain.schedule import POLICIES, Spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.workload import Workload
from tests.scenario import (
    EXACT,
    one_machine,
    random_cluster,
    random_layered,
    random_spec,
    random_workload,
    workloads,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)
@given(workload=workloads(), seed=st.integers(0, 2**32))
def test_no_policy_beats_the_optimum(name, workload, seed):
    """In integers: not by a picosecond, on any network, with any knobs."""
    rng = random.Random(seed)
    run = simulate(workload, random_cluster(rng), random_spec(rng, name, workload.size), trace=False)
    assert run.iteration_time >= run.bound.time


@pytest.mark.parametrize("partition", [10_000, 1000, 100, 1])
def test_largest_tail_first_tends_to_the_optimum(partition):
    """T ≤ T* + (W + δ)κ with nothing to pay per operation; κ is 1 here."""
    rng = random.Random(partition)
    for _ in range(100):
        plan = Spec("largest_tail_first", {"partition": partition, "credit": rng.choice((1, partition, 3 * partition))})
        run = simulate(random_workload(rng, most=5, scale=20_000 if partition > 1 else 60), EXACT, plan, trace=False)
        assert run.iteration_time <= run.bound.time + plan.knobs["credit"] + partition


def with_overhead(workload, place, partition):
    """T*(c_i + θ⌈s_i/δ⌉) with κ = 1."""
    job = job_on(workload, place)
    work = [task.size + place.overhead * -(-task.size // partition) for task in job.tasks]
    return max(one_machine(job.releases, work, job.tails), workload.compute)


@pytest.mark.parametrize("name", ["bytescheduler", "largest_tail_first"])
@pytest.mark.parametrize("latency", [0, 700])
def test_overheads_cost_what_the_bound_says(name, latency):
    """T ≤ T*(c_i + θ⌈s_i/δ⌉) + (W + δ)κ + θ·(operations under way) + latency, if the window hides the latency.

    Credit lets fewer than W + δ bytes under way: at most W/δ + 1 operations when all are full partitions, and one more
    for each tensor that ends in a smaller one.
    """
    rng = random.Random(f"{name} {latency}")
    for trial in range(600):
        workload = random_layered(rng)
        partition = rng.randint(1024, 8000)
        if full := trial % 2 == 0:
            gradients = [dataclasses.replace(g, size=-(-g.size // partition) * partition) for g in workload.gradients]
            workload = dataclasses.replace(workload, gradients=tuple(gradients))
        place = dataclasses.replace(EXACT, overhead=rng.choice((0, 10, 400, 3000)), latency=latency)
        credit = rng.randint(1024, 4 * partition) + 2 * (2 * latency + partition if latency else 0)
        run = simulate(workload, place, Spec(name, {"partition": partition, "credit": credit}), trace=False)
        operations = credit / partition + 1 + (0 if full else len(workload.gradients))
        worst = with_overhead(workload, place, partition) + credit + partition + place.overhead * operations
        assert run.iteration_time <= worst + 2 * latency


def test_fifo_is_the_comparator():
    rng = random.Random(2)
    for _ in range(400):
        place = Cluster(rng.randint(2, 9), up=rng.uniform(0.3e12, 3e12), latency=0, overhead=0)
        run = simulate(random_workload(rng), place, "fifo", trace=False)
        assert run.iteration_time == run.bound.wfbp


def whole_to_the_end(workload: Workload) -> Workload:
    """The last gradient leaves with the end of the backward pass, and none is smaller than DeAR's smallest group."""
    gradients = [dataclasses.replace(g, size=g.size + 1024) for g in workload.gradients]
    gradients[0] = dataclasses.replace(gradients[0], release=workload.backward)
    return dataclasses.replace(workload, gradients=tuple(gradients))


def test_dear_with_groups_of_one_is_the_comparator():
    """Up to a picosecond per half, which is rounded up where the comparator rounds down."""
    rng = random.Random(3)
    for _ in range(600):
        workload = whole_to_the_end(random_workload(rng))
        run = simulate(workload, EXACT, "dear(group=1KiB)", trace=False)
        assert run.bound.dear <= run.iteration_time <= run.bound.dear + 2 * len(workload.gradients)
