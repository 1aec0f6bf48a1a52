import json
import random

import pytest

from foretrain.errors import ConfigError
from foretrain.experiments import compare, sweep
from foretrain.schedule import IDEAL, POLICIES, spec
from foretrain.simulation import bound, simulate
from tests.scenario import layered, random_cluster, random_workload

SLOW = "4 workers @ 10Gbps"
DEEP = layered([10**9] * 12, [2 * 10**9] * 12, [4_000_000] * 12)
"""12 layers of 1 + 2 ms and 4 MB."""


@pytest.fixture(scope="module")
def everything():
    return compare(DEEP, SLOW, trace=False)


def test_there_is_a_row_for_every_schedule(everything):
    assert [run.schedule.name for run in everything.runs] == list(POLICIES)


def test_the_baseline_is_ddp_at_its_best(everything):
    assert everything.baseline.schedule.name == "ddp"
    for run in everything.runs:
        if run.schedule.name == "ddp":
            assert everything.baseline.iteration_time <= run.iteration_time
    for bucket in ("100kB", "1MB", "4MB", "10MB", "25MB", "100MB"):
        assert everything.baseline.iteration_time <= simulate(DEEP, SLOW, f"ddp(bucket={bucket})").iteration_time


def test_a_row_of_ddp_that_is_better_than_the_search_becomes_the_baseline():
    rng = random.Random(1)
    for _ in range(20):
        workload = random_workload(rng)
        found = compare(workload, random_cluster(rng), ["ddp(bucket=1KiB)", "ddp(bucket=5kB)", "fifo"], trace=False)
        assert all(found.baseline.iteration_time <= run.iteration_time for run in found.runs[:2])


def test_speedups_are_over_the_baseline(everything):
    for run in everything.runs:
        assert everything.speedup(run) == everything.baseline.iteration_time / run.iteration_time
    assert everything.speedup(everything.baseline) == 1
    real = [run.iteration_time for run in everything.runs if run.schedule.name != IDEAL]
    assert everything.best.iteration_time == min(real)
    assert everything.advice.gain == everything.speedup(everything.best)


def test_every_row_is_at_least_the_optimum(everything):
    assert everything.bound == bound(DEEP, SLOW)
    assert all(run.bound == everything.bound and run.gap >= 0 for run in everything.runs)


def test_rows_keep_their_order_and_the_knobs_that_were_set():
    asked = ["p3", "bytescheduler(partition=2MB, credit=5MB)", "ddp(bucket=3MB)", "fifo"]
    found = compare(DEEP, SLOW, asked, trace=False)
    assert [run.schedule.name for run in found.runs] == ["p3", "bytescheduler", "ddp", "fifo"]
    assert [str(run.schedule) for run in found.runs[1:]] == [str(spec(text)) for text in asked[1:]]
    untuned = compare(DEEP, SLOW, ["p3", "prophet"], tuned=False, trace=False)
    assert [str(run.schedule) for run in untuned.runs] == ["p3", "prophet"]


def test_it_goes_into_json_and_back(everything):
    swept = everything.with_sweep(sweep(DEEP, SLOW, ["ddp"], "rate=1Gbps:10Gbps", points=2, tuned=False))
    for comparison in (everything, swept):
        data = comparison.to_dict()
        assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["sweep"]["parameter"] == "rate"
    assert [row["speedup"] for row in data["runs"]] == [everything.speedup(run) for run in everything.runs]
    assert data["bound"]["optimum"] == pytest.approx(everything.bound.time / 1e12)
    assert everything.sweep is None


def test_it_says_how_far_it_is():
    heard = []
    compare(DEEP, SLOW, ["fifo", "p3"], tuned=False, progress=lambda *said: heard.append(said))
    assert heard == [("fifo", 0, 3), ("p3", 1, 3), ("ddp", 2, 3), ("done", 3, 3)]


@pytest.mark.parametrize(
    ("schedules", "words"),
    [([], "schedules: .* is empty; name some of: fifo, ddp"), (["nope"], "schedule: 'nope' is unknown")],
)
def test_nothing_to_compare_is_refused(schedules, words):
    with pytest.raises(ConfigError, match=words):
        compare(DEEP, SLOW, schedules)
