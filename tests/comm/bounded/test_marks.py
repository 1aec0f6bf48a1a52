"""Types of service of real packets, and what marks and delays of the network do to a sender."""

import ctypes
import dataclasses
import threading
import time

import numpy as np
import pytest

from foretrain.comm.bounded import CLASSES, Hint, congestion, service_of
from foretrain.comm.bounded.engine import SETTINGS
from foretrain.network.packet import state
from foretrain.units import MILLISECOND
from tests.comm.bounded.group import group, has_ipv6
from tests.comm.bounded.relay import Network, perfect
from tests.comm.collectives.test_ring import inputs, nothing_is_left_behind, run
from tests.waiting import until

__all__ = ["nothing_is_left_behind"]

PAYLOAD = 8192
"""Bytes of a packet's data on loopback."""
DATA, ACK = 0, 1
CAPABLE, MARKED = 2, 3
"""Of a type of service: packets may be marked rather than dropped; they were."""


def window(engine, peer):
    """Packets that may be under way."""
    return engine.flows[peer].view(np.float64)[state.WINDOW]


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=has_ipv6)])
def test_packets_say_how_urgent_they_are_and_whether_they_may_be_dropped(host):
    """The class is the policy's. A droppable packet is not capable of marks, by which switches would spare it."""
    seen, lock = set(), threading.Lock()

    def note(packet, service):
        with lock:  # message, stage, whether it is important
            seen.add((packet[14] == DATA, packet[20] if packet[14] == DATA else 0, packet[15] & 1, service))
        return service

    values = np.ones(2 * 10 * PAYLOAD // 4, np.float32)
    back = np.array([[first * PAYLOAD, (first + 5) * PAYLOAD] for first in (5, 15)])
    with (
        Network(perfect, note) as network,
        group(2, host=host, tolerance=0.3, droppable="layer", network=network) as members,
    ):
        for urgent in range(CLASSES):
            with lock:
                seen.clear()
            hint = Hint(urgency=urgent / CLASSES, important=back)
            run(members, "all_reduce", [values.copy(), values.copy()], hint=hint)
            protected = service_of(urgent // 2, 1) | CAPABLE
            with lock:
                assert {each for each in seen if each[0]} == {
                    (True, 0, 0, service_of(urgent // 2, 3)),  # front layers
                    (True, 0, 1, protected),  # back layers
                    (True, 1, 1, protected),  # the sum
                }
                assert {each for each in seen if not each[0]} == {(False, 0, 1, service_of(0, 1) | CAPABLE)}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=has_ipv6)])
def test_marks_are_acknowledged_and_shrink_the_window_until_they_end(host):
    """All that goes from rank 0 to rank 1 meets congestion."""
    acknowledged = []

    def mark(packet, service):
        if packet[14] == ACK and packet[12] == 1:
            acknowledged.append(np.frombuffer(packet[40:48], np.uint32).tolist())
        from_0 = packet[14] == DATA and packet[12] == 0
        return service | MARKED if from_0 and service & MARKED == CAPABLE else service

    with Network(perfect, mark) as network, group(2, host=host, network=network) as members:
        engines = [each.engine for each in members]
        run(members, "all_reduce", inputs("float32", 2, 200 * PAYLOAD // 4)[0])
        assert window(engines[0], 1) == 1.0
        came, marked = acknowledged[-1]
        assert came == marked > 60
        assert engines[1].counted()["marked"] == engines[1].counted()["received"] >= marked
        assert engines[0].counted()["marked"] == 0
        network.marks = lambda _, service: service

        def grows():
            run(members, "all_reduce", inputs("float32", 2, 100 * PAYLOAD // 4)[0])
            return window(engines[0], 1) >= 8

        until(grows)


def test_what_may_be_dropped_is_never_marked():
    """What goes again, as where a host was held up, must arrive, and may be marked."""
    droppable = set()

    def mark(packet, service):
        if packet[14] == DATA and not packet[15] & 1:
            droppable.add(service & MARKED)
        return service | MARKED if service & MARKED == CAPABLE else service

    with Network(perfect, mark) as network, group(2, tolerance=0.3, network=network) as members:
        values = [np.ones(2 * 40 * PAYLOAD // 4, np.float32) for _ in members]
        for one, work in [(one, one.reduce_scatter(each)) for one, each in zip(members, values, strict=True)]:
            assert work.wait(300)
            assert one.engine.counted()["received"] >= 20
        again = sum(one.engine.counted()["sent_again"] for one in members)
        assert sum(one.engine.counted()["marked"] for one in members) <= again
    assert droppable == {0}


def test_a_queue_shrinks_the_window_though_nothing_is_marked():
    """Each packet takes half a millisecond at one port: what waits there is no more than the first window, or twice."""

    def slowly(packet, _):
        if packet[14] == DATA and packet[12] == 0:
            time.sleep(0.0005)
        return [packet]

    with Network(slowly) as network, group(2, network=network, transport=SETTINGS) as members:
        engine, largest = members[0].engine, 0.0
        for _ in range(4):
            run(members, "all_reduce", inputs("float32", 2, 400 * PAYLOAD // 4)[0])
            largest = max(largest, window(engine, 1))
        assert 1.0 <= window(engine, 1) <= largest <= 4 * SETTINGS.first_window
        assert members[1].engine.counted()["marked"] == 0


def test_a_long_path_is_no_loss():
    """Its round trip of 60 ms is longer than any wait for a probe."""
    with Network(perfect, delay=0.03) as network, group(2, network=network, transport=SETTINGS) as members:

        def opens():
            run(members, "all_reduce", inputs("float32", 2, 200 * PAYLOAD // 4)[0])
            return window(members[0].engine, 1) >= 10

        until(opens)


@pytest.mark.parametrize("trip", [MILLISECOND // 10, 10 * MILLISECOND, 300 * MILLISECOND])
def test_silence_is_no_loss_before_three_round_trips(trip):
    """The first one's variation is half of it (RFC 6298); before there is one, a path may be long."""
    memory = congestion.flow(SETTINGS, 1e9)
    rows = [memory.ctypes.data_as(ctypes.POINTER(kind)) for kind in (ctypes.c_int64, ctypes.c_double)]
    assert congestion._silence.ctypes(*rows) == 200 * MILLISECOND
    congestion._sent.ctypes(*rows, 1)
    congestion._heard.ctypes(*rows, 0, 1, 0, trip)
    assert congestion._silence.ctypes(*rows) >= max(3 * trip, SETTINGS.least_timeout)


def test_a_rate_paces_packets():
    """Between the first and the last there is the time that those before the last call take, by the sender's clock."""
    stamps, rate = {}, 20e6

    def note(packet, _):
        if packet[14] == DATA and packet[12] == 0 and packet[20] == 0:  # of rank 0's contribution
            stamps[int.from_bytes(packet[24:28], "little")] = int.from_bytes(packet[32:36], "little")
        return [packet]

    transport = dataclasses.replace(SETTINGS, law="fixed")
    with Network(note) as network, group(2, network=network, transport=transport, peak=rate) as members:
        run(members, "all_reduce", inputs("float32", 2, 2 * 100 * PAYLOAD // 4)[0])
        together = members[0].engine.path.segments
    assert len(stamps) == 100
    took = max((stamp - min(stamps.values())) % 2**32 for stamp in stamps.values())
    assert took >= (100 - together) * PAYLOAD / rate * 1e6


def test_timelys_rate_falls_where_round_trips_grow():
    """Each packet takes half a millisecond at one port, and so more than is sent, which begins at the peak."""

    def slowly(packet, _):
        if packet[14] == DATA and packet[12] == 0:
            time.sleep(0.0005)
        return [packet]

    transport = dataclasses.replace(SETTINGS, law="timely")
    with Network(slowly) as network, group(2, network=network, transport=transport, peak=1e9) as members:
        memory = members[0].engine.flows[1].view(np.float64)

        def falls():
            run(members, "all_reduce", inputs("float32", 2, 2 * 200 * PAYLOAD // 4)[0])
            return memory[state.PACE_RATE] < memory[state.PEAK] / 4

        until(falls)
