"""PACE's fusion against every grouping there is."""

import itertools
import random

import pytest

from foretrain.schedule import CostModel, Spec
from foretrain.schedule.pace import fuse
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Chunk, Ready
from tests.scenario import EXACT, random_cluster, random_layered, random_spec, random_workload, replay

BYTE = 1 << 32
"""A cost of one picosecond per byte."""


def predicted(groups, releases, sizes, tails, overhead, partition):
    """max over groups k of r_k + Σ_{i≤k} (θ·⌈s_i/δ⌉ + s_i) + q_k at a picosecond per byte."""
    found, sent = [], 0
    for group in groups:
        size = sum(sizes[i] for i in group)
        sent += size + overhead * -(-size // partition)
        found.append(max(releases[i] for i in group) + sent + max(tails[i] for i in group))
    return max(found)


def groupings(count):
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, here in enumerate(cuts) if here]
        yield [range(a, b) for a, b in itertools.pairwise([0, *ends, count])]


def random_problem(rng, most):
    """In order of urgency; releases in any order in half of the cases."""
    count = rng.randint(1, most)
    scale = rng.choice((50, 5000, 10**7))
    releases = [rng.randint(0, scale) for _ in range(count)]
    tails = sorted((rng.randint(0, scale) for _ in range(count)), reverse=True)
    if rng.random() < 0.5:
        releases.sort(reverse=True)
    sizes = [1 + int(scale * rng.random() ** 4) for _ in range(count)]
    overhead = rng.choice((0, 1, scale // 20, scale // 2))
    partition = max(1, int(scale * rng.uniform(0.01, 2)))
    return releases, sizes, tails, overhead, partition


def test_it_is_within_a_thousandth_of_the_best_grouping():
    rng = random.Random(1)
    for _ in range(600):
        releases, sizes, tails, overhead, partition = problem = random_problem(rng, 8)
        groups = fuse(releases, sizes, tails, CostModel(overhead, BYTE), partition)
        best = min(predicted(one, *problem) for one in groupings(len(sizes)))
        assert predicted(groups, *problem) <= best + max(1, best // 1000 + 1)


def test_it_never_predicts_worse_than_unfused():
    rng = random.Random(2)
    for _ in range(1500):
        releases, sizes, tails, overhead, partition = problem = random_problem(rng, 40)
        groups = fuse(releases, sizes, tails, CostModel(overhead, BYTE), partition)
        assert [i for group in groups for i in group] == list(range(len(sizes)))
        assert predicted(groups, *problem) <= predicted([[i] for i in range(len(sizes))], *problem)


@pytest.mark.parametrize("size", [1, 10**15])
def test_it_ends_however_small_or_large_the_numbers(size):
    groups = fuse([0, 0, 0], [size] * 3, [2, 1, 0], CostModel(size, BYTE), 1 << 34)
    assert [i for group in groups for i in group] == [0, 1, 2]


def test_groups_follow_tails_and_start_by_urgency():
    rng = random.Random(4)
    for _ in range(150):
        workload, place = random_workload(rng), random_cluster(rng)
        plan = random_spec(rng, "pace", workload.size)
        job = job_on(workload, place)
        order = sorted(range(len(job.tasks)), key=lambda i: (-job.tails[i], job.tasks[i].first_use))
        place_of = {task: rank for rank, task in enumerate(order)}
        groups = fuse(
            [job.releases[i] for i in order],
            [job.tasks[i].size for i in order],
            [job.tails[i] for i in order],
            job.cost,
            plan.settings["partition"],
        )
        group_of = {order[k]: number for number, group in enumerate(groups) for k in group}
        watched, _, _ = replay(workload, place, plan)
        missing = [len(group) for group in groups]
        left = [0] * len(groups)
        for event in watched.events:
            if isinstance(event, Ready):
                group = group_of[event.task]
                missing[group] -= 1
                if not missing[group]:
                    missing[group] = len(groups[group])
                    left[group] = sum(job.tasks[order[k]].size for k in groups[group])
            elif isinstance(event, Chunk):
                (group,) = {group_of[piece.task] for piece in event.pieces}
                assert group == min(k for k in range(len(groups)) if left[k])
                assert event.size == min(left[group], plan.settings["partition"])
                places = [place_of[piece.task] for piece in event.pieces]
                assert places == sorted(places)
                left[group] -= event.size


def test_without_overhead_it_is_largest_tail_first():
    rng = random.Random(5)
    for _ in range(100):
        workload = random_layered(rng, updates=True)
        knobs = {"partition": 2048, "credit": 4096}
        runs = [simulate(workload, EXACT, Spec(name, knobs), trace=False) for name in ("pace", "largest_tail_first")]
        assert runs[0].log == runs[1].log
