"""A network that loses, repeats, delays, marks and damages packets: a relay in front of each rank's UDP socket."""

import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_IP_RECVTOS = 13
_DATA = 0
"""Kind of a packet, in its byte 14."""

Fate = Callable[[bytes, random.Random], Sequence[bytes]]
"""What becomes of a packet: the packets that go on instead."""


Marks = Callable[[bytes, int], int]
"""The type of service that a packet goes on with, from itself and the one it came with."""


class Relay:
    """Relays to ``target``, one after the other, what the ``network`` makes of each packet."""

    def __init__(self, target: tuple[str, int], network: "Network", seed: int) -> None:
        wide = ":" in target[0]
        self.socket = socket.socket(socket.AF_INET6 if wide else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        level, told = (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS) if wide else (socket.IPPROTO_IP, _IP_RECVTOS)
        self._service = level, socket.IPV6_TCLASS if wide else socket.IP_TOS
        self.socket.setsockopt(level, told, 1)
        self.socket.bind(("::1" if wide else "127.0.0.1", 0))
        self._target, self._network, self._random = target, network, random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        held = deque[tuple[float, bytes, bytes]]()
        while not self._ended.is_set():
            wait = max(held[0][0] - time.monotonic(), 0.0) if held else 0.05
            if select.select([self.socket], [], [], wait)[0]:
                packet, [(*_, service)], *_ = self.socket.recvmsg(65536, 64)
                for each in self._network.fate(packet, self._random):
                    marked = struct.pack("i", self._network.marks(each, service[0]))
                    held.append((time.monotonic() + self._network.delay, each, marked))
            while held and held[0][0] <= time.monotonic():
                _, packet, marked = held.popleft()
                self.socket.sendmsg([packet], [(*self._service, marked)], 0, self._target)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.socket.close()


class Network:
    """Relays in front of all ranks, which add a ``delay`` in seconds; a context manager."""

    def __init__(self, fate: Fate, marks: Marks = lambda _, service: service, delay: float = 0.0) -> None:
        self.fate, self.marks, self.delay = fate, marks, delay
        self._relays: list[Relay] = []
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[str, int]] = {}

    def in_front_of(self, address: tuple[str, int]) -> tuple[str, int]:
        """Return the relay's address that stands for ``address``."""
        with self._lock:
            if address not in self._known:
                relay = Relay(address, self, len(self._relays))
                self._relays.append(relay)
                self._known[address] = relay.socket.getsockname()[:2]
            return self._known[address]

    def record(self) -> list[bytes]:
        """Return a list that gets all packets that go on from now on."""
        found: list[bytes] = []
        fate = self.fate

        def note(packet: bytes, rng: random.Random) -> Sequence[bytes]:
            going = fate(packet, rng)
            found.extend(going)
            return going

        self.fate = note
        return found

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._relays:
            each.close()


def perfect(packet: bytes, rng: random.Random) -> list[bytes]:
    return [packet]


def losing(share: float) -> Fate:
    """Lose a share of all packets."""
    return lambda packet, rng: [] if rng.random() < share else [packet]


def losing_data(share: float) -> Fate:
    """Lose a share of data, and no signals: where a STOP is lost, a sender may never hear what else was."""
    return lambda packet, rng: [] if packet[14] == _DATA and rng.random() < share else [packet]


def hostile(share: float) -> Fate:
    """Lose, repeat, hold back, cut or damage a share of all packets, or send an old one again before them."""
    held: list[bytes] = []
    old: deque[bytes] = deque(maxlen=1000)

    def fate(packet: bytes, rng: random.Random) -> list[bytes]:
        if rng.random() >= share:
            old.append(packet)
            return [packet]
        what = rng.randrange(6)
        if what == 0:
            return []
        if what == 1:
            return [packet, packet]
        if what == 2:
            held.append(packet)
            return [held.pop(rng.randrange(len(held)))] if len(held) > 8 else []
        if what == 5:
            return [rng.choice(old), packet] if old else [packet]
        if what == 3:
            return [packet[: rng.randrange(len(packet))]]
        damaged = bytearray(packet)
        damaged[rng.randrange(len(packet))] ^= 1 << rng.randrange(8)
        return [bytes(damaged)]

    return fate
