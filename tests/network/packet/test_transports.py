"""Each transport against what can be computed by hand, and switches that pause, cut and share."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from foretrain.errors import ConfigError, StallError
from foretrain.network.fabrics.clos import attach
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Bounded, Dcqcn, Dctcp, Ndp, NewReno, Pfabric, Pias, Timely
from foretrain.network.program import Paths, Program
from foretrain.network.routing import Ecmp
from foretrain.network.servers import Host
from foretrain.network.topology.graph import Builder
from foretrain.units import MILLISECOND
from tests.network.packet.flows import LATENCY, PAYLOAD, RATE, REPLY, SENDING, SIZES, WIRE, both, fabric, flows, hosts

WIDE = NewReno(**SIZES, first_window=1000, most=1000)
FIXED = Bounded(**SIZES, law="fixed", tolerance=0.0)


def incast(senders, packets, **columns):
    network = hosts(senders + 1)
    return network, flows(network, [(k, senders) for k in range(senders)], packets * PAYLOAD, **columns)


ALONE = (
    Pfabric(**SIZES, first_window=50, most=50),
    Ndp(**SIZES, first_window=50),
    Dcqcn(**SIZES),
    Timely(**SIZES),
    FIXED,
    replace(FIXED, law="timely"),
)


@pytest.mark.parametrize("transport", ALONE, ids=lambda each: type(each).__name__)
def test_one_flow_has_the_link_to_itself(transport):
    network = fabric()
    program = flows(network, [(0, 11)], 40 * PAYLOAD)
    outcome = both(network, program, transport=transport)
    assert outcome.finish[0] == 40 * SENDING + 4 * LATENCY + 3 * SENDING
    assert outcome.repeated[0] == outcome.timeouts[0] == 0


@pytest.mark.parametrize("transport", [Dcqcn(**SIZES, most=4000), Timely(**SIZES, most=4000), WIDE])
def test_what_pauses_never_drops(transport):
    network, program = incast(6, 300)
    link = int(program.paths.of(0)[-1])
    # What may still come after XOFF: a round trip's worth, a packet that goes and one that has begun, of each sender.
    late = 2 * LATENCY * RATE / 1e12 + 3 * WIRE
    queues = Queues(xoff=20 * WIRE, xon=10 * WIRE, limit=int(6 * (20 * WIRE + late)))
    outcome = both(network, program, transport=transport, switches=queues)
    assert outcome.drops == outcome.repeated.sum() == 0
    assert outcome.pauses > 0
    assert outcome.counts[link, 0, c.DEEPEST] > 20 * WIRE
    # The link never idles, whoever is paused.
    if transport is WIDE:
        assert outcome.finish.max() == SENDING + LATENCY + 6 * 300 * SENDING + LATENCY


def test_a_pause_holds_up_who_is_not_to_blame():
    # Hosts 0, 1 and 2 of one leaf send to host 4; host 0 sends to host 5, too, which nobody else does.
    network = fabric(2, 4, 1)
    program = flows(network, [(0, 4), (1, 4), (2, 4), (0, 5)], 200 * PAYLOAD)
    paused = both(network, program, transport=WIDE, switches=Queues(xoff=10 * WIRE, xon=5 * WIRE))
    free = both(network, program, transport=WIDE)
    assert paused.pauses > 0
    assert paused.finish[3] > 1.2 * free.finish[3]


def test_classes_are_paused_by_themselves():
    network = fabric(2, 4, 1)
    priority = np.array([1, 1, 1, 0], np.int32)
    program = flows(network, [(0, 4), (1, 4), (2, 4), (3, 5)], 200 * PAYLOAD, priority=priority)
    outcome = both(network, program, transport=WIDE, switches=Queues(xoff=10 * WIRE, xon=5 * WIRE))
    alone = both(network, flows(network, [(3, 5)], 200 * PAYLOAD), transport=WIDE)
    assert outcome.pauses > 0
    # Class 0 waits for one packet of the others at most, at each of three ports, and for replies.
    assert outcome.finish[3] <= alone.finish[0] + 3 * SENDING + 200 * REPLY * 80


def circle():
    """Three switches in a circle with a host each, flows that go two thirds of the way round, and its cables' links."""
    build = Builder("circle")
    switches = [build.node(f"switch{k}", "switch", tier=1) for k in range(3)]
    ranks = [attach(build, Host(), k, (switches[k],), rate=RATE, latency=LATENCY)[0] for k in range(3)]
    for k in range(3):
        build.cable(switches[k], switches[(k + 1) % 3], rate=RATE, latency=LATENCY)
    topology = build.topology(ranks)
    number = {pair: k for k, pair in enumerate(zip(topology.source.tolist(), topology.target.tolist(), strict=True))}
    places = [[ranks[k], *(switches[(k + i) % 3] for i in range(3)), ranks[(k + 2) % 3]] for k in range(3)]
    ways = [number[pair] for place in places for pair in itertools.pairwise(place)]
    around = [number[switches[k], switches[(k + 1) % 3]] for k in range(3)]
    return topology, Paths(np.arange(0, 13, 4, dtype=np.int32), np.array(ways, np.int32)), around


