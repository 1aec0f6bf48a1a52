"""Jobs on topologies: alone as the formulas say, and together in one network."""

from __future__ import annotations

import pytest

from foretrain.errors import ConfigError
from foretrain.network import Cluster, cluster
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import topology
from foretrain.schedule import POLICIES
from foretrain.simulation import simulate
from foretrain.simulation.shared_network import Tenant, alone, together
from foretrain.units import MILLISECOND
from foretrain.workload import Gradient, Layer, Workload

NETWORK = "leaf_spine:2x4@10Gbps,oversubscription=4"


def work(layers: int = 6, size: int = 4_000_000) -> Workload:
    """Equal layers whose communication takes about as long as their computation."""
    step = tuple(Layer(f"layer{i}", 2 * MILLISECOND, 4 * MILLISECOND, 0) for i in range(layers))
    gradients = tuple(Gradient(f"layer{i}.weight", size, i, 4 * MILLISECOND * (layers - i)) for i in range(layers))
    return Workload("layers", 1, step, gradients)


@pytest.mark.parametrize("schedule", [name for name in POLICIES if name not in ("tictac", "tic")])
def test_a_star_is_the_simple_cluster(schedule: str) -> None:
    """Of a ring on a star without latency the simulation and the formula say the same, under every policy."""
    network = topology("star:4@10Gbps,latency=0ns")
    place = Deployment(network, "ring", overhead=50_000_000, step=0)
    simple = Cluster(4, up=1.25e9, down=1.25e9, latency=0, overhead=50_000_000)
    times = [simulate(work(), where, schedule, trace=False).iteration_time for where in (place, simple)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["fifo", "bytescheduler", "prophet"])
def test_a_job_with_the_network_to_itself_is_a_job_alone(schedule: str) -> None:
    """Flow by flow in the shared network, or by the time of each collective: the same."""
    place = cluster(f"{NETWORK},collective=halving_doubling")
    assert isinstance(place, Deployment)
    one = simulate(work(), place, schedule, trace=False)
    other = alone(Tenant(work(), place, schedule))
    assert other.iteration_time == pytest.approx(one.iteration_time, rel=1e-4)
    assert one.iteration_time >= one.bound.time


def test_jobs_on_separate_leaves_do_not_meet_and_across_spines_they_do() -> None:
    def pair(first: str, second: str) -> list[int]:
        places = [cluster(f"{NETWORK},collective=ring,ranks={ranks}") for ranks in (first, second)]
        tenants = [Tenant(work(), place, "fifo") for place in places if isinstance(place, Deployment)]
        shared = [run.iteration_time for run in together(tenants, trace=False)]
        single = [alone(tenant).iteration_time for tenant in tenants]
        return [a - b for a, b in zip(shared, single, strict=True)]

    assert pair("0-3", "4-7") == [0, 0]
    assert min(pair("0-1+4-5", "2-3+6-7")) > MILLISECOND


def test_runs_of_tenants_are_complete() -> None:
    places = [cluster(f"{NETWORK},collective=ring,ranks={ranks}") for ranks in ("0-1+4-5", "2-3+6-7")]
    tenants = [
        Tenant(work(), places[0], "bytescheduler"),
        Tenant(work(3, 40_000_000), places[1], "ddp", offset=5 * MILLISECOND),
    ]
    first, second = together(tenants, steps=3)
    assert first.begins[0] == 0
    assert second.begins[0] == 5 * MILLISECOND
    assert {span.lane for span in first.timeline} >= {"network", "gpu"}
    again = together(tenants, steps=3)
    assert [run.begins for run in again] == [first.begins, second.begins]


def test_a_straggler_slows_all_ranks() -> None:
    network = topology("star:4@1Tbps").straggling({"host2": 1.2})
    place = Deployment(network, "ring")
    assert simulate(work(), place, "fifo", trace=False).iteration_time > 1.19 * work().compute


def test_wrong_tenants_are_named() -> None:
    place = cluster(f"{NETWORK},collective=ring")
    other = cluster("star:8@10Gbps,collective=ring")
    assert isinstance(place, Deployment)
    assert isinstance(other, Deployment)
    with pytest.raises(ConfigError, match="is another network"):
        together([Tenant(work(), place), Tenant(work(), other)])
    with pytest.raises(ConfigError, match="is a rank that job 0 has"):
        together([Tenant(work(), place), Tenant(work(), place)])
    with pytest.raises(ConfigError, match="is empty"):
        together([])
    with pytest.raises(ConfigError, match="steps"):
        together([Tenant(work(), place)], steps=0)
