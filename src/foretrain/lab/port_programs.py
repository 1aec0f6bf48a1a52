"""Programs (eBPF) of a lab's ports: losses in bursts, and marks of congestion (ECN).

Marks go by the time that a packet has waited, as in TCN ("Enabling ECN over Generic Packet Scheduling", CoNEXT 2016):
the switch stamps a packet when it comes to the queues of a port, and the other end of the cable marks it where that was
too long ago. So marks need no length of a queue, and hold under strict priority. Not every kernel has RED or CoDel.

The loader makes system calls alone: no compiler, and no file system for bpf. Programs are lists of instructions, whose
jumps name labels. `attach` hands one to a queueing discipline as a classifier (``tc filter ... bpf`` takes such
programs only from files).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from foretrain.lab import iproute
from foretrain.lab.iproute import LabError

_CERTAIN = 2**32
_LOOKUP, _NOW, _RANDOM, _SET_CE, _SET_STAMP = 1, 5, 7, 97, 192
_STAMP, _STAMP_TYPE, _MONOTONIC = 152, 180, 1
"""Places in the kernel's struct __sk_buff."""
_CODES = 64
_CALL = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _MAP_LOOKUP, _PROG_LOAD = 0, 1, 5
_PROG_BY_ID, _MAP_BY_ID, _INFO = 13, 14, 15
_ARRAY, _CLASSIFIER = 2, 3
_NEW_NETWORK = 0x40000000
_NEW_FILTER, _REQUEST_ACK_CREATE = 44, 0x1 | 0x4 | 0x400
_IPV4, _IPV6 = 0x0800, 0x86DD
PROTOCOLS = {_IPV4: 1, _IPV6: 3}
"""Whose packets programs see, and the priority of their filters: each is before those of DSCP."""
INGRESS = 0xFFFFFFF2
"""Parent of programs that see what an interface receives."""


def lose_bursts(namespace: str, interface: str, parent: int, nowhere: int, share: float, burst: float) -> None:
    """Send a ``share`` of all packets to class ``nowhere``, in bursts of mean length ``burst``.

    This is Gilbert's and Elliott's model, as the packet simulation has it (`LinkLosses.bursts`): at each packet a burst
    begins with one probability and ends with another, and all packets of a burst are lost.
    """
    map_ = array(1)
    with opened(map_):
        program = load(burst_losses(map_, share / (burst * (1 - share)), 1 / burst))
        with opened(program):
            for protocol in PROTOCOLS:
                attach(namespace, interface, parent, program, nowhere, protocol=protocol)


def burst_losses(map_: int, begins: float, ends: float) -> Program:
    """Return a program that returns -1 for packets of a burst; whether there is one stands in ``map_``."""
    return [
        *state(map_),
        Op(0xBF, 6, 0),  # r6 = the state's address
        Op(0x85, 0, 0, 0, _RANDOM),
        Op(0x61, 1, 6),  # r1 = the state
        Op(0x55, 1, 0, "in a burst", 0),
        Op(0x36, 0, 0, "passes", _threshold(begins)),  # if random >= begins
        Op(0x62, 6, 0, 0, 1),
        Op(0x05, 0, 0, "lost"),
        "in a burst",
        Op(0x36, 0, 0, "lost", _threshold(ends)),
        Op(0x62, 6, 0, 0, 0),
        "passes",
        Op(0xB7, 0, 0, 0, 0),
        Op(0x95),
        "lost",
        Op(0xB7, 0, 0, 0, -1),
        Op(0x95),
    ]


def _threshold(chance: float) -> int:
    return min(round(chance * _CERTAIN), _CERTAIN - 1)


def mark_waiting(switch: str, port: str, parent: int, host: str, interface: str, longest: int) -> None:
    """Mark packets through ``port`` of the switch as congested that have waited longer than ``longest`` nanoseconds."""
    stamp = [Op(0xBF, 6, 1), Op(0x85, 0, 0, 0, _NOW), Op(0xBF, 1, 6), Op(0xBF, 2, 0), Op(0xB7, 3, 0, 0, _MONOTONIC)]
    stamp += [Op(0x85, 0, 0, 0, _SET_STAMP), Op(0xB7), Op(0x95)]
    with opened(array(_CODES)) as (counts,), opened(load(stamp)) as (stamps,):
        iproute.run(iproute.tool("tc"), "-n", host, "qdisc", "replace", "dev", interface, "clsact")
        for protocol in PROTOCOLS:
            with opened(load(_mark(counts, longest, protocol))) as (marks,):
                attach(host, interface, INGRESS, marks, protocol=protocol)
            attach(switch, port, parent, stamps, protocol=protocol)