@pytest.mark.parametrize("kernel", ["windows", "events"])
@pytest.mark.parametrize("transport", [WIDE, Dcqcn(**SIZES)], ids=["newreno", "dcqcn"])
def test_ports_that_pause_each_other_are_named(kernel, transport):
    topology, paths, around = circle()
    program = Program.of(paths, np.full(3, 900.0 * PAYLOAD))
    assert (both(topology, program, transport=WIDE).finish > 0).all()
    queues = Queues(xoff=2 * WIRE, xon=WIRE)
    with pytest.raises(StallError, match="pause each other") as raised:
        Packets(topology, transport=transport, switches=queues, kernel=kernel).run(program)
    assert all(f"link {link}, class 0" in str(raised.value) for link in around)


def test_a_shared_buffer_is_dynamic():
    # One port alone may have half of what is free: a third of all, if its share is a half (Choudhury and Hahne).
    network, program = incast(4, 400)
    link = int(program.paths.of(0)[-1])
    outcome = both(network, program, transport=WIDE, switches=Queues(shared=90 * WIRE, share=0.5))
    assert outcome.counts[link, 0, c.DEEPEST] == pytest.approx(30 * WIRE, abs=WIRE)
    assert outcome.drops > 0


def test_the_shortest_goes_first_and_what_is_furthest_from_its_end_is_dropped():
    network, packets = hosts(4), np.array([60, 5, 20])
    program = flows(network, [(0, 3), (1, 3), (2, 3)], packets * PAYLOAD)
    transport = Pfabric(**SIZES, first_window=60, most=60)
    outcome = both(network, program, transport=transport, switches=Queues(nearest=True, room=200 * WIRE))
    first = SENDING + LATENCY
    # At the switch all that came waits for who has less to go; one packet of somebody else may have begun.
    for flow in (1, 2, 0):
        ahead = packets[packets <= packets[flow]].sum()
        assert outcome.finish[flow] <= first + (ahead + 2) * SENDING + LATENCY + ahead * REPLY * 80
    assert outcome.drops == 0
    program = flows(network, [(0, 3), (1, 3), (2, 3)], np.array([80, 8, 8]) * PAYLOAD)
    transport = Pfabric(**SIZES, first_window=20, most=20)
    outcome = both(network, program, transport=transport, switches=Queues(nearest=True, room=10 * WIRE))
    assert outcome.drops == outcome.repeated[0] > 0
    assert outcome.repeated[1:].sum() == 0


def test_an_incast_is_pulled_at_the_links_rate():
    network, program = incast(8, 40)
    queues = Queues(limit=(10**6, *[8 * WIRE] * 7), cut_to=REPLY)
    outcome = both(network, program, transport=Ndp(**SIZES, first_window=12), switches=queues)
    ideal = SENDING + LATENCY + 8 * 40 * SENDING + LATENCY
    assert outcome.cuts > 0
    assert outcome.drops == outcome.timeouts.sum() == 0
    # Headers take some of the link in the first round trip; then data keeps it busy.
    assert ideal <= outcome.finish.max() <= 1.1 * ideal
    assert outcome.repeated.sum() == outcome.cuts
    link = int(program.paths.of(0)[-1])
    assert outcome.counts[link, 1, c.DEEPEST] <= 8 * WIRE


@pytest.mark.parametrize(
    "transport",
    [Dcqcn(**SIZES, most=4000, leap=5e8, step=5e8), Timely(**SIZES, most=4000, step=5e7, low=3_000_000, high=10**8)],
    ids=["dcqcn", "timely"],
)
def test_rates_share_a_link(transport):
    network, program = incast(2, 4000)
    queues = Queues(xoff=100 * WIRE, xon=50 * WIRE, mark_from=5 * WIRE, mark_to=100 * WIRE, mark_chance=0.1)
    outcome = both(network, program, transport=transport, switches=queues)
    ideal = 2 * 4000 * SENDING
    assert outcome.drops == 0
    assert ideal < outcome.finish.max() < 1.3 * ideal
    assert outcome.finish.min() > 0.6 * outcome.finish.max()


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3])
def test_a_step_has_come_when_enough_of_it_has(tolerance):
    network, program = hosts(2), flows(hosts(2), [(0, 1)], 1000 * PAYLOAD, steps=np.array([3], np.int32))
    losses = {int(program.paths.links[0]): LinkLosses(0.1)}
    transport = Bounded(**SIZES, law="fixed", tolerance=tolerance)
    outcome = both(network, program, transport=transport, losses=losses)
    came = outcome.came[0]
    assert came.shape == (3, 1000)
    # Not a packet more than is needed, since receivers have no use for what comes after STOP.
    assert (came.sum(axis=1) == np.ceil(1000 * (1 - tolerance) - 1e-9)).all()
    assert (outcome.repeated[0] > 0) == (tolerance < 0.1)


