"""Engine of one rank: owns engine.cpp's thread, its UDP socket and the links to all other ranks."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import SERVICES, Loss, early_close, optireduce
from foretrain.comm.bounded.congestion import callbacks, flow
from foretrain.comm.collectives.runners import library
from foretrain.comm.coordinator.link import Link
from foretrain.comm.options import Ending
from foretrain.errors import ConfigError
from foretrain.network.packet.transports.transport import Bounded
from foretrain.units import MILLISECOND

HEADER = 40
"""Bytes of a packet before its data."""
_HEADER_ON_WIRE = HEADER + 28 + 38
"""Bytes of a packet on the wire besides its data: ours, UDP and IPv4, Ethernet with preamble and gap."""
SETTINGS = Bounded(first_window=16, least_timeout=MILLISECOND, tolerance=0.0)
"""Of congestion control: probes wait for threads here, which take longer than packets in a data centre."""
COUNTERS = (
    *("sent", "sent_bytes", "sent_again", "received", "received_bytes", "duplicate", "late", "early", "marked"),
    *("malformed", "stranger", "forged", "replayed", "probes", "maps", "over_tcp", "over_udp_again", "lost_bytes"),
)
"""Names of the engine's counters, in its order: of packets unless they say bytes. ``late`` came when enough was there;
``early`` before their operation; ``duplicate`` had gone again; ``malformed``, ``stranger``, ``forged`` and
``replayed``, which came before or are very old, were dropped; ``over_tcp`` counts how often a peer took nothing over
UDP and was served over TCP from then on, ``over_udp_again`` how often one went back."""

_BUFFER = 16 << 20
"""Bytes of the socket's buffers that are asked for; Linux gives others than root less, see net.core.rmem_max."""
_LARGEST, _SMALLEST = 8192, 496
"""Bytes of a packet's data; the smallest fit an MTU of 576."""
_SEGMENTS = 44
"""Packets that are handed to the kernel at once, of 1,448 bytes each: the most that one call takes."""
_UDP_SEGMENT, _UDP_GRO = 103, 104
_IP_MTU, _IP_MTU_DISCOVER, _DONT = 14, 10, 0
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_ADDRESS = struct.Struct("=H")
_ECT = 2
"""ECN bits of what may be marked rather than dropped (RFC 3168)."""
_PATHS_CHANGED = -3
_open: weakref.WeakSet[BoundedEngine] = weakref.WeakSet()
"""All engines of this process; see Note [Forked children] in `foretrain.comm.coordinator.link`."""


class EngineFailed(Exception):
    """A rank was lost: ``rank``, and ``why``: errno, 0 where it hung up, -1 where another rank says so."""

    def __init__(self, rank: int, why: int) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


@dataclass(frozen=True, slots=True)
class Path:
    """Properties of the paths between all ranks, on which all have agreed.

    Attributes:
        payload: bytes of a packet's data.
        segments: packets that are handed to the kernel at once.
        window: packets that may be under way to a peer.
    """

    payload: int
    segments: int
    window: int


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine.

    Attributes:
        transport: settings of congestion control; sizes of packets and windows are the path's.
        peak: bytes/s that are never exceeded: those of the fastest network that is expected.
        services: for each class, the type of service of packets that may be dropped and of important ones.
        ending: when an array is over that may lose some.
        blocked: seconds without an answer over UDP after which a peer is served over TCP.
        timeout: seconds without an answer after which a peer is lost.
    """

    transport: Bounded = SETTINGS
    peak: float = 1.25e10
    services: Sequence[tuple[int, int]] = SERVICES
    ending: Ending = "share"
    blocked: float = 1.0
    timeout: float = 60.0


def open_socket(host: str) -> socket.socket:
    """Return a UDP socket on a free port of ``host``, with large buffers.

    Raises:
        ConfigError: the host is none of this machine's.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.bind((host, 0))
    except OSError as error:
        made.close()
        raise ConfigError("host", host, f"cannot be used for UDP ({error})", "name an address of this host") from None
    for forced, usual in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            made.setsockopt(socket.SOL_SOCKET, forced, _BUFFER)
        except OSError:  # not root
            made.setsockopt(socket.SOL_SOCKET, usual, _BUFFER)
    with contextlib.suppress(OSError):
        made.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, 66, 1)  # IPV6_RECVTCLASS
    else:
        made.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
        # A path whose packets are smaller than the interface says: they are fragmented, and nothing is lost.
        made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DONT)
    return made


