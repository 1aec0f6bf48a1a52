"""Bands, selective drop and losses of a lab's links, as the kernel makes them."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from foretrain.comm.bounded import service_of
from foretrain.errors import ConfigError
from foretrain.lab import Conditions, HostStatus, Lab, iproute, labs, network
from foretrain.lab.host import senders
from foretrain.lab.iproute import tree_rate
from foretrain.lab.port_queues import bands_of, form
from foretrain.units import parse_rate
from tests.processes import started
from tests.waiting import until

SINK = """
import socket, sys
sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sink.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)
sink.bind((sys.argv[1], 5000))
print("listens", flush=True)
found = []
while True:
    packet, sender = sink.recvfrom(9000)
    if packet.startswith(b"end"):
        break
    found.append(packet[0])
print(*found)
sink.sendto(packet, sender)
"""
SOURCE = """
import socket, sys, time
source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
source.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)
services = [int(each) for each in sys.argv[3].split(",")]
for k in range(int(sys.argv[2])):
    which = k % len(services)
    source.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, services[which])
    source.sendto(bytes([which]) * 1400, (sys.argv[1], 5000))
    if float(sys.argv[4]):
        time.sleep(float(sys.argv[4]))
# Behind all others of its band. It may be lost as well, until one is answered.
source.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, services[0])
source.settimeout(1.0)
for k in range(60):
    source.sendto(b"end%d" % k, (sys.argv[1], 5000))
    try:
        print(source.recv(9000)[3:].decode())
        break
    except TimeoutError:
        pass
"""
SOURCE_IPV6 = """
import socket
source = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
source.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)
for k in range(900):
    source.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, {services}[k % 3])
    source.sendto(bytes(4000), ("fd00::2", 9))
"""


def delivered(lab: Lab, packets: int, services: list[int], pause: float) -> tuple[list[int], int]:
    """Which of ``services`` each packet had that came from host 0 to host 1, in their order; how many were lost.

    The first service is of the band that is sent last.
    """
    address = lab.host(1).address
    numbers = [address, str(packets), ",".join(map(str, services)), str(pause)]
    listening = lab.command(1, [sys.executable, "-c", SINK, address])
    with started(listening, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "listens\n"
        source = lab.command(0, [sys.executable, "-c", SOURCE, *numbers])
        ends_lost = int(subprocess.run(source, stdout=subprocess.PIPE, check=True).stdout)
        came = [int(each) for each in sink.communicate(timeout=300)[0].split()]
    return came, packets - len(came) + ends_lost


def test_packets_are_lost_at_random_and_counted(name):
    with Lab.up(name, 2, "1Gbps", conditions=Conditions(loss=0.1, lossy_host=1)) as lab:
        _, lost = delivered(lab, 3000, [0], 1e-4)
        status = lab.status().hosts
        assert status[1].rate == status[0].receive_rate == parse_rate("1Gbps")
        # A packet or two are for finding the address.
        assert 0 <= status[1].lost - lost <= 2
        assert 200 < status[1].lost < 400
        assert status[0].lost == 0
        assert not status[0].faults


@pytest.mark.parametrize("host", [None, 0])
def test_conditions_outlast_a_change_of_rate(name, host):
    conditions = Conditions(3, "selective", 0.1, 1, 0.4, 5)
    with Lab.up(name, 2, "100Mbps", conditions=conditions) as lab:
        before = flows(name)
        Lab.find(name).rate("50Mbps", host)
        after = lab.status()
        assert after.conditions == conditions
        assert [each.rate for each in after.hosts] == [each.receive_rate for each in after.hosts]
        assert [each.rate for each in after.hosts] == [6.25e6, 12.5e6 if host == 0 else 6.25e6]
        assert [len(each.bands) for each in after.hosts] == [6, 6]
        assert after.background is not None
        # A share of the port's rate, and as before ended by the process that has built the lab.
        assert after.background.rate == pytest.approx(0.4 * after.hosts[1].rate)
        assert (set(before) == set(flows(name))) == (host == 0)
        owners = [int(each.command.split()[-1]) for each in senders(iproute.namespaces()) if name in each.command]
        assert owners == [os.getpid()] * 4
        until(lambda: lab.status().hosts[1].lost > 10)
        with pytest.raises(ConfigError, match="rate: 'none' has no queues"):
            lab.rate("none")


def test_a_host_drops_only_at_its_tail_and_the_switch_has_room_for_a_burst(name):
    with Lab.up(name, 2, "300Mbps", conditions=Conditions(3, "selective")) as lab:
        limits = {
            interface: sorted(
                # A red drops what comes beyond its threshold, unless it marks.
                leaf["options"]["limit" if leaf["kind"] == "bfifo" or leaf["options"]["ecn"] else "min"]
                for leaf in iproute.shapers(space)[interface]["leaves"].values()
                if leaf["kind"] in ("bfifo", "red")
            )
            for space, interface in ((f"ft-{name}-h0", "fth0"), (f"ft-{name}-sw", "ftp0"))
        }
        assert limits == {"fth0": [2**19] * 3, "ftp0": [16 * 9014] * 3 + [2**19] * 3}
        # What may be dropped takes the band of its urgency there.
        _, lost = delivered(lab, 30, [service_of(0, 3)], 0)
        assert lost == 0
        first, *_ = bands_of(iproute.shapers(f"ft-{name}-h0")["fth0"]["leaves"])
        assert (first.band, first.droppable) == (0, False)
        assert first.sent >= 30


def seen(status: HostStatus) -> int:
    """Packets that have left the switch's queues to a host, or were dropped or lost there."""
    return status.lost + sum(band.sent + band.dropped for band in status.bands)


