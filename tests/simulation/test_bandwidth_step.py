"""A link that becomes half as fast in mid-run, and recovers: who adapts, and how soon."""

from dataclasses import replace
from itertools import pairwise

import pytest

from foretrain.network import cluster
from foretrain.schedule import spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import carrier_on, job_on
from foretrain.workload import zoo

SLOW, AGAIN, STEPS = 12, 26, 40
"""From and to which step the link has half its bandwidth, and how many there are."""
SOON = 10
"""Steps in which what is steady must be reached."""
PLACES = {"resnet50": "4x1xV100@5Gbps,ps=4", "vgg16": "4x1xV100@25Gbps,ps=4"}


def steps_of(model, name):
    """Times of all steps over a link that changes."""
    workload, place = zoo(model), cluster(PLACES[model] + ",overhead=200us,latency=100us")
    job = job_on(workload, place)
    carrier = carrier_on(place, job, lambda task: run.landed(task))
    world = VirtualWorld(carrier)
    run = TrainingLoop(workload, job, spec(name).build(job), world, STEPS, served=True)
    fast = (carrier._push, carrier._pull)

    def begin():
        slowness = 2 if SLOW <= len(run.begins) - 1 < AGAIN else 1
        carrier._push, carrier._pull = (replace(hop, cost=slowness * hop.cost) for hop in fast)

    run.on_begin = begin
    run.begin()
    world.run()
    return [b - a for a, b in pairwise(run.begins)]


@pytest.mark.parametrize("model", PLACES)
def test_prophet_adapts_within_ten_steps_and_is_never_slower_than_fifo(model):
    prophet, fifo = steps_of(model, "prophet"), steps_of(model, "fifo")
    for first, last in ((SLOW, AGAIN), (AGAIN, STEPS)):
        assert len({round(time * 1e-6) for time in prophet[first + SOON : last]}) == 1
    assert prophet[AGAIN + SOON] == prophet[SLOW - 1]
    assert all(mine <= theirs for mine, theirs in zip(prophet[4:], fifo[4:], strict=True))
