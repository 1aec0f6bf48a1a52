"""A network that loses, repeats, delays and damages packets: a relay in front of each rank's UDP socket."""

import random
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Fate = Callable[[bytes, random.Random], Sequence[bytes]]
"""What becomes of a packet: the packets that go on instead."""


class Relay:
    """Relays to ``target``, one after the other, what ``fate`` makes of each packet."""

    def __init__(self, target: tuple[str, int], fate: Fate, seed: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind(("127.0.0.1", 0))
        self._target, self._fate, self._random = target, fate, random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not select.select([self.socket], [], [], 0.05)[0]:
                continue
            for packet in self._fate(self.socket.recv(65536), self._random):
                self.socket.sendto(packet, self._target)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.socket.close()


class Network:
    """Relays in front of all ranks; a context manager."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self._relays: list[Relay] = []
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[str, int]] = {}

    def in_front_of(self, address: tuple[str, int]) -> tuple[str, int]:
        """Return the relay's address that stands for ``address``."""
        with self._lock:
            if address not in self._known:
                relay = Relay(address, lambda packet, rng: self.fate(packet, rng), len(self._relays))
                self._relays.append(relay)
                self._known[address] = relay.socket.getsockname()
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