def test_status_says_of_what_queues_are_made(name):
    with Lab.up(name, 2, "1Gbps", conditions=Conditions(2, "selective")) as lab:
        assert lab.status().queues == form()
        Lab.up(name, 2, "1Gbps")
        assert lab.status().queues is None


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the kernel has no IPv6")
@pytest.mark.parametrize("burst", [1, 3])
def test_bands_losses_and_marks_are_the_same_for_ipv6(name, burst):
    conditions = Conditions(3, "selective", 0.2, 1, burst=burst)
    with Lab.up(name, 2, "20Mbps", queue="1s", conditions=conditions) as lab:
        source, sink = lab.hosts
        for host in lab.hosts:
            address = f"address add fd00::{host.index + 1}/64 dev {host.interface} nodad"
            iproute.run(iproute.tool("ip"), "-n", host.namespace, lines=[address])
        hardware = iproute.links(sink.namespace)[sink.interface]["address"]
        neighbour = f"neighbour replace fd00::2 lladdr {hardware} dev {source.interface} nud permanent"
        iproute.run(iproute.tool("ip"), "-n", source.namespace, lines=[neighbour])
        # So that packets wait at the switch, however busy the machine of the sender is.
        lab.rate("2Mbps", host=1)
        script = SOURCE_IPV6.format(services=[service_of(0, 1) | 2, service_of(1, 3), 0])
        subprocess.run(lab.command(0, [sys.executable, "-c", script]), check=True)
        until(lambda: seen(lab.status().hosts[1]) > 850)
        status = lab.status().hosts[1]
        sent = {(band.band, band.droppable): band.sent for band in status.bands}
        assert sent[0, False] > 100
        assert sent[1, True] > 20
        assert sent[2, False] > 20
        assert sent[0, True] == sent[1, False] == 0
        assert 60 < status.lost < 300
        assert status.bands[0].marked > 20


def test_packets_are_lost_in_bursts(name):
    with Lab.up(name, 2, "1Gbps", conditions=Conditions(loss=0.2, lossy_host=1, burst=8)) as lab:
        came, lost = delivered(lab, 6000, [0] * 250, 1e-4)
        assert 0 <= lab.status().hosts[1].lost - lost <= 10
        assert lab.status().hosts[0].lost == 0
    # Packets are numbered modulo 250. Of 150 bursts the mean is 8 ± 0.65.
    runs = [(after - before - 1) % 250 for before, after in pairwise(came) if (after - before) % 250 != 1]
    assert 5.4 < sum(runs) / len(runs) < 10.6
    assert 0.13 < 1 - len(came) / 6000 < 0.27


