"""Addresses of hosts: which one a rank listens on, and how ranks tell each other theirs. IPv4, and IPv6 without it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError

_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"
"""Scope of an IPv6 address that means nothing on another host."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"


def resolved(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the socket's address of a host and port: IPv4's where the host has both.

    Raises:
        OSError: no such host is known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address


def split(text: str) -> tuple[str, str]:
    """Return host and port of ``text``: ``"10.0.0.5:29501"``, ``"[fd00::5]:29501"``."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), port


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address that means this host on every host."""
    return host.startswith("127.") or host == "::1"


def local_address(interface: str | None, towards: tuple[str, int] | None) -> str:
    """Return the address of this host to listen on.

    That of ``interface`` if given; else of the first of GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (a prefix, as NCCL reads
    it) and TP_SOCKET_IFNAME that is one plain name and not a list or pattern; else the one this host would use to reach
    ``towards`` (nothing is sent); else 127.0.0.1. Where ``towards`` is this host itself, the answer may be a loopback
    address that other hosts cannot reach.

    Raises:
        ConfigError: the interface does not exist or has no address.
    """
    if interface is not None:
        return _interface_address("interface", interface)
    for variable in _INTERFACE_VARIABLES:
        name = os.environ.get(variable, "")
        if re.fullmatch(r"[\w.-]+", name):
            return _interface_address(variable, name, prefix=variable.startswith("NCCL"))
    if towards is not None:
        with contextlib.suppress(OSError):
            family, address = resolved(*towards)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return _LOOPBACK


def _interface_address(variable: str, name: str, prefix: bool = False) -> str:
    known = {each: found[0] for _, each in socket.if_nameindex() if (found := addresses_of(each))}
    if name in known:
        return known[name]
    for each in known:
        if prefix and each.startswith(name):
            return known[each]
    shown = ", ".join(f"{each} ({address})" for each, address in known.items())
    raise ConfigError(variable, name, "is no interface with an address", f"this host has: {shown or 'none'}")


def addresses_of(interface: str, *, link_local: bool = False) -> list[str]:
    """Return the addresses of an interface: the first of IPv4, then those of IPv6, link-local ones where asked for."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # struct ifreq: 16 bytes of name, then a sockaddr_in whose address begins at its fifth byte.
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and (link_local or scope != _LINK_LOCAL):
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def encoded(host: str, port: int) -> list[int]:
    """Return an address as integers of 64 bits."""
    data = socket.inet_pton(socket.AF_INET6, host) if ":" in host else socket.inet_aton(host)
    first, second = struct.unpack("<qq", data.ljust(16, b"\0"))
    return [len(data), first, second, port]


def decoded(row: Sequence[int]) -> tuple[str, int]:
    """Return the host and port of `encoded`."""
    size, first, second, port = row
    data = struct.pack("<qq", first, second)[:size]
    return socket.inet_ntop(socket.AF_INET6 if size == 16 else socket.AF_INET, data), port
