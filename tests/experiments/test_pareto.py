"""The best and the Pareto front: by definition, not by how they are found."""

from hypothesis import given
from hypothesis import strategies as st

from foretrain.experiments import ScenarioResult, expand, parse
from foretrain.experiments.result_table import best, front, over_seeds, table

SWEEP = parse("""
workloads = ["alexnet", { model = "vgg16", batch = [16, 32] }]
clusters = [{ notation = "4x1xV100@{rate}", axes = { rate = ["1Gbps", "10Gbps"] } }]
schedules = ["ddp", "fifo", "largest_tail_first"]
jitter = 0.1
seeds = 3
""")
EXPANSION = expand(SWEEP)
times = st.lists(st.integers(1, 20), min_size=len(EXPANSION.scenarios), max_size=len(EXPANSION.scenarios))


def made(numbers: list[int]):
    results = {
        known: ScenarioResult(
            known,
            schedule=one.schedule,
            iteration_time=float(number),
            samples_per_second=60 / number,
            bandwidth=float(1 + index % 5),
            knobs={"partition": 1.0},
        )
        for index, ((known, one), number) in enumerate(zip(EXPANSION.scenarios.items(), numbers, strict=True))
    }
    return table(EXPANSION.scenarios, results)


@given(times)
def test_no_point_of_the_front_is_dominated_and_every_other_is(numbers):
    rows = [row for row in over_seeds(made(numbers)) if row["policy"] != "largest_tail_first"]
    found = front(rows, ["samples_per_second", "bandwidth"])

    for row in rows:
        on = found.rows[row["workload"]]
        worse = [one for one in on if one["samples_per_second"] >= row["samples_per_second"]]
        assert any(one["bandwidth"] <= row["bandwidth"] for one in worse)
    for on in found.rows.values():
        fast = [row["samples_per_second"] for row in on]
        cheap = [row["bandwidth"] for row in on]
        assert fast == sorted(set(fast))
        assert cheap == sorted(set(cheap))


@given(times)
def test_the_best_is_the_fastest_of_its_workload_and_cluster_and_not_the_ideal(numbers):
    rows = over_seeds(made(numbers))
    found = best(rows)

    assert len(found) == 3 * 2
    for row in found:
        rivals = [one for one in rows if all(one[name] == row[name] for name in ("workload", "batch", "cluster"))]
        assert len(rivals) == 3
        assert row["iteration_time"] == min(
            one["iteration_time"] for one in rivals if one["policy"] != "largest_tail_first"
        )


def test_seeds_become_their_median():
    rows = over_seeds(made(list(range(1, 1 + len(EXPANSION.scenarios)))))

    assert len(rows) == 3 * 2 * 3
    assert {row["seeds"] for row in rows} == {3}
    assert [row["iteration_time"] for row in rows[:3]] == [4, 5, 6]  # 1 4 7, 2 5 8, 3 6 9
    assert all(isinstance(row["batch"], int) for row in rows)


def test_throughput_is_weighed_against_the_first_cost_that_varies():
    assert front(over_seeds(made([1] * len(EXPANSION.scenarios)))).objectives == ("samples_per_second", "bandwidth")
    assert front([]).objectives == ("samples_per_second", "operations")