def test_a_full_queue_drops_first_what_may_be_dropped(name):
    conditions = Conditions(3, "selective")
    with Lab.up(name, 2, "5Gbps", conditions=conditions) as lab:
        # So slow that the switch's queue fills, however busy the machine of the sender is.
        lab.rate("1Mbps", host=1, queue="8s")
        protected, droppable = service_of(0, 1), service_of(0, 3)
        came, _ = delivered(lab, 1000, [protected, droppable], 0)
        assert came.count(0) == 500
        assert came.count(1) < 250
        first, second, *_ = lab.status().hosts[1].bands
        assert (first.band, first.droppable, second.band, second.droppable) == (0, False, 0, True)
        assert (first.dropped, second.dropped) == (0, 500 - came.count(1))


def test_packets_that_have_waited_are_marked_and_counted_by_band(name):
    with Lab.up(name, 2, "20Mbps", queue="1s", conditions=Conditions(1, "selective")) as lab:
        # So slow that the switch's queue fills, however busy the machine of the sender is.
        lab.rate("1Mbps", host=1)
        capable, other = service_of(0, 1) | 2, service_of(0, 1)
        assert len(delivered(lab, 600, [other, capable], 0)[0]) > 200
        protected, droppable = lab.status().hosts[1].bands
        assert protected.marked is not None
        assert 20 < protected.marked <= 300
        assert droppable.marked == 0
        assert not any(host.faults for host in lab.status().hosts)
        Lab.up(name, 2, "20Mbps", conditions=Conditions(3))
        assert lab.status().hosts[1].bands[0].marked is None


def test_the_first_band_goes_first(name):
    with Lab.up(name, 2, "5Mbps", queue="4s", conditions=Conditions(3)) as lab:
        came, _ = delivered(lab, 600, [0, service_of(1, 1), service_of(0, 1)], 0)
        ends = [max(place for place, each in enumerate(came) if each == which) for which in range(3)]
        assert ends[2] < ends[1] < ends[0]


def flows(name: str) -> tuple[int, ...]:
    """Pids of the senders of a lab's background flows."""
    return tuple(process.pid for process in senders(iproute.namespaces()) if name in process.command)


@pytest.mark.smoke
def test_background_flows_reach_one_port_and_end_with_the_lab(name):
    with Lab.up(name, 3, "100Mbps", conditions=Conditions(3, lossy_host=1, background=0.4)) as lab:
        until(lambda: lab.status().hosts[1].bands[2].sent > 100)
        status = lab.status()
        assert status.background is not None
        assert (status.background.host, status.background.senders, status.background.rate) == (1, 4, 5e6)
        assert status.background.sent > 100 * 8972
        assert [host.bands[2].sent for host in status.hosts[::2]] == [0, 0]
        # The receiver answers nothing, and no sender counts as a process of the lab.
        assert status.hosts[1].sent < 1000
        assert network.processes(name) == ()
        assert not any(host.faults for host in status.hosts)
        assert len(flows(name)) == 4
    assert flows(name) == ()
    assert name not in labs()


def test_background_flows_change_with_up_and_follow_the_rate(name):
    conditions = Conditions(background=0.1)
    Lab.up(name, 2, "10Mbps", conditions=conditions)
    first = flows(name)
    lab = Lab.up(name, 2, "20Mbps", conditions=conditions)
    found = lab.status().background
    assert found is not None
    assert (found.host, found.rate) == (1, pytest.approx(250e3))
    assert not set(first) & set(flows(name))
    lab.rate("10Mbps")
    found = lab.status().background
    assert found is not None
    assert (found.host, found.senders, found.rate) == (1, 4, pytest.approx(125e3))
    # One that has ended begins again.
    for pid in flows(name):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not flows(name))
    lab.rate("20Mbps", host=1)
    assert len(flows(name)) == 4
    lab.down()
    assert flows(name) == ()