def test_without_losses_bounded_loss_stops_early():
    network, program = hosts(2), flows(hosts(2), [(0, 1)], 100 * PAYLOAD)
    outcome = both(network, program, transport=Bounded(**SIZES, law="fixed", tolerance=0.2))
    assert outcome.finish[0] == 80 * SENDING + 2 * LATENCY + SENDING
    assert outcome.came[0][0, :80].all()
    assert outcome.sent[0] < 100 + 2 * (SENDING + 2 * LATENCY) // SENDING


def test_important_packets_are_marked_and_others_dropped():
    network, program = incast(4, 200)
    rng = np.random.default_rng(1)
    important = [rng.random((1, 200)) < 0.5 for _ in range(4)]
    transport = Bounded(**SIZES, tolerance=0.4, law="aimd")
    queues = Queues(spare=5 * WIRE, mark_from=5 * WIRE, mark_to=5 * WIRE)
    outcome = both(network, program, important=important, transport=transport, switches=queues)
    assert outcome.drops > 0
    missing = [~came for came in outcome.came]
    # Of what is missing though it was sent, nothing was important: those were all kept.
    dropped = sum(int((gone & vital).sum()) for gone, vital in zip(missing, important, strict=True))
    assert outcome.repeated.sum() > 0 or dropped <= sum(int(gone.sum()) for gone in missing) / 2


@pytest.mark.parametrize("packets", [9, 10])
def test_messages_that_may_lose_no_packet_are_not_dropped(packets):
    network, program = incast(4, packets)
    outcome = both(network, program, transport=Bounded(**SIZES, tolerance=0.1), switches=Queues(spare=WIRE))
    assert (outcome.drops == 0) == (packets < 10)


def test_what_an_early_step_misses_goes_again_while_later_ones_go():
    network = hosts(3)
    program = flows(
        network,
        [(0, 1), (1, 2)],
        [2000 * PAYLOAD, PAYLOAD],
        steps=np.array([4, 1], np.int32),
        first=np.array([0, 0, 1], np.int32),
        after=np.array([0], np.int32),
        lag=np.array([1], np.int32),
    )
    losses = {int(program.paths.of(0)[0]): LinkLosses(0.1)}
    outcome = both(network, program, transport=FIXED, losses=losses)
    # The second flow passes on the first step, which needs every packet, before the others have all gone.
    assert 2000 * SENDING < outcome.begun[1] < 8000 * SENDING
    assert all(came.all() for came in outcome.came)


def test_who_never_answers_is_given_up():
    network, program = hosts(2), flows(hosts(2), [(0, 1)], 10 * PAYLOAD)
    transport = Bounded(**SIZES, law="fixed", most_tries=4)
    with pytest.raises(StallError, match="gave up after 4 probes"):
        Packets(network, transport=transport, losses={int(program.paths.links[1]): LinkLosses(1.0)}).run(program)


