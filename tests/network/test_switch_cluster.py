import dataclasses
import random
from fractions import Fraction

import pytest

from foretrain.errors import ConfigError
from foretrain.network import Cluster, Hop
from foretrain.network.switch_cluster import route_cost, served_cost
from foretrain.schedule import CostModel
from foretrain.units import MICROSECOND
from tests.scenario import kappa, random_cluster

GBPS = 1.25e8
QUANTA = Fraction(8, 1 << 32) / 10**12
"""What rounding costs per byte up may add to κ, in seconds."""


def close(place, exact):
    return 0 <= kappa(place) - exact <= QUANTA


@pytest.mark.parametrize("exchange", ["all_reduce", "ps_colocated"])
@pytest.mark.parametrize("workers", [2, 3, 4, 7, 64])
def test_a_ring_or_a_server_on_every_worker_moves_each_byte_almost_twice(workers, exchange):
    place = Cluster(workers, up=10 * GBPS, down=10 * GBPS, exchange=exchange)
    assert close(place, Fraction(2 * (workers - 1), workers) / Fraction(10 * GBPS))


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (4, 2), (4, 4), (4, 8), (1, 1), (7, 3)])
@pytest.mark.parametrize("server_rate", [None, 40 * GBPS])
def test_dedicated_servers_cost_what_the_dearer_side_costs(workers, servers, server_rate):
    place = Cluster(workers, up=10 * GBPS, down=10 * GBPS, exchange="ps", servers=servers, server_rate=server_rate)
    worker, server = 1 / Fraction(10 * GBPS), Fraction(workers, servers) / Fraction(server_rate or 10 * GBPS)
    assert close(place, max(worker, server))


@pytest.mark.parametrize("exchange", ["all_reduce", "ps_colocated"])
@pytest.mark.parametrize(("up", "down"), [(10, 1), (1, 10)])
def test_who_sends_and_receives_alike_goes_at_the_slower_rate(exchange, up, down):
    asymmetric = Cluster(4, up=up * GBPS, down=down * GBPS, exchange=exchange)
    assert asymmetric.cost == Cluster(4, up=GBPS, down=GBPS, exchange=exchange).cost


def test_dedicated_servers_are_pushed_at_the_sending_and_pulled_at_the_receiving_rate():
    routes = Cluster(4, up=GBPS, down=2 * GBPS, exchange="ps", servers=4, server_rate=100 * GBPS).routes()
    push, pull = routes["all_reduce"]
    assert (push.pipe, pull.pipe) == ("up", "down")
    assert push.cost == 2 * pull.cost == 8000 << 32
    assert routes["reduce_scatter"] == (push,)
    assert routes["all_gather"] == (pull,)


def test_servers_as_fast_as_a_worker_send_at_its_sending_rate():
    # A worker's push is received by a server, and a pull is sent by one.
    push, pull = Cluster(4, up=GBPS, down=2 * GBPS, exchange="ps", servers=1).routes()["all_reduce"]
    assert push.cost == 4 * 4000 << 32
    assert pull.cost == 4 * 8000 << 32


def test_one_host_exchanges_among_its_gpus():
    place = Cluster(1, gpus=8, local=100e9)
    assert close(place, Fraction(2 * 7, 8) / Fraction(100e9))
    assert {hop.pipe for route in place.routes().values() for hop in route} == {"local"}


def test_gpus_of_a_host_reduce_before_the_hosts_do():
    alone = Cluster(4, up=GBPS, down=GBPS)
    many = dataclasses.replace(alone, gpus=8, local=100e9)
    assert [hop.pipe for hop in many.routes()["all_reduce"]] == ["local", "wire"]
    assert many.cost.per_byte == alone.cost.per_byte  # the wire is dearer
    slow = dataclasses.replace(many, local=1e6)
    assert close(slow, Fraction(2 * 7, 8) / 10**6)
    assert dataclasses.replace(many, local=None).routes() == alone.routes()


