"""Packets that nobody has sent, or that come once more: they move counters, and nothing else."""

import random
import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.bounded.collectives import BoundedCollectives
from foretrain.comm.bounded.engine import HEADER
from foretrain.comm.coordinator.link import LinkError
from foretrain.network.packet import state as c
from tests.comm.bounded.group import engines, group, in_threads
from tests.comm.bounded.relay import Network, losing, perfect
from tests.comm.collectives.test_ring import inputs, nothing_is_left_behind, run
from tests.waiting import until

__all__ = ["nothing_is_left_behind"]

DROPPED = ("malformed", "stranger", "forged", "replayed")
DATA, ACK, STOP, PROBE, MAP, PING, GONE, BYE = range(8)
_WAITING = 2000
"""Packets that wait for an engine at most: its socket has room for them."""


def dropped(engine):
    """Return how many packets the engine has dropped."""
    return sum(engine.counted()[name] for name in DROPPED)


def sent_by(rank, packets):
    """Return those of ``packets`` that ``rank`` has sent."""
    return [each for each in packets if int.from_bytes(each[12:14], "little") == rank]


def flood(engine, packets, count, seed):
    """Send ``engine`` ``count`` packets made of ``packets``, which it has; return how many of them are as they were.

    They are in any order; others are cut, damaged, forged, of another job, or noise. The kernel cuts batches into
    packets of one size, of which small ones are the most, or it would take long.
    """
    rng, before, sent, whole = np.random.default_rng(seed), dropped(engine), 0, 0
    by_size = {}
    for each in packets:
        by_size.setdefault(len(each), []).append(np.frombuffer(each, np.uint8))
    tables = {size: np.array(rows[-2000:]) for size, rows in by_size.items()}
    sizes = np.array(sorted(tables))
    weights = np.array([len(tables[size]) * (0.02 if size > 2000 else 1.0) for size in sizes])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
        foreign.connect(engine._socket.getsockname())
        while sent < count:
            size = int(rng.choice(sizes, p=weights / weights.sum()))
            many = min(count - sent, 64, 60_000 // size)
            rows = tables[size][rng.integers(len(tables[size]), size=many)]
            what = rng.integers(5, size=many)
            (flipped,), (forged,), (foreign_job,), (noise,) = (np.nonzero(what == kind) for kind in range(1, 5))
            places = rng.integers(size, size=len(flipped))
            rows[flipped, places] ^= (1 << rng.integers(8, size=len(flipped))).astype(np.uint8)
            rows[forged, :8] = rng.integers(256, size=(len(forged), 8))
            rows[forged, 14] = rng.integers(9, size=len(forged))  # any kind
            rows[foreign_job, 8:12] ^= rng.integers(1, 256, size=(len(foreign_job), 4), dtype=np.uint8)
            rows[noise] = rng.integers(256, size=(len(noise), size))
            if rng.random() < 0.1:
                size = int(rng.integers(1, size))
                rows, what = rows[:, :size], np.ones(many)
            segments = [(socket.IPPROTO_UDP, 103, struct.pack("=H", size))]  # UDP_SEGMENT
            foreign.sendmsg([np.ascontiguousarray(rows)], segments)
            sent += many
            whole += int(np.sum(what == 0))
            while dropped(engine) - before < sent - _WAITING:
                time.sleep(0.0005)
    return whole


def control(engine):
    """Return the state of congestion control towards the only other rank, but for how often it was asked."""
    found = engine.flows[1 - engine.rank].copy()
    found[c.TRIES] = 0
    return found


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.process)])  # for it takes long
def test_operations_go_on_while_packets_of_all_kinds_come_again(count):
    with Network(losing(0.05)) as network, engines(2, network=network, blocked=60.0, timeout=300.0) as made:
        going = network.record()
        members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
        attackers, rounds = [threading.Event(), threading.Event()], 20

        def operate():
            many = 0
            while not all(each.is_set() for each in attackers) or not many:
                arrays, total = inputs("float32", 2, (700, 3, 9000, 200)[many % 4], many)
                run(members, "all_reduce", arrays)
                for values in arrays:
                    np.testing.assert_array_equal(values, total)
                many += 1
            return many

        def attack(rank):
            try:
                until(lambda: {each[14] for each in list(going)} >= {DATA, ACK, STOP, PROBE, MAP})
                seeds, share = range(rank, rounds, 2), count // rounds
                return sum(flood(made[rank], sent_by(1 - rank, list(going)), share, seed) for seed in seeds)
            finally:
                attackers[rank].set()

        *whole, many = in_threads(3, lambda which: attack(which) if which < 2 else operate())
        assert many > 4
        for rank, (engine, unchanged) in enumerate(zip(made, whole, strict=True)):
            until(lambda: dropped(engine) >= count // 2)  # noqa: B023
            data = [each for each in sent_by(1 - rank, going) if each[14] == DATA]
            until(lambda: engine.counted()["received"] >= len(data))  # noqa: B023
            counted = engine.counted()
            assert dropped(engine) == count // 2
            assert counted["replayed"] == unchanged > count // 20
            assert counted["received"] == len(data)
            assert counted["over_tcp"] == counted["lost_bytes"] == 0
            acknowledged = [each[HEADER : HEADER + 4] for each in sent_by(rank, going) if each[14] == ACK]
            assert max(int.from_bytes(each, "little") for each in acknowledged) <= len(data)
        for each in members:
            each.close()


def test_an_operation_that_waits_is_moved_by_no_packet_of_before():
    with Network(losing(0.05)) as network, engines(2, network=network, blocked=60.0, timeout=300.0) as made:
        going = network.record()
        members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
        for seed in range(40):
            run(members, "all_reduce", inputs("float32", 2, 20_000, seed)[0])
        packets = sent_by(1, list(going))
        assert {each[14] for each in packets} >= {DATA, ACK, STOP, PROBE, MAP}
        network.fate = losing(1.0)
        arrays, total = inputs("float32", 2, 1000)
        sent = made[0].counted()["sent"]
        work = members[0].all_reduce(arrays[0])
        until(lambda: made[0].counted()["sent"] > sent)
        before, values, counted = control(made[0]), arrays[0].copy(), made[0].counted()
        unchanged = flood(made[0], packets, 50_000, 0)
        until(lambda: dropped(made[0]) - sum(counted[name] for name in DROPPED) >= 50_000)
        moved = {name: many - counted[name] for name, many in made[0].counted().items() if many != counted[name]}
        assert moved.keys() - {"probes"} == set(DROPPED)
        assert moved["replayed"] == unchanged
        np.testing.assert_array_equal(control(made[0]), before)
        np.testing.assert_array_equal(arrays[0], values)
        network.fate = perfect
        members[1].all_reduce(arrays[1]).wait(300)
        assert work.wait(300)
        np.testing.assert_array_equal(arrays[0], total)
        for each in members:
            each.close()


def test_a_rank_that_is_dead_is_named_though_its_packets_come_again():
    with Network(perfect) as network, engines(2, timeout=1.5, network=network, blocked=0.2) as made:
        going = network.record()
        members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
        run(members, "all_reduce", inputs("float32", 2, 1000)[0])
        made[1]._library.foretrain_bounded_close(made[1]._handle)
        work = members[0].all_reduce(np.ones(100, np.float32))
        packets, deadline = sent_by(1, list(going)), time.monotonic() + 100
        address = made[0]._socket.getsockname()

        def repeat():
            with socket.socket(type=socket.SOCK_DGRAM) as foreign:
                while time.monotonic() < deadline and not work.wait(0.01):
                    for each in packets:
                        foreign.sendto(each, address)

        with pytest.raises(LinkError, match="rank 1 was lost"):
            repeat()
        assert made[0].counted()["replayed"] > len(packets)
        for each in members:
            each.close()


def test_a_peer_over_tcp_is_not_taken_back_by_tries_of_before():
    with Network(losing(1.0)) as network, engines(2, network=network, blocked=0.2) as made:
        members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
        run(members, "all_reduce", inputs("float32", 2, 1000)[0])
        network.fate = perfect
        going = network.record()
        until(lambda: all(each.counted()["over_udp_again"] for each in made))
        tries = [each for each in sent_by(1, list(going)) if each[14] == PING and len(each) > HEADER]
        assert any(int.from_bytes(each[24:28], "little") for each in tries)  # it says that one of ours has come
        network.fate = losing(1.0)
        until(lambda: run(members, "all_reduce", inputs("float32", 2, 1000)[0]) or made[0].counted()["over_tcp"] == 2)
        before = made[0].counted()
        with socket.socket(type=socket.SOCK_DGRAM) as foreign:
            for _ in range(100):
                for each in tries:
                    foreign.sendto(each, made[0]._socket.getsockname())
        until(lambda: made[0].counted()["replayed"] == before["replayed"] + 100 * len(tries))
        arrays, total = inputs("float32", 2, 1000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[0], total)
        assert made[0].counted()["over_udp_again"] == before["over_udp_again"]
        for each in members:
            each.close()


def packet_of(engine, kind, source, data=b""):
    """Return a packet that lacks only a number and a tag."""
    header = bytearray(HEADER)
    header[8:12] = int(engine._settings[2]).to_bytes(4, "little")
    header[12:14] = source.to_bytes(2, "little")
    header[14] = kind
    header[22:24] = len(data).to_bytes(2, "little")
    return bytes(header) + data


def inject(engine, packets):
    """Return how many of ``packets`` the engine has dropped, by counter."""
    before = engine.counted()
    engine.inject(b"".join(packets), [len(each) for each in packets])
    return {name: many - before[name] for name, many in engine.counted().items() if many != before[name]}


def test_each_number_passes_once_in_any_order():
    with engines(2) as (receiver, sender):
        packet = packet_of(receiver, MAP, 1)
        sealed = [sender.seal(0, packet, number) for number in range(120_000)]
        shuffled = random.Random(0).sample(sealed[:60_000], 60_000)
        assert inject(receiver, shuffled) == {}
        assert inject(receiver, shuffled[::-1]) == {"replayed": 60_000}
        assert inject(receiver, sealed[110_000:]) == {}
        assert inject(receiver, sealed[:50_000]) == {"replayed": 50_000}
        # What lies in between is new, but for what is older than is remembered.
        found = inject(receiver, sealed[109_999:59_999:-1])
        assert found == {}
        assert inject(receiver, sealed[60_000:]) == {"replayed": 60_000}


def test_signals_and_data_are_numbered_apart():
    with engines(2) as (receiver, sender):
        data, signal = (sender.seal(0, packet_of(receiver, kind, 1, b"1234"), 7) for kind in (DATA, STOP))
        inject(receiver, [data])
        assert inject(receiver, [signal]) == {}
        assert inject(receiver, [signal, data]) == {"replayed": 2}


def test_no_packet_passes_again_when_numbers_come_again_on_the_wire():
    with engines(2) as (receiver, sender):
        packet, ahead = packet_of(receiver, MAP, 1), 1 << 30
        sealed = [sender.seal(0, packet, number * ahead + 5) for number in range(12)]
        assert sealed[1][28:32] == sealed[5][28:32]  # the number as it is on the wire
        for number in range(12):
            assert inject(receiver, [sealed[number]]) == {}
        assert inject(receiver, sealed) == {"forged": 9, "replayed": 3}


def test_forged_packets_move_nothing_but_counters():
    rng = random.Random(0)
    with engines(2) as made:
        one, packets = made[0], []
        for kind in range(8):
            for _ in range(2500):
                size = rng.choice((0, 7, HEADER - 1, HEADER, HEADER + 12, HEADER + 100))
                packet = bytearray(rng.randbytes(size))
                if size >= HEADER and rng.random() < 0.9:  # only the tag is wrong
                    packet[8:HEADER] = packet_of(one, kind, 1, bytes(size - HEADER))[8:HEADER]
                packets.append(bytes(packet))
        moved = inject(one, packets)
        assert moved.keys() == {"malformed", "stranger", "forged"}
        assert sum(moved.values()) == 20_000
        members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
        arrays, total = inputs("float32", 2, 1000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[0], total)
        for each in members:
            each.close()


def test_packets_of_another_job_on_the_same_port_are_strangers():
    with group(2) as members, Network(perfect) as network, group(2, network=network) as others:
        going = network.record()
        run(others, "all_reduce", inputs("float32", 2, 30_000)[0])
        one, before, packets = members[0].engine, members[0].engine.counted(), list(going)[:50]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
            for packet in packets:
                foreign.sendto(packet, one._socket.getsockname())
        sent = len(packets)
        until(lambda: one.counted()["stranger"] >= before["stranger"] + sent)
        assert one.counted() == before | {"stranger": before["stranger"] + sent}
        arrays, total = inputs("float32", 2, 30_000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[0], total)


def test_every_changed_byte_of_a_packet_is_found():
    with engines(2) as (receiver, sender):

        @settings(max_examples=200, deadline=None)
        @given(st.binary(max_size=300), st.data())
        def check(body, data):
            sealed = bytearray(sender.seal(0, packet_of(receiver, DATA, 1, body)))
            sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
            moved = inject(receiver, [bytes(sealed)])
            assert moved.keys() < {"malformed", "stranger", "forged"}
            assert sum(moved.values()) == 1

        check()
