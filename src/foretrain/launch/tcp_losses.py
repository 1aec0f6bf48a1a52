"""Losses of this process's TCP connections, as the kernel counts them: how many packets went again."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

LOSSY = 0.001
"""Share of packets that go again from which on a network loses some, and is not clean."""
_SENT_AGAIN, _SENT = 100, 156
"""Places of ``tcpi_total_retrans`` and ``tcpi_data_segs_out`` in Linux's ``tcp_info``."""


def sent_again() -> tuple[int, int]:
    """Return packets that all TCP connections of this process have sent again, and sent at all, since they began."""
    again = sent = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it may be closed by now
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.type != socket.SOCK_STREAM or each.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                found = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT + 4).ljust(_SENT + 4, b"\0")
                again += struct.unpack_from("=I", found, _SENT_AGAIN)[0]
                sent += struct.unpack_from("=I", found, _SENT)[0]
    return again, sent


def loss_advice(again: int, sent: int) -> str:
    """Return whether bounded loss is recommended where ``again`` of ``sent`` packets went again."""
    share = again / max(sent, 1)
    found = f"{share:.2%} of the packets went again over TCP"
    if share < LOSSY:
        return f"{found}: bounded loss (--tolerance) gains nothing on such a clean network, and is not recommended"
    return (
        f"{found}: where packets are lost, TCP waits 200 ms for the last ones. Set its least timeout to 10 ms (sysctl "
        "net.ipv4.tcp_rto_min_us=10000, or ip route change … rto_min 10ms); then compare with --tolerance 0.01, or "
        "auto (docs/bounded.md)"
    )
