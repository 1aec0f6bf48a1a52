import random

import pytest

from foretrain.lab.compare import experiment
from foretrain.network import Cluster
from foretrain.planner import search, tune
from foretrain.schedule import POLICIES, Spec, spec
from foretrain.simulation import simulate
from foretrain.units import MICROSECOND, MILLISECOND
from tests.scenario import layered, random_cluster, random_workload

TUNABLE = [name for name, policy in POLICIES.items() if any(knob.tunable for knob in policy.knobs)]
SLOW = "4 workers @ 10Gbps"
DEEP = layered([10**9] * 20, [2 * 10**9] * 20, [4_000_000] * 20)
"""20 layers of 1 + 2 ms and 4 MB: at 10 Gb/s communication takes about 1.6 times as long as computation."""


def time_of(workload, place, plan):
    return simulate(workload, place, plan, steps=1, trace=False).iteration_time


@pytest.mark.parametrize("name", TUNABLE)
def test_it_is_never_worse_than_the_defaults(name):
    rng = random.Random(name)
    scenarios = [(random_workload(rng, scale=50_000), random_cluster(rng)) for _ in range(6)]
    for workload, place in [*scenarios, (DEEP, SLOW)]:
        best = tune(workload, place, name)
        assert time_of(workload, place, best) <= time_of(workload, place, name)


def test_it_finds_something_where_there_is_something_to_find():
    # One bucket of 80 MB overlaps nothing: smaller ones must win.
    plan = tune(DEEP, SLOW, "ddp")
    assert plan.knobs["bucket"] < 25 << 20
    assert time_of(DEEP, SLOW, plan) < time_of(DEEP, SLOW, "ddp")


def test_knobs_that_are_set_are_kept():
    best = tune(DEEP, SLOW, "bytescheduler(partition=3MB)")
    assert best.knobs["partition"] == 3_000_000
    assert tune(DEEP, SLOW, "bytescheduler(partition=3MB, credit=7MB)") == spec(
        "bytescheduler(partition=3MB, credit=7MB)"
    )


def test_only_what_is_tunable_is_tuned():
    for name in TUNABLE:
        fixed = {knob.name for knob in POLICIES[name].knobs if not knob.tunable}
        assert fixed.isdisjoint(tune(DEEP, SLOW, name, evaluations=8).knobs)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in TUNABLE])
def test_a_policy_without_knobs_is_returned_as_it_is(name):
    assert tune(DEEP, SLOW, name) == Spec(name)


@pytest.mark.parametrize("evaluations", [1, 5, 20])
def test_it_simulates_no_more_often_than_allowed_and_once_at_the_optimum(monkeypatch, evaluations):
    asked = []

    def counted(workload, place, plan, **options):
        asked.append(str(plan))
        return simulate(workload, place, plan, **options)

    monkeypatch.setattr(search, "simulate", counted)
    tune(DEEP, SLOW, "prophet", evaluations=evaluations)
    assert len(asked) <= evaluations
    assert len(set(asked)) == len(asked)
    asked.clear()
    idle = layered([10**9] * 4, [10**9] * 4, [1000] * 4)  # nothing to gain: the defaults already are within 0.02 %
    tune(idle, "4 workers @ 1000Gbps,latency=0s,overhead=0s", "bytescheduler")
    assert len(asked) == 1


def test_a_careful_search_leaves_knobs_that_need_exact_times():
    rng = random.Random(0)
    for workload, place in [(random_workload(rng, scale=50_000), random_cluster(rng)) for _ in range(12)]:
        tried = []
        tune(workload, place, "prophet", careful=True, tried=tried)
        assert all(plan.settings["factor"] == 2.0 for plan, _ in tried)


def test_a_careful_search_does_not_jump_to_the_published_knobs():
    """A block in one message promises 1.2 % where a server's messages cost 200 µs; on real links it lost 18 %."""
    how = {"hosts": 3, "rate": "1Gbps", "servers": 1, "ratio": 1.0, "size": 0.054}
    workload, place = (
        experiment("vgg16", **how, schedules=("prophet",)).workload,
        "3 workers @ 1Gbps, ps=1, overhead=200us",
    )
    found = tune(workload, place, "prophet", careful=True)
    assert time_of(workload, place, found) > 1.01 * time_of(workload, place, "prophet")
    assert found.settings["partition"] < 1_000_000
    assert found.settings["strict"] == 1


@pytest.mark.parametrize("name", ["p3", "bytescheduler", "prophet"])
def test_a_careful_partition_is_worth_its_operation_twice(name):
    tried, floor = [], 700 * MICROSECOND
    where = Cluster(3, up=3.75e7, down=3.75e7, overhead=0, floor=floor)
    workload = layered([MILLISECOND] * 12, [2 * MILLISECOND] * 12, [60_000] * 9 + [180_000] * 3)
    tune(workload, where, name, careful=True, tried=tried)
    sizes = [plan.settings.get("partition", plan.settings.get("slice")) for plan, _ in tried]
    assert min(sizes) >= 0.95 * 2 * where.cost.breakeven > 36_000  # two significant digits
    assert where.cost.time(where.cost.breakeven) == pytest.approx(floor, rel=1e-3)


@pytest.mark.parametrize("knobs", [{}, {"partition": 100_000}, {"credit": 400_000}])
def test_a_careful_window_holds_three_partitions_unless_it_is_set(knobs):
    for name in ("bytescheduler", "prophet"):
        found = tune(DEEP, SLOW, Spec(name, knobs), careful=True)
        if "credit" in knobs:
            assert found.knobs["credit"] == knobs["credit"]
        else:
            assert found.settings["credit"] >= 2.9 * found.settings["partition"]
