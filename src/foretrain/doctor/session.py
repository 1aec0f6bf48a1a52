"""Session of all hosts: each links to every other, and rank 0 has pairs measure one after the other.

Every rank listens on its own address alone and connects to those of lower ranks; who does not know the job's secret is
turned away by the handshake. The link to rank 0 carries its commands, too. Rank 0 hears of every host's facts, then
tells the lower rank of each pair to lead and the higher one to follow. What does not work becomes a sentence of the
diagnosis; a rank other than 0 ends with `LinkError` when it loses rank 0.

The skew of clocks is by Cristian's method: the other clock was read somewhere within a round trip, so its reading
minus the middle of the fastest round trip is the skew, give or take half of that round trip. Rates are those of one
TCP connection, counted where bytes arrive, without the first fifth, in which TCP starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import msgspec

from foretrain.comm.coordinator.handshake import Listener, connect
from foretrain.comm.coordinator.link import Link, LinkError, LinkMessage
from foretrain.doctor.facts import Diagnosis, HostFacts, PairFacts, interfaces
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

    def unread(self) -> int:
        """Return how many bytes have arrived that `next` has not returned."""
        return self.link.unread() + sum(len(message.body) for message in self._waiting)

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
    """Return the rate at which a flow arrives, bytes per second.

    What the system has received counts, read or not: a busy machine may let this process wait while the flow goes on.
    """
    read, marks = 0, [(time.perf_counter(), 0)]
    while (message := peer.next()).kind == _DATA:
        read += len(message.body)
        marks.append((time.perf_counter(), read + peer.unread()))
    if len(marks) < 3:
        raise LinkError(f"the way to host {peer.where} is too slow to measure", peer.link.peer)
    return rate_of(marks)


def rate_of(marks: Sequence[tuple[float, int]]) -> float:
    """Return the rate of a flow, bytes per second, from times and the bytes that had arrived by then.

    Its first fifth, in which TCP finds the rate, is left out, unless most of the flow came before anybody looked.
    """
    total = marks[-1][1]
    ended = next(time for time, arrived in marks if arrived >= total)
    begun, before = next(mark for mark in marks if mark[1] >= total / 5)
    if before > total / 2:
        begun, before = marks[0]
    return (total - before) / (ended - begun)


# ── the session ──

_HELLO, _LEAD, _FOLLOW, _RESULT, _FAILED, _NEXT, _BYE = range(7)
_PAIR_LIMIT = 4 * SILENCE
_GRACE = 5.0

Address = tuple[str, int]
Told = Callable[[int, int], None]
"""Function that gets the number of pairs that are measured, and of all."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """First message of a rank to rank 0: its facts, and why it did not reach lower ranks."""

    facts: HostFacts
    failed: dict[int, str]


def diagnose(
    rank: int, addresses: Sequence[Address], secret: bytes, facts: HostFacts, timeout: float, told: Told
) -> Diagnosis | None:
    """Take part as ``rank`` in the measurement of all pairs; return what was found at rank 0, None at others.

    Args:
        rank: of this host.
        addresses: host and port on which each rank listens.
        secret: the job's.
        facts: of this host.
        timeout: seconds to wait for other hosts to answer.
        told: is told of progress at rank 0.

    Raises:
        LinkError: rank 0 did not answer, refused this rank, or ended.
        ConfigError: the secret is short, or this rank's address is none of this host's, or taken.
    """
    peers: dict[int, HostLink] = {}
    try:
        failed = _meet(peers, rank, addresses, secret, timeout)
        if rank:
            _serve(rank, peers, Introduction(facts, failed), timeout)
            return None
        return _coordinate(peers, facts, tuple(failed.values()), timeout, told)
    finally:
        for peer in list(peers.values()):
            peer.link.close()


def _meet(
    peers: dict[int, HostLink], rank: int, addresses: Sequence[Address], secret: bytes, timeout: float
) -> dict[int, str]:
    """Link to all other ranks, into ``peers``; return why some are missing, of which rank 0 must not be one."""
    failed: dict[int, str] = {}

    def dial(peer: int) -> None:
        begun = time.monotonic()
        try:
            link = connect(addresses[peer], secret, rank, timeout, peer=peer, send_timeout=SILENCE)
        except LinkError as error:
            late = time.monotonic() - begun > timeout - 0.5
            failed[peer] = _unanswered(addresses[peer], timeout) if late else str(error)
        else:
            peers[peer] = HostLink(link, _text(addresses[peer]))

    host, port = addresses[rank]
    expected = range(rank + 1, len(addresses))
    with Listener(host, secret, port=port, expected=expected, send_timeout=SILENCE) as listener:
        if rank:
            dial(0)
            if why := failed.get(0):
                raise LinkError(why, 0)
        # They die with the process where it is interrupted; a connection that waits cannot be ended otherwise.
        dialling = [threading.Thread(target=dial, args=(peer,), daemon=True) for peer in range(1, rank)]
        for thread in dialling:
            thread.start()
        for peer, link in listener.accept(timeout).items():
            peers[peer] = HostLink(link, _text(addresses[peer]))
        for thread in dialling:
            thread.join(timeout + _GRACE)
        refused = listener.refused
    if rank == 0:
        turned = f" (connections refused: {refused}; is the secret the same?)" if refused else ""
        failed |= {peer: _unanswered(addresses[peer], timeout) + turned for peer in expected if peer not in peers}
    return failed


def _serve(rank: int, peers: dict[int, HostLink], introduction: Introduction, timeout: float) -> None:
    """Do what rank 0 says until it has done."""
    control = peers[0]
    control.send(_HELLO, body=msgspec.json.encode(introduction))
    while (message := control.next(2 * timeout + _PAIR_LIMIT + _GRACE)).kind != _BYE:
        if message.kind == _LEAD:
            with _survived(peers, message.value):
                found = lead(_linked(peers, message.value), (rank, message.value))
                control.send(_RESULT, value=message.value, body=msgspec.json.encode(found))
        elif message.kind == _FOLLOW:
            with _survived(peers, message.value):
                follow(_linked(peers, message.value))


@contextlib.contextmanager
def _survived(peers: dict[int, HostLink], rank: int) -> Iterator[None]:
    """Tell rank 0 if the block loses another rank; raise if it loses rank 0."""
    try:
        yield
    except LinkError as error:
        if error.peer == 0:
            raise
        if rank in peers:  # what it still says belongs to what has failed
            peers[rank].link.close()
        peers[0].send(_FAILED, value=rank, body=str(error).encode())


def _linked(peers: dict[int, HostLink], rank: int) -> HostLink:
    if rank not in peers:
        raise LinkError(f"there is no link to host {rank}", rank)
    return peers[rank]


def _coordinate(
    peers: dict[int, HostLink], facts: HostFacts, missing: tuple[str, ...], timeout: float, told: Told
) -> Diagnosis:
    """Hear of all hosts and have all pairs measure, one after the other."""
    hosts, failures, found = {0: facts}, [*missing], list[PairFacts]()
    broken: dict[tuple[int, int], str] = {}
    for rank, peer in sorted(peers.items()):
        try:
            introduction = msgspec.json.decode(peer.next(timeout + _GRACE).body, type=Introduction)
        except (LinkError, msgspec.MsgspecError) as error:
            failures.append(f"host {peer.where} was lost: {error}")
            continue
        hosts[rank] = introduction.facts
        broken |= {(other, rank): why for other, why in introduction.failed.items()}
    pairs = list(combinations(sorted(hosts), 2))
    for number, pair in enumerate(pairs):
        told(number, len(pairs))
        try:
            if pair in broken:
                raise LinkError(broken[pair])
            for rank, peer in peers.items():  # so that who waits knows that rank 0 lives
                if rank in hosts and rank not in pair:
                    with contextlib.suppress(LinkError):
                        peer.send(_NEXT)
            found.append(_measure(peers, pair))
        except (LinkError, msgspec.MsgspecError) as error:
            failures.append(f"hosts {pair[0]} and {pair[1]} could not measure: {error}")
            if pair[0] == 0:  # what that host still says belongs to what has failed
                peers[pair[1]].link.close()
    told(len(pairs), len(pairs))
    for peer in peers.values():
        with contextlib.suppress(LinkError):
            peer.send(_BYE)
    return Diagnosis(hosts, tuple(found), tuple(failures))


def _measure(peers: dict[int, HostLink], pair: tuple[int, int]) -> PairFacts:
    first, second = pair
    peers[second].send(_FOLLOW, value=first)
    if first == 0:
        return lead(peers[second], pair)
    leader = peers[first]
    leader.send(_LEAD, value=second)
    until = time.monotonic() + _PAIR_LIMIT
    while True:
        message = leader.next(max(0.001, until - time.monotonic()))
        if message.value == second and message.kind == _RESULT:
            return msgspec.json.decode(message.body, type=PairFacts)
        if message.value == second and message.kind == _FAILED:
            raise LinkError(message.body.decode(errors="replace"), first)


def _unanswered(address: Address, timeout: float) -> str:
    remedy = "is foretrain doctor running there, is the port open?"
    return f"host {_text(address)} did not answer within {timeout:g} s; {remedy}"


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
