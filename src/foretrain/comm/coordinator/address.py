"""Where a rank listens: on one address of one interface, never on all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct

from foretrain.errors import ConfigError

_SIOCGIFADDR = 0x8915
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def local_address(interface: str | None, towards: tuple[str, int] | None) -> str:
    """The IPv4 address of this host to listen on.

    That of ``interface`` if given; else of the first of GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (a prefix, as NCCL reads
    it) and TP_SOCKET_IFNAME that is one plain name and not a list or pattern; else the one this host would use to reach
    ``towards`` (nothing is sent); else 127.0.0.1. Where ``towards`` is this host itself, the answer may be a loopback
    address that other hosts cannot reach.

    Raises:
        ConfigError: the interface does not exist or has no IPv4 address.
    """
    if interface is not None:
        return _interface_address("interface", interface)
    for variable in _INTERFACE_VARIABLES:
        name = os.environ.get(variable, "")
        if re.fullmatch(r"[\w.-]+", name):
            return _interface_address(variable, name, prefix=variable.startswith("NCCL"))
    if towards is not None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(towards)
            return probe.getsockname()[0]
    return "127.0.0.1"


def _interface_address(variable: str, name: str, prefix: bool = False) -> str:
    known = {each: address for _, each in socket.if_nameindex() if (address := _address_of(each))}
    if name in known:
        return known[name]
    for each in known:
        if prefix and each.startswith(name):
            return known[each]
    shown = ", ".join(f"{each} ({address})" for each, address in known.items())
    raise ConfigError(variable, name, "is no interface with an IPv4 address", f"this host has: {shown or 'none'}")


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifreq: 16 bytes of name, then a sockaddr_in whose address begins at its fifth byte.
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
