import random

import pytest

from foretrain.errors import StallError
from foretrain.network import Cluster
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.world import ARRIVAL, LOOK, START, TIMER
from foretrain.tasks import Chunk, Piece
from foretrain.trace import Timeline


def chunk(size, op="all_reduce"):
    return Chunk(op, (Piece(0, 0, size),), size)


def run(routes, arrivals):
    """When each of ``arrivals``, (time, size, op), is done, and the pipes' timeline."""
    timeline, done = Timeline(), {}
    world = VirtualWorld(Pipes(routes, timeline))

    def start(index, size, op):
        world.start(chunk(size, op), lambda _: done.__setitem__(index, world.now()))

    for index, (time, size, op) in enumerate(arrivals):
        world.call_at(time, lambda index=index, size=size, op=op: start(index, size, op))
    world.run()
    return [done[index] for index in range(len(arrivals))], timeline


def test_time_jumps_and_never_goes_back():
    seen = []
    world = VirtualWorld(Pipes(Cluster(2).routes()))
    for time in (50, 7, 7, 0):
        world.call_at(time, lambda time=time: seen.append((time, world.now())))
    world.call_at(20, lambda: world.call_at(3, lambda: seen.append((3, world.now()))))  # past: now
    world.run()
    assert seen == [(0, 0), (7, 7), (7, 7), (3, 20), (50, 50)]


def test_at_one_instant_arrivals_come_before_timers_and_both_in_order():
    seen = []
    world = VirtualWorld(Pipes(Cluster(2).routes()))
    for name, priority in (("timer 1", TIMER), ("arrival 1", ARRIVAL), ("timer 2", TIMER), ("arrival 2", ARRIVAL)):
        world.schedule(5, priority, seen.append, name)
    world.run()
    assert seen == ["arrival 1", "arrival 2", "timer 1", "timer 2"]


def test_one_tensor_around_a_ring():
    # θ + 2(N−1)α + 2(N−1)/N · S/B, with a rate that makes it a whole number of picoseconds
    for workers, size, theta, alpha in ((2, 1, 0, 0), (4, 1000, 50, 7), (8, 123_456, 1, 10)):
        place = Cluster(workers, up=1e9, down=1e9, latency=alpha, overhead=theta)
        (done,), _ = run(place.routes(), [(100, size, "all_reduce")])
        assert done == 100 + theta + 2 * (workers - 1) * alpha + 2 * (workers - 1) * size * 1000 // workers


def test_the_halves_of_a_ring_are_each_half():
    place = Cluster(4, up=1e9, down=1e9, latency=7, overhead=50)
    done, _ = run(place.routes(), [(0, 1000, "reduce_scatter"), (10_000_000, 1000, "all_gather")])
    assert done == [50 + 750_000 + 3 * 7, 10_000_000 + 50 + 750_000 + 3 * 7]


def test_push_and_pull_store_and_forward():
    place = Cluster(4, up=1e9, down=2e9, latency=7, overhead=50, exchange="ps", servers=4)
    (whole,), _ = run(place.routes(), [(0, 1000, "all_reduce")])
    push, pull = 50 + 1_000_000, 50 + 1_000_000  # servers send at the workers' sending rate
    assert whole == push + 7 + pull + 7
    # Two halves pipeline: the second is pushed while the first is pulled.
    halves, timeline = run(place.routes(), [(0, 500, "all_reduce"), (0, 500, "all_reduce")])
    assert halves == [2 * (50 + 500_000 + 7), 3 * (50 + 500_000) + 2 * 7]
    assert timeline.busy("up") == timeline.busy("down") == 2 * (50 + 500_000)


def lindley(releases, services):
    """Departures from a first-in-first-out server: the waiting time recursion, W' = max(0, W + S − A)."""
    wait, departures = 0, []
    for k, (release, service) in enumerate(zip(releases, services, strict=True)):
        if k:
            wait = max(0, wait + services[k - 1] - (release - releases[k - 1]))
        departures.append(release + wait + service)
    return departures


def test_pipes_in_a_row_are_queues_in_tandem():
    rng = random.Random(8)
    for _ in range(300):
        place = Cluster(
            2, up=1e12, down=0.5e12, latency=rng.choice((0, 40)), overhead=9, exchange="ps", servers=2, server_rate=9e12
        )
        releases = sorted(rng.randint(0, 3000) for _ in range(30))
        sizes = [rng.randint(1, 200) for _ in releases]
        done, _ = run(place.routes(), [(t, s, "all_reduce") for t, s in zip(releases, sizes, strict=True)])
        pushed = [t + place.latency for t in lindley(releases, [9 + size for size in sizes])]
        assert done == [t + place.latency for t in lindley(pushed, [9 + 2 * size for size in sizes])]


def test_time_that_stands_still_is_an_error(monkeypatch):
    monkeypatch.setattr("foretrain.simulation.world._MOST_EVENTS", 1000)
    world = VirtualWorld(Pipes(Cluster(2).routes()))

    def again():
        world.call_at(world.now(), again)

    world.call_at(7, again)
    with pytest.raises(StallError, match="time stands still at 7 ps after 1,000 events"):
        world.run()


def test_advancing_stops_where_more_may_be_asked_for():
    seen = []
    world = VirtualWorld()
    for when, priority in ((3, TIMER), (5, LOOK), (5, START), (5, TIMER), (5, ARRIVAL), (6, TIMER)):
        world.schedule(when, priority, seen.append, (when, priority))
    world.advance(5)
    assert seen == [(3, TIMER), (5, ARRIVAL), (5, TIMER)]
    world.schedule(5, TIMER, seen.append, "late")
    world.advance(6)
    assert seen[3:] == ["late", (5, START), (5, LOOK), (6, TIMER)]
    assert world.now() == 6


def test_an_advance_can_be_held():
    seen = []
    world = VirtualWorld()
    for when in (1, 2, 3, 4):
        world.call_at(when, lambda when=when: seen.append(when))
    world.call_at(2, lambda: world.hold(3))
    world.advance(100)
    assert seen == [1, 2, 3]