def test_one_worker_with_one_gpu_has_nobody_to_talk_to():
    with pytest.raises(ConfigError, match="nobody to exchange gradients with"):
        Cluster(1)
    assert Cluster(1, exchange="ps", servers=1).cost.per_byte > 0  # but a server may still hold its parameters


def test_halves_cost_what_the_whole_costs_and_one_exchange_alone_its_time_and_its_delay():
    rng = random.Random(3)
    for _ in range(500):
        place, size = random_cluster(rng), rng.randint(1, 10**6)
        routes = place.routes()
        whole, halves = routes["all_reduce"], routes["reduce_scatter"] + routes["all_gather"]
        assert sum(hop.cost for hop in halves) == sum(hop.cost for hop in whole)
        assert sum(hop.latency for hop in halves) == sum(hop.latency for hop in whole)
        if place.exchange == "all_reduce":
            alone = sum(hop.occupancy(size) + hop.latency for hop in whole)
            assert abs(alone - place.cost.time(size) - place.cost.delay(size)) <= len(whole)  # each rounds up


def test_latency_counts_the_hops_of_a_ring():
    assert Cluster(8, latency=10 * MICROSECOND).cost.latency == 2 * 7 * 10 * MICROSECOND
    assert Cluster(8, latency=10, exchange="ps_colocated").cost.latency == 20
    assert Cluster(8, overhead=5).cost.overhead == 5
    assert Cluster(8, overhead=5, exchange="ps_colocated").cost.overhead == 10  # both halves use one wire


def test_the_dearest_pipe_costs_and_the_others_delay():
    route = (Hop("a", 3, 1, 7), Hop("b", 5, 4), Hop("a", 3, 2))
    assert route_cost(route) == CostModel(overhead=3, per_byte=6, latency=7 + 4, elsewhere=5)


def test_over_servers_the_dearer_direction_costs_and_the_acknowledgement_delays():
    # What comes back does so while more is pushed.
    route = (Hop("local", 2), Hop("up", 3, 1, 7), Hop("down", 5, 4, 8))
    assert served_cost(route) == CostModel(overhead=4, per_byte=5, latency=15, elsewhere=2)
    assert served_cost((Hop("wire", 3, 1, 7), Hop("wire", 3, 1, 7))) == CostModel(overhead=2, per_byte=6, latency=14)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers: 0 is not a whole number of at least 1"),
        ({"workers": True}, "workers: True"),
        ({"workers": 2.0}, "workers: 2.0"),
        ({"gpus": -1}, "gpus: -1"),
        ({"up": 0.0}, "up: 0.0 is not a positive finite rate"),
        ({"down": float("nan")}, "down: nan"),
        ({"up": float("inf")}, "up: inf"),
        ({"up": "1Gbps"}, "up: '1Gbps'"),
        ({"latency": -1}, "latency: -1"),
        ({"overhead": 0.5}, "overhead: 0.5"),
        ({"exchange": "ring"}, "exchange: 'ring' is unknown; known: all_reduce, ps, ps_colocated"),
        ({"exchange": "ps"}, "servers: 0 leaves the parameter server without a host"),
        ({"servers": 2}, "servers: 2 contradicts exchange 'all_reduce'"),
        ({"exchange": "ps_colocated", "server_rate": 1e9}, "contradicts exchange 'ps_colocated'"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        Cluster(**{"workers": 4, **changes})
    assert words in str(caught.value)


def test_a_cluster_reads_as_a_sentence():
    place = Cluster(4, 8, "V100", 12.5e9, 1.25e9, latency=5_000_000, exchange="ps", servers=2)
    shape, how = "4 workers × 8 V100 @ 100 Gbps / 10.0 Gbps", "2 dedicated parameter servers"
    assert str(place) == f"{shape}, {how}, latency 5.00 us, θ 50.0 us"
    assert place.total_gpus == 32