def unmark(host: str, interface: str) -> None:
    """Remove what `mark_waiting` left at a host, if it did."""
    with contextlib.suppress(LabError):
        iproute.run(iproute.tool("tc"), "-n", host, "qdisc", "delete", "dev", interface, "clsact")


def marked(host: str, interface: str) -> Mapping[int, int] | None:
    """Return how many packets to a host were marked, by DSCP; None where nothing marks."""
    shown = iproute.filters(host, interface)
    numbers = [each["options"]["prog"]["id"] for each in shown if "prog" in each.get("options", ())]
    return dict(enumerate(entries(numbers[0], _CODES))) if numbers else None


def _mark(counts: int, longest: int, protocol: int) -> Program:
    # r0 = the DSCP: of IPv6 it stands behind four bits of version.
    code = [Op(0x30, 0, 0, 0, 15)] if protocol == _IPV4 else [Op(0x28, 0, 0, 0, 14), Op(0x77, 0, 0, 0, 4)]
    code += [Op(0x57, 0, 0, 0, 0xFF), Op(0x77, 0, 0, 0, 2)]
    return [
        Op(0xBF, 6, 1),  # r6 = the packet
        Op(0x71, 1, 6, _STAMP_TYPE),
        Op(0x55, 1, 0, "passes", _MONOTONIC),  # it was not stamped
        Op(0x79, 7, 6, _STAMP),
        Op(0x85, 0, 0, 0, _NOW),
        Op(0x1F, 0, 7),  # r0 = how long it has waited
        Op(0xA5, 0, 0, "passes", min(longest, 2**31 - 1)),
        Op(0xBF, 1, 6),
        Op(0x85, 0, 0, 0, _SET_CE),
        Op(0x15, 0, 0, "passes", 0),  # it is not capable of ECN
        *code,
        Op(0x63, 10, 0, -4),
        Op(0xBF, 2, 10),
        Op(0x07, 2, 0, 0, -4),
        Op(0x18, 1, 1, 0, counts),
        Op(0),
        Op(0x85, 0, 0, 0, _LOOKUP),
        Op(0x15, 0, 0, "passes", 0),
        Op(0xB7, 1, 0, 0, 1),
        Op(0xDB, 0, 1),  # count it
        "passes",
        Op(0xB7),
        Op(0x95),
    ]


# The loader


class Op(NamedTuple):
    """Instruction of eBPF: its code, registers, offset or label of a jump, and constant."""

    code: int
    to: int = 0
    source: int = 0
    offset: int | str = 0
    value: int = 0


Program: TypeAlias = "Sequence[Op | str]"
"""Instructions, and labels before those that they name."""


def state(map_: int, key: int = 0) -> list[Op]:
    """Return the instructions that put the address of entry ``key`` of a map into r0; they end where there is none."""
    return [
        Op(0x62, 10, 0, -4, key),  # *(u32 *)(r10 - 4) = key
        Op(0xBF, 2, 10),  # r2 = r10
        Op(0x07, 2, 0, 0, -4),  # r2 += -4
        Op(0x18, 1, 1, 0, map_),  # r1 = map
        Op(0),
        Op(0x85, 0, 0, 0, 1),  # r0 = map_lookup_elem(r1, r2)
        Op(0x55, 0, 0, 1, 0),  # if r0 != 0 skip
        Op(0x95),  # return 0
    ]


def assemble(program: Program) -> bytes:
    """Return the machine code of ``program``."""
    places: dict[str, int] = {}
    ops: list[Op] = []
    for each in program:
        if isinstance(each, str):
            places[each] = len(ops)
        else:
            ops.append(each)
    code = b""
    for place, op in enumerate(ops):
        offset = places[op.offset] - place - 1 if isinstance(op.offset, str) else op.offset
        code += struct.pack("<BBhI", op.code, op.source << 4 | op.to, offset, op.value % 2**32)
    return code


