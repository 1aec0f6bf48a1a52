"""Prophet: blocks that drain before the next one comes, and a profile that follows what lasts."""

import dataclasses
import random
from itertools import pairwise

import pytest

from foretrain.network import Cluster
from foretrain.schedule import Spec
from foretrain.schedule.monitor import blocks
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Done, Ready, StepBegin
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import EXACT, Trainer, by_step, layered, random_cluster, random_spec, random_workload, replay

BYTE = 1 << 32
"""A cost of one picosecond per byte."""


def stepwise(rng, most=6):
    """Gradients that leave the backward pass in steps: some at nearly the same time, then for long none."""
    count = rng.randint(2, most)
    layers, gradients, end = [], [], 0
    for place in range(count):
        layer = count - 1 - place
        spread = rng.choice((0, 0, 50, 300))
        end += rng.randint(4000, 20_000)
        for k in range(rng.randint(1, 6)):
            size = 1 + int(30_000 * rng.random() ** 3)
            gradients.append(Gradient(f"w{layer}.{k}", size, layer, end + rng.randint(0, spread)))
        end = max(gradient.release for gradient in gradients)
        layers.append(Layer(f"l{layer}", rng.randint(1, 20_000), end - sum(each.backward for each in layers)))
    return Workload("stepwise", 1, tuple(reversed(layers)), tuple(gradients))


def late(job, releases, decisions):
    """Return for how long the link is occupied by what was sent before a block began or was complete, added up."""
    edges = {edge(releases[i] for i in group) for group in blocks(releases, 2.0) for edge in (min, max)}
    free, occupied = 0, []
    for time, chunk in decisions:
        free = max(time, free) + job.cost.time(chunk.size)
        occupied.append((time, free))
    return sum(max([end - at for time, end in occupied if time < at < end], default=0) for at in edges)


@pytest.mark.parametrize(
    ("ahead", "overhead", "knobs"),
    [
        (0.0, 0, {}),
        (0.0, 200, {"cut": 0, "fuse": 0.0}),
        (0.0, 200, {"cut": 1, "fuse": 0.0}),
        (0.0, 200, {"cut": 0, "fuse": 4.0}),
        (1.0, 200, {}),
        (2.5, 200, {}),
    ],
)
def test_what_is_under_way_when_a_block_begins_or_is_complete_drains_within_so_many_start_ups(ahead, overhead, knobs):
    """In steady state, on a link that is as the model says; and yet the backward phase is used."""
    rng = random.Random(f"{ahead} {overhead} {knobs}")
    sent_early = 0
    for _ in range(60):
        workload = stepwise(rng)
        knobs = {**knobs, "partition": rng.randint(1024, 20_000), "credit": rng.randint(1024, 40_000)}
        releases = [gradient.release for gradient in workload.gradients]
        trainer = Trainer(workload, Spec("prophet", {**knobs, "ahead": ahead, "strict": 1e6}), overhead)
        for _ in range(5):
            sent = trainer.step(releases)
        groups = blocks(releases, 2.0)
        assert late(trainer.job, releases, sent) <= 2 * len(groups) * ahead * overhead
        last = min(releases[i] for i in groups[-1])
        sent_early += sum(chunk.size for time, chunk in sent if time < last)
    assert sent_early > 60 * 1000


def test_before_the_end_comes_near_it_is_bytescheduler():
    """Nothing can begin before the last block has come, so until a full window would be in its way the window rules."""
    rng = random.Random(12)
    for _ in range(40):
        workload = stepwise(rng)
        knobs = {"partition": rng.randint(1024, 20_000), "credit": rng.randint(1024, 40_000)}
        releases = [gradient.release for gradient in workload.gradients]
        prophet = Trainer(workload, Spec("prophet", knobs | {"fuse": 0.0, "strict": 1.0}))
        window = Trainer(workload, Spec("bytescheduler", knobs))
        for _ in range(5):
            ours, theirs = prophet.step(releases), window.step(releases)
        strict = max(releases) - prophet.job.cost.time(knobs["credit"])
        assert [one for one in ours if one[0] < strict] == [one for one in theirs if one[0] < strict]


def test_cut_0_fuse_0_never_sends_a_cut_or_fused_piece():
    rng = random.Random(2)
    for trial in range(200):
        workload = stepwise(rng) if trial % 2 else random_workload(rng)
        plan = random_spec(rng, "prophet", workload.size)
        plan = Spec("prophet", {**plan.knobs, "cut": 0, "fuse": 0.0})
        run = simulate(workload, random_cluster(rng), plan, trace=False)
        partition = plan.settings["partition"]
        for decision in run.log:
            (piece,) = decision.chunk.pieces
            assert piece.offset % partition == 0
            assert piece.size == min(partition, workload.gradients[piece.task].size - piece.offset)