@pytest.mark.parametrize(
    "transport", [NewReno(), Pfabric(), Ndp(), Dcqcn(), Bounded()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("kernel", ["windows", "events"])
def test_a_dead_wire_is_told_and_not_waited_for(transport, kernel):
    network = hosts(3)
    program = flows(network, [(0, 2), (1, 2)], 4000)
    dead = int(program.paths.of(1)[0])
    with pytest.raises(StallError, match="1 of 2 flows never end") as found:
        Packets(network, transport=transport, losses={dead: LinkLosses(1.0)}, kernel=kernel).run(program)
    assert "flow 1 has had 0 of 1 steps" in str(found.value)
    assert "timed out" in str(found.value) or "gave up" in str(found.value)
    online = Packets(network, transport=transport, losses={dead: LinkLosses(1.0)}, kernel=kernel).online()
    online.add(program)
    with pytest.raises(StallError, match="1 of 2 flows never end"):
        online.advance()


def test_ways_that_meet_congestion_are_avoided():
    # Three flows take all four spines; three others, as many as fill it, one of them.
    network = fabric(2, 6, 4)
    pairs = [(k, 6 + k) for k in range(6)]
    sources, targets = (network.ranks[np.array(side)] for side in zip(*pairs, strict=True))
    router = Ecmp(network, seed=3)
    ways = [router.paths(sources, targets, np.full(6, k, np.int32)) for k in range(12)]
    middle = int(ways[0].of(3)[1])
    held = [next(way.of(f) for way in ways if way.of(f)[1] == middle) for f in range(3, 6)]
    ways = [Paths(way.first, np.concatenate([*(way.of(f) for f in range(3)), *held]).astype(np.int32)) for way in ways]
    program = Program.of(ways[0], np.full(6, 2000.0 * PAYLOAD))
    queues = Queues(mark_from=20 * WIRE, mark_to=20 * WIRE)
    took = {}
    for adaptive in (False, True):
        transport = Bounded(**SIZES, tolerance=0.0, important=1.0, adaptive=adaptive)
        took[adaptive] = both(network, program, ways[1:], transport=transport, switches=queues).finish[:3].max()
    assert took[True] < 0.9 * took[False]


def test_queues_are_traced():
    network, program = incast(4, 30)
    link = int(program.paths.of(0)[-1])
    traces = [
        Packets(network, transport=WIDE, kernel=kernel).run(program, watch=[link], every=0).trace
        for kernel in ("windows", "events")
    ]
    for trace in traces:
        assert trace.bytes.shape == (len(trace.time), 1)
        assert (np.diff(trace.time) == 1 << (LATENCY.bit_length() - 1)).all()
    shorter = min(len(trace.time) for trace in traces)
    np.testing.assert_array_equal(traces[0].bytes[:shorter], traces[1].bytes[:shorter])
    # Four packets come in the time of one: the queue grows by three for each.
    at = traces[0].time
    arrived = np.clip((at - LATENCY) // SENDING, 0, 30)
    expected = np.maximum(4 * arrived - np.maximum(arrived, (at - SENDING - LATENCY) // SENDING + 1), 0) * WIRE
    growing = at < LATENCY + 30 * SENDING
    assert np.abs(traces[0].bytes[growing, 0] - expected[growing]).max() <= 4 * WIRE


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Bounded(tolerance=1.0), "is not a share"),
        (lambda: Bounded(law="other"), "is unknown"),  # pyright: ignore[reportArgumentType]
        (lambda: Bounded(important=2), "is not a share"),
        (lambda: Dcqcn(g=1.0), "is no weight"),
        (lambda: Dcqcn(step=0), "is not positive"),
        (lambda: Timely(low=10, high=5), "is below low"),
        (lambda: Queues(xoff=5, xon=6), "is above xoff"),
        (lambda: Queues(share=0), "is not a share"),
        (lambda: Queues(nearest=True, xoff=5), "does not go with"),
        (lambda: Queues(cut_to=-1), "is negative"),
        (lambda: Packets(hosts(2)).run(flows(hosts(2), [(0, 1)], 10), watch=[99]), "is no link"),
        (lambda: Packets(hosts(2)).run(flows(hosts(2), [(0, 1)], 10), every=-1), "is negative"),
        (lambda: Packets(hosts(2)).run(flows(hosts(2), [(0, 1)], 10), important=[]), "one array per flow"),
        (lambda: Packets(hosts(2)).run(flows(hosts(2), [(0, 1)], 10), important=[np.zeros(2, bool)]), "one per packet"),
        (lambda: Packets(hosts(2), seed=-1), "seed"),
        (lambda: Packets(hosts(2), losses={10**6: LinkLosses(0.1)}), "is no link"),
        (lambda: LinkLosses(1.5), "is no probability"),
        (lambda: Queues(limit=(1, 2)), "is not one per class"),
        (lambda: Queues(mark_from=2, mark_to=1), "is above mark_to"),
        (lambda: NewReno(payload=70_000), "makes packets too large"),
        (lambda: NewReno(first_window=2000), "is more than ever may go"),
        (lambda: Dctcp(g=0), "is no weight"),
        (lambda: Pias(demotions=(5, 5)), "do not ascend"),
        (lambda: Packets(hosts(2)).run(flows(hosts(2), [(0, 1)], 1, priority=np.array([8], np.int32))), "is no class"),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_prompt_flows_ask_at_once_and_lose_little():
    """What is missing is asked for when the last packet is acknowledged; receivers wait for the rest until then."""
    topology = hosts(2)
    program, into = (
        flows(topology, [(0, 1)], 50 * PAYLOAD),
        int(np.flatnonzero(topology.target == topology.ranks[1])[0]),
    )

    def run(seed, **options):
        transport = Bounded(**SIZES, law="fixed", least_timeout=MILLISECOND, **options)
        return Packets(topology, transport=transport, losses={into: LinkLosses(0.05)}, seed=seed).run(program)

    strict = [[run(seed, tolerance=0.0, prompt=prompt).finish[0] for seed in range(9)] for prompt in (False, True)]
    lost = [
        sum((~run(seed, tolerance=0.4, prompt=prompt).came[0]).sum() for seed in range(9)) for prompt in (False, True)
    ]

    assert np.median(strict[1]) < MILLISECOND < np.median(strict[0])
    assert lost[1] < lost[0]
