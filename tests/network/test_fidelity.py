"""What each fidelity finds more than the one before, where they agree, and what auto takes."""

from dataclasses import replace

import numpy as np
import pytest

from foretrain.collective import build
from foretrain.errors import ConfigError, StallError
from foretrain.network import fidelity as module
from foretrain.network.collective_benchmark import exchange
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import topology
from foretrain.network.fidelity import FLUID, Fidelity, Ideal, PacketEstimate, decided, estimate, packet_hops, parts
from foretrain.network.packet import LinkLosses, Queues
from foretrain.network.packet.notation import TRANSPORTS, losses, queues, transport
from foretrain.network.packet.transports.transport import Bounded, Dcqcn, Dctcp, NewReno, Pias
from foretrain.network.program import place
from foretrain.network.routing import Ecmp
from foretrain.units import MICROSECOND
from tests.network.fluid.oracle import waiting
from tests.network.packet.flows import LATENCY, RATE, fabric, flows, hosts

IDEAL, PACKET = Fidelity("ideal"), Fidelity("packet")


def incast(senders, size):
    network = hosts(senders + 1)
    latency = np.full(senders, 2.0 * LATENCY)
    return network, flows(network, [(k, senders) for k in range(senders)], size, latency=latency)


def ring():
    network = fabric(2, 4, 4)
    return network, place(build("ring", "all_reduce", 8), 4_000_000, Ecmp(network))


@pytest.mark.parametrize("senders", [1, 8])
def test_each_finds_more_time_than_the_one_before(senders):
    network, program = incast(senders, 200_000)
    times = [level.finish(program, network).max() for level in (IDEAL, FLUID, PACKET)]
    alone = 2 * LATENCY + 200_000 / RATE * 1e12
    assert times[0] == pytest.approx(alone, abs=1)
    assert times[1] == pytest.approx(alone + (senders - 1) * 200_000 / RATE * 1e12, rel=1e-9)
    assert times[1] < times[2] < 1.4 * times[1]


def test_ideal_flows_keep_their_dependencies_and_steps():
    network = hosts(3)
    program = waiting(flows(network, [(0, 1), (1, 2), (0, 2)], 12_500), [(1, 0, 2**30)])
    program = replace(program, steps=np.array([2, 1, 1], np.int32))
    each = 1_000_000  # ps that 12,500 bytes take
    np.testing.assert_allclose(module.run_ideal(program, network.capacity), [2 * each, 3 * each, each])
    stuck = waiting(flows(network, [(0, 1), (1, 2)], 1), [(0, 1, 2**30), (1, 0, 2**30)])
    with pytest.raises(StallError):
        module.run_ideal(stuck, network.capacity)


@pytest.mark.parametrize("fidelity", [IDEAL, FLUID, PACKET], ids=str)
def test_every_fidelity_carries_what_comes_later(fidelity):
    network = hosts(3)
    program = flows(network, [(0, 1)], 125_000)
    alone = int(np.ceil(fidelity.finish(program, network).max()))
    carrier = fidelity.carrier(network)
    assert carrier.next_completion() is None
    first = carrier.add(program, 5 * MICROSECOND)
    assert carrier.predict(first) == carrier.next_completion() == 5 * MICROSECOND + alone
    second = carrier.add(program, 6 * MICROSECOND)
    gone = carrier.add(program, 7 * MICROSECOND)
    carrier.cancel(gone)
    assert carrier.running == (first, second)
    assert carrier.advance(stop=True)[0] is first
    assert carrier.now == first.end
    carrier.advance()
    assert second.end is not None
    assert second.end >= 6 * MICROSECOND + alone
    together = second.end - 6 * MICROSECOND
    assert together == alone if fidelity is IDEAL else together > 1.3 * alone
    with pytest.raises(ConfigError, match="is past"):
        carrier.advance(1)
    with pytest.raises(ConfigError, match="was cancelled"):
        carrier.predict(gone)


def test_ideal_is_a_carrier_of_empty_programs():
    carrier = Ideal(hosts(2).capacity)
    none = flows(hosts(2), [(0, 1)], 1)
    empty = replace(none, paths=none.paths.gather(np.zeros(0, np.int64)), size=none.size[:0])
    assert carrier.add(empty, 3).end == 3


