"""Labs of real namespaces, read back with ip and tc, and their refusals."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretrain.errors import ConfigError
from foretrain.lab import Lab, LabError, iproute, labs, network, remove
from foretrain.lab.host import end, uninterrupted
from tests.processes import started


def ip(*arguments: str) -> list[dict]:
    return json.loads(subprocess.run(["ip", "-j", *arguments], capture_output=True, check=True).stdout or "[]")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def tbf(namespace: str, interface: str) -> dict | None:
    command = ["tc", "-j", "-r", "-n", namespace, "qdisc", "show", "dev", interface]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return next((entry["options"] for entry in found if entry["kind"] == "tbf"), None)


def identity(name: str) -> list[int]:
    """Changes when a lab is built anew."""
    return [Path(f"/run/netns/ft-{name}-{role}").stat().st_ino for role in ("sw", "h0")]


def sleeper(lab: Lab, host: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(lab.command(host, ["sleep", "600"]))


def inside(lab: Lab) -> list[int]:
    return [process.pid for process in network.processes(lab.name)]


def wait_until_inside(lab: Lab, process: subprocess.Popen[bytes]) -> None:
    while not any(found.pid == process.pid and "ip" not in found.command for found in network.processes(lab.name)):
        assert process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "Lab"}, ("name", "'Lab'")),
        ({"name": "a" * 40}, ("name",)),
        ({"hosts": 0}, ("hosts", "1 to 64")),
        ({"hosts": 65}, ("hosts", "1 to 64")),
        ({"rate": "1Gb"}, ("rate", "'1Gb'")),
        ({"rate": "1kbps"}, ("rate", "1Mbps")),
        ({"rate": "9Tbps"}, ("rate", "1Tbps")),
        ({"rate": "1Gbps", "queue": "8"}, ("queue", "'8'")),
        ({"rate": "1Gbps", "queue": "0ms"}, ("queue",)),
        ({"rate": "1Gbps", "queue": "60s"}, ("queue", "2 GiB")),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_touched(arguments, words, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ConfigError) as error:
        Lab.up(**arguments)
    for word in words:
        assert word in str(error.value)


def test_without_root_it_refuses_and_says_what_to_type(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for use in (Lab.up, Lab.find, remove, lambda: Lab("lab", 2).rate("1Gbps"), lambda: Lab("lab", 2).status()):
        with pytest.raises(LabError, match=r"needs root.*sudo"):
            use()


def test_without_the_tools_it_refuses_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match=r"'ip'.*apt-get install iproute2"):
        Lab.up()


@pytest.mark.parametrize(
    ("rate", "bytes_per_second", "burst", "limit"),
    [
        ("100Mbps", 12_500_000, 96 * 2**10, 512 * 2**10),
        (1.25e9, 1_250_000_000, 1_250_000, 10_000_000),
    ],
)
def test_hosts_have_an_address_and_both_ends_of_every_cable_are_shaped(name, rate, bytes_per_second, burst, limit):
    lab = Lab.up(name, 2, rate)
    for index, host in enumerate(lab.hosts):
        assert host.namespace == f"ft-{name}-h{index}"
        for namespace, interface in ((host.namespace, host.interface), (f"ft-{name}-sw", f"ftp{host.index}")):
            found = tbf(namespace, interface)
            assert found is not None
            assert (found["rate"], found["limit"]) == (bytes_per_second, limit)
            # The kernel counts a burst in ticks of 64 ns.
            assert found["burst"] == pytest.approx(burst, rel=0.01)
        links = {link["ifname"]: link for link in ip("-n", host.namespace, "address")}
        assert links.keys() == {"lo", host.interface}
        assert all("UP" in link["flags"] for link in links.values())
        assert links[host.interface]["mtu"] == 9000
        addresses = [f"{a['local']}/{a['prefixlen']}" for a in links[host.interface]["addr_info"]]
        assert addresses == [f"{host.address}/24"]
        assert host.address.startswith("10.77.")
    assert not {link["ifname"] for link in ip("link")} & {"fth0", "fth1", "ftp0", "ftp1", "ftbr"}


@pytest.mark.smoke
def test_bytes_arrive_and_are_counted(name):
    size = 3_000_000
    serve = f"""
import hashlib, socket
server = socket.create_server(("", 5999))
print("ready", flush=True)
peer, _ = server.accept()
data = b""
while part := peer.recv(1 << 16):
    data += part
print(len(data), hashlib.sha256(data).hexdigest())
assert len(data) == {size}
"""
    send = f"""
