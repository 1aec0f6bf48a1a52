"""Trainings over networks of packets: what is lost there is lost to the model, and the time is the network's."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from foretrain.collective import build
from foretrain.errors import ConfigError
from foretrain.loss_tolerance.execution import Lossy
from foretrain.loss_tolerance.layout import Tensor, TensorLayout
from foretrain.loss_tolerance.losses import Way
from foretrain.loss_tolerance.replicas import LossyExchange, Replica
from foretrain.loss_tolerance.rounds import NetworkRounds
from foretrain.loss_tolerance.tagging import Criterion, Tagging
from foretrain.loss_tolerance.training import Training, timed
from foretrain.loss_tolerance.trial import Trial
from foretrain.network.fabrics.clos import leaf_spine, star
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.transports.transport import Bounded, Dctcp
from foretrain.network.routing import Ecmp, Scatter

NETWORK = star(5, 1.25e9)
ROUTER = Ecmp(NETWORK)
WAYS = ("ring", "parameter_server", "halving_doubling")


def trial() -> Trial:
    """Four classes of points, which a small network tells apart."""
    torch.manual_seed(0)
    points, classes = torch.randn(256, 16), torch.randint(0, 4, (256,))
    points += 2 * torch.eye(4, 16)[classes]
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> float:
        return (model(points).argmax(1) == classes).float().mean().item()

    batches = [(points[k : k + 64], classes[k : k + 64]) for k in range(0, 256, 64)]
    return Trial(model, torch.optim.SGD(model.parameters(), lr=0.2), batches, loss, evaluate)


def rounds(exchange, transport, losses=None, count=3):
    made = trial()
    tensors = Replica(made, made.model, made.optimizer).tensors()

    def network(number: int) -> Packets:
        return Packets(NETWORK, transport=transport, losses=losses, seed=number)

    return NetworkRounds(exchange, tensors, ROUTER, network, count=count)


@pytest.mark.parametrize("way", WAYS)
def test_what_loses_nothing_trains_as_without_a_network(way):
    exchange = LossyExchange(way=way, ranks=4)
    over = rounds(exchange, Dctcp(), {0: LinkLosses(0.02)})
    trainings = [Training(trial(), exchange, losses=losses) for losses in (over, 0.0)]
    assert trainings[0].advance(20) == trainings[1].advance(20)
    assert trainings[0].curve().losses == trainings[1].curve().losses
    assert all(over.round(number).lost == 0 for number in range(3))
    curve = timed(trainings[0].curve(), over.times())
    assert curve[0][0] == 6 * sum(over.times()) + sum(over.times()[:2])


@pytest.mark.parametrize("way", WAYS)
def test_what_the_network_loses_the_model_loses(way):
    exchange = LossyExchange(way=way, ranks=4)
    # So many packets that whole ones may be lost within what is tolerated.
    small = LossyExchange(way=way, ranks=4, payload=64)
    transport = Bounded(payload=64, tolerance=0.3, law="fixed")
    over = rounds(small, transport, {link: LinkLosses(0.2) for link in range(NETWORK.links)})
    found = Training(trial(), small, losses=over)
    found.advance(12)
    shares = [over.round(number).lost for number in range(3)]
    assert all(0 < share < 0.3 for share in shares)
    # In bytes it is about the same: last packets are shorter.
    assert found.curve().lost == pytest.approx(np.mean(shares), abs=0.05)
    assert found.curve().losses != Training(trial(), exchange).curve().losses


def test_a_grey_link_delays_who_tolerates_nothing():
    exchange = LossyExchange(way="ring", ranks=4, payload=64)
    link = int(np.flatnonzero(NETWORK.source == NETWORK.ranks[2])[0])
    times = {}
    for tolerance in (0.0, 0.2):
        transport = Bounded(payload=64, tolerance=tolerance, law="fixed")
        clean, grey = (rounds(exchange, transport, losses, count=1) for losses in ({}, {link: LinkLosses(0.1)}))
        times[tolerance] = grey.round(0).time / clean.round(0).time
        assert grey.round(0).lost <= tolerance
    assert times[0.0] > 1.1 * times[0.2]


def tagged(way: Way, by: Criterion, rounds: int = 6):
    """A training over switches that drop what is droppable above two packets, and mark all else."""
    exchange = LossyExchange(way=way, ranks=4, payload=64, tagging=Tagging(by))
    made = trial()
    switches = Queues(spare=2 * 142, mark_from=2 * 142, mark_to=2 * 142)
    transport = Bounded(payload=64, tolerance=0.3, law="fixed")

    def network(number: int) -> Packets:
        return Packets(NETWORK, transport=transport, switches=switches, seed=number)

    over = NetworkRounds(exchange, Replica(made, made.model, made.optimizer).tensors(), ROUTER, network, count=2)
    found = Training(made, exchange, losses=over)
    found.advance(rounds)
    return over, found


@pytest.mark.parametrize("by", ["layer", "magnitude"])
def test_switches_drop_what_hosts_have_tagged(by):
    over, found = tagged("parameter_server", by)
    push = found._replicas.tallies[0]
    # What comes after enough has come is of no use, important or not; all else that is lost was droppable.
    assert 0 < push.dropped_important < 0.5 * push.lost
    everything, _ = tagged("parameter_server", "packet")
    assert over.round(1).time > 0
    assert everything.round(1).losses != over.round(1).losses


def test_by_magnitude_every_round_of_training_is_simulated():
    over, found = tagged("ring", "magnitude", rounds=5)
    assert len(over.times()) == 5
    assert found.curve().lost == pytest.approx(np.mean([over.round(k).lost for k in range(5)]), abs=0.05)
    with pytest.raises(ConfigError, match="has not been trained"):
        over.round(5)
    again, _ = tagged("ring", "magnitude", rounds=5)
    assert again.times() == over.times()


def test_tensors_that_cannot_lose_a_packet_are_kept():
    # Two workers push seven long tensors and a short one at once, of which a switch drops all that it can.
    tensors = [Tensor(str(k), 2000 if k < 7 else 16, 0) for k in range(8)]
    switches = Queues(spare=2 * 142, limit=400 * 142)

    def network(number: int) -> Packets:
        transport = Bounded(payload=64, tolerance=0.3, law="fixed")
        return Packets(NETWORK, transport=transport, switches=switches, seed=number)

    over = NetworkRounds(LossyExchange(ranks=4, payload=64), tensors, ROUTER, network, classes=1, count=1)
    push = over(0)[0]
    lost = {message for message, _, _ in push._lost}
    assert lost == set(range(7))


@pytest.mark.parametrize("by", ["packet", "layer", "magnitude"])
def test_tags_are_foreseen_where_nothing_is_lost(by):
    plan = build("ring", "all_reduce", 4)
    made = trial()
    layout = TensorLayout(Replica(made, made.model, made.optimizer).tensors(), plan.blocks, 64)
    collective = Lossy(plan, layout, tagging=Tagging(by))
    draw, asked = np.random.default_rng(1), {}

    class Nothing:
        def foresee(self, tags):
            self.tags = dict(tags)

        def lost(self, transfer, step, packets):
            np.testing.assert_array_equal(packets.droppable, self.tags[transfer, step].droppable)
            asked[transfer, step] = packets
            return np.zeros(len(packets), np.bool_)

    for _ in range(3):
        holds = draw.normal(size=(4, plan.blocks, layout.width)).astype(np.float32)
        before = holds.copy()
        assert list(collective.foreseen(holds)) == sorted(collective.foreseen(holds), key=lambda key: (key[1], key[0]))
        np.testing.assert_array_equal(holds, before)
        collective.run(holds, Nothing())
    assert len(asked) == int(plan.steps.sum())
    share = np.mean([packets.droppable.mean() for packets in asked.values()])
    # By layer: packets of the first of two layers.
    assert share == pytest.approx({"packet": 1.0, "layer": 17 / 22, "magnitude": 0.5}[by], abs=0.1)


def test_packets_of_rounds_take_all_ways():
    network = leaf_spine(4, 1, 1.25e9, spines=4)
    made = trial()
    tensors = Replica(made, made.model, made.optimizer).tensors()
    exchange = LossyExchange(way="ring", ranks=4, payload=64)
    grey = int(np.flatnonzero(~np.isin(network.source, network.ranks) & ~np.isin(network.target, network.ranks))[0])

    def carried(number: int) -> Packets:
        transport = Bounded(payload=64, tolerance=0.3, law="fixed")
        return Packets(network, transport=transport, losses={grey: LinkLosses(1.0)}, seed=number)

    lost = NetworkRounds(exchange, tensors, Scatter(network), carried, count=1).round(0).lost
    assert 0 < lost < 0.3  # a dead link takes a quarter of a rank's packets, not all of a flow


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: rounds(LossyExchange(back="reliable"), Dctcp()), "is not simulated"),
        (lambda: rounds(LossyExchange(), Dctcp(), count=0), "is no number of rounds"),
        (lambda: rounds(LossyExchange(), Dctcp(payload=1000)).round(0), "is not the exchange's"),
        (
            lambda: NetworkRounds(LossyExchange(), [], ROUTER, lambda n: Packets(NETWORK), release=[1]),
            "is not one for each",
        ),
        (
            lambda: NetworkRounds(LossyExchange(), [], ROUTER, lambda n: Packets(NETWORK), classes=9),
            "is no number of classes",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
