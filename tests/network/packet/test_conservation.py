"""At any time what was sent has come, was lost, or is under way; a class keeps the order of a flow's packets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.network.packet import Packets, Queues
from foretrain.network.packet import state as c
from foretrain.network.packet.kernels import Windows
from foretrain.network.packet.loading import grow, prepared
from foretrain.network.packet.transports.transport import Dcqcn
from tests.network.packet.flows import HEADER, PAYLOAD, REPLY, WIRE, fabric, flows
from tests.network.packet.test_twins import random_case


def under_way(state) -> tuple[int, int]:
    """Packets that cross the network: those with hops to go, and those on their last wire."""
    memory = state.memory
    address = np.concatenate([first + c.PACKET_COLUMNS * np.arange(packets) for first, packets in state.pools])
    free, p = set(), int(memory[c.FREE])
    while p >= 0:
        free.add(p)
        p = int(memory[p + c.NEXT])
    live = np.array([p for p in address.tolist() if p not in free], np.int64)
    crossing = live[(memory[live + c.WORD] >> c.KIND_SHIFT & c.KIND_MASK) <= c.LAST_CROSSING]
    last = memory[memory[crossing + c.WAY] & 0xFFFFFFFF] < 0
    return int((~last).sum()), int(last.sum())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_what_was_sent_is_somewhere_at_any_time(seed: int) -> None:
    network, program, others, options = random_case(seed)
    queues = (Queues(), options["switches"])
    ready = prepared(network, program, others, options["transport"], queues, options["losses"], seed)
    kernel, looks, why = Windows(), 0, c.BREATH
    into_hosts = np.isin(network.target, network.ranks)
    kernel.load(ready.state)
    while why != c.DONE_ALL and looks < 200:
        why = kernel.run(ready.state, 7)
        if why == c.GROW:
            grow(ready.state)
            continue
        looks += 1
        counts = ready.port[:, c.TALLY :].reshape(network.links, c.CLASSES, c.COUNT_COLUMNS)
        sent_on = counts[into_hosts][:, :, c.PACKETS_OUT].sum() - counts[into_hosts][:, :, c.LOST].sum()
        going, landing = under_way(ready.state)
        memory = ready.state.memory
        assert memory[c.STAMPS] == sent_on + going + memory[c.DROPS] + memory[c.LOSSES]
        assert landing <= sent_on
        held = ready.port[:, c.TOTAL]
        assert (held >= 0).all()
        assert (held == ready.port[:, c.BYTES : c.BYTES + 3 * c.CLASSES : 3].sum(axis=1)).all()
    assert looks > 1


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_a_class_keeps_the_order_of_a_flow(seed: int) -> None:
    """RoCE's receivers refuse what overtook: where nothing is lost, nothing goes again."""
    rng = np.random.default_rng(seed)
    network, count = fabric(3, 3, 2), int(rng.integers(2, 20))
    pairs = [tuple(rng.choice(9, 2, replace=False)) for _ in range(count)]
    size, priority = rng.integers(1, 80, count) * 500.0, rng.integers(0, 8, count).astype(np.int32)
    program = flows(network, pairs, size, priority=priority)
    strict, quantum, xoff = int(rng.integers(0, 9)), int(rng.choice([300, 3000])), int(rng.choice([6, 10**6])) * WIRE
    switches = Queues(strict=strict, quantum=quantum, xoff=xoff, mark_from=5 * WIRE)
    outcome = Packets(network, transport=Dcqcn(PAYLOAD, HEADER, REPLY), switches=switches, seed=seed).run(program)
    assert outcome.repeated.sum() == outcome.drops == 0
    assert all(came.all() for came in outcome.came)
