"""Servers that hold parts of the tasks each: closed forms of a message that is on the link of one of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network import Cluster
from foretrain.simulation import VirtualWorld, simulate
from foretrain.simulation.parameter_server import ParameterServerCarrier, ShardLinks
from foretrain.tasks import Chunk, Piece, Task
from tests.scenario import layered

BYTE = 1e12
"""Bytes a second at which one takes a picosecond."""
SIZE = 6400


def place(workers, servers, **options):
    links = {"up": BYTE, "down": BYTE, "latency": 0, "overhead": 0, **options}
    if servers == "colocated":
        return Cluster(workers, **links, exchange="ps_colocated", sharded=True)
    return Cluster(workers, **links, exchange="ps", servers=servers, sharded=True)


def pushed(where, sizes):
    """Return when tasks of these sizes, all pushed at 0, are done."""
    tasks = [Task(index, f"w{index}", size, 0) for index, size in enumerate(sizes)]
    carrier = ParameterServerCarrier(
        where.routes(), tasks, lambda task: None, message=where.message, shards=where.shards
    )
    world = VirtualWorld(carrier)
    for index, size in enumerate(sizes):
        world.start(Chunk("reduce_scatter", (Piece(index, 0, size),), size), lambda chunk: None)
    world.run()
    return world.now()


@pytest.mark.parametrize("servers", [2, 4])
def test_a_message_of_all_workers_fills_the_link_of_one_server(servers):
    where = place(4, servers)
    assert pushed(where, [SIZE]) == 4 * SIZE
    assert pushed(replace(where, sharded=False), [SIZE]) == 4 // servers * SIZE


@pytest.mark.parametrize("servers", [2, 4])
def test_with_a_message_for_every_server_all_links_are_full(servers):
    where = place(4, servers)
    assert pushed(where, [SIZE] * servers) == pushed(replace(where, sharded=False), [SIZE] * servers) == 4 * SIZE


def test_a_task_larger_than_a_message_is_on_several_servers():
    where = place(4, 2, message=SIZE)
    assert pushed(where, [2 * SIZE]) == 4 * SIZE


def test_a_message_is_for_one_part():
    where = place(4, 2, message=SIZE)
    links = ShardLinks(where.shards, [Task(0, "w0", 2 * SIZE + 64, 0)], SIZE)
    third = 4288  # three even parts, of whole cache lines
    found = list(links.cut(Piece(0, 100, 2 * SIZE - 100)))
    assert [(piece.offset, piece.size) for piece in found] == [
        *((100, third - 100), (third, third), (2 * third, 2 * SIZE - 2 * third)),
    ]


def test_beside_the_workers_one_of_them_sends_nothing():
    assert pushed(place(3, "colocated"), [SIZE]) == 2 * SIZE
    assert pushed(place(3, "colocated"), [SIZE] * 3) == pytest.approx(2 * SIZE, abs=3)


def test_servers_may_have_faster_links():
    assert pushed(place(4, 2, server_rate=2 * BYTE), [SIZE]) == 2 * SIZE
    assert pushed(place(4, 2, server_rate=8 * BYTE), [SIZE]) == SIZE


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6), workers=st.integers(2, 4), servers=st.integers(1, 4)
)
def test_sharded_servers_are_never_faster(sizes, workers, servers):
    where = place(workers, servers, message=1000)
    assert pushed(where, sizes) >= pushed(replace(where, sharded=False), sizes)


@pytest.mark.parametrize("schedule", ["fifo", "p3", "bytescheduler", "prophet"])
def test_one_server_has_every_message(schedule):
    work = layered((50, 50), (50, 50), (3_000, 5_000))
    where = place(3, 1)
    assert where.shards is None
    whole = simulate(work, replace(where, sharded=False), schedule).iteration_time
    assert simulate(work, where, schedule).iteration_time == whole


def test_one_message_at_a_time_leaves_other_servers_idle():
    work = layered((50, 50), (50, 50), (30_000, 50_000))
    where = place(2, 2)
    schedule = "p3(slice=2kB)"
    sharded, even = (simulate(work, one, schedule).iteration_time for one in (where, replace(where, sharded=False)))
    assert sharded > 1.5 * even


def test_a_partition_at_a_time_keeps_all_servers_busy():
    work = layered((50, 50), (50, 50), (400_000, 400_000))
    where = place(2, 2)
    schedule = "bytescheduler(partition=400kB, credit=1KiB)"
    sharded, even = (simulate(work, one, schedule).iteration_time for one in (where, replace(where, sharded=False)))
    assert sharded == pytest.approx(even, rel=0.01)
