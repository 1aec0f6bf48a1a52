"""Comparisons over one parameter, and schedules × collectives × topologies: every point and cell is a simulation."""

import pytest

from foretrain.errors import ConfigError
from foretrain.experiments import sweep
from foretrain.experiments.grid import grid
from foretrain.network import cluster
from foretrain.schedule import POLICIES
from foretrain.simulation import bound, simulate
from foretrain.units import MICROSECOND
from foretrain.workload import zoo
from tests.scenario import layered

PLACE = "4 workers @ 10Gbps"
DEEP = layered([10**9] * 8, [2 * 10**9] * 8, [4_000_000] * 8)


@pytest.mark.parametrize("along", ["rate=1Gbps:100Gbps", "latency=1us:10ms", "overhead=1us:1ms", "workers=2:64"])
def test_the_optimum_is_below_every_schedule_at_every_point(along):
    found = sweep(DEEP, PLACE, list(POLICIES), along, points=4, tuned=False)
    assert list(found.times) == list(POLICIES)
    for times in found.times.values():
        assert len(times) == len(found.values) == len(found.optimum)
        assert all(found.compute <= best <= time for best, time in zip(found.optimum, times, strict=True))


def test_points_are_geometric_and_include_both_ends():
    found = sweep(DEEP, PLACE, ["fifo"], "rate=1Gbps:16Gbps", points=5, tuned=False)
    assert found.values == pytest.approx([1.25e8 * 2**k for k in range(5)])
    assert (found.values[0], found.values[-1]) == (1.25e8, 2e9)
    assert [found.label(value) for value in found.values] == [
        "1.00 Gbps",
        "2.00 Gbps",
        "4.00 Gbps",
        "8.00 Gbps",
        "16.0 Gbps",
    ]


def test_times_are_picoseconds_and_hosts_whole_numbers_that_do_not_repeat():
    found = sweep(DEEP, PLACE, ["fifo"], "latency=1us:100us", points=3, tuned=False)
    assert found.values == (MICROSECOND, 10 * MICROSECOND, 100 * MICROSECOND)
    assert found.label(found.values[1]) == "10us"
    hosts = sweep(DEEP, PLACE, ["fifo"], "workers=2:4", points=9, tuned=False)
    assert hosts.values == (2, 3, 4)
    assert [hosts.label(value) for value in hosts.values] == ["2", "3", "4"]


def test_each_point_is_a_simulation_of_its_own():
    found = sweep(DEEP, PLACE, ["p3", "ddp(bucket=4MB)"], "rate=1Gbps:16Gbps", points=2, tuned=False)
    for value, best, p3, ddp in zip(("1Gbps", "16Gbps"), found.optimum, *found.times.values(), strict=True):
        place = f"4 workers @ {value}"
        assert best == bound(DEEP, place).time
        assert p3 == simulate(DEEP, place, "p3").iteration_time
        assert ddp == simulate(DEEP, place, "ddp(bucket=4MB)").iteration_time


def test_the_ratio_of_the_directions_stays():
    found = sweep(DEEP, "4 workers @ 10Gbps/5Gbps,ps=4", ["fifo"], "rate=2Gbps:4Gbps", points=2, tuned=False)
    assert found.optimum == tuple(bound(DEEP, f"4@{up}Gbps/{up / 2}Gbps,ps=4").time for up in (2, 4))


def test_one_policy_with_different_knobs_is_different_schedules():
    found = sweep(DEEP, PLACE, ["ddp(bucket=1MB)", "ddp(bucket=25MB)", "ddp(bucket=1MB)"], "rate=1Gbps:9Gbps", points=3)
    assert list(found.times) == ["ddp(bucket=1MB)", "ddp(bucket=25MB)"]
    assert all(len(times) == 3 for times in found.times.values())