def test_packet_hops_are_counted_as_they_will_be():
    network, program = incast(4, 10 * 1460 + 1)
    outcome = PACKET.packets(network).run(program)
    assert packet_hops(program, 1460) == outcome.data_hops == 4 * 11 * 2


def test_auto_takes_packets_within_the_budget():
    network, program = incast(4, 100_000)
    within = decided(Fidelity("auto", budget=1e9), network, [program])
    assert within.fidelity.level == "packet"
    assert within.why.startswith("auto takes the packet level: 552 packet hops, about ")
    beyond = decided(Fidelity("auto", budget=0), network, [program, program], times=3)
    assert beyond.fidelity.level == "fluid"
    assert "3.31 k packet hops" in beyond.why
    assert decided(PACKET, network, [program]).why.startswith("packet level: 552 packet hops")
    assert decided(FLUID, network, [program]).fidelity is FLUID
    with pytest.raises(ConfigError, match="has not been decided"):
        Fidelity("auto").finish(program, network)
    with pytest.raises(ConfigError, match="has not been decided"):
        Fidelity("auto").carrier(network)
    with pytest.raises(ConfigError, match="is no number of seconds"):
        Fidelity("auto", budget=-1)
    where = Deployment(topology("star:4@10Gbps"), "ring")
    for budget, level in ((1e9, "packet"), (0, "fluid")):
        assert where.simulated(Fidelity("auto", budget=budget)).decided(1 << 16)[0].fidelity.level == level


@pytest.mark.parametrize(
    ("hops", "seconds", "said"),
    [
        (12_400_000, 9, "12.4 M packet hops, about 9 s"),
        (999, 0.2, "999 packet hops, about a second"),
        (3_000_000_000, 900, "3 G packet hops, about 15 min"),
        (3_000_000_000, 9000, "3 G packet hops, about 2.5 h"),
    ],
)
def test_estimates_are_said(hops, seconds, said):
    assert str(PacketEstimate(hops, hops / seconds)) == said
    assert PacketEstimate(0, 1.0).seconds == 0
    assert estimate(PACKET, *(lambda pair: (pair[0], [pair[1]]))(incast(2, 1000))).speed > 0


def test_parts_of_a_whole_tell_it():
    heard = []
    for told in parts([10, 30], lambda done, total: heard.append((done, total))):
        told(1, 2)
        told(2, 2)
    assert heard == [(5, 40), (10, 40), (25, 40), (40, 40)]


def test_a_deployment_of_packets_is_slower_and_goes_on_at_its_rate(monkeypatch):
    where = Deployment(topology("star:4@10Gbps"), "ring")
    packets = where.simulated(PACKET)
    assert packets.cost == where.cost
    for size in (1000, 1 << 20):
        assert where.duration("all_reduce", size) < packets.duration("all_reduce", size)
    monkeypatch.setattr("foretrain.network.deployment._MOST_HOPS", 20_000)
    short = where.simulated(PACKET)
    assert short.duration("all_reduce", 1 << 21) == pytest.approx(packets.duration("all_reduce", 1 << 21), rel=0.05)
    heard = []
    again = where.simulated(PACKET)
    again.measure(1 << 21, lambda done, total: heard.append(done / total))
    assert heard == sorted(heard)
    assert heard[-1] == 1
    assert again.duration("all_reduce", 1 << 20) == short.duration("all_reduce", 1 << 20)
    assert where.simulated(IDEAL).duration("all_reduce", 1 << 20) <= where.duration("all_reduce", 1 << 20)
    assert "packets (dctcp)" in str(packets)


def test_an_exchange_says_what_links_carried():
    where = Deployment(topology("star:4@10Gbps"), "ring")
    found = [exchange(where.simulated(level), "all_reduce", 10**6) for level in (IDEAL, FLUID, PACKET)]
    assert found[0].time <= found[1].time < found[2].time
    np.testing.assert_allclose(found[1].carried, 1.5e6)
    # Headers, and acknowledgements of what comes.
    np.testing.assert_allclose(found[2].carried, 1.5e6 * (1460 + 78 + 84) / 1460, rtol=0.01)


