"""CPU time of a parameter server's messages: closed forms, and more cores are never slower."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network import Cluster
from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.simulation import VirtualWorld, simulate
from foretrain.simulation.host_cores import ends
from foretrain.simulation.parameter_server import ParameterServerCarrier
from foretrain.tasks import Chunk, Piece, Task
from tests.scenario import layered

BYTE = 1e12
"""Bytes a second at which one takes a picosecond."""
FREE = CpuCost()


def place(workers, servers, cpu, rate=1e24, message=100):
    links = {"up": rate, "down": rate, "server_rate": rate * workers / servers, "latency": 0, "overhead": 0}
    return Cluster(workers, **links, exchange="ps", servers=servers, message=message, cpu=cpu)


def pushed(where, count):
    """Return when ``count`` messages of 100 bytes, all sent at 0, are done."""
    tasks = [Task(0, "w", 100 * count, 0)]
    carrier = ParameterServerCarrier(where.routes(), tasks, lambda task: None, message=where.message, ends=ends(where))
    world, done = VirtualWorld(carrier), []
    chunk = Chunk("reduce_scatter", (Piece(0, 0, 100 * count),), 100 * count)
    world.start(chunk, lambda chunk: done.append(world.now()))
    world.run()
    return done[0]


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_on_a_fast_link_a_servers_cores_set_the_pace(cores):
    one = 1000
    where = place(1, 1, HostCpu(cores, FREE, CpuCost(one)))
    assert pushed(where, 20) == pytest.approx(19 * one / cores + one, abs=20 * 2)


def test_link_and_cores_work_at_the_same_time():
    slow_link = place(1, 1, HostCpu(1, FREE, CpuCost(30)), rate=BYTE)
    assert pushed(slow_link, 20) == 20 * 100 + 30
    slow_cpu = place(1, 1, HostCpu(1, FREE, CpuCost(300)), rate=BYTE)
    assert pushed(slow_cpu, 20) == 100 + 20 * 300


def test_a_server_handles_the_messages_of_all_workers_and_servers_share_them():
    cpu = HostCpu(1, FREE, CpuCost(1000))
    assert pushed(place(4, 1, cpu), 10) == pytest.approx(4 * 10 * 1000, abs=20)
    assert pushed(place(4, 2, cpu), 10) == pytest.approx(2 * 10 * 1000, abs=20)


def test_hosts_together_share_their_cores():
    cpu = HostCpu(2, CpuCost(1000), CpuCost(500), together=True)
    assert pushed(place(4, 2, cpu), 100) == pytest.approx(4 * 100 * 1500 / 2, rel=0.02)


def test_bytes_cost_cpu_time_too():
    assert CpuCost(7, 3 << 20).time(100) == 7 + CpuCost(0, 3 << 20).time(100)


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    cores=st.integers(1, 8),
    more=st.integers(0, 8),
    worker=st.integers(0, 500),
    server=st.integers(0, 500),
    together=st.booleans(),
)
def test_more_cores_are_never_slower(sizes, cores, more, worker, server, together):
    cpu = HostCpu(cores, CpuCost(worker), CpuCost(server), together)
    tasks = [Task(index, f"w{index}", size, 0) for index, size in enumerate(sizes)]

    def last(count):
        where = place(2, 1, replace(cpu, cores=count), BYTE)
        carrier = ParameterServerCarrier(
            where.routes(), tasks, lambda task: None, message=where.message, ends=ends(where)
        )
        world = VirtualWorld(carrier)
        for index, size in enumerate(sizes):
            world.start(Chunk("reduce_scatter", (Piece(index, 0, size),), size), lambda chunk: None)
        world.run()
        return world.now()

    assert last(cores + more) <= last(cores)


@pytest.mark.parametrize("exchange", ["ps", "ps_colocated"])
def test_messages_that_cost_nothing_change_nothing(exchange):
    servers = {"servers": 1} if exchange == "ps" else {}
    where = Cluster(3, up=BYTE, down=BYTE, latency=10, overhead=5, exchange=exchange, **servers)
    work = layered((50, 50), (50, 50), (3_000, 5_000))
    free = replace(where, cpu=HostCpu(1, FREE, FREE))
    for schedule in ("fifo", "p3", "bytescheduler", "prophet"):
        assert simulate(work, free, schedule).iteration_time == simulate(work, where, schedule).iteration_time


def test_scarce_cores_make_an_iteration_longer():
    where = Cluster(3, up=BYTE, down=BYTE, exchange="ps", servers=1)
    work = layered((50, 50), (50, 50), (3_000, 5_000))
    scarce = replace(where, cpu=HostCpu(1, CpuCost(10**7), CpuCost(10**7), together=True))
    assert simulate(work, scarce, "fifo").iteration_time > simulate(work, where, "fifo").iteration_time
    assert "cores for messages: 1 together" in str(scarce)


def test_wrong_cores_are_refused():
    with pytest.raises(ConfigError, match="cores"):
        HostCpu(0, FREE, FREE)
    with pytest.raises(ConfigError, match="cpu"):
        HostCpu(1, CpuCost(-1), FREE)
    with pytest.raises(ConfigError, match="all-reduce"):
        Cluster(2, cpu=HostCpu(1, FREE, FREE))
