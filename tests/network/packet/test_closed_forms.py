"""What can be computed by hand: pipelines of hops, queues that fill, marks, drops, turns, rings."""

from dataclasses import replace

import numpy as np
import pytest

from foretrain.collective import build
from foretrain.errors import ConfigError, StallError
from foretrain.network.fluid import run as fluid
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Dctcp, NewReno, Pias
from foretrain.network.program import place
from foretrain.network.routing import Ecmp
from tests.network.packet.flows import (
    BYTE,
    HEADER,
    LATENCY,
    PAYLOAD,
    REPLY,
    SENDING,
    WIRE,
    both,
    fabric,
    flows,
    hosts,
    waiting,
)

WIDE = NewReno(PAYLOAD, HEADER, REPLY, first_window=1000, most=1000)
"""A window in which all that is sent here fits."""
MARKING = Dctcp(PAYLOAD, HEADER, REPLY, first_window=10, most=1000)
MARKED = replace(MARKING, first_window=1000)


def of(outcome, link, column, klass=0):
    return int(outcome.counts[link, klass, column])


@pytest.mark.parametrize("packets", [1, 2, 50])
def test_one_flow_is_a_pipeline_of_hops(packets):
    network = fabric()
    program = flows(network, [(0, 11)], packets * PAYLOAD, release=np.array([12_345.0]))
    hops = len(program.paths.links)
    assert hops == 4
    outcome = both(network, program, transport=WIDE)
    assert outcome.begun[0] == 12_345
    assert outcome.finish[0] == 12_345 + packets * SENDING + hops * LATENCY + (hops - 1) * SENDING
    assert outcome.sent[0] == outcome.arrived == packets
    assert outcome.data_hops == hops * packets
    assert outcome.hops == 2 * hops * packets
    assert outcome.end == outcome.finish[0] + hops * (LATENCY + REPLY * BYTE)


def test_the_last_packet_of_a_step_is_as_long_as_what_is_left():
    outcome = both(hosts(2), flows(hosts(2), [(0, 1)], 2 * PAYLOAD + 1), transport=WIDE)
    last = (HEADER + 1) * BYTE
    assert outcome.finish[0] == 3 * SENDING + last + 2 * LATENCY  # it waits for the second at the switch


@pytest.mark.parametrize("senders", [2, 8])
def test_an_incast_keeps_its_last_link_busy(senders):
    network, packets = hosts(senders + 1), 40
    program = flows(network, [(k, senders) for k in range(senders)], packets * PAYLOAD)
    outcome = both(network, program, transport=WIDE)
    assert outcome.finish.max() == SENDING + LATENCY + senders * packets * SENDING + LATENCY
    # All come at the same rate, and take turns: the port serves equal instants by their links.
    assert np.ptp(outcome.finish) == (senders - 1) * SENDING


@pytest.mark.parametrize("senders", [8, 32])
def test_incast_as_the_fluid_sees_it(senders):
    network = hosts(senders + 1)
    program = flows(network, [(k, senders) for k in range(senders)], 1000 * PAYLOAD)
    with_headers = replace(program, size=program.size * WIRE / PAYLOAD, latency=np.full(senders, 2.0 * LATENCY))
    expected = fluid(with_headers, network.capacity).finish
    fixed = both(network, program, transport=replace(WIDE, first_window=20, most=20))
    np.testing.assert_allclose(fixed.finish, expected, rtol=0.002)
    # DCTCP keeps the link as busy, and shares it less fairly: some are served earlier.
    marked = both(network, program, transport=MARKING, switches=Queues(mark_from=65 * WIRE, mark_to=65 * WIRE))
    assert marked.finish.max() == pytest.approx(expected.max(), rel=0.01)
    assert (marked.finish <= expected * 1.01).all()


def test_marks_begin_above_the_threshold():
    network, packets, k = hosts(3), 30, 10
    program = flows(network, [(0, 2), (1, 2)], packets * PAYLOAD)
    queues = Queues(mark_from=k * WIRE, mark_to=k * WIRE)
    outcome = both(network, program, transport=MARKED, switches=queues)
    link = int(program.paths.of(0)[-1])
    # Every SENDING two packets come and one goes: packet pair i finds i − 1 in the queue, and the second one more.
    held, marked = 0, 0
    for pair in range(packets):
        for second in (False, True):
            if pair == 0 and not second:
                continue  # goes at once
            marked += held > k
            held += 1
        held -= 1
    assert of(outcome, link, c.MARKS) == marked > 0
    assert of(outcome, link, c.DEEPEST) == packets * WIRE