def own_path(made: socket.socket, addresses: Sequence[tuple[str, int]], rank: int) -> Path:
    """Return what this rank's socket allows towards ``addresses``, all ranks' by number."""
    overhead = HEADER + (48 if made.family == socket.AF_INET6 else 28)
    others = [each for k, each in enumerate(addresses) if k != rank] or list(addresses)
    smallest = min(_mtu(made.family, each) for each in others)
    payload = max(_SMALLEST, min(_LARGEST, smallest - overhead) // 16 * 16)
    segments = min(_SEGMENTS, max(1, 65000 // (payload + HEADER)))
    with contextlib.suppress(OSError):  # a kernel without segmentation sends one at a time
        made.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, 0)
    buffer = made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    # The kernel counts what a packet occupies, which is up to twice its size.
    window = max(16, buffer // (2 * (payload + 256)) // len(others))
    return Path(payload, segments, window)


class BoundedEngine:
    """Engine of one rank. `close` it.

    Args:
        rank: of this process.
        made: its UDP socket, which the engine owns from now on.
        addresses: of all ranks' sockets.
        links: to all other ranks, which the engine owns from now on.
        secret: of the job.
        path: what all ranks have agreed on.
        options: the same on all ranks.

    Attributes:
        counters: see `COUNTERS`.
        path: as above.
        flows: by peer, the memory of its congestion control; see `foretrain.comm.bounded.congestion`.
    """

    def __init__(
        self,
        rank: int,
        made: socket.socket,
        addresses: Sequence[tuple[str, int]],
        links: Mapping[int, Link],
        secret: bytes,
        path: Path,
        options: EngineOptions,
    ) -> None:
        transport = replace(
            options.transport,
            payload=path.payload,
            header=_HEADER_ON_WIRE,
            first_window=min(options.transport.first_window, path.window),
            most=path.window,
        )
        ranks = len(addresses)
        self.rank, self.path = rank, path
        self._socket, self._library = made, library()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._closed = False
        self._job = int.from_bytes(hashlib.blake2b(secret, digest_size=4).digest(), "little")
        self.counters, self._over_tcp = np.zeros(len(COUNTERS), np.int64), np.zeros(ranks, np.int64)
        self._law, self._ending = callbacks(), _ending(options.ending)
        numbers = [rank, ranks, self._job, path.payload, path.segments, made.fileno(), self._wake]
        numbers += [
            int(transport.first_window),
            int(options.blocked * 1e9),
            int(options.timeout * 1e9),
            int(made.family == socket.AF_INET6),
        ]
        self._settings = np.array(numbers, np.int64)
        flat = np.array([[least, most | _ECT] for least, most in options.services], np.uint8).reshape(-1)
        self._services = np.resize(flat, 16)
        self._handle = self._library.foretrain_bounded_new(
            *(each.ctypes.data for each in (self._settings, self._law, self._ending, self._services, self.counters)),
            self._over_tcp.ctypes.data,
        )
        self._links = {peer: link.detach() for peer, link in links.items()}
        self._kept: list[NDArray[Any]] = []
        self.flows: dict[int, NDArray[np.int64]] = {}
        for peer, address in enumerate(addresses):
            if peer != rank:
                self._add(peer, address, secret, transport, options.peak)
        _open.add(self)
        self._library.foretrain_bounded_start(self._handle)

    def submit(
        self,
        plan: NDArray[np.int64],
        values: NDArray[np.uint8],
        vital: NDArray[np.int64],
        important: NDArray[np.int64],
        pulled: NDArray[np.uint8] | None = None,
    ) -> None:
        """Begin an operation; ``values`` and ``pulled`` stay until it is done.

        Args:
            plan: encoded, with its header.
            values: bytes.
            vital: (n, 2), first byte and the one behind the last of what must not be lost, ascending.
            important: the same of what switches must not drop first, besides.
            pulled: as many bytes, which a server sends in place of sums; see Note [Pulls] in engine.cpp.
        """
        back = None if pulled is None else pulled.ctypes.data
        extents = (vital.ctypes.data, len(vital), important.ctypes.data, len(important))
        self._library.foretrain_bounded_submit(
            self._handle, plan.ctypes.data, len(plan), values.ctypes.data, back, *extents
        )

    def next_held(self) -> int | None:
        """Wait until an operation is held, and return its number, in the order of `submit`; None at the end."""
        number = self._library.foretrain_bounded_next_held(self._handle)
        return None if number < 0 else number

    def resume(self, number: int) -> None:
        """Let operation ``number`` go on, which is held; do nothing once the engine is closed."""
        with self._closing:
            if not self._closed:
                self._library.foretrain_bounded_resume(self._handle, number)

    def next(self, paths_changed: Callable[[], None] = lambda: None) -> list[Loss] | None:
        """Wait until the next operation is done, and return what it has lost; None once the engine is closed.

        A loss whose source is this rank is of its own contribution, as far as receivers could say so.

        Args:
            paths_changed: called meanwhile whenever `over_tcp` has changed.

        Raises:
            EngineFailed: a rank was lost.
        """
        failed, first = np.zeros(2, np.int64), ctypes.POINTER(ctypes.c_int64)()
        while True:
            count = self._library.foretrain_bounded_next(self._handle, failed.ctypes.data, ctypes.byref(first))
            if count != _PATHS_CHANGED:
                break
            paths_changed()
        if count == -1:
            return None
        if count < 0:
            raise EngineFailed(int(failed[0]), int(failed[1]))
        numbers = first[:count]
        return [Loss(*numbers[k : k + 3]) for k in range(0, count, 3)]

    def counted(self) -> dict[str, int]:
        """Return the counters by name."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    def over_tcp(self) -> frozenset[int]:
        """Return the peers that are served over TCP at present, since they take nothing over UDP."""
        return frozenset(np.flatnonzero(self._over_tcp).tolist())

    def close(self, lost: int | None = None) -> None:
        """End the thread, and tell the other ranks; ``lost`` is the rank for whose sake. Any number of times.

        Nobody waits in `next` when this returns; `release` the memory afterwards.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._library.foretrain_bounded_close(self._handle)
            self._library.foretrain_bounded_say_goodbye(self._handle, -1 if lost is None else lost)
            for each in self._links.values():
                # What was sent is delivered; a reset would take it back.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_WR)
                each.close()
            self._socket.close()
            os.close(self._wake)

    def release(self) -> None:
        """Free the engine's memory, once it is closed and nobody calls it any more; any number of times."""
        with self._closing:
            handle, self._handle = self._handle, None
        if handle:
            self._library.foretrain_bounded_delete(handle)

    def inject(self, packets: bytes, sizes: Sequence[int] | NDArray[np.int64] | None = None) -> None:
        """Process packets as if they had come over UDP; only for tests, while the thread has nothing to do.

        ``packets`` stand one behind the other, of ``sizes`` bytes; without these it is one.
        """
        each = np.array([len(packets)] if sizes is None else sizes, np.int64)
        assert each.sum() == len(packets)
        self._library.foretrain_bounded_inject(self._handle, packets, each.ctypes.data, len(each))

    def seal(self, peer: int, packet: bytes, number: int = 0) -> bytes:
        """Return ``packet`` with a number, and the tag of this rank for ``peer``; only for tests."""
        buffer = ctypes.create_string_buffer(packet, len(packet))
        self._library.foretrain_bounded_seal(self._handle, peer, buffer, number)
        return buffer.raw

    def _add(self, peer: int, address: tuple[str, int], secret: bytes, transport: Bounded, peak: float) -> None:
        size = 4 + self.path.payload // 4 + 2
        sending, receiving = (_keys(secret, *way, size) for way in ((self.rank, peer), (peer, self.rank)))
        control = self.flows[peer] = flow(transport, peak)
        self._kept += [sending, receiving]
        packed = _packed(address, self._socket.family)
        self._library.foretrain_bounded_peer(
            *(self._handle, peer, packed, len(packed), self._links[peer].fileno() if peer in self._links else -1),
            *(each.ctypes.data for each in (sending, receiving, control)),
        )

    def _leave(self) -> None:
        """Give up the copies of descriptors in a forked child, where the thread does not exist."""
        if self._closed:
            return  # its numbers may be others' by now
        self._closing, self._closed = threading.Lock(), True
        self._handle = None
        for each in (*self._links.values(), self._socket):
            each.close()
        with contextlib.suppress(OSError):
            os.close(self._wake)


def _ending(ending: Ending) -> NDArray[np.int64]:
    """Return the numbers of engine.cpp's ``Ending``."""
    if ending == "early_close":
        return early_close.callbacks()
    return optireduce.callbacks() if ending == "adaptive_timeout" else np.zeros(3, np.int64)


def _keys(secret: bytes, source: int, target: int, words: int) -> NDArray[np.uint32]:
    """Return the keys of packets from one rank to another: 16 bytes for SipHash, the rest for NH."""
    label = b"foretrain bounded 3" + struct.pack("<II", source, target)
    return np.frombuffer(hashlib.shake_256(secret + label).digest(4 * words), np.uint32).copy()


def _packed(address: tuple[str, int], family: socket.AddressFamily) -> bytes:
    host, port = address
    if family == socket.AF_INET6:
        number, _, scope = host.partition("%")
        index = socket.if_nametoindex(scope) if scope else 0
        return (
            _ADDRESS.pack(family)
            + struct.pack("!HI", port, 0)
            + socket.inet_pton(family, number)
            + struct.pack("=I", index)
        )
    return _ADDRESS.pack(family) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)


def _mtu(family: socket.AddressFamily, address: tuple[str, int]) -> int:
    """Return the largest packet of the interface on the way to ``address``."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
            if family == socket.AF_INET6:
                return probe.getsockopt(socket.IPPROTO_IPV6, 24)  # IPV6_MTU
            return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError:
            return 1280


def _leave_all() -> None:
    for engine in _open:
        engine._leave()


if sys.byteorder != "little":  # pragma: no cover
    raise ConfigError("transport", "bounded", "needs a little-endian machine", "use AllReduce() here")
os.register_at_fork(after_in_child=_leave_all)
