"""What can be computed by hand: pipelines of hops, queues that fill, marks, drops, turns, rings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network.fluid import run as fluid
from foretrain.network.packet import Distribution, LinkLosses, Packets, Queues
from foretrain.network.packet import state as c
from foretrain.network.packet.memory_layout import Extents, Parts
from foretrain.network.packet.transports.transport import Dctcp, NewReno, Pias
from tests.network.fluid.oracle import waiting
from tests.network.packet.flows import (
    BYTE,
    HEADER,
    LATENCY,
    PAYLOAD,
    REPLY,
    SENDING,
    SIZES,
    WIRE,
    both,
    fabric,
    flows,
    hosts,
)

WIDE = NewReno(**SIZES, first_window=1000, most=1000)
"""A window in which all that is sent here fits."""
MARKING = Dctcp(**SIZES, first_window=10, most=1000)
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


@pytest.mark.parametrize("senders", [8, 32])
def test_an_incast_keeps_its_last_link_busy_as_the_fluid_says(senders):
    network = hosts(senders + 1)
    program = flows(network, [(k, senders) for k in range(senders)], 1000 * PAYLOAD)
    with_headers = replace(program, size=program.size * WIRE / PAYLOAD, latency=np.full(senders, 2.0 * LATENCY))
    expected = fluid(with_headers, network.capacity).finish
    wide = both(network, program, transport=WIDE)
    assert wide.finish.max() == SENDING + LATENCY + senders * 1000 * SENDING + LATENCY
    # All come at the same rate, and take turns: the port serves equal instants by their links.
    assert np.ptp(wide.finish) == (senders - 1) * SENDING
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
    # Room that is spared is for what can be marked.
    assert both(network, program, transport=MARKED, switches=Queues(spare=0)).drops == 0
    assert both(network, program, transport=WIDE, switches=Queues(spare=0)).drops > 0
    assert outcome.sent.sum() == outcome.arrived + outcome.drops
    assert outcome.repeated.sum() >= outcome.drops


def test_a_lost_packet_is_noticed_by_three_duplicates():
    network = hosts(2)
    program = flows(network, [(0, 1)], 20 * PAYLOAD)
    # The wire loses what comes in a burst of one, at a packet that the seed chooses.
    losses = {int(program.paths.links[0]): LinkLosses(0.03)}
    for seed in range(40):
        outcome = both(network, program, transport=WIDE, losses=losses, seed=seed)
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
    priority = np.array([1, 0, 0], np.int32)
    program = flows(network, [(0, 3), (1, 3), (2, 3)], packets * PAYLOAD, priority=priority)
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
    some = {**SIZES, "first_window": 1000, "most": 1000}
    outcome = both(network, program, transport=Pias(**some, demotions=(10 * PAYLOAD, 60 * PAYLOAD)))
    # By then the long one has gone down, and the short one passes it.
    assert outcome.finish[1] <= 50 * SENDING + 2 * LATENCY + (short + 2) * SENDING
    counts = outcome.counts[int(program.paths.of(0)[0]), :, c.PACKETS_OUT]
    assert counts[:3].tolist() == [10, 50, 40]


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


def test_overheads_are_the_softwares():
    network = hosts(2)
    program = flows(network, [(0, 1)], PAYLOAD, latency=np.array([2 * LATENCY + 7000.0]))
    assert both(network, program, transport=WIDE).begun[0] == 7000


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=2000))
def test_quantiles_are_the_smallest_that_cover_them(times):
    found = Distribution.of(np.array(times))
    for name, share in (("median", 0.5), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)):
        value = getattr(found, name)
        assert value in times
        assert sum(time <= value for time in times) >= share * len(times) - 1e-9
        assert sum(time < value for time in times) < share * len(times) + 1e-9
    assert found.largest == max(times)


def test_nothing_has_a_distribution_too():
    assert Distribution.of(np.zeros(0, np.int64)) == Distribution(0.0, 0, 0, 0, 0, 0)


def test_counts_of_ports_by_name():
    network = hosts(3)
    program = flows(network, [(0, 2), (1, 2)], 8 * PAYLOAD, priority=np.array([0, 3], np.int32))
    last = int(np.flatnonzero(network.target == network.ranks[2])[0])
    transport = NewReno(**SIZES, first_window=8)
    switches = Queues(limit=(100 * WIRE,) * 3 + (3 * WIRE,) * 5)
    outcome = Packets(network, transport=transport, switches=switches).run(program)
    ports = outcome.ports
    # Of class 0 nothing is dropped; of class 3 what finds three packets of it.
    assert ports.drops[last].tolist()[:3] == [0, 0, 0]
    assert ports.drops[last, 3] == outcome.drops > 0
    assert ports.dropped_bytes[last, 3] == WIRE * outcome.drops
    assert ports.deepest[last, 3] == 3 * WIRE
    assert ports.packets[last, 0] == 8
    assert ports.bytes[last, 0] == 8 * WIRE
    assert ports.packets.sum() == outcome.hops
    assert ports.losses.sum() == ports.cuts.sum() == ports.marks.sum() == 0


def test_completion_is_from_the_first_packet_to_the_last_byte():
    network = hosts(2)
    program = flows(network, [(0, 1)] * 2, 4 * PAYLOAD, release=np.array([0.0, 1e9]))
    outcome = Packets(network, transport=NewReno(**SIZES)).run(program)
    alone = 5 * SENDING + 2 * 500_000
    assert outcome.completion.tolist() == [alone, alone]
    assert outcome.completions.p99 == outcome.completions.largest == alone


def test_bursts_have_the_share_and_the_length_that_were_asked_for():
    network = hosts(2)
    program = flows(network, [(0, 1)], 40_000 * PAYLOAD)
    losses = {0: LinkLosses.bursts(0.02, 5)}
    outcome = Packets(network, transport=NewReno(**SIZES, reordering=3), losses=losses, seed=4).run(program)
    assert outcome.losses / outcome.ports.packets[0].sum() == pytest.approx(0.02, rel=0.3)
    with pytest.raises(Exception, match="in bursts of"):
        LinkLosses.bursts(0.9, 2)


def test_parts_begin_where_lines_do():
    parts = Parts(80)
    first, second = parts.add(np.arange(3)), parts.add(np.ones((2, 8), np.int64))
    assert (first, second, parts.end) == (80, 88, 104)
    np.testing.assert_array_equal(parts.whole(), [0, 1, 2, 0, 0, 0, 0, 0, *[1] * 16])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_what_is_given_is_taken_again(sizes, random):
    free, held = Extents(), {}
    free.give(100, sum(sizes))
    for size in sizes:
        held[free.take(size)] = size
    assert free.take(1) is None
    taken = sorted((first, size) for first, size in held.items())
    assert taken[0][0] == 100
    assert all(first + size == then for (first, size), (then, _) in pairwise(taken))
    random.shuffle(taken)
    for first, size in taken:
        free.give(first, size)
    assert free.take(sum(sizes)) == 100