def test_chances_of_marks_are_those_of_red():
    network = hosts(3)
    program = flows(network, [(0, 2), (1, 2)], 800 * PAYLOAD)
    never = both(network, program, transport=MARKED, switches=Queues(mark_from=0, mark_to=10**9, mark_chance=0.0))
    assert never.counts[:, :, c.MARKS].sum() == 0
    half = both(network, program, transport=MARKED, switches=Queues(mark_from=0, mark_to=1600 * WIRE, mark_chance=1.0))
    link = int(program.paths.of(0)[-1])
    # The queue grows to 800 packets: on average a packet finds a quarter of mark_to.
    assert of(half, link, c.MARKS) / 1600 == pytest.approx(0.25, abs=0.04)


def test_what_finds_no_room_is_dropped_and_sent_again():
    network, packets = hosts(3), 30
    program = flows(network, [(0, 2), (1, 2)], packets * PAYLOAD)
    outcome = both(network, program, transport=WIDE, switches=Queues(limit=10 * WIRE))
    link = int(program.paths.of(0)[-1])
    # Until 10 wait there is room; then of each pair that comes one finds what went, and the other nothing.
    assert of(outcome, link, c.DEEPEST) == 10 * WIRE
    assert outcome.drops == of(outcome, link, c.DROPPED) > 0
    assert (outcome.finish > 0).all()
    assert outcome.sent.sum() == outcome.arrived + outcome.drops
    assert outcome.repeated.sum() >= outcome.drops


def test_a_lost_packet_is_noticed_by_three_duplicates():
    network = hosts(2)
    program = flows(network, [(0, 1)], 20 * PAYLOAD)
    # The wire loses what comes in a burst of one, at a packet that the seed chooses.
    for seed in range(40):
        outcome = both(
            network, program, transport=WIDE, losses={int(program.paths.links[0]): LinkLosses(0.03)}, seed=seed
        )
        if outcome.losses == 1 and outcome.timeouts[0] == 0:
            assert outcome.repeated[0] == 1
            assert outcome.finish[0] < 20 * SENDING + 4 * (2 * LATENCY + SENDING)
            return
    pytest.fail("no seed loses one packet")


def test_a_lost_last_packet_is_noticed_by_the_timer():
    network = hosts(2)
    program = flows(network, [(0, 1)], PAYLOAD)
    losses = {int(program.paths.links[0]): LinkLosses(0.5)}
    timeout = WIDE.least_timeout
    for seed in range(40):
        outcome = both(network, program, transport=WIDE, losses=losses, seed=seed)
        tries = int(outcome.sent[0])
        # Each try waits twice as long as the one before.
        assert outcome.finish[0] == (2 ** (tries - 1) - 1) * timeout + 2 * (SENDING + LATENCY)
        assert outcome.timeouts[0] == outcome.losses == tries - 1


def test_classes_are_strict():
    network, packets = hosts(4), 30
    program = flows(
        network,
        [(0, 3), (1, 3), (2, 3)],
        packets * PAYLOAD,
        priority=np.array([1, 0, 0], np.int32),
    )
    outcome = both(network, program, transport=WIDE)
    first = SENDING + LATENCY
    assert outcome.finish[1:].max() <= first + (2 * packets + 1) * SENDING + LATENCY
    assert outcome.finish[0] == first + 3 * packets * SENDING + LATENCY


def test_turns_share_by_quantum():
    network, packets = hosts(3), 400
    program = flows(network, [(0, 2), (1, 2)], packets * PAYLOAD, priority=np.array([1, 2], np.int32))
    quantum = (WIRE, 3 * WIRE, WIRE, *[WIRE] * 5)
    outcome = both(network, program, transport=WIDE, switches=Queues(strict=1, quantum=quantum))
    # While both wait the first has three packets of four.
    first = SENDING + LATENCY
    assert outcome.finish[0] == pytest.approx(first + packets * 4 / 3 * SENDING + LATENCY, rel=0.01)
    assert outcome.finish[1] == first + 2 * packets * SENDING + LATENCY


