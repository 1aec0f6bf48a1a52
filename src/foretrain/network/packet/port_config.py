"""Settings of a port: queues, marking, drops, service order and losses of its wire; and defaults by transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Dcqcn, Transport
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, SECOND

UNLIMITED = 1 << 50
"""Bytes that no queue ever holds."""
CERTAIN = 1 << 32
"""A probability of 1, in 2^-32."""


@dataclass(frozen=True, slots=True)
class Queues:
    """Eight queues of one port; class 0 goes first. Bytes are those on the wire.

    Attributes:
        limit: bytes that each class may hold; one number for all, or eight.
        room: bytes that all classes may hold together.
        mark_from, mark_to: of each class; a packet that finds more than ``mark_to`` bytes of its class is marked, one
            that finds ``mark_from`` or less is not, with a chance up to ``mark_chance`` between (RED on the queue as it
            is). Equal, they are DCTCP's K.
        mark_chance: just below ``mark_to``.
        spare: bytes of a class above which data that may not be marked is dropped (Aeolus, SIGCOMM 2020).
        strict: how many classes are served strictly in order before all others; these take turns.
        quantum: bytes that each of those may send in a turn (deficit round robin).
        nearest: whether classes mean nothing, what is nearest to its flow's end goes first, and what is furthest from
            it is dropped where ``room`` does not suffice (pFabric, SIGCOMM 2013).
        cut_to: bytes of the header to which data is cut that finds no room, which then is of class 0 (NDP, SIGCOMM
            2017); 0 drops it.
        xoff, xon: of each class, bytes from one link above which its sender is paused, and down to which (priority flow
            control, IEEE 802.1Qbb). ``limit`` and ``room`` must leave what may still come: twice the link's delay times
            its rate, and two packets.
        shared: bytes that all ports of a switch may hold together.
        share: of what is left of ``shared``, how much a class of a port may hold (dynamic thresholds, Choudhury and
            Hahne 1998), at most 255.
    """

    limit: int | tuple[int, ...] = UNLIMITED
    room: int = UNLIMITED
    mark_from: int | tuple[int, ...] = UNLIMITED
    mark_to: int | tuple[int, ...] = UNLIMITED
    mark_chance: float = 1.0
    spare: int | tuple[int, ...] = UNLIMITED
    strict: int = c.CLASSES
    quantum: int | tuple[int, ...] = 1538
    nearest: bool = False
    cut_to: int = 0
    xoff: int | tuple[int, ...] = UNLIMITED
    xon: int | tuple[int, ...] | None = None
    shared: int = UNLIMITED
    share: float = 255.0

    def __post_init__(self) -> None:
        for name in ("limit", "mark_from", "mark_to", "spare", "quantum", "xoff", "xon"):
            found = self.of(name)
            if len(found) != c.CLASSES:
                raise ConfigError(name, getattr(self, name), "is not one per class", f"give one number, or {c.CLASSES}")
            least = 1 if name == "quantum" else 0
            if min(found) < least:
                raise ConfigError(name, min(found), f"is below {least}", "give bytes")
        if any(low > high for low, high in zip(self.of("mark_from"), self.of("mark_to"), strict=True)):
            raise ConfigError("mark_from", self.mark_from, f"is above mark_to, {self.mark_to}", "lower it")
        if not 0 <= self.mark_chance <= 1:
            raise ConfigError("mark_chance", self.mark_chance, "is no probability", "give 0 to 1")
        if not 0 <= self.strict <= c.CLASSES:
            raise ConfigError("strict", self.strict, "is no number of classes", f"give 0 to {c.CLASSES}")
        for name in ("room", "cut_to", "shared"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "is negative", "give bytes")
        if any(high < low for high, low in zip(self.of("xoff"), self.of("xon"), strict=True)):
            raise ConfigError("xon", self.xon, f"is above xoff, {self.xoff}", "lower it")
        if not 0 < self.share <= 255:
            raise ConfigError("share", self.share, "is not a share", "give more than 0 and at most 255")
        if self.nearest and self.coupled:
            raise ConfigError("nearest", True, "does not go with xoff or shared", "give one of them")

    @property
    def coupled(self) -> bool:
        """Return whether ports of one switch influence each other without delay."""
        return self.shared < UNLIMITED or min(self.of("xoff")) < UNLIMITED

    def of(self, name: str) -> tuple[int, ...]:
        """Return the numbers of all classes."""
        value = getattr(self, name)
        if value is None:
            return self.of("xoff")
        return (value,) * c.CLASSES if isinstance(value, int) else value

    def row(self) -> NDArray[np.int64]:
        """Return the settings as a row of the kernels' memory."""
        found = np.zeros(c.SETTING_COLUMNS, np.int64)
        found[c.STRICT], found[c.ROOM] = self.strict, self.room
        found[c.MARK_CHANCE] = round(self.mark_chance * CERTAIN)
        found[c.NEAREST], found[c.CUT_TO] = self.nearest, self.cut_to
        found[c.SHARED], found[c.SHARE : c.SHARE + c.CLASSES] = self.shared, round(self.share * 256)
        for name, at in (
            ("limit", c.LIMIT),
            ("mark_from", c.MARK_FROM),
            ("mark_to", c.MARK_TO),
            ("spare", c.SPARE),
            ("quantum", c.QUANTUM),
            ("xoff", c.XOFF),
            ("xon", c.XON),
        ):
            found[at : at + c.CLASSES] = self.of(name)
        return found


