"""Programs that come while time passes: to the ps as if all had been known, and in no more memory than they need."""

from dataclasses import replace

import numpy as np
import pytest

from foretrain.errors import ConfigError, StallError
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet import loading as module
from foretrain.network.packet.notation import TRANSPORTS
from foretrain.network.packet.port_config import usual
from foretrain.network.packet.transports.transport import Dctcp, NewReno
from foretrain.network.program import Paths, Program, joined
from tests.network.fluid.oracle import waiting
from tests.network.packet.flows import LATENCY, PAYLOAD, SENDING, SIZES, WIRE, fabric, flows, hosts

KERNELS = ("windows", "events")
TRANSPORT = Dctcp(**SIZES, first_window=4, most=200)
SWITCHES = Queues(limit=30 * WIRE, mark_from=8 * WIRE, mark_to=8 * WIRE)


def network(topology, kernel="auto", **options):
    settings = {"transport": TRANSPORT, "switches": SWITCHES, "kernel": kernel} | options
    return Packets(topology, **settings)


def crowd(topology, seed, count=12):
    """Programs of a few flows with steps and dependencies, and when they come."""
    rng = np.random.default_rng(seed)
    made, ranks, when = [], len(topology.ranks), 0
    for _ in range(count):
        flow_count = int(rng.integers(1, 5))
        pairs = [tuple(rng.choice(ranks, 2, replace=False)) for _ in range(flow_count)]
        steps = rng.integers(1, 4, flow_count).astype(np.int32)
        program = flows(topology, pairs, rng.integers(1, 60, flow_count) * 700.0, steps=steps, seed=seed)
        if flow_count > 2:
            program = waiting(program, [(1, 0, 0), (2, 1, 2**30)])
        made.append((program, when))
        when += int(rng.integers(0, 40)) * 777_777
    return made


def known(topology, programs, kernel, **options):
    """When each program's flows end if all is known from the beginning."""
    released = [replace(one, release=np.maximum(one.release, when)) for one, when in programs]
    finish = network(topology, kernel, **options).run(joined(released)).finish
    return np.split(finish, np.cumsum([len(one) for one, _ in programs])[:-1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_comes_later_ends_as_if_it_had_been_known(kernel, name, monkeypatch):
    monkeypatch.setattr(module, "_DEAD", 1 << 10)
    topology = fabric(2, 3, 2)
    transport = TRANSPORTS[name](**SIZES, **({"important": 0.5} if name == "bounded" else {}))
    switches = usual(topology, transport)
    if name in ("dcqcn", "timely"):
        switches = Queues(xoff=6 * WIRE, xon=3 * WIRE, mark_from=WIRE, mark_to=4 * WIRE)
    lossy = {"transport": transport, "switches": switches, "losses": {1: LinkLosses(0.01)}}
    for options, seed, count in ((lossy, 5, 40), ({}, 0, 12)):
        programs, handles = crowd(topology, seed, count), []
        online = network(topology, kernel, **options).online()
        for k, (program, when) in enumerate(programs):
            handles.append(online.add(program, when))
            if k % 3 == 0:
                online.predict(handles[-1])
            if k % 4 == 1:
                online.next_completion()
        online.advance()
        for handle, finish in zip(handles, known(topology, programs, kernel, **options), strict=True):
            np.testing.assert_array_equal(handle.finish, finish)
            assert handle.end == finish.max()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_completion_is_told_at_its_time_and_what_follows_begins_then(kernel):
    topology = hosts(4)
    online = network(topology, kernel, transport=replace(TRANSPORT, first_window=100)).online()
    online.add(flows(topology, [(0, 1)], 20 * PAYLOAD))
    alone = 21 * SENDING + 2 * LATENCY
    assert online.next_completion() == alone
    assert online.advance(alone - 1) == ()
    assert len(online.advance(alone)) == 1
    assert online.now == alone
    second = online.add(flows(topology, [(2, 3)], 20 * PAYLOAD))
    assert online.predict(second) == 2 * alone
    assert online.advance(stop=True) == (second,)
    assert online.now == 2 * alone
    assert online.advance(10 * alone) == ()
    third = online.add(flows(topology, [(2, 3)], 20 * PAYLOAD))
    online.advance()
    assert third.end == 11 * alone


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_what_is_over_are_used_again(kernel, monkeypatch):
    topology = hosts(6)
    programs = crowd(topology, 7, count=400)
    memory = []
    for dead in (1 << 40, 1 << 10):
        monkeypatch.setattr(module, "_DEAD", dead)
        online = network(topology, kernel).online()
        empty = online.memory
        handles = [online.add(program, when) for program, when in programs]
        online.advance()
        memory.append(online.memory - empty)
    assert memory[1] < 0.5 * memory[0]
    for handle, finish in zip(handles, known(topology, programs, kernel), strict=True):
        np.testing.assert_array_equal(handle.finish, finish)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_is_cancelled_leaves_its_links(kernel, name):
    topology, transport = hosts(3), TRANSPORTS[name](**SIZES, first_window=40, most=1000)
    online = network(topology, kernel, transport=transport, switches=usual(topology, transport)).online()
    long = online.add(flows(topology, [(0, 2)], 10_000 * PAYLOAD))
    other = online.add(flows(topology, [(1, 2)], 400 * PAYLOAD))
    both = online.predict(other)
    online.cancel(long)
    # With pFabric the shorter one had the link to itself all the time.
    assert online.predict(other) < (1.1 if name == "pfabric" else 0.7) * both
    assert online.advance() == (other,)
    with pytest.raises(ConfigError, match="was cancelled"):
        online.predict(long)


def test_nothing_is_a_program_and_a_flow_may_cross_nothing():
    topology = hosts(2)
    online = network(topology).online()
    empty = online.add(Program.of(Paths(np.zeros(1, np.int32), np.zeros(0, np.int32)), np.zeros(0)))
    assert empty.end == 0
    nowhere = Paths(np.zeros(2, np.int32), np.zeros(0, np.int32))
    local = Program.of(nowhere, np.array([5.0]), latency=np.array([9000.0]))
    handle = online.add(local, 1000)
    online.advance()
    assert handle.end == 10_000


def test_what_makes_no_sense_is_refused():
    topology = hosts(3)
    online = network(topology).online()
    program = flows(topology, [(0, 1), (1, 2)], PAYLOAD)
    online.add(program, 1_000_000)
    with pytest.raises(ConfigError, match="is past"):
        online.advance(5)
    stuck = online.add(waiting(program, [(0, 1, 2**30), (1, 0, 2**30)]))
    with pytest.raises(StallError, match="2 of 4 flows never end"):
        online.predict(stuck)
    with pytest.raises(StallError):
        online.advance()


def test_new_connections_begin_anew():
    topology = hosts(2)
    online = network(topology, transport=NewReno(**SIZES, first_window=1), switches=Queues()).online()
    program = flows(topology, [(0, 1)], 3 * PAYLOAD)
    first = online.add(program)
    online.advance()
    second = online.add(program, 50 * LATENCY)
    online.advance()
    assert first.end is not None
    assert second.end == 50 * LATENCY + first.end
