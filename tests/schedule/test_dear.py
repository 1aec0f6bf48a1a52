"""DeAR: all halves forth, then all halves back in forward order."""

import random

from foretrain.schedule.window import by_size
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Done
from tests.scenario import EXACT, by_step, layered, random_cluster, random_spec, random_workload, replay


def runs(seed, count=200):
    rng = random.Random(seed)
    for _ in range(count):
        workload = random_workload(rng)
        plan = random_spec(rng, "dear", workload.size)
        yield workload, plan, replay(workload, random_cluster(rng), plan)


def members(chunk):
    return tuple(piece.task for piece in chunk.pieces)


def test_groups_are_reduce_scattered_in_the_order_of_release_and_then_all_gathered_in_forward_order():
    for workload, plan, (_, run, _) in runs(1):
        job = job_on(workload, EXACT)
        groups = by_size(job.by_release, job.tasks, [plan.settings["group"]])
        for step, chunks in by_step(run.log).items():
            half = len(chunks) // 2
            assert [chunk.op for chunk in chunks] == ["reduce_scatter"] * half + ["all_gather"] * half
            assert sorted(map(members, chunks[:half])) == sorted(map(members, chunks[half:]))
            first_use = [min(job.tasks[task].first_use for task in members(chunk)) for chunk in chunks[half:]]
            assert first_use == sorted(first_use)
            assert step == 0 or [members(chunk) for chunk in chunks[:half]] == groups


def test_the_first_all_gather_starts_with_the_arrival_of_the_last_reduce_scatter():
    for _, _, (watched, _, _) in runs(2, 50):
        scattering = 0
        for seen in watched.seen:
            scattering += sum(chunk.op == "reduce_scatter" for chunk in seen.chunks)
            if isinstance(seen.event, Done) and seen.event.chunk.op == "reduce_scatter":
                scattering -= 1
            if any(chunk.op == "all_gather" for chunk in seen.chunks):
                assert not scattering
                assert isinstance(seen.event, Done)


def test_a_layer_waits_only_for_its_own_group():
    # Halves of 1024 take 1024 (rounded from κ = 1): forth 2 behind the backward pass, back l0 first.
    run = simulate(layered((5000, 7), (10, 10), (2048, 2048)), EXACT, "dear(group=1KiB)", steps=1)
    # Scattered: 10 + 1024 + 1024; w0 gathered 1024 later; w1 hides behind l0's forward.
    assert run.iteration_time == 10 + 3 * 1024 + 5000 + 7
