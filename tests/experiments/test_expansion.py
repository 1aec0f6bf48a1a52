"""A sweep is the product of what it lists, without what it excludes; a scenario's id is its content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.experiments import SweepFile, expand, parse
from foretrain.experiments.evaluation import Scenario, Source, Where
from foretrain.experiments.sweep_file import ClusterAxis, ScheduleAxis, WorkloadAxis

few = st.integers(1, 3)


def some(count: int, unit: str = "MB") -> list[str]:
    return [f"{index + 1}{unit}" for index in range(count)]


def sweep(batches: int, hosts: int, rates: int, partitions: int, windows: int, seeds: int) -> SweepFile:
    return SweepFile(
        workloads=[WorkloadAxis(model=["alexnet", "vgg16"], batch=list(range(1, batches + 1)))],
        clusters=[
            ClusterAxis("{hosts}x1xV100@{rate}", {"hosts": list(range(2, hosts + 2)), "rate": some(rates, "Gbps")}),
            "star:4@10Gbps",
        ],
        schedules=[
            "ddp",
            ScheduleAxis("bytescheduler", {"partition": some(partitions), "credit": some(windows)}),
        ],
        seeds=seeds,
        jitter=0.1,
    )


@settings(max_examples=25)
@given(few, few, few, few, few, few)
def test_the_count_is_the_product(batches, hosts, rates, partitions, windows, seeds):
    made = expand(sweep(batches, hosts, rates, partitions, windows, seeds))

    assert len(made.scenarios) == 2 * batches * (hosts * rates + 1) * seeds * (1 + partitions * windows)
    assert made.excluded == made.repeated == 0


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_ids_depend_on_no_order(chance):
    declared = sweep(2, 2, 2, 2, 2, 2)
    shuffled = sweep(2, 2, 2, 2, 2, 2)
    for listed in (shuffled.workloads, shuffled.clusters, shuffled.schedules):
        chance.shuffle(listed)

    assert expand(declared).scenarios.keys() == expand(shuffled).scenarios.keys()


def test_an_id_stays_what_it_was():
    """What was simulated before an upgrade is found again by the same id."""
    one = Scenario(Source("resnet50", 64), Where("4x8xV100@10Gbps"), "bytescheduler(partition=1MB)", False, "ddp")

    assert one.id == "b200178c3a51009536c6"
    named = Scenario(one.source, Where("4x8xV100@10Gbps", axes=(("rate", "10Gbps"),)), one.schedule, False, "ddp")
    assert named.id == one.id


def test_however_it_is_written_it_is_one_scenario():
    made = expand(
        parse("""
        clusters = ["4x1xV100@10Gbps"]
        workloads = ["alexnet", "AlexNet", { model = "alexnet", batch = 128 }]
        schedules = [
          "ddp(bucket=25MB)", { notation = "ddp", knobs = { bucket = ["25MB", "25000kB"] } },
          { notation = "fifo", tuned = true }, "fifo",
        ]
        jitter = [0.0, 0.1]
        seeds = 2
        """)
    )
    assert len(made.scenarios) == 2 * 3
    assert made.repeated == (3 * 4 - 2) * 3


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("schedule = p3", 2 * 2 * 4),
        ("schedule != p3", 2 * 2 * 2),
        ("schedule = BYTE*", 2 * 2 * 2),
        ("credit < partition", 2 * 2 * (2 + 3)),
        ("slice > 1MB", 2 * 2 * (4 + 1)),
        ("rate >= 10Gbps", 2 * 1 * 6),
        ("rate >= 10Gbps and model = vgg16", 4 * 6 - 6),
        ("batch = 32", 2 * 6),
        ("cluster = *@1Gbps", 2 * 6),
        ("device = V100 and jitter = 0 and seed = 0 and precision = fp16", 4 * 6),
    ],
)
def test_what_meets_a_condition_is_left_out(exclude, left):
    made = expand(
        parse(f"""
        exclude = ["{exclude}"]
        workloads = ["alexnet", "vgg16"]
        clusters = [{{ notation = "4x1xV100@{{rate}}", axes = {{ rate = ["1Gbps", "10Gbps"] }} }}]
        schedules = [
          {{ notation = "bytescheduler", knobs = {{ partition = ["1MB", "4MB"], credit = ["2MB", "8MB"] }} }},
          {{ notation = "p3", knobs = {{ slice = ["1MB", "4MB"] }} }},
        ]
        """)
    )
    assert (len(made.scenarios), made.excluded) == (left, 24 - left)
