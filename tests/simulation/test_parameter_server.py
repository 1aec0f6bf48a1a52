"""Parameter servers in virtual time: two directions, each with an order of its own."""

import dataclasses
import random

import pytest

from foretrain.network import Cluster
from foretrain.schedule import POLICIES
from foretrain.simulation import VirtualWorld, simulate
from foretrain.simulation.parameter_server import ParameterServerCarrier
from foretrain.tasks import Chunk, Piece, Task
from foretrain.trace import Timeline
from tests.scenario import layered, random_spec, random_workload, replay

BYTE = 1e12
"""Bytes a second at which one takes a picosecond."""
PLACE = Cluster(2, up=BYTE, down=BYTE, latency=10, overhead=0, exchange="ps", servers=2)
COLOCATED = Cluster(3, up=BYTE, down=BYTE, latency=10, overhead=0, exchange="ps_colocated")


def whole(task, size, op="all_reduce"):
    return Chunk(op, (Piece(task, 0, size),), size)


class Sent:
    """Chunks started at given times, and when each was done and each task had landed."""

    def __init__(self, place, sizes):
        self.done, self.landings, self.timeline = {}, {}, Timeline()
        tasks = [Task(index, f"w{index}", size, index) for index, size in enumerate(sizes)]
        self.carrier = ParameterServerCarrier(
            place.routes(), tasks, self._land, self.timeline, lambda chunk: (str(chunk.pieces), 0)
        )
        self.world = VirtualWorld(self.carrier)

    def _land(self, task):
        self.landings[task] = self.world.now()

    def at(self, time, chunk):
        def finish(chunk):
            self.done[chunk] = self.world.now()

        self.world.call_at(time, lambda: self.world.start(chunk, finish))

    def run(self):
        self.world.run()
        return self


def test_a_chunk_is_done_when_its_push_is_acknowledged_and_lands_when_its_sum_has_come():
    sent = Sent(PLACE, [100])
    sent.at(0, whole(0, 100))
    sent.run()
    assert sent.done == {whole(0, 100): 100 + 2 * 10}
    assert sent.landings == {0: 100 + 10 + 100 + 10}


def test_the_directions_do_not_wait_for_each_other():
    sent = Sent(PLACE, [100, 100])
    for task in (0, 1):
        sent.at(0, whole(task, 100))
    sent.run()
    assert sent.landings == {0: 220, 1: 320}
    assert [(span.lane, span.start, span.end) for span in sent.timeline] == [
        ("up", 0, 100),
        ("up", 100, 200),
        ("down", 110, 210),
        ("down", 210, 310),
    ]


@pytest.mark.parametrize("message", [25, 100, 1000])
def test_what_is_summed_together_comes_back_together(message):
    place = dataclasses.replace(PLACE, message=message)
    work = layered([1], [1], [100])
    run = simulate(work, place, "fifo")
    cut = min(message, 100)
    assert run.iteration_time == 2 + 100 + 10 + cut + 10


def test_servers_answer_the_most_urgent_first_beyond_what_they_have_handed_over():
    size = 1 << 24
    sent = Sent(dataclasses.replace(PLACE, down=BYTE / 10, server_rate=BYTE / 5), [size, size, size])
    for task in (2, 1, 0):  # the least urgent is pushed first
        sent.at(0, whole(task, size))
    landings = sent.run().landings
    assert landings[0] < landings[1] < landings[2]


def test_beside_the_workers_both_directions_share_a_wire():
    """Two thirds of every byte leave the host when pushing and when answering; at once, each at half the rate."""
    sent = Sent(COLOCATED, [300, 300])
    for task in (0, 1):
        sent.at(0, whole(task, 300))
    landings = sent.run().landings
    work = COLOCATED.routes()["all_reduce"][0].occupancy(300)
    # The first push has the wire for itself, and the second until the first answer begins; then each has half of it.
    second = work + 10 + 2 * (work - 10)
    assert landings == {0: second + 10 + 10, 1: second + 10 + work + 10}


def test_a_gather_is_asked_for_and_done_when_it_has_come():
    sent = Sent(PLACE, [100])
    sent.at(0, whole(0, 100, "reduce_scatter"))
    sent.at(500, whole(0, 100, "all_gather"))
    sent.run()
    assert sent.done == {whole(0, 100, "reduce_scatter"): 120, whole(0, 100, "all_gather"): 500 + 10 + 100 + 10}
    assert sent.landings == {0: 620}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("place", [PLACE, COLOCATED], ids=["dedicated", "colocated"])
def test_every_byte_goes_up_and_comes_down_once_a_step(name, place):
    rng = random.Random(name)
    for _ in range(20):
        workload = random_workload(rng)
        run = simulate(workload, place, random_spec(rng, name, workload.size))
        steps = len(run.begins) - 1
        for lane in ("up", "down"):
            assert sum(span.size for span in run.timeline if span.lane == lane) == steps * workload.size


def test_a_server_is_no_slower_than_its_dearer_direction_allows():
    """All released at once, nothing else to do: up, and the last byte's way down, is all there is."""
    workload = layered((1, 1), (1, 1), (50_000, 50_000))
    _, run, _ = replay(workload, PLACE, lambda job: POLICIES["largest_tail_first"](job, partition=100, credit=10**6))
    period = run.begins[-1] - run.begins[-2]
    assert period <= 2 + 100_000 + 2 * 10 + 2 * 100 + 2