def test_transports_and_queues_as_text():
    assert transport("dctcp") == Dctcp()
    assert transport("NewReno(payload=4096B, least_timeout=1ms, most=64)") == NewReno(
        4096, least_timeout=1000 * MICROSECOND, most=64
    )
    assert transport("pias(demotions=10kB+1MB, g=0.5)") == Pias(demotions=(10_000, 1_000_000), g=0.5)
    assert transport("dcqcn(quiet=40us,raise_bytes=1MB,adaptive=1)") == Dcqcn(
        quiet=40 * MICROSECOND, raise_bytes=10**6, adaptive=True
    )
    assert transport("bounded(law=timely,tolerance=0.2)") == Bounded(law="timely", tolerance=0.2)
    assert queues("xoff=50kB,xon=40kB,shared=1MB,share=0.5") == Queues(xoff=50_000, xon=40_000, shared=10**6, share=0.5)
    assert queues("nearest=1,room=40kB") == Queues(nearest=True, room=40_000)
    assert queues("limit=1MB" + 7 * "+12kB" + ",cut_to=84B") == Queues(limit=(10**6, *7 * (12_000,)), cut_to=84)
    assert queues("limit=300kB,mark=100kB") == Queues(limit=300_000, mark_from=100_000, mark_to=100_000)
    assert queues("room=1MB,strict=2,mark_chance=0.5") == Queues(room=1_000_000, strict=2, mark_chance=0.5)


@pytest.mark.parametrize(
    ("read", "text", "match"),
    [
        (transport, "dctpc", "did you mean 'dctcp'"),
        (transport, "(", "is not a transport"),
        (transport, "dctcp(gain=1)", "gain"),
        (transport, "dctcp(g=2)", "transport dctcp.g: 2.0 is no weight"),
        (transport, "dctcp(most=2.5)", "is not a whole number"),
        (transport, "dctcp(payload)", "is not name=value"),
        (transport, "bounded(law=some)", "law"),
        (transport, "dctcp(adaptive=yes)", "is neither 0 nor 1"),
        (transport, "dctcp(payload=1kB+2kB)", "is several sizes"),
        (queues, "room=1kB+2kB", "is several sizes"),
        (queues, "limit=1kB+2kB", "is not one per class"),
        (queues, "limit=300", "limit"),
        (queues, "marks=3kB", "did you mean 'mark"),
        (queues, "mark=3kB,mark=4kB", "contradicts the value before"),
        (queues, "mark_from=3kB,mark_to=1kB", "is above mark_to"),
        (queues, "strict=9", "is no number of classes"),
    ],
)
def test_what_does_not_read_says_what_to_write(read, text, match):
    with pytest.raises(ConfigError, match=match):
        read(text)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_finds_queues_that_it_is_made_for(name):
    # These two keep their first window, which must be what the network holds.
    window = {"pfabric": "(first_window=40,most=40)", "ndp": "(first_window=40)"}
    level = Fidelity("packet", transport=transport(name + window.get(name, "")))
    for network, program in (incast(8, 500_000), ring()):
        fluid, packet = FLUID.finish(program, network).max(), level.finish(program, network).max()
        enough = 0.9 if name == "bounded" else 1.0
        assert enough * fluid < packet < 2 * fluid


def test_losses_as_text_are_of_wires():
    network = topology("leaf_spine:2x2@10Gbps")
    some = network.between("leaf0", "spine1").tolist()
    found = Fidelity("packet", losses=losses("0.1%, leaf0:spine1=1%x8"))._lossy(network)
    assert len(found) == network.links
    assert found[some[0]] == LinkLosses.bursts(0.01, 8)
    assert all(what == LinkLosses(0.001) for link, what in found.items() if link not in some)
    assert losses("*=0.5") == losses("50%") == (("*", LinkLosses(0.5)),)
    for wrong in ("leaf0=1%", "a:=1%", "1%x", "=1%%"):
        with pytest.raises(ConfigError, match="does not read"):
            losses(wrong)
    with pytest.raises(ConfigError, match="in bursts of"):
        losses("90%x2")
