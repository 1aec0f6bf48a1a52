"""What is counted has names, and adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network.packet import Distribution, LinkLosses, Packets, Queues
from foretrain.network.packet.transports.transport import NewReno
from tests.network.packet.flows import HEADER, PAYLOAD, REPLY, SENDING, WIRE, flows, hosts

SIMPLE = {"payload": PAYLOAD, "header": HEADER, "reply": REPLY}


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
    transport = NewReno(**SIMPLE, first_window=8)
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
    outcome = Packets(network, transport=NewReno(**SIMPLE)).run(program)
    alone = 5 * SENDING + 2 * 500_000
    assert outcome.completion.tolist() == [alone, alone]
    assert outcome.completions.p99 == outcome.completions.largest == alone


def test_bursts_have_the_share_and_the_length_that_were_asked_for():
    network = hosts(2)
    program = flows(network, [(0, 1)], 40_000 * PAYLOAD)
    losses = {0: LinkLosses.bursts(0.02, 5)}
    outcome = Packets(network, transport=NewReno(**SIMPLE, reordering=3), losses=losses, seed=4).run(program)
    assert outcome.losses / outcome.ports.packets[0].sum() == pytest.approx(0.02, rel=0.3)
    with pytest.raises(Exception, match="in bursts of"):
        LinkLosses.bursts(0.9, 2)
