"""A path through routers whose middle takes smaller packets than both ends: namespaces of this machine."""

import ctypes
import os
import secrets
import subprocess
from itertools import pairwise

import numpy as np
import pytest

from foretrain.comm.bounded import engine
from foretrain.comm.bounded.collectives import BoundedCollectives, connect_engine
from foretrain.comm.bounded.engine import EngineOptions
from tests.comm.bounded.group import Exchange, has_ipv6, in_threads
from tests.comm.collectives.test_ring import inputs, run

NARROW = 1300
FORWARD = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}


def address(net: int, side: int, version: int) -> str:
    return f"10.77.{net}.{side}" if version == 4 else f"fd77:{net}::{side}"


def routed(name: str, version: int) -> list[str]:
    """Make h0 ── h1 ── h2 ── h3, all of 9,000 bytes but the middle; return the namespaces of both ends."""
    spaces = [f"ft-{name}-{each}" for each in ("h0", "h1", "h2", "h3")]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    for space in spaces:
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
    for net, (left, right) in enumerate(pairwise(spaces)):
        ip("link", "add", "right", "netns", left, "type", "veth", "peer", "name", "left", "netns", right)
        for space, device, side in ((left, "right", 1), (right, "left", 2)):
            ip("-n", space, "link", "set", device, "mtu", str(NARROW if net == 1 else 9000), "up")
            length = "24" if version == 4 else "64"
            nodad = ("nodad",) if version == 6 else ()
            ip("-n", space, "address", "add", f"{address(net, side, version)}/{length}", "dev", device, *nodad)
    for space, towards in zip(spaces, ((0, 2), (1, 2), (1, 1), (2, 1)), strict=True):
        ip("-n", space, f"-{version}", "route", "add", "default", "via", address(*towards, version))
    for space in spaces[1:3]:
        set_ = f"echo 1 > /proc/sys/{FORWARD[version]}"
        subprocess.run(["ip", "netns", "exec", space, "sh", "-c", set_], check=True, capture_output=True)
    return [spaces[0], spaces[-1]]


@pytest.mark.parametrize("mtu", [576, 600, 1280, 1500, 9000])
def test_packets_fit_the_mtu_of_the_interface(mtu, monkeypatch):
    monkeypatch.setattr(engine, "_mtu", lambda family, address: mtu)
    with engine.open_socket("127.0.0.1") as made:
        path = engine.own_path(made, [made.getsockname(), ("127.0.0.1", 9)], 0)
    packet = path.payload + engine.HEADER + 28
    assert packet <= mtu
    assert packet > mtu - 16 or path.payload == 8192


@pytest.mark.parametrize("version", [4, pytest.param(6, marks=has_ipv6)])
def test_a_narrow_path_loses_nothing(name, version):
    spaces, exchange, secret = routed(name, version), Exchange(2), secrets.token_bytes(32)
    hosts = [address(0, 1, version), address(2, 2, version)]

    def connected(rank):
        entered = os.open(f"/run/netns/{spaces[rank]}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(entered, 0x40000000) == 0  # of this thread alone, which ends after this
        os.close(entered)
        return connect_engine(hosts[rank], exchange.of(rank), secret, rank, 2, EngineOptions(blocked=5.0, timeout=30.0))

    made = in_threads(2, connected)
    members = [BoundedCollectives(each, rank, 2) for rank, each in enumerate(made)]
    try:
        assert made[0].path.payload > NARROW
        for _ in range(3):
            arrays, total = inputs("float32", 2, 300_000)
            run(members, "all_reduce", arrays)
            np.testing.assert_array_equal(arrays[1], total)
        assert not any(each.counted()["over_tcp"] for each in made)
    finally:
        for each in members:
            each.close()
