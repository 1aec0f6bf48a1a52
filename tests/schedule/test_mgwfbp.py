"""MG-WFBP's merging against the rule as the paper's algorithm states it: layers downwards, starts recomputed."""

import dataclasses
import random

from foretrain.schedule import CostModel
from foretrain.schedule.by_readiness import merge
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from tests.scenario import EXACT, by_step, random_cluster, random_workload

BYTE = 1 << 32
"""A cost of one picosecond per byte."""


def algorithm_1(releases, sizes, cost):
    """Layers L..1, ready in that order; a merged layer gives its bytes to the one below and sends nothing.

    For l = L..2, R = ready(l−1): if R < start_l + tc_l and (start_l > R or R − start_l < α) merge l into l−1, then
    recompute all starts with start_l = max(start_{l+1} + tc_{l+1}, ready_l).
    """
    count = len(sizes)
    ready = dict(zip(range(count, 0, -1), releases, strict=True))
    size = dict(zip(range(count, 0, -1), sizes, strict=True))
    into = {}

    def duration(layer):
        return cost.time(size[layer]) if size[layer] else 0

    def starts():
        found = {count: ready[count]}
        for layer in range(count - 1, 0, -1):
            found[layer] = max(found[layer + 1] + duration(layer + 1), ready[layer])
        return found

    start = starts()
    for layer in range(count, 1, -1):
        following = ready[layer - 1]
        if following < start[layer] + duration(layer) and (
            start[layer] > following or following - start[layer] < cost.overhead
        ):
            size[layer - 1] += size[layer]
            size[layer] = 0
            into[layer] = layer - 1
            start = starts()
    groups = [[]]
    for place, layer in enumerate(range(count, 0, -1)):
        groups[-1].append(place)
        if layer not in into and layer > 1:
            groups.append([])
    return groups


def models(seed, number):
    """Small ones at random: when gradients are released, their sizes, what an operation costs."""
    rng = random.Random(seed)
    for _ in range(number):
        count = rng.randint(1, 12)
        releases = sorted(rng.randint(0, 300) for _ in range(count))
        yield releases, [rng.randint(1, 80) for _ in range(count)], CostModel(rng.choice((0, 1, 20, 100)), BYTE)


def test_it_is_algorithm_1():
    for releases, sizes, cost in models(1, 5000):
        assert [list(group) for group in merge(releases, sizes, cost)] == algorithm_1(releases, sizes, cost)


def test_latency_is_no_start_up_cost():
    """What follows hides it, so it is no reason to wait."""
    rng = random.Random(3)
    for _ in range(100):
        workload = random_workload(rng)
        near, far = (dataclasses.replace(EXACT, overhead=50, latency=latency) for latency in (0, 5000))
        logs = [by_step(simulate(workload, place, "mgwfbp").log)[0] for place in (near, far)]
        assert logs[0] == logs[1]


def test_merged_gradients_leave_in_order_when_the_last_is_ready():
    rng = random.Random(4)
    for _ in range(200):
        workload, place = random_workload(rng), random_cluster(rng)
        job = job_on(workload, place)
        order = job.by_release
        groups = merge([job.releases[i] for i in order], [job.tasks[i].size for i in order], job.cost)
        run = simulate(workload, place, "mgwfbp", trace=False)
        for step, begin in enumerate(run.begins[:-1]):
            decisions = [decision for decision in run.log if decision.step == step]
            for decision, group in zip(decisions, groups, strict=True):
                assert [piece.task for piece in decision.chunk.pieces] == [order[k] for k in group]
                assert decision.time - begin == job.releases[order[group[-1]]]
