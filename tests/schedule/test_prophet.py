"""Prophet: blocks that drain before the next one comes, and a profile that follows what lasts."""

import dataclasses
import random
from itertools import pairwise

import pytest

from foretrain.engine import Engine
from foretrain.network import Cluster, cluster
from foretrain.schedule import CostModel, Job, Spec
from foretrain.schedule.arrivals import blocks
from foretrain.simulation import VirtualWorld, simulate
from foretrain.simulation.simulation import job_on
from foretrain.simulation.world import ARRIVAL
from foretrain.tasks import Done, Ready, StepBegin
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import EXACT, by_step, layered, random_cluster, random_spec, random_workload, replay

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


def under_way_at_readiness(watched, step):
    """For each gradient that becomes ready in ``step``: the gradient, and the chunks still under way just before."""
    now, under_way, found = -1, [], []
    for seen in watched.seen:
        if isinstance(seen.event, StepBegin):
            now = seen.event.step
        elif isinstance(seen.event, Done):
            under_way.remove(seen.event.chunk)
        elif isinstance(seen.event, Ready) and now == step:
            found.append((seen.event.task, tuple(under_way)))
        under_way += seen.chunks
    return found


@pytest.mark.parametrize("overhead", [0, 200])
@pytest.mark.parametrize("knobs", [{}, {"cut": 0, "fuse": 0.0}, {"cut": 1, "fuse": 0.0}, {"cut": 0, "fuse": 4.0}])
def test_nothing_is_under_way_when_a_block_begins(overhead, knobs):
    """In steady state, on a link that is as the model says: what was sent has drained before anything urgent comes."""
    place = dataclasses.replace(EXACT, overhead=overhead)
    rng = random.Random(f"{overhead} {knobs}")
    sent_early = 0
    for _ in range(60):
        workload = stepwise(rng)
        plan = Spec(
            "prophet",
            {
                "partition": rng.randint(1024, 20_000),
                "credit": rng.randint(1024, 40_000),
                "ahead": 0.0,
                "strict": 1e6,
                **knobs,
            },
        )
        watched, run, _ = replay(workload, place, plan, steps=5)
        job = job_on(workload, place)
        groups = blocks(job.releases, 2.0)
        assert len(groups) > 1 or len(workload.gradients) < 8
        first = {min(group, key=lambda i: (job.releases[i], job.tasks[i].first_use)) for group in groups}
        for task, under_way in under_way_at_readiness(watched, 4):
            if task in first:
                assert not under_way
        last = run.begins[4] + min(job.releases[i] for i in groups[-1])
        sent_early += sum(decision.chunk.size for decision in run.log if decision.step == 4 and decision.time < last)
    assert sent_early > 60 * 1000  # and yet the backward phase is used


@pytest.mark.parametrize("ahead", [0.0, 1.0, 2.5])
def test_what_is_under_way_when_a_block_begins_drains_within_so_many_start_ups(ahead):
    rng = random.Random(int(10 * ahead))
    used = 0
    for _ in range(60):
        workload = stepwise(rng)
        knobs = {"partition": rng.randint(1024, 20_000), "ahead": ahead, "strict": 1e6, "profile": 3}
        releases = [gradient.release for gradient in workload.gradients]
        trainer = Trainer(workload, Spec("prophet", knobs), overhead=200)
        for _ in range(5):
            sent = trainer.step(releases)
        count = len(blocks(releases, 2.0))
        assert late(trainer.job, releases, sent) <= count * ahead * 200
        used = max(used, late(trainer.job, releases, sent) / count)
    assert used > 0 or not ahead


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


def test_nothing_is_under_way_when_a_block_is_complete():
    """The time from its first to its last gradient is filled by the same rule."""
    rng = random.Random(1)
    for _ in range(100):
        workload = stepwise(rng)
        watched, _, _ = replay(
            workload, EXACT, Spec("prophet", {"partition": 4096, "ahead": 0.0, "strict": 1e6}), steps=5
        )
        job = job_on(workload, EXACT)
        coming = [set(group) for group in blocks(job.releases, 2.0)]
        for task, under_way in under_way_at_readiness(watched, 4):
            block = next(block for block in coming if task in block)
            block.remove(task)
            if not block:
                assert not under_way


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
            for name, extra, steps in (("prophet", {"profile": 4}, 1), ("bytescheduler", {}, 4))
        ]
        prophet, other = (by_step(run.log) for run in runs)
        assert [prophet[step] for step in range(4)] == [other[step] for step in range(4)]