import socket, sys
peer = socket.create_connection((sys.argv[1], 5999))
peer.sendall(bytes(range(250)) * {size // 250})
"""
    with Lab.up(name, 3, "1Gbps") as lab:
        with started(lab.command(2, [sys.executable, "-c", serve]), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            run(*lab.command(0, [sys.executable, "-c", send, lab.hosts[2].address]))
            received = server.stdout.read().decode().split()
        assert received == [str(size), hashlib.sha256(bytes(range(250)) * (size // 250)).hexdigest()]
        hosts = lab.status().hosts
        assert size < hosts[0].sent < 1.1 * size
        assert size < hosts[2].received < 1.1 * size
        assert hosts[1].sent < 1000


def test_rates_queues_and_congestion_are_read_back(name):
    lab = Lab.up(name, 3, "1Gbps", congestion="reno")
    lab.rate("500Mbps", host=1, queue="50ms")
    lab.rate("none", host=2)
    first, second, third = lab.status().hosts
    assert (first.rate, first.receive_rate, first.queue) == (125e6, 125e6, 8_000_000_000)
    assert (second.rate, second.receive_rate, second.queue) == (62.5e6, 62.5e6, 50_000_000_000)
    assert (third.rate, third.receive_rate, third.queue) == (None, None, None)
    assert {host.congestion for host in (first, second, third)} == {"reno"}
    lab.rate("2Gbps")
    assert {host.rate for host in lab.status().hosts} == {250e6}
    with pytest.raises(ConfigError, match="choose 0 to 2"):
        lab.rate("1Gbps", host=3)


def test_up_again_keeps_the_lab_and_what_runs_inside(name):
    lab = Lab.up(name, 2, "1Gbps", congestion="cubic")
    before = identity(name)
    with sleeper(lab) as process:
        wait_until_inside(lab, process)
        Lab.up(name, 2, "1Gbps", congestion="cubic")
        again = Lab.up(name, 2, "200Mbps")
        assert identity(name) == before
        assert process.poll() is None
        process.terminate()
    status = again.status()
    assert {(host.rate, host.congestion, host.faults) for host in status.hosts} == {(25e6, None, ())}


def test_another_number_of_hosts_builds_it_anew_unless_something_lives_inside(name):
    lab = Lab.up(name, 2)
    before = identity(name)
    with sleeper(lab, 1) as process:
        wait_until_inside(lab, process)
        with pytest.raises(LabError, match=rf"{process.pid} sleep 600.*--name {name} --kill"):
            Lab.up(name, 3)
        assert identity(name) == before
        process.terminate()
    assert len(Lab.up(name, 3).status().hosts) == 3
    assert identity(name) != before
    assert len(Lab.find(name).hosts) == 3


def test_changes_by_hand_are_shown_and_repaired_in_place(name):
    lab = Lab.up(name, 2, "1Gbps")
    before = identity(name)
    for damage, fault in (
        ("ip -n ft-{}-h1 link set dev fth1 down", "fth1 is down"),
        ("ip -n ft-{}-h1 link set dev lo down", "lo is down"),
        ("ip -n ft-{}-h1 link set dev fth1 mtu 1500", "MTU is 1500"),
        ("ip -n ft-{}-h1 address flush dev fth1", "no address"),
        ("ip -n ft-{}-sw link set dev ftp1 nomaster", "unplugged"),
        ("ip -n ft-{}-sw link set dev ftp1 down", "down or unplugged"),
        ("tc -n ft-{}-sw qdisc del dev ftp1 root", "different rates"),
    ):
        run(*damage.format(name).split())
        assert fault in " ".join(lab.status().hosts[1].faults)
        assert lab.status().hosts[0].faults == ()
        Lab.up(name, 2, "1Gbps")
        assert lab.status().hosts[1].faults == ()
    assert identity(name) == before


def test_an_incomplete_lab_is_reported_and_rebuilt_or_removed(name):
    lab = Lab.up(name, 3, "1Gbps")
    for damage in (
        "ip netns delete ft-{}-h1",
        "ip netns delete ft-{}-sw",
        "ip netns add ft-{}-h5",
        "ip -n ft-{}-h1 link delete dev fth1",
        "ip -n ft-{}-sw link delete dev ftbr",
        "umount /run/netns/ft-{}-h1",  # a name without a namespace, as after a reboot
    ):
        run(*damage.format(name).split())
        with pytest.raises(LabError, match=rf"half there.*foretrain lab up --name {name}"):
            lab.status()
        whole = Lab.up(name, 3, "1Gbps").status()
        assert [host.rate for host in whole.hosts] == [125e6] * 3
        assert all(host.faults == () for host in whole.hosts)
    run("umount", f"/run/netns/ft-{name}-h0")
    assert remove(name) == ()
    assert not list(Path("/run/netns").glob(f"ft-{name}-*"))
    assert remove(name) == ()


@pytest.mark.parametrize("step", ["_create", "_configure", "_apply", "_await_links", "flows_of"])
def test_an_interrupted_up_leaves_nothing_behind(name, step, monkeypatch):
    """The last step is that of the ``with`` statement."""
    real = getattr(network, step)

    def interrupted(*arguments, **options):
        real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(network, step, interrupted)
    with pytest.raises(KeyboardInterrupt), Lab.up(name, 2, "1Gbps"):
        raise AssertionError("the block has begun")
    assert name not in labs()


def test_a_lab_that_stood_before_outlives_a_failed_change(name):
    Lab.up(name, 2, "1Gbps")
    with pytest.raises(LabError):
        Lab.up(name, 2, "1Gbps", congestion="nosuch")  # pyright: ignore
    assert [host.rate for host in Lab.find(name).status().hosts] == [125e6, 125e6]


def test_concurrent_changes_take_turns(name):
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(Lab.up, name, hosts) for hosts in (2, 3, 2, 3)]]
    assert len(Lab.find(name).hosts) in {len(lab.hosts) for lab in found}


def test_the_end_of_the_block_warns_of_surviving_processes(name, caplog):
    with caplog.at_level(logging.WARNING), Lab.up(name, 2) as lab:
        process = sleeper(lab)
        wait_until_inside(lab, process)
    assert f"process {process.pid} lives on: sleep 600" in caplog.text
    assert process.poll() is None
    process.terminate()
    process.wait()


def test_down_reports_and_with_kill_ends_only_what_lives_inside(name):
    lab = Lab.up(name, 2)
    with started(lab.command(0, ["sleep", "600"])) as within, started(["sleep", "600"]) as outside:
        wait_until_inside(lab, within)
        assert [(p.pid, p.command, p.host) for p in lab.status().hosts[0].processes] == [(within.pid, "sleep 600", 0)]
        assert lab.down(kill=True) == ()
        assert within.wait() == -15
        assert outside.poll() is None
        outside.terminate()
    assert name not in labs()


def test_a_process_that_ignores_sigterm_is_killed(name):
    lab = Lab.up(name, 2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    with started(lab.command(1, [sys.executable, "-c", deaf]), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"deaf\n"
        end(lambda: network.processes(name), timeout=0.2)
        assert process.wait() == -9
    assert inside(lab) == []


def test_signals_wait_until_the_clean_up_is_done():
    done = []

    def tidy(number: signal.Signals) -> None:
        with uninterrupted():
            signal.raise_signal(number)
            done.append(number)

    with pytest.raises(KeyboardInterrupt):
        tidy(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, lambda number, frame: done.append("terminated"))
    try:
        tidy(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == [signal.SIGINT, signal.SIGTERM, "terminated"]


def test_labs_with_a_common_prefix_are_independent(name):
    other = f"{name}-h0"
    try:
        Lab.up(name, 1)
        Lab.up(other, 2)
        assert {name, other} <= set(labs())
        Lab.find(name).down()
        assert len(Lab.find(other).hosts) == 2
        with pytest.raises(LabError, match=rf"no lab '{name}' \(known: .*{other}.*foretrain lab up --name {name}"):
            Lab.find(name)
    finally:
        remove(other)


def test_a_lab_is_there_once_the_kernel_has_opened_its_links(name, monkeypatch):
    opened, links = [False] * 5 + [True] * 3, iproute.links

    def answered(namespace):
        state = {} if opened.pop(0) else {"operstate": "DOWN"}
        return {interface: link | state for interface, link in links(namespace).items()}

    monkeypatch.setattr(iproute, "links", answered)
    with Lab.up(name, 2):
        assert not opened
        monkeypatch.undo()
    monkeypatch.setattr(network, "_OPENING", 0.0)
    monkeypatch.setattr(iproute, "links", lambda namespace: defaultdict(lambda: {"operstate": "DOWN"}))
    with pytest.raises(LabError, match=f"links of ft-{name}-h0 do not open within 0 s"):
        Lab.up(name, 2)
    monkeypatch.undo()
    assert name not in labs()