def test_the_longest_prefix_that_fits_goes_the_most_urgent_first():
    """By hand: 100 ps per operation, a picosecond per byte; blocks at 10 000, 12 000 and 20 000."""
    rows = [("a", 500, 2), ("b", 600, 2), ("c", 900, 2), ("d", 2000, 1), ("e", 10, 0)]
    releases = {2: 10_000, 1: 12_000, 0: 20_000}
    layers = (Layer("l0", 1, 8000), Layer("l1", 1, 2000), Layer("l2", 1, 10_000))
    gradients = tuple(Gradient(name, size, layer, releases[layer]) for name, size, layer in rows)
    workload = Workload("by hand", 1, layers, gradients)
    place = dataclasses.replace(EXACT, overhead=100)

    def sent(**knobs):
        run = simulate(workload, place, Spec("prophet", {"factor": 0.0, "ahead": 0.0, "strict": 1e6, **knobs}), steps=1)
        step = len(run.begins) - 2
        return [
            (
                decision.time - run.begins[step],
                tuple((gradients[p.task].name, p.offset, p.size) for p in decision.chunk.pieces),
            )
            for decision in run.log
            if decision.step == step
        ]

    # In 2000 ps: a (600) and b (700) fit, c (1000) does not. Then d and c in the 8000 before e.
    assert sent(cut=0, fuse=0.0) == [
        (10_000, (("a", 0, 500),)),
        (10_000, (("b", 0, 600),)),
        (12_000, (("d", 0, 2000),)),
        (12_000, (("c", 0, 900),)),
        (20_000, (("e", 0, 10),)),
    ]
    # Cut: 700 ps are left for c, 600 bytes of it.
    assert sent(fuse=0.0) == [
        (10_000, (("a", 0, 500),)),
        (10_000, (("b", 0, 600),)),
        (10_000, (("c", 0, 600),)),
        (12_000, (("d", 0, 2000),)),
        (12_000, (("c", 600, 300),)),
        (20_000, (("e", 0, 10),)),
    ]
    # Fused in the backward phase: one operation for what fits.
    assert sent() == [
        (10_000, (("a", 0, 500), ("b", 0, 600), ("c", 0, 800))),
        (12_000, (("d", 0, 2000), ("c", 800, 100))),
        (20_000, (("e", 0, 10),)),
    ]


def test_the_forward_phase_is_strict_priority_under_credit():
    rng = random.Random(3)
    for _ in range(150):
        workload, place = random_workload(rng), random_cluster(rng)
        plan = random_spec(rng, "prophet", workload.size)
        plan = Spec("prophet", {**plan.knobs, "planned": 0})
        credit, partition = plan.settings["credit"], plan.settings["partition"]
        watched, _, _ = replay(workload, place, plan, steps=5)
        urgency = [task.first_use for task in job_on(workload, place).tasks]
        left, coming, under_way = {}, 0, 0
        for seen in watched.seen:
            if isinstance(seen.event, StepBegin):
                coming = len(workload.gradients)
            elif isinstance(seen.event, Ready):
                coming -= 1
                left[seen.event.task] = workload.gradients[seen.event.task].size
            elif isinstance(seen.event, Done):
                under_way -= seen.event.chunk.size
            for chunk in seen.chunks:
                assert coming or under_way < credit
                under_way += chunk.size
                assert chunk.size <= partition
                for piece in chunk.pieces:
                    assert piece.task == min((i for i in left if left[i]), key=urgency.__getitem__)
                    left[piece.task] -= piece.size
        assert not any(left.values())


def test_while_it_profiles_it_is_bytescheduler():
    rng = random.Random(4)
    for _ in range(50):
        workload, place = random_workload(rng), random_cluster(rng)
        knobs = {"partition": 4096, "credit": 10_000}
        runs = [
            simulate(workload, place, Spec(name, knobs | extra), steps=steps, trace=False)
            for name, extra, steps in (("prophet", {"profile": 4, "planned": 0}, 1), ("bytescheduler", {}, 4))
        ]
        prophet, other = (by_step(run.log) for run in runs)
        assert [prophet[step] for step in range(4)] == [other[step] for step in range(4)]


def test_lasting_new_release_times_are_adopted():
    rng = random.Random(5)
    for _ in range(40):
        workload = stepwise(rng)
        plan = Spec("prophet", {"partition": 4096, "profile": 3, "ahead": 0.0, "strict": 1e6})
        old = [gradient.release for gradient in workload.gradients]
        new = [release // 2 for release in old] if rng.random() < 0.5 else [2 * release for release in old]
        trainer, fresh = Trainer(workload, plan), Trainer(workload, plan)
        for _ in range(6):
            trainer.step(old)
        for _ in range(5):
            after = trainer.step(new)
        for _ in range(5):
            expected = fresh.step(new)
        assert after == expected
        assert late(trainer.job, new, after) == 0


def test_one_odd_step_changes_nothing():
    rng = random.Random(6)
    for _ in range(40):
        workload = stepwise(rng)
        old = [gradient.release for gradient in workload.gradients]
        trainer = Trainer(workload, Spec("prophet", {"partition": 4096, "profile": 3, "ahead": 0.0, "strict": 1e6}))
        for _ in range(5):
            steady = trainer.step(old)
        trainer.step([3 * release for release in old])
        assert trainer.step(old) == steady


def test_a_late_block_does_not_idle_the_link_for_ever():
    """When what should have come has not, a little more is sent, again and again."""
    workload = layered((1, 1), (10_000, 10_000), (100, 60_000))
    releases = [gradient.release for gradient in workload.gradients]
    trainer = Trainer(workload, Spec("prophet", {"partition": 1024, "profile": 3, "factor": 0.5, "strict": 1e6}))
    for _ in range(4):
        trainer.step(releases)
    decisions = trainer.step([100_000, releases[1]])
    sent = sum(chunk.size for time, chunk in decisions if time < 100_000)
    assert sent == 60_000
    gaps = [after - before for (before, _), (after, _) in pairwise(decisions) if after < 80_000]
    assert max(gaps) <= 10_000


def test_a_network_that_costs_nothing_is_no_error():
    workload = stepwise(random.Random(3))
    free = Cluster(1, gpus=2)
    assert simulate(workload, free, "prophet", trace=False).iteration_time >= workload.compute