class Link:
    """One pipe, ``slowness`` times as slow as the model says."""

    def __init__(self, cost):
        self.cost, self.slowness, self.free = cost, 1, 0

    def carry(self, chunk, world, done):
        self.free = max(world.now(), self.free) + self.cost.time(chunk.size) * self.slowness
        world.schedule(self.free, ARRIVAL, done, chunk)


class Trainer:
    """Backward passes only, with gradients and a link that may change from step to step."""

    def __init__(self, workload, plan, overhead=0):
        self.job = Job.of(workload, CostModel(overhead, BYTE))
        self.policy = plan.build(self.job)
        self.link = Link(self.job.cost)
        self.world = VirtualWorld(self.link)
        self.landed = []
        self.engine = Engine(self.policy, self.world, self.job.tasks, self.landed.append)
        self.steps = 0

    def step(self, releases):
        """What was started in one step and when, counted from its beginning; and when the last byte arrived."""
        began, before = self.world.now(), len(self.engine.log)
        self.engine.post(StepBegin(self.steps))
        for task in sorted(range(len(releases)), key=lambda i: (releases[i], self.job.tasks[i].first_use)):
            self.world.call_at(began + releases[task], lambda task=task: self.engine.post(Ready(task)))
        self.landed.clear()
        self.world.run()
        assert sorted(self.landed) == list(range(len(releases)))
        self.steps += 1
        return [(decision.time - began, decision.chunk) for decision in self.engine.log[before:]]


def late(job, releases, decisions, slowness=1):
    """Time by which the blocks' first gradients find the link occupied by what was sent before, added up."""
    starts = {min(releases[i] for i in group) for group in blocks(releases, 2.0)}
    free, total = 0, 0
    occupied = []
    for time, chunk in decisions:
        begin = max(time, free)
        free = begin + job.cost.time(chunk.size) * slowness
        occupied.append((time, free))
    for start in starts:
        total += max([end - start for time, end in occupied if time < start < end], default=0)
    return total


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


@pytest.mark.parametrize("slowness", [2, 5])
def test_a_lasting_new_bandwidth_is_adopted(slowness):
    """A link that became slower blocks the next blocks at first, and no longer when that was noticed."""
    rng = random.Random(slowness)
    blocked, adopted = 0, 0
    for _ in range(15):
        workload = stepwise(rng)
        releases = [gradient.release for gradient in workload.gradients]
        trainer = Trainer(
            workload, Spec("prophet", {"partition": 1024, "profile": 3, "ahead": 0.0, "strict": 1e6}), overhead=10
        )
        for _ in range(5):
            before = trainer.step(releases)
        assert late(trainer.job, releases, before) == 0
        trainer.link.slowness = slowness
        blocked += late(trainer.job, releases, trainer.step(releases), slowness)
        for _ in range(80):
            after = trainer.step(releases)
        adopted += late(trainer.job, releases, after, slowness)
        trainer.link.slowness = 1
        for _ in range(80):
            again = trainer.step(releases)
        assert late(trainer.job, releases, again) == 0
    assert blocked > 15 * 1000
    assert adopted <= 15 * len(releases)  # rounding


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


@pytest.mark.parametrize(("options", "apart"), [("", 0.0), (",ps=2", 0.0), (",ps=colocated", 0.02)])
def test_it_has_settled_after_its_warm_up(options, apart):
    """What is measured is the first step after profiling: the following ones must be the same.

    Beside the workers pushes are faster while nothing is pulled, so that what a push takes depends on the order.
    """
    rng = random.Random(options)
    for _ in range(40):
        workload = stepwise(rng)
        place = cluster(f"4@8000Gbps,latency=0s,overhead=0s{options}")
        run = simulate(workload, place, random_spec(rng, "prophet", workload.size), steps=5, trace=False)
        times = [b - a for a, b in pairwise(run.begins[-6:])]
        assert max(times) <= min(times) * (1 + apart)


def test_a_network_that_costs_nothing_is_no_error():
    workload = stepwise(random.Random(3))
    free = Cluster(1, gpus=2)
    assert simulate(workload, free, "prophet", trace=False).iteration_time >= workload.compute
