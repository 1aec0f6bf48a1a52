"""Schedules × collectives × topologies: every cell is a simulation, and what does not suit says why."""

import pytest

from foretrain.errors import ConfigError
from foretrain.experiments.grid import grid
from foretrain.network import cluster
from foretrain.simulation import simulate
from foretrain.workload import zoo

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
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ConfigError, match=message):
        grid(WORK, **{"clusters": PLACES, "collectives": ("ring",), "schedules": ("fifo",), "tuned": False} | arguments)