def test_what_has_sent_much_goes_down():
    network, long, short = hosts(3), 100, 4
    program = flows(
        network, [(0, 2), (1, 2)], np.array([long, short]) * PAYLOAD, release=np.array([0.0, 50.0 * SENDING])
    )
    some = {"payload": PAYLOAD, "header": HEADER, "reply": REPLY, "first_window": 1000, "most": 1000}
    outcome = both(network, program, transport=Pias(**some, demotions=(10 * PAYLOAD, 60 * PAYLOAD)))
    # By then the long one has gone down, and the short one passes it.
    assert outcome.finish[1] <= 50 * SENDING + 2 * LATENCY + (short + 2) * SENDING
    counts = outcome.counts[int(program.paths.of(0)[0]), :, c.PACKETS_OUT]
    assert counts[:3].tolist() == [10, 50, 40]


def test_spare_room_is_for_what_can_be_marked():
    network = hosts(3)
    program = flows(network, [(0, 2), (1, 2)], 30 * PAYLOAD)
    assert both(network, program, transport=MARKED, switches=Queues(spare=0)).drops == 0
    assert both(network, program, transport=WIDE, switches=Queues(spare=0)).drops > 0


def test_a_step_begins_when_what_it_waits_for_has_come():
    network = hosts(3)
    program = flows(network, [(0, 1), (1, 2), (0, 2)], 4 * PAYLOAD)
    alone = SENDING * 5 + 2 * LATENCY
    outcome = both(network, waiting(program, [(1, 0, 2**30), (2, 1, 2**30)]), transport=WIDE)
    assert outcome.finish[0] == alone
    assert outcome.begun[1] == alone
    # Flow 2 leaves another host than flow 1 reaches: the news takes a window.
    window = 1 << (LATENCY.bit_length() - 1)
    assert outcome.begun[2] == outcome.finish[1] + window


def test_a_ring_in_lock_step():
    count, size = 8, 8 * 16 * PAYLOAD
    network = hosts(count)
    plan = build("ring", "all_reduce", count)
    program = place(plan, size, Ecmp(network))
    outcome = both(network, program, transport=WIDE)
    ideal = 2 * (count - 1) * (17 * SENDING + 2 * LATENCY)
    # Acknowledgements of what comes go the way of what is sent.
    assert (outcome.finish >= ideal).all()
    assert (outcome.finish <= ideal * (1 + REPLY / WIRE)).all()


def test_overheads_are_the_softwares():
    network = hosts(2)
    program = flows(network, [(0, 1)], PAYLOAD, latency=np.array([2 * LATENCY + 7000.0]))
    assert both(network, program, transport=WIDE).begun[0] == 7000


def test_who_waits_for_whom_is_said():
    network = hosts(3)
    program = waiting(flows(network, [(0, 1), (1, 2)], PAYLOAD), [(0, 1, 2**30), (1, 0, 2**30)])
    for kernel in ("windows", "events"):
        with pytest.raises(StallError, match="2 of 2 flows never end"):
            Packets(network, kernel=kernel).run(program)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda network: Packets(network, seed=-1), "seed"),
        (lambda network: Packets(network, losses={10**6: LinkLosses(0.1)}), "is no link"),
        (lambda network: LinkLosses(1.5), "is no probability"),
        (lambda network: Queues(limit=(1, 2)), "is not one per class"),
        (lambda network: Queues(mark_from=2, mark_to=1), "is above mark_to"),
        (lambda network: NewReno(payload=70_000), "makes packets too large"),
        (lambda network: NewReno(first_window=2000), "is more than ever may go"),
        (lambda network: Dctcp(g=0), "is no weight"),
        (lambda network: Pias(demotions=(5, 5)), "do not ascend"),
        (
            lambda network: Packets(network).run(flows(network, [(0, 1)], 1, priority=np.array([8], np.int32))),
            "is no class",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make(hosts(2))
