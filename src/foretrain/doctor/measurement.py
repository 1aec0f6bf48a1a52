"""Measurement of the way between two hosts over an authenticated link: one host leads, the other follows.

The skew of clocks is by Cristian's method: the other clock was read somewhere within a round trip, so its reading
minus the middle of the fastest round trip is the skew, give or take half of that round trip. Rates are those of one
TCP connection, counted where bytes arrive, without the first fifth, in which TCP starts.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from statistics import median

from foretrain.comm.coordinator.link import Link, LinkError, LinkMessage
from foretrain.doctor.facts import PairFacts
from foretrain.doctor.host import interfaces
from foretrain.units import NANOSECOND, SECOND

SILENCE = 20.0
"""Seconds that a host may be silent within a measurement."""
_PING, _PONG, _TAKE, _GIVE, _DATA, _END, _ANSWER, _DONE = range(16, 24)
_PINGS, _WARMUP, _BURST = 50, 5, 256
_CHUNK = bytes(1 << 18)
_FLOW = 0.5
"""Seconds that one way is filled."""
_CLOCK, _RATE = struct.Struct("<q"), struct.Struct("<d")


class HostLink:
    """Link to another host, of which messages are taken one by one; ``where`` names the host in messages."""

    def __init__(self, link: Link, where: str) -> None:
        self.link, self.where = link, where
        self.send = link.send
        self._waiting: deque[LinkMessage] = deque()

    def next(self, timeout: float = SILENCE) -> LinkMessage:
        """Return the next message; LinkError when the link has ended or ``timeout`` seconds have passed."""
        if not self._waiting:
            self._waiting.extend(self.link.receive(timeout))
        if not self._waiting:
            raise LinkError(f"host {self.where} said nothing for {timeout:g} s", self.link.peer)
        return self._waiting.popleft()

    def expect(self, kind: int) -> LinkMessage:
        """Return the next message, which must be of ``kind``."""
        message = self.next()
        if message.kind != kind:
            raise LinkError(f"host {self.where} speaks another version of foretrain; install the same", self.link.peer)
        return message

    def interface(self) -> str:
        """Return the name of this host's interface that the link uses."""
        with socket.socket(fileno=os.dup(self.link.fileno())) as view:
            address = view.getsockname()[0]
        return next((one.name for one in interfaces() if address in one.addresses), "lo")


def lead(peer: HostLink, hosts: tuple[int, int]) -> PairFacts:
    """Measure the way to ``peer``, which must `follow`; ``hosts`` are the ranks of this host and of that one."""
    trips = [_ping(peer) for _ in range(_WARMUP + _PINGS)][_WARMUP:]
    fastest = min(trips)
    overhead = _burst(peer)
    peer.send(_TAKE)
    _send_flow(peer)
    answer = peer.expect(_ANSWER).body
    (there,) = _RATE.unpack_from(answer)
    peer.send(_GIVE)
    back = _receive_flow(peer)
    peer.send(_DONE)
    return PairFacts(
        hosts=hosts,
        interfaces=(peer.interface(), answer[_RATE.size :].decode()),
        round_trip=round(median(trip for trip, _ in trips) * NANOSECOND),
        skew=round(fastest[1] * NANOSECOND),
        skew_error=round(fastest[0] * NANOSECOND / 2),
        overhead=overhead,
        rates=(there, back),
    )


def follow(peer: HostLink) -> None:
    """Answer a host that measures, until it has done."""
    while (message := peer.next()).kind != _DONE:
        if message.kind == _PING:
            peer.send(_PONG, body=_CLOCK.pack(time.time_ns()))
        elif message.kind == _TAKE:
            rate = _receive_flow(peer)
            peer.send(_ANSWER, body=_RATE.pack(rate) + peer.interface().encode())
        elif message.kind == _GIVE:
            _send_flow(peer)


def _ping(peer: HostLink) -> tuple[int, float]:
    """Return the time of one round trip and the skew it shows, ns."""
    begun, wall = time.perf_counter_ns(), time.time_ns()
    peer.send(_PING)
    (theirs,) = _CLOCK.unpack(peer.expect(_PONG).body)
    trip = time.perf_counter_ns() - begun
    return trip, theirs - wall - trip / 2


def _burst(peer: HostLink) -> int:
    """Return the time per message of many that follow each other without waiting, ps."""
    begun = time.perf_counter()
    for _ in range(_BURST):
        peer.send(_PING)
    for _ in range(_BURST):
        peer.expect(_PONG)
    return round((time.perf_counter() - begun) / _BURST * SECOND)


def _send_flow(peer: HostLink) -> None:
    until = time.perf_counter() + _FLOW
    while time.perf_counter() < until:
        peer.send(_DATA, body=_CHUNK)
    peer.send(_END)


def _receive_flow(peer: HostLink) -> float:
    """Return the rate at which a flow arrives, bytes per second."""
    arrived, marks = 0, list[tuple[float, int]]()
    while (message := peer.next()).kind == _DATA:
        arrived += len(message.body)
        marks.append((time.perf_counter(), arrived))
    if len(marks) < 2:
        raise LinkError(f"the way to host {peer.where} is too slow to measure", peer.link.peer)
    (first, _), (last, total) = marks[0], marks[-1]
    begun, before = next(mark for mark in marks if mark[0] >= first + (last - first) / 5 or mark is marks[-2])
    return (total - before) / (last - begun)
