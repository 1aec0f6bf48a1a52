"""Conditions of a lab's links beyond their rate: priority bands, selective drop, loss, and background flows.

    tc:  root htb ── 9:1 the link's rate ──┬── band 0   protected  bfifo, the queue
                                           │            droppable  bfifo, short                 selective drop
                                           ├── band 1   …
                                           └── nowhere             bfifo that holds nothing     loss

A packet's DSCP chooses its leaf: AF4x is band 0, what has none the last one, and AF3x to AF1x the second of three.
AFx3, the highest drop precedence (RFC 2597), may be dropped. A filter of classic BPF sends a random share of packets
nowhere; where losses come in bursts it is a program of eBPF, which has a memory (`port_programs`). So all is the
traffic control of a stock kernel: no netem, no nftables, no actions. Filters see IPv4 and IPv6.

A host's own interface has the bands, and drops at its tail: real hosts do not drop selectively, switches do. The short
queue of a switch takes the packets that several hosts send at once, or it would drop what nothing else waits for.

Conditions stand in the alias of the switch's bridge, so that a change of rate finds them.

The kernel decides on super-packets of many segments where it may; for single packets to be lost, hosts of such labs
send segments one by one (``gso_max_segs 1``), which costs CPU time: some 3 Gb/s here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from foretrain.comm.bounded import service_of
from foretrain.errors import ConfigError, unknown

Drop: TypeAlias = Literal["tail", "selective"]
"""What a full queue drops: whatever comes last, or first what may be dropped."""

MTU = 9000
"""Bytes of the largest IP packet of all links."""
BANDS = 3
"""Most bands of a port."""
MOST_BURST = 10_000
ROOT, NOWHERE = 0x90000, 0x900FF
"""Handles of the tree, and of the class for packets that are lost."""
_SPARE_SHARE = 0.03
"""Of a queue, what droppable packets may fill; the lab's spike had 15 of 500 kB."""
_LEAST_SPARE = 16 * (MTU + 14)
"""Bytes that a burst of 16 packets takes, with headers of Ethernet."""
_NOWHERE = "ff"
_PROTECTED, _DROPPABLE = 0x10, 0x20
_QUANTUM = 18_000


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of all links of a lab.

    Attributes:
        bands: priority classes of a port, 1 to 3; the first is served before the others.
        drop: what a full queue drops.
        loss: share of packets that is lost at random on the way to ``lossy_host``, or to every host.
        lossy_host: the host with a grey link; None is every one.
        burst: mean number of packets that are lost in a row; 1 loses each independently.
        background: share of one port's rate that background flows take on average: that of ``lossy_host``, or of the
            last host.
    """

    bands: int = 1
    drop: Drop = "tail"
    loss: float = 0.0
    lossy_host: int | None = None
    background: float = 0.0
    burst: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.bands, int) or not 1 <= self.bands <= BANDS:
            raise ConfigError("bands", self.bands, "is no number of bands", f"write 1 to {BANDS}")
        if self.drop not in get_args(Drop):
            raise unknown("drop", self.drop, get_args(Drop))
        if not 0 <= self.loss < 1:
            raise ConfigError("loss", self.loss, "is no share of packets", "write e.g. 1%")
        if not 1 <= self.burst <= MOST_BURST:
            raise ConfigError("burst", self.burst, "is no mean number of packets", f"write 1 to {MOST_BURST}")
        if self.burst > 1 and self.loss > self.burst * (1 - self.loss):
            raise ConfigError("loss", self.loss, f"is too much for bursts of {self.burst:g}", "take longer bursts")
        if not 0 <= self.background <= 1:
            raise ConfigError("background", self.background, "is no share of a port's rate", "write e.g. 40%")
        if self.burst > 1 and not self.loss:
            raise ConfigError("burst", self.burst, "needs losses", "add a loss, e.g. 1%, or leave it out")
        if self.lossy_host is not None and not self.loss and not self.background:
            remedy = "add a loss, e.g. 1%, or a background, e.g. 40%, or leave it out"
            raise ConfigError("lossy_host", self.lossy_host, "has neither losses nor background flows", remedy)

    @property
    def plain(self) -> bool:
        """Return whether links only have a rate."""
        return self == Conditions()

    @classmethod
    def read(cls, text: str) -> Conditions:
        """Return the conditions that `written` has written; an empty text has none."""
        return cls(**json.loads(text)) if text else cls()

    def written(self) -> str:
        """Return a line that `read` reads."""
        return json.dumps(asdict(self))

    def loses(self, host: int) -> bool:
        """Return whether packets to ``host`` are lost at random."""
        return self.loss > 0 and self.lossy_host in (None, host)

    def lines(self, interface: str, rate: float, burst: int, limit: int, *, host: int | None) -> list[str]:
        """Return the lines for ``tc -batch`` that shape ``interface``.

        Args:
            interface: a host's, or a port of the switch.
            rate: bytes/s.
            burst: bytes that may go at once.
            limit: bytes of a queue.
            host: the host that the port leads to; None for a host's own interface, which loses nothing.
        """
        bits = round(rate * 8)
        # A tree cannot be changed in place.
        lines = [f"qdisc replace dev {interface} root handle 2: pfifo"]
        lines += [
            f"qdisc replace dev {interface} root handle 9: htb default {_PROTECTED + self.bands - 1:x}",
            f"class add dev {interface} parent 9: classid 9:1 htb rate {bits}bit ceil {bits}bit burst {burst}"
            f" cburst {burst} quantum {_QUANTUM}",
        ]
        selective = self.drop == "selective" and host is not None
        for band in range(self.bands):
            leaves = {_PROTECTED + band: limit}
            if selective:
                leaves[_DROPPABLE + band] = spare_of(limit)
            for leaf, size in leaves.items():
                lines += self._leaf(interface, f"{leaf:x}", bits, burst, band, size)
        if host is not None and self.loses(host):
            lines += self._leaf(interface, _NOWHERE, bits, burst, 0, 1)
        filters = f"filter add dev {interface} parent 9: protocol"
        if host is not None and self.loses(host) and self.burst == 1:
            lines += [
                f"{filters} {protocol} bpf {self._random()} flowid 9:ff" for protocol in ("ip prio 1", "ipv6 prio 3")
            ]
        for service, leaf in self.places(selective=selective):
            lines += [
                f"{filters} ip prio 2 u32 match ip tos {service:#x} 0xfc flowid 9:{leaf:x}",
                f"{filters} ipv6 prio 4 u32 match ip6 priority {service:#x} 0xfc flowid 9:{leaf:x}",
            ]
        return lines

    def _leaf(self, interface: str, name: str, bits: int, burst: int, band: int, limit: int) -> list[str]:
        # Each leaf has a right to hardly anything, and borrows what those of higher priority leave.
        return [
            f"class add dev {interface} parent 9:1 classid 9:{name} htb rate {max(8, bits // 1000)}bit ceil {bits}bit"
            f" burst {burst} cburst {burst} prio {band} quantum {_QUANTUM}",
            f"qdisc add dev {interface} parent 9:{name} handle {name}: bfifo limit {limit}",
        ]

    def _random(self) -> str:
        """Return a program of classic BPF that matches a random share of all packets."""
        threshold = round(self.loss * 2**32)
        # ld rand; jge #threshold, 1, 0; ret match; ret none
        random = 2**32 - 0x1000 + 56
        return f"bytecode '4,32 0 0 {random},53 1 0 {threshold},6 0 0 4294967295,6 0 0 0'"

    def places(self, *, selective: bool) -> Iterator[tuple[int, int]]:
        """Return the type of service and the leaf of each DSCP that has one.

        Args:
            selective: whether there are short queues.
        """
        for urgency in range(4):  # AF4x to AF1x
            band = min(urgency, max(self.bands - 2, 0))
            for precedence in (1, 2, 3):
                droppable = precedence == 3 and selective
                yield service_of(urgency, precedence), (_DROPPABLE if droppable else _PROTECTED) + band


def spare_of(limit: int) -> int:
    """Return the bytes of the short queue beside one of ``limit`` bytes, where drop is selective."""
    return min(limit, max(_LEAST_SPARE, round(limit * _SPARE_SHARE)))


@dataclass(frozen=True, slots=True)
class BandStatus:
    """Counters of one queue of a port.

    Attributes:
        band: its priority; 0 goes first.
        droppable: whether it is the short one for what may be dropped.
        sent: packets.
        dropped: packets that found no room.
        marked: packets that had waited long, and were marked (ECN); None where this kernel cannot.
    """

    band: int
    droppable: bool
    sent: int
    dropped: int
    marked: int | None = None


def bands_of(leaves: Mapping[str, Mapping[str, Any]], marks: Mapping[int, int] | None = None) -> tuple[BandStatus, ...]:
    """Return the counters of a port's ``leaves``, as tc shows them, by handle, and of ``marks`` by DSCP."""
    found = []
    numbers = [int(handle.rstrip(":"), 16) for handle in leaves]
    last = sum(number >> 4 == _PROTECTED >> 4 for number in numbers) - 1
    places = dict(Conditions(last + 1).places(selective=True)) if marks and last >= 0 else {}
    counts = Counter[int]()
    for code, count in (marks or {}).items():
        counts[places.get(code << 2, _PROTECTED + last)] += count
    for handle, leaf in leaves.items():
        number = int(handle.rstrip(":"), 16)
        if number >> 4 in (_PROTECTED >> 4, _DROPPABLE >> 4):
            droppable = number >= _DROPPABLE
            marked = None if marks is None else counts[number]
            found.append(BandStatus(number & 15, droppable, leaf.get("packets", 0), leaf.get("drops", 0), marked))
    return tuple(sorted(found, key=lambda band: (band.band, band.droppable)))


def lost_of(leaves: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many packets a port has lost at random."""
    return leaves.get(f"{_NOWHERE}:", {}).get("drops", 0)


def tree_rate(text: str) -> float | None:
    """Return the bytes/s of a tree, of what ``tc class show`` says; None if there is none."""
    found = re.search(r"class htb 9:1 root .*?rate (\d+)([KMGT]?)bit", text)
    return int(found[1]) * 1000 ** " KMGT".index(found[2] or " ") / 8 if found else None
