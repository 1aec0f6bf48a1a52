"""Tree of queues of a port, as ``tc`` builds it, and its counters.

    ets   root htb 9: ─┬─ 9:1   the link's rate ── ets 8: ─┬─ band 0, ets 30: ─┬─ droppable  red, short
                       │                                   │                   └─ protected  red that marks
                       │                                   └─ band 1, …
                       └─ 9:ff  bfifo that holds nothing: losses

    htb   root htb 9: ─┬─ 9:1   the link's rate ──┬─ band 0  protected  bfifo
                       │                          │          droppable  bfifo, short
                       │                          └─ band 1  …
                       └─ 9:ff  bfifo that holds nothing: losses

Kernels with the queueing disciplines ets and red get the first form, all others the second, where eBPF marks
(`port_programs`). Ports of the switch have short queues where drop is selective, a host's own interface never: real
hosts do not drop selectively, switches do. The short queue takes the packets that several hosts send at once, or it
would drop what nothing else waits for.

A packet's DSCP chooses its queue: AF4x is band 0, what has none the last one, and AF3x to AF1x the second of three.
AFx3, the highest drop precedence (RFC 2597), may be dropped. The droppable and the protected packets of a band take
turns. A filter of classic BPF sends a random share of packets nowhere; where losses come in bursts it is a program of
eBPF, which has a memory. Filters see IPv4 and IPv6.

Leaves have the same handles in both forms: 10: to 12: what is protected, by band, and 20: to 22: what may be dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from foretrain.comm.bounded import service_of
from foretrain.lab import iproute
from foretrain.lab.conditions import MTU, Conditions, spare_of
from foretrain.lab.iproute import LabError

Form: TypeAlias = Literal["ets", "htb"]
"""Queueing disciplines that make bands and marks: ets and red, or htb and eBPF."""

ROOT, NOWHERE = 0x90000, 0x900FF
"""Handles of the tree, and of the class for packets that are lost."""
MARKED_FROM = 1 / 4
"""Share of a full queue behind which a packet is marked."""
_PROTECTED, _DROPPABLE, _PAIR = 0x10, 0x20, 0x30
"""Handles of band 0; those of the next bands follow."""
_NOWHERE = "ff"
_QUANTUM = 18_000
_FASTEST_IDLE = 10**10
"""Most bit/s that red is told; it takes 32 bits of bytes/s, to forget lengths of the queue while nothing comes."""


@cache
def form() -> Form:
    """Return the form that this kernel can build; one is tried in a network namespace that ends with its command."""
    lines = lines_of(Conditions(2, "selective"), "lo", 1.25e8, 2**17, 2**20, host=0, form="ets")
    try:
        iproute.run(iproute.tool("unshare"), "--net", iproute.tool("tc"), lines=lines)
    except LabError:
        return "htb"
    return "ets"


def lines_of(
    conditions: Conditions, interface: str, rate: float, burst: int, limit: int, *, host: int | None, form: Form
) -> list[str]:
    """Return the lines for ``tc -batch`` that shape ``interface``.

    Args:
        conditions: of the lab's links.
        interface: a host's, or a port of the switch.
        rate: bytes/s.
        burst: bytes that may go at once.
        limit: bytes of a queue.
        host: the host that the port leads to; None for a host's own interface, which loses nothing.
        form: of the tree.
    """
    bits, device = round(rate * 8), f"dev {interface}"
    selective = conditions.drop == "selective" and host is not None
    last = _PROTECTED + conditions.bands - 1
    rest = f"burst {burst} cburst {burst}"
    lines = [
        # A tree cannot be changed in place.
        f"qdisc replace {device} root handle 2: pfifo",
        f"qdisc replace {device} root handle 9: htb default {1 if form == 'ets' else last:x}",
        f"class add {device} parent 9: classid 9:1 htb rate {bits}bit ceil {bits}bit {rest} quantum {_QUANTUM}",
    ]
    if host is not None and conditions.loses(host):
        lines += [
            f"class add {device} parent 9: classid 9:{_NOWHERE} htb rate {bits}bit {rest} quantum {_QUANTUM}",
            f"qdisc add {device} parent 9:{_NOWHERE} handle {_NOWHERE}: bfifo limit 1",
        ]
        if conditions.burst == 1:
            matches = f"bpf {_random(conditions.loss)} flowid 9:{_NOWHERE}"
            lines += [
                f"filter add {device} parent 9: protocol {each} {matches}" for each in ("ip prio 1", "ipv6 prio 3")
            ]
    if form == "ets":
        lines += _bands_of_ets(device, conditions.bands, bits, limit, selective=selective)
    else:
        lines += _bands_of_htb(device, conditions.bands, bits, limit, rest, selective=selective)
    return lines


def _bands_of_ets(device: str, bands: int, bits: int, limit: int, *, selective: bool) -> Iterator[str]:
    yield f"qdisc add {device} parent 9:1 handle 8: ets bands {bands} strict {bands}"
    for band in range(bands):
        protected, droppable, pair = (f"{leaf + band:x}" for leaf in (_PROTECTED, _DROPPABLE, _PAIR))
        if selective:
            # What no filter matches goes to the last band of ets.
            yield f"qdisc add {device} parent 8:{band + 1} handle {pair}: ets bands 2 quanta {_QUANTUM} {_QUANTUM}"
            spare = spare_of(limit)
            yield f"qdisc add {device} parent {pair}:1 handle {droppable}: {_red(2 * spare, spare, bits)}"
            marking = _red(limit, round(limit * MARKED_FROM), bits)
            # What is not capable of ECN waits (nodrop), and only a full queue drops it.
            yield f"qdisc add {device} parent {pair}:2 handle {protected}: {marking} ecn nodrop"
        else:
            yield f"qdisc add {device} parent 8:{band + 1} handle {protected}: bfifo limit {limit}"
    for service, leaf in places(bands, selective=selective):
        band = leaf & 15
        yield from _matches(device, "8:", service, f"8:{band + 1}")
        if leaf >= _DROPPABLE:
            yield from _matches(device, f"{_PAIR + band:x}:", service, f"{_PAIR + band:x}:1")


def _red(limit: int, threshold: int, bits: int) -> str:
    """Return a red that acts on each packet that comes while more than ``threshold`` bytes wait.

    It averages over as few packets as red can: each halves the weight of those before.
    """
    lengths = f"min {threshold} max {threshold} avpkt {MTU} burst {math.ceil(threshold / MTU)} probability 1"
    return f"red limit {limit} {lengths} bandwidth {min(bits, _FASTEST_IDLE)}bit"


def _bands_of_htb(device: str, bands: int, bits: int, limit: int, rest: str, *, selective: bool) -> Iterator[str]:
    for band in range(bands):
        leaves = {_PROTECTED + band: limit} | ({_DROPPABLE + band: spare_of(limit)} if selective else {})
        for leaf, size in leaves.items():
            # Each leaf has a right to hardly anything, and borrows what those of higher priority leave.
            rates = f"rate {max(8, bits // 1000)}bit ceil {bits}bit {rest} prio {band} quantum {_QUANTUM}"
            yield f"class add {device} parent 9:1 classid 9:{leaf:x} htb {rates}"
            yield f"qdisc add {device} parent 9:{leaf:x} handle {leaf:x}: bfifo limit {size}"
    for service, leaf in places(bands, selective=selective):
        yield from _matches(device, "9:", service, f"9:{leaf:x}")


def _matches(device: str, parent: str, service: int, target: str) -> Iterator[str]:
    filters = f"filter add {device} parent {parent} protocol"
    yield f"{filters} ip prio 2 u32 match ip tos {service:#x} 0xfc flowid {target}"
    yield f"{filters} ipv6 prio 4 u32 match ip6 priority {service:#x} 0xfc flowid {target}"


def _random(share: float) -> str:
    """Return a program of classic BPF that matches a random share of all packets."""
    threshold = round(share * 2**32)
    # ld rand; jge #threshold, 1, 0; ret match; ret none
    random = 2**32 - 0x1000 + 56
    return f"bytecode '4,32 0 0 {random},53 1 0 {threshold},6 0 0 4294967295,6 0 0 0'"


def places(bands: int, *, selective: bool) -> Iterator[tuple[int, int]]:
    """Return the type of service and the leaf of each DSCP that has one.

    Args:
        bands: number of them.
        selective: whether there are short queues.
    """
    for urgency in range(4):  # AF4x to AF1x
        band = min(urgency, max(bands - 2, 0))
        for precedence in (1, 2, 3):
            droppable = precedence == 3 and selective
            yield service_of(urgency, precedence), (_DROPPABLE if droppable else _PROTECTED) + band


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
    """Return the counters of a port's ``leaves``, as tc shows them, by handle.

    Args:
        leaves: of the tree.
        marks: what eBPF has marked, by DSCP; None where red does, or nothing.
    """
    found = []
    numbers = [int(handle.rstrip(":"), 16) for handle in leaves]
    last = sum(number >> 4 == _PROTECTED >> 4 for number in numbers) - 1
    by_code = dict(places(last + 1, selective=True)) if marks and last >= 0 else {}
    counts = Counter[int]()
    for code, count in (marks or {}).items():
        counts[by_code.get(code << 2, _PROTECTED + last)] += count
    for handle, leaf in leaves.items():
        number = int(handle.rstrip(":"), 16)
        if number >> 4 in (_PROTECTED >> 4, _DROPPABLE >> 4):
            droppable = number >= _DROPPABLE
            marked = leaf.get("marked") if marks is None else counts[number]
            found.append(BandStatus(number & 15, droppable, leaf.get("packets", 0), leaf.get("drops", 0), marked))
    return tuple(sorted(found, key=lambda band: (band.band, band.droppable)))


def lost_of(leaves: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many packets a port has lost at random."""
    return leaves.get(f"{_NOWHERE}:", {}).get("drops", 0)


def form_of(leaves: Mapping[str, Mapping[str, Any]]) -> Form | None:
    """Return the form of a port's tree; None where there is none."""
    if not leaves:
        return None
    return "ets" if any(leaf.get("kind") == "ets" for leaf in leaves.values()) else "htb"
