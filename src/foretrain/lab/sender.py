"""Program of a background flow: send bursts of UDP datagrams from one host of a lab. `background` starts it.

    sender.py NAMESPACE ADDRESS HOST RATE OWNER

It knows no other module of foretrain, so that it starts at once and stays small. All senders of a lab begin their
bursts at the same times, multiples of PERIOD, which makes incast of them. It ends when its namespace has no name any
more, when SIGTERM comes, or with process OWNER; 0 is nobody.
"""

import os
import select
import socket
import sys
import time

PERIOD = 0.01
"""Seconds from burst to burst."""
SIZE = 8972
"""Bytes of a datagram: the lab's MTU without headers of IP and UDP."""
_TOGETHER = 7
"""Most datagrams of a call, as it takes 64 KiB."""
_UDP_SEGMENT = 103
_BEHIND = 4
"""Most periods that a sender makes up for when it was late."""


def main(namespace: str, address: str, rate: float, owner: int) -> None:
    """Send ``rate`` bytes/s to ``address``, in the background of whoever calls the program."""
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    out.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, SIZE)
    out.connect((address, 9))
    watched = [os.pidfd_open(owner)] if owner else []
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    due, last = 0.0, time.monotonic()
    while _named(namespace) and not select.select(watched, [], [], PERIOD - time.monotonic() % PERIOD)[0]:
        now = time.monotonic()
        due, last = due + rate * min(now - last, _BEHIND * PERIOD), now
        while due >= SIZE:
            count = min(_TOGETHER, int(due // SIZE))
            out.send(bytes(count * SIZE))
            due -= count * SIZE


def _named(namespace: str) -> bool:
    """Return whether ``namespace`` is still the name of this process's own."""
    try:
        return os.stat(f"/run/netns/{namespace}").st_ino == os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[4]), int(sys.argv[5]))
