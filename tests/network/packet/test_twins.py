"""Windows find what events find, to the ps, whatever is sent over what; nothing appears or vanishes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet import state as c
from foretrain.network.packet.kernels import Slices
from foretrain.network.packet.loading import grow, prepared
from foretrain.network.packet.transports.transport import Bounded, Dcqcn, Dctcp, Ndp, NewReno, Pfabric, Pias, Timely
from foretrain.network.routing import Ecmp
from tests.network.fluid.oracle import waiting
from tests.network.packet.flows import PAYLOAD, REPLY, SIZES, WIRE, both, fabric, flows, hosts
from tests.network.ways import interpreted

KINDS = (NewReno, Dctcp, Pias, Pfabric, Ndp, Dcqcn, Timely, Bounded)


def random_transport(rng):
    some = {**SIZES, "first_window": int(rng.choice([1, 3, 20]))}
    some["adaptive"] = bool(rng.integers(2))
    kind = KINDS[int(rng.integers(len(KINDS)))]
    if kind is Pias:
        some["demotions"] = (2 * PAYLOAD, 9 * PAYLOAD)
    elif kind is Pfabric:
        some["most"] = 20
    elif kind is Bounded:
        law, tolerance, important = (rng.choice(each) for each in (["aimd", "timely", "fixed"], [0, 0.1], [0, 0.5, 1]))
        some |= {"law": str(law), "tolerance": float(tolerance), "important": float(important)}
    return kind(**some)


def random_queues(rng, transport):
    low = int(rng.integers(0, 8)) * WIRE
    some = {
        "limit": int(rng.choice([4, 12, 1000])) * WIRE,
        "room": int(rng.choice([10, 1000])) * WIRE,
        "mark_from": low,
        "mark_to": low + int(rng.choice([0, 10])) * WIRE,
        "mark_chance": float(rng.choice([0.3, 1.0])),
        "spare": int(rng.choice([2, 1000])) * WIRE,
        "strict": int(rng.choice([0, 2, 8])),
        "quantum": int(rng.choice([500, WIRE])),
        "cut_to": int(rng.choice([0, 0, REPLY])),
    }
    if isinstance(transport, Pfabric) and rng.random() < 0.8:
        some["nearest"] = True
    elif rng.random() < 0.5:
        xoff = int(rng.integers(1, 6)) * WIRE
        some |= {"xoff": xoff, "xon": int(rng.integers(0, xoff + 1)), "limit": 10**6, "room": 10**7}
        if rng.random() < 0.5:
            some |= {"shared": int(rng.integers(20, 60)) * WIRE, "share": float(rng.choice([0.5, 2.0]))}
    return Queues(**some)


def random_case(seed: int):
    """Everything at once: DAGs with steps on a leaf-spine or a star, small queues, marks, losses, turns, classes."""
    rng = np.random.default_rng(seed)
    network = fabric(3, 3, int(rng.integers(1, 4))) if rng.random() < 0.7 else hosts(6)
    ranks, count = len(network.ranks), int(rng.integers(1, 25))
    pairs = [tuple(rng.choice(ranks, 2, replace=False)) for _ in range(count)]
    base = flows(
        network,
        pairs,
        rng.integers(1, 60, count) * rng.choice([1.0, 500.0, 1000.0], count),
        seed=int(rng.integers(1000)),
        steps=rng.integers(1, 4, count).astype(np.int32),
        release=rng.choice([0.0, 0.0, 1e6, 7.3e6], count),
        priority=rng.integers(0, 4, count).astype(np.int32),
    )
    gates = []
    for flow in range(1, count):
        others = {int(x) for x in rng.integers(0, flow, rng.integers(0, 2))}
        gates += [(flow, other, int(rng.choice([0, 1, 2**30]))) for other in others]
    transport = random_transport(rng)
    queues = random_queues(rng, transport)
    losses = {}
    if rng.random() < 0.5:
        bursts = LinkLosses(0, begins=0.01, ends=0.3, in_burst=0.7)
        for link in rng.integers(0, network.links, 4):
            losses[int(link)] = LinkLosses(0.02) if rng.random() < 0.5 else bursts
    ways = Ecmp(network, seed=5)
    sources, targets = (network.ranks[np.array(side, np.int64)] for side in zip(*pairs, strict=True))
    others = [ways.paths(sources, targets, np.full(count, k, np.int32)) for k in range(int(rng.integers(0, 3)))]
    options = {"transport": transport, "switches": queues, "losses": losses, "seed": seed}
    return network, waiting(base, gates) if gates else base, others, options


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_windows_find_what_events_find_and_what_is_sent_arrives_or_is_lost(seed: int) -> None:
    network, program, others, options = random_case(seed)
    outcome = both(network, program, others, **options)
    assert (outcome.finish >= 0).all()
    assert outcome.under_way == 0
    counts = outcome.counts.sum(axis=1)
    gone = outcome.drops + outcome.losses
    assert counts[:, c.DROPPED].sum() + counts[:, c.LOST].sum() == gone
    into_hosts = np.isin(network.target, network.ranks)
    assert counts[into_hosts, c.PACKETS_OUT].sum() - counts[into_hosts, c.LOST].sum() == outcome.made - gone
    assert outcome.made >= outcome.sent.sum() + outcome.arrived - outcome.cuts
    assert counts[:, c.CUT_DOWN].sum() == outcome.cuts
    first = {int(program.paths.of(f)[0]) for f in range(len(program))}
    assert first <= set(np.flatnonzero(counts[:, c.PACKETS_OUT] + counts[:, c.DROPPED]))


def outcomes(kernel: str) -> str:
    """What a kernel finds in three cases."""
    found = []
    for seed in (3, 11, 27):
        network, program, others, options = random_case(seed)
        outcome = Packets(network, kernel=kernel, **options).run(program, others=others)
        found += [outcome.finish.tolist(), outcome.hops, outcome.drops, outcome.losses, int(outcome.counts.sum())]
    return str(found)


@pytest.mark.parametrize("kernel", ["windows", "events"])
def test_interpreted_kernels_find_the_same(kernel: str) -> None:
    code = f"from tests.network.packet.test_twins import outcomes; print(outcomes({kernel!r}))"
    assert interpreted(code) == outcomes(kernel)


def test_the_pool_grows_in_mid_window() -> None:
    network = hosts(3)
    program = flows(network, [(0, 2), (1, 2)], 6000 * PAYLOAD)
    transport = NewReno(**SIZES, first_window=6000, most=6000)
    outcome = both(network, program, transport=transport)
    assert (outcome.sent == 6000).all()


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
    kernel, looks, why = Slices(windows=True), 0, c.BREATH
    into_hosts = np.isin(network.target, network.ranks)
    kernel.load(ready.state)
    while why != c.DONE_ALL and looks < 80:
        why = kernel.step(ready.state, 23)
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
    outcome = Packets(network, transport=Dcqcn(**SIZES), switches=switches, seed=seed).run(program)
    assert outcome.repeated.sum() == outcome.drops == 0
    assert all(came.all() for came in outcome.came)