def array(entries: int) -> int:
    """Return a descriptor of a new map of ``entries`` integers of 8 bytes, all 0."""
    return _bpf(_MAP_CREATE, struct.pack("<IIII", _ARRAY, 4, 8, entries))


def load(program: Program) -> int:
    """Return a descriptor of ``program``, which the kernel has verified."""
    code = assemble(program)
    kept, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    where = (ctypes.addressof(kept), ctypes.addressof(licence))
    return _bpf(_PROG_LOAD, struct.pack("<IIQQIIQ", _CLASSIFIER, len(code) // 8, *where, 0, 0, 0))


def attach(namespace: str, interface: str, parent: int, descriptor: int, target: int = 0, *, protocol: int) -> None:
    """Let a program see each packet of ``protocol`` on ``interface`` in ``namespace``, before filters of DSCP.

    Args:
        namespace: of the interface.
        interface: its name.
        parent: handle of the queueing discipline with classes, or INGRESS, which needs clsact.
        descriptor: of the program. The kernel keeps it as long as the discipline.
        target: class of a packet for which the program returns -1. With 0 it goes on to the next filter.
        protocol: one of PROTOCOLS.
    """
    index = iproute.links(namespace)[interface]["ifindex"]
    options = _attribute(3, struct.pack("=I", target)) + _attribute(6, struct.pack("=I", descriptor))
    options += _attribute(7, b"foretrain\0")
    info = PROTOCOLS[protocol] << 16 | socket.htons(protocol)
    body = struct.pack("=BxxxiIII", 0, index, 0, parent, info) + _attribute(1, b"bpf\0") + _attribute(2, options)
    header = struct.pack("=IHHII", 16 + len(body), _NEW_FILTER, _REQUEST_ACK_CREATE, 1, 0)
    with closing(_netlink(namespace)) as kernel:
        kernel.send(header + body)
        (number,) = struct.unpack_from("=i", kernel.recv(1 << 16), 16)
    if number:
        raise LabError(f"the kernel attaches no eBPF program to {interface}: {os.strerror(-number)}")


def entries(program: int, count: int) -> list[int]:
    """Return the first ``count`` entries of the map of the program with that number of the kernel's."""
    number, key, value = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint64()
    info = ctypes.create_string_buffer(struct.pack("<52xIQ", 1, ctypes.addressof(number)), 64)
    with opened(_bpf(_PROG_BY_ID, struct.pack("<I", program))) as (descriptor,):
        _bpf(_INFO, struct.pack("<IIQ", descriptor, 64, ctypes.addressof(info)))
    found = []
    with opened(_bpf(_MAP_BY_ID, struct.pack("<I", number.value))) as (descriptor,):
        for key.value in range(count):
            _bpf(_MAP_LOOKUP, struct.pack("<IxxxxQQ", descriptor, ctypes.addressof(key), ctypes.addressof(value)))
            found.append(value.value)
    return found


@contextmanager
def opened(*descriptors: int) -> Iterator[tuple[int, ...]]:
    """Return ``descriptors``, and close them at the end of the block."""
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _netlink(namespace: str) -> socket.socket:
    """Return a netlink socket in ``namespace``, made by a thread that moves there, and ends."""
    made: list[socket.socket] = []

    def make() -> None:
        with Path("/run/netns", namespace).open() as file:
            if ctypes.CDLL(None).setns(file.fileno(), _NEW_NETWORK) == 0:
                made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise LabError(f"the namespace {namespace} cannot be entered; build the lab anew")
    return made[0]


def _bpf(command: int, attributes: bytes) -> int:
    number, library = _CALL.get(os.uname().machine), ctypes.CDLL(None, use_errno=True)
    given = ctypes.create_string_buffer(attributes, 128)
    found = library.syscall(number, command, given, 128) if number else -1
    if found < 0:
        said = os.strerror(ctypes.get_errno()) if number else "unknown kind of machine"
        raise LabError(f"the kernel refuses an eBPF program, which bursts of losses and marks need: {said}")
    return found