def test_tuning_never_hurts():
    fixed, tuned = (
        sweep(DEEP, PLACE, ["ddp", "bytescheduler"], "rate=1Gbps:100Gbps", points=3, tuned=tuned)
        for tuned in (False, True)
    )
    for name, times in fixed.times.items():
        assert all(best <= time for best, time in zip(tuned.times[name], times, strict=True))


def test_it_says_how_far_it_is():
    heard = []
    sweep(DEEP, PLACE, ["fifo"], "rate=1Gbps:10Gbps", points=2, tuned=False, progress=lambda *said: heard.append(said))
    assert heard == [("rate 1/2", 0, 2), ("rate 2/2", 1, 2), ("done", 2, 2)]


@pytest.mark.parametrize(
    ("along", "words"),
    [
        ("rte=1Gbps:10Gbps", "sweep: 'rte' is unknown; did you mean 'rate'"),
        ("rate", "has no range; write e.g. 'rate=1Gbps:100Gbps'"),
        ("rate=10Gbps:1Gbps", "is not an ascending range"),
        ("latency=0us:10us", "is not an ascending range above zero"),
        ("rate=1:10", "sweep rate: '1' is not a rate"),
        ("latency=1Gbps:2Gbps", "sweep latency: '1Gbps' is not a time"),
        ("workers=2.5:4", "sweep workers: '2.5' is not a whole number"),
        ("workers=1:4", "nobody to exchange gradients with"),
    ],
)
def test_a_wrong_range_is_refused(along, words):
    with pytest.raises(ConfigError) as caught:
        sweep(DEEP, PLACE, ["fifo"], along)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="is not a number of points"):
        sweep(DEEP, PLACE, ["fifo"], "rate=1Gbps:10Gbps", points=1)


WORK = zoo("alexnet", batch=32, device="V100")
PLACES = ("bigraph:4x2@10Gbps", "star:4@10Gbps", "4x1xV100@10Gbps")


@pytest.fixture(scope="module")
def made():
    return grid(WORK, PLACES, ("ring", "hdrm", "auto"), ("fifo", "bytescheduler"), tuned=False)


def test_every_topology_meets_every_collective_and_a_simple_cluster_only_its_own(made):
    cells = [(cell.topology, cell.collective) for cell in made.cells]
    assert cells == [(place, name) for place in PLACES[:2] for name in ("ring", "hdrm", "auto")] + [(PLACES[2], "")]
    assert made.cells[-1].carried_by == "all_reduce"


def test_a_cell_is_what_simulating_it_gives(made):
    for cell in made.cells:
        for run, schedule in zip(cell.runs, ("fifo", "bytescheduler"), strict=False):
            option = f",collective={cell.collective}" if cell.collective else ""
            alone = simulate(WORK, cluster(cell.topology + option), schedule, trace=False)
            assert run.iteration_time == alone.iteration_time >= run.bound.time


def test_what_does_not_suit_says_why(made):
    cell = next(cell for cell in made.cells if not cell.runs)
    assert (cell.topology, cell.collective) == ("star:4@10Gbps", "hdrm")
    assert "needs a BiGraph" in cell.why_not


def test_the_best_is_the_fastest_of_all(made):
    cell, run = made.best
    assert run.iteration_time == min(run.iteration_time for cell in made.cells for run in cell.runs)
    assert run in cell.runs
    assert made.to_dict()["cells"][0]["runs"][0]["schedule"].startswith("fifo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clusters": ()}, "clusters: .* is empty"),
        ({"collectives": ()}, "collectives: .* is empty"),
        ({"schedules": ()}, "schedules: .* is empty"),
        ({"collectives": ("rnig",)}, "'rnig' is unknown; did you mean 'ring'"),
        ({"clusters": ("star:4@10Gbps",), "collectives": ("hdrm",)}, "suit no topology"),
    ],
)
def test_wrong_arguments_of_a_grid_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        grid(WORK, **{"clusters": PLACES, "collectives": ("ring",), "schedules": ("fifo",), "tuned": False} | arguments)
