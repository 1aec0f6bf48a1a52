"""The best buckets of DistributedDataParallel against every partition, and the list of caps that makes them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network import Cluster
from foretrain.planner.bucket_advice import advise_buckets, best_buckets, best_caps, caps_in_mib
from foretrain.schedule import Job, Spec, spec
from foretrain.schedule.window import by_size
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.units import MICROSECOND, MILLISECOND
from tests.scenario import by_step, layered, workloads

RING = Cluster(4, up=1e9, down=1e9, latency=0, overhead=50 * MICROSECOND)


def end_of(job: Job, buckets) -> int:
    end = 0
    for bucket in buckets:
        released = max(job.releases[task] for task in bucket)
        end = max(end, released) + job.cost.time(sum(job.tasks[task].size for task in bucket))
    return end


def partitions(order):
    for cuts in range(1 << (len(order) - 1)):
        places = [0, *(i + 1 for i in range(len(order) - 1) if cuts >> i & 1), len(order)]
        yield [list(order[a:b]) for a, b in pairwise(places)]


@given(workloads(most=5), st.sampled_from([0, 1, 50, 5000]))
def test_no_partition_ends_earlier_by_more_than_a_thousandth(workload, overhead):
    job = job_on(workload, Cluster(4, up=1e9, down=1e9, latency=0, overhead=overhead * MICROSECOND))
    order = job.by_release
    found = best_buckets(job)
    assert [task for bucket in found for task in bucket] == list(order)
    least = min(end_of(job, each) for each in partitions(order))
    assert end_of(job, found) <= least + (job.backward + least) // 1000


@given(st.lists(st.lists(st.integers(1, 1 << 28), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_caps_cut_gradients_into_these_buckets(sizes):
    flat = [size for bucket in sizes for size in bucket]
    job = job_on(layered((1,) * len(flat), (1,) * len(flat), flat), RING)
    caps = [int(cap * (1 << 20)) for cap in caps_in_mib(sizes)]
    cut = by_size(range(len(flat)), job.tasks, [max(1, cap) for cap in caps])
    assert [len(bucket) for bucket in cut] == [len(bucket) for bucket in sizes]


def test_the_roundest_cap_is_taken():
    mib = 1 << 20
    assert caps_in_mib([[3 * mib, 5 * mib], [mib // 2, mib // 3]]) == [8, 0.8]


def test_the_policy_sends_the_listed_buckets_in_the_order_of_release():
    sizes = (3 << 20, 1 << 20, 2 << 20, 5 << 20)
    workload = layered((MILLISECOND,) * 4, (MILLISECOND,) * 4, sizes)
    run = simulate(workload, RING, "ddp(buckets=[6MiB, 4MiB])")
    sent = [[piece.task for piece in chunk.pieces] for chunk in by_step(run.log)[1]]
    assert sent == [[3, 2], [1, 0]]


def test_a_list_is_read_and_written():
    plan = spec("ddp(buckets=[1MiB, 25MB], first=2MiB)")
    assert plan == Spec("ddp", {"buckets": (1 << 20, 25_000_000), "first": 2 << 20})
    assert spec(str(plan)) == plan


@pytest.mark.parametrize("text", ["ddp(buckets=[0B])", "ddp(buckets=[x])", "ddp(buckets=[1MB, 1EB])"])
def test_a_list_of_other_than_sizes_is_refused(text):
    with pytest.raises(ValueError, match="buckets"):
        spec(text)


def test_one_bucket_of_everything_gains_by_a_list():
    # 20 MB fit into DDP's first two buckets, so that its default hides nearly nothing of them.
    layers = 20
    workload = layered((MILLISECOND,) * layers, (2 * MILLISECOND,) * layers, (1_000_000,) * layers)
    advice = advise_buckets(workload, RING)
    assert advice.gain(advice.listed) >= advice.gain(advice.single) >= 0.1
    assert advice.recommended in (advice.single, advice.listed)
    assert any(f"bucket_cap_mb_list={list(advice.cap_list)}" in line for line in advice.lines)


def test_one_size_is_the_first_buckets_too_as_in_torch():
    # A first bucket of 1 MiB and all else in a second would be best, and no single size gives that.
    workload = layered((MILLISECOND,) * 4, (MILLISECOND,) * 4, (1 << 20, 1 << 20, 1 << 20, 1 << 20))
    advice = advise_buckets(workload, Cluster(2, up=1e10, down=1e10, latency=0, overhead=2 * MILLISECOND))
    used = advice.single.schedule.settings
    assert used["bucket"] == used["first"] == advice.cap * (1 << 20)
    assert advice.single.time == simulate(workload, advice.single.place, advice.single.schedule).iteration_time


@given(workloads(most=5), st.booleans())
def test_a_single_size_is_the_best_of_all_sizes_by_its_end(workload, unused):
    job = job_on(workload, RING)
    order = range(len(job.tasks)) if unused else job.by_release

    def end(cap: float) -> int:
        cut = by_size(order, job.tasks, [int(cap * (1 << 20))])
        return end_of(job, cut[::-1] if unused else cut)

    found = best_caps(job, unused)
    assert [end(cap) for cap in found] == sorted(end(cap) for cap in found)
    assert end(found[0]) <= min(map(end, (0.01, 0.1, 1, 10, 25, 100, 1000)))


def test_gains_are_over_the_arguments_that_a_script_gives():
    layers = 20
    workload = layered((MILLISECOND,) * layers, (2 * MILLISECOND,) * layers, (1_000_000,) * layers)
    usual = advise_buckets(workload, RING)
    best = advise_buckets(workload, RING, present=usual.listed.schedule, copies=False)
    assert best.gain(best.listed) == 0
    assert best.recommended is best.present
    assert any("is set already" in line for line in best.lines)


def test_where_unused_parameters_are_looked_for_buckets_are_cut_from_the_other_end():
    sizes = (3 << 20, 1 << 20, 2 << 20, 5 << 20)
    workload = layered((MILLISECOND,) * 4, (MILLISECOND,) * 4, sizes)
    advice = advise_buckets(workload, RING, present=spec("ddp(find_unused=1)"))
    assert advice.searchless is not None
    assert advice.searchless.time == simulate(workload, RING, "ddp").iteration_time
    assert sum("static_graph=True, or find_unused_parameters=False" in line for line in advice.lines) == 1
    assert advice.listed.schedule.settings["find_unused"] == 1
    job = job_on(workload, RING)
    cut = by_size(range(4), job.tasks, [int(cap * (1 << 20)) for cap in advice.cap_list])
    assert [list(bucket)[::-1] for bucket in cut[::-1]] == best_buckets(job)


def test_halved_gradients_travel_in_the_listed_buckets():
    layers = 20
    workload = layered((MILLISECOND,) * layers, (2 * MILLISECOND,) * layers, (1_000_000,) * layers)
    advice = advise_buckets(workload, RING)
    assert advice.half is not None

    def cut(workload, plan):
        return [[p.task for p in chunk.pieces] for chunk in by_step(simulate(workload, RING, plan).log)[1]]

    assert cut(advice.half.workload, advice.half.schedule) == cut(workload, advice.listed.schedule)


def test_where_the_link_is_free_the_defaults_stay():
    workload = layered((MILLISECOND,) * 4, (MILLISECOND,) * 4, (1000,) * 4)
    advice = advise_buckets(workload, Cluster(2, up=1e12, down=1e12, latency=0, overhead=0))
    assert advice.recommended is advice.present
    assert advice.lines[-1].startswith("Keep DDP's buckets as they are")