@dataclass(frozen=True, slots=True)
class LinkLosses:
    """Random packet loss on the wire of one link, which no queue sees. A grey failure is a small ``chance`` on one.

    Attributes:
        chance: of each packet, outside bursts.
        begins: of a burst, at each packet outside one (Gilbert's and Elliott's model); 0 for none.
        ends: of the end of one, at each packet in it.
        in_burst: of each packet in one.
    """

    chance: float = 0.0
    begins: float = 0.0
    ends: float = 1.0
    in_burst: float = 1.0

    def __post_init__(self) -> None:
        for name in ("chance", "begins", "ends", "in_burst"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "is no probability", "give 0 to 1")

    @classmethod
    def bursts(cls, share: float, packets: float) -> LinkLosses:
        """Return losses in bursts of so many ``packets`` on average, in the long run a ``share`` of all."""
        if not 0 <= share < 1 or packets < 1 or share > packets * (1 - share):
            what = f"{share:g} in bursts of {packets:g}"
            raise ConfigError("losses", what, "cannot be", "lower the share, or take longer bursts")
        return cls(0.0, begins=share / (packets * (1 - share)), ends=1 / packets, in_burst=1.0)

    def row(self) -> NDArray[np.int64]:
        """Return four columns of a port, from LOSES on."""
        return np.array([round(each * CERTAIN) for each in (self.chance, self.begins, self.ends, self.in_burst)])


_HELD: Final = 50 * MICROSECOND
_HOPS: Final = 6
_MARK_AT: Final = 65
"""Packets in a queue that is marked, at least: DCTCP's recommendation for 10 Gb/s (SIGCOMM 2010, 3.4)."""
_CUT_AT: Final = 8
"""Packets in a queue above which NDP cuts (SIGCOMM 2017)."""


def usual(topology: Topology, transport: Transport) -> Queues:
    """Return the queues of switches that suit ``transport``.

    | transport | queues |
    |---|---|
    | pFabric | what is nearest to its end goes first; two products of bandwidth and delay of room |
    | NDP | eight packets of a class, and then headers, which are never dropped |
    | bounded loss | twice as many bytes of a class as DCTCP marks above, and then drops |
    | DCQCN | marks as its paper has it; nothing is dropped |
    | others | marks as `marking` does; nothing is dropped |
    """
    packet = transport.payload + transport.header
    if transport.protocol == c.NEAREST_FIRST:
        return Queues(nearest=True, room=2 * max(round(_in_flight(topology)), transport.first_window * packet))
    if transport.protocol == c.PULLED:
        limit = (UNLIMITED, *(_CUT_AT * packet for _ in range(1, c.CLASSES)))
        return Queues(limit=limit, cut_to=transport.reply)
    if transport.protocol == c.BOUNDED:
        return Queues(limit=2 * _threshold(topology, transport))
    if isinstance(transport, Dcqcn):
        return Queues(mark_from=5_000, mark_to=200_000, mark_chance=0.01)
    return marking(topology, transport)


def marking(topology: Topology, transport: Transport) -> Queues:
    """Return queues that mark above DCTCP's K and drop nothing, as a fabric without losses.

    K is a seventh of what the fastest link sends in the round trip of six hops (SIGCOMM 2010, 3.4, equation 13), and
    at least 65 packets. One K serves all ports: on slow links it lets queues grow longer than they need.
    """
    k = _threshold(topology, transport)
    return Queues(mark_from=k, mark_to=k)


def holding(topology: Topology, transport: Transport) -> Queues:
    """Return queues of hosts, which mark what would wait for 50 µs, but a first window, and drop nothing.

    A host's own data would else hold up the acknowledgements behind it until timers run out, which real hosts prevent
    by limits of what they hand to their network interfaces (TCP small queues in Linux).
    """
    forwards = np.array([node.forwards for node in topology.nodes], np.bool_)
    leaving = topology.capacity[~forwards[topology.source] & (topology.capacity > 0)]
    if not len(leaving):
        return Queues()
    k = max(transport.first_window * (transport.payload + transport.header), round(leaving.min() * _HELD / SECOND))
    return Queues(mark_from=k, mark_to=k)


def _threshold(topology: Topology, transport: Transport) -> int:
    """Return DCTCP's K, bytes."""
    return max(_MARK_AT * (transport.payload + transport.header), round(_in_flight(topology) / 7))


def _in_flight(topology: Topology) -> float:
    """Return the bytes that the fastest link sends in the longest round trip of six hops."""
    used = topology.capacity > 0
    round_trip = 2 * _HOPS * float(topology.latency[used].max(initial=0)) / SECOND
    return float(topology.capacity[used].max(initial=0.0)) * round_trip
