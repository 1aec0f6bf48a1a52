"""P3: the most urgent slice, exactly one at a time."""

import dataclasses
import random

from foretrain.schedule import Spec
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Chunk, Done, Ready
from tests.scenario import EXACT, by_step, layered, random_cluster, random_spec, random_workload, replay


def test_exactly_one_slice_is_under_way_whenever_any_is_ready():
    rng = random.Random(1)
    for _ in range(200):
        workload = random_workload(rng)
        plan = random_spec(rng, "p3", workload.size)
        watched, _, _ = replay(workload, random_cluster(rng), plan)
        under_way, unsent = 0, 0
        for seen in watched.seen:
            if isinstance(seen.event, Ready):
                unsent += workload.gradients[seen.event.task].size
            under_way += len(seen.chunks) - isinstance(seen.event, Done)
            unsent -= sum(chunk.size for chunk in seen.chunks)
            assert under_way in (0, 1)
            assert under_way or not unsent


def test_it_is_always_the_most_urgent_slice():
    rng = random.Random(2)
    for _ in range(200):
        workload = random_workload(rng)
        plan = random_spec(rng, "p3", workload.size)
        watched, _, _ = replay(workload, random_cluster(rng), plan)
        urgency = [task.first_use for task in job_on(workload, EXACT).tasks]
        left = dict.fromkeys(range(len(workload.gradients)), 0)
        for event in watched.events:
            if isinstance(event, Ready):
                left[event.task] = workload.gradients[event.task].size
            elif isinstance(event, Chunk):
                (piece,) = event.pieces
                assert piece.task == min((i for i in left if left[i]), key=urgency.__getitem__)
                assert piece.size == min(left[piece.task], plan.settings["slice"])
                left[piece.task] -= piece.size
        assert not any(left.values())


def test_an_urgent_gradient_overtakes_after_one_slice():
    # w1 (3 slices) is released at 1 and w0 at 11: it goes between the first and the second slice.
    _, run, _ = replay(layered((1, 1), (10, 1), (1000, 3072)), EXACT, Spec("p3", {"slice": 1024}), steps=1)
    pieces = [(chunk.pieces[0].task, chunk.pieces[0].offset) for chunk in by_step(run.log)[0]]
    assert pieces == [(1, 0), (0, 0), (1, 1024), (1, 2048)]


def test_stop_and_wait_pays_the_latency_of_every_slice():
    place = dataclasses.replace(EXACT, latency=500)  # of one way: twice for both halves of an all-reduce
    _, run, _ = replay(layered((1,), (1,), (4096,)), place, Spec("p3", {"slice": 1024}), steps=1)
    assert run.begins[1] == 1 + 4 * (1024 + 2 * 500) + 1