def test_background_flows_end_with_a_process_that_is_killed(name):
    script = f"""
import sys
from foretrain.lab import Conditions, Lab
with Lab.up({name!r}, 2, "10Mbps", conditions=Conditions(background=0.1)):
    print("up", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert len(flows(name)) == 4
        owner.kill()
    until(lambda: not flows(name))


def test_background_flows_end_when_their_namespaces_lose_their_names(name):
    Lab.up(name, 2, "10Mbps", conditions=Conditions(background=0.1))
    assert len(flows(name)) == 4
    spaces = [f"netns delete ft-{name}-b{k}" for k in range(4)]
    pids = flows(name)
    iproute.run(iproute.tool("ip"), lines=spaces)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


BATCHES = """
import socket, sys
source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for k in range(100):
    parts = [bytes([k]) * 1000] * 8
    source.sendmsg(parts, [(socket.IPPROTO_UDP, 103, (1000).to_bytes(2, "little"))], 0, (sys.argv[1], 5000))
source.settimeout(1.0)
for k in range(60):
    source.sendto(b"end", (sys.argv[1], 5000))
    try:
        source.recv(9000)
        break
    except TimeoutError:
        pass
"""


def segments(lab: Lab) -> list[int]:
    """Packets that each host's interface takes at once."""
    shown = [iproute.run("ip", "-n", each.namespace, "-d", "-j", "link", "show", each.interface) for each in lab.hosts]
    return [json.loads(each)[0]["gso_max_segs"] for each in shown]


def test_single_packets_of_a_batch_are_lost(name):
    with Lab.up(name, 2, "1Gbps", conditions=Conditions(loss=0.1, lossy_host=1)) as lab:
        assert segments(lab) == [1, 1]
        address = lab.host(1).address
        with started(lab.command(1, [sys.executable, "-c", SINK, address]), stdout=subprocess.PIPE, text=True) as sink:
            assert sink.stdout is not None
            assert sink.stdout.readline() == "listens\n"
            subprocess.run(lab.command(0, [sys.executable, "-c", BATCHES, address]), check=True)
            came = Counter(sink.communicate(timeout=300)[0].split())
        assert sum(0 < came[str(k)] < 8 for k in range(100)) > 20
        Lab.up(name, 2, "1Gbps")
        assert segments(lab) == [65535, 65535]


def test_codes_are_those_of_rfc_2597():
    assert [service_of(urgency, 1) >> 2 for urgency in range(4)] == [34, 26, 18, 10]
    assert service_of(0, 3) >> 2 == 38


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bands": 4}, "bands: 4 is no number of bands"),
        ({"drop": "some"}, "drop: 'some' is unknown"),
        ({"loss": 1.0}, "loss: 1.0 is no share"),
        ({"loss": 0.1, "burst": 0.5}, "burst: 0.5 is no mean number of packets; write 1 to 10000"),
        ({"loss": 0.8, "burst": 2}, "loss: 0.8 is too much for bursts of 2; take longer bursts"),
        ({"background": 1.5}, "background: 1.5 is no share of a port's rate; write e.g. 40%"),
        ({"burst": 5}, "burst: 5 needs losses; add a loss, e.g. 1%, or leave it out"),
        ({"lossy_host": 1}, "lossy_host: 1 has neither losses nor background flows; add a loss, e.g. 1%, or a backgr"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Conditions(**options)


def test_bands_need_a_rate_and_the_lossy_host_is_one():
    with pytest.raises(ConfigError, match="rate: None has no queues"):
        Lab.up("nowhere", 2, conditions=Conditions(3))
    with pytest.raises(ConfigError, match="host: 2 is not in lab"):
        Lab.up("nowhere", 2, "1Gbps", conditions=Conditions(loss=0.1, lossy_host=2))


def test_rates_are_read_as_tc_writes_them():
    assert tree_rate("class htb 9:1 root rate 12500Kbit ceil 12500Kbit burst 1b") == parse_rate("12.5Mbps")
    assert tree_rate("") is None
