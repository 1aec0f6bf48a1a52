"""A parameter server in the lab: what is measured over it, and that no server outlives its job."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretrain.errors import ConfigError
from foretrain.lab import Lab, LabError, labs, launch, network
from foretrain.lab.calibration import fit, nominal
from foretrain.lab.compare import conduct, experiment, on, plan_of
from foretrain.lab.iproute import LinkTraffic
from foretrain.lab.messages import CalibrationSample
from foretrain.lab.result import PLAIN
from foretrain.lab.servers import serving
from foretrain.network import Cluster
from foretrain.report.lab import render, verdict
from foretrain.units import MICROSECOND, MILLISECOND

RATE = 125e6


@pytest.mark.parametrize(
    ("servers", "dedicated", "homes", "exchange"),
    [
        (None, 0, [], "all_reduce"),
        (1, 1, [3], "ps"),
        ("2", 2, [3, 4], "ps"),
        ("colocated", 0, [0, 1, 2], "ps_colocated"),
    ],
)
def test_servers_have_hosts_of_their_own_or_the_workers(servers, dedicated, homes, exchange):
    plan = plan_of(hosts=3, rate="1Gbps", servers=servers)
    assert (plan.dedicated, list(plan.homes), plan.exchange) == (dedicated, homes, exchange)
    assert plan.links == Cluster(
        3, up=RATE, down=RATE, latency=0, overhead=0, exchange=exchange, servers=dedicated
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"servers": "0"}, "no number of servers"),
        ({"servers": "two"}, "colocated"),
        ({"servers": -1}, "no number"),
        ({"servers": 63}, "too many hosts"),
        ({"servers": 1, "hosts": 1}, "nobody"),
        ({"servers": 1, "buckets": (None,)}, "all-reduces"),
        ({"servers": "colocated", "half_hook": True}, "all-reduces"),
    ],
)
def test_what_contradicts_servers_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        experiment(**({"model": "alexnet", "hosts": 2, "rate": "1Gbps"} | wrong))


def test_over_servers_the_baseline_is_fifo_and_a_ratio_is_that_of_their_links():
    one = experiment("alexnet", hosts=3, rate="1Gbps", servers=1, schedules=("prophet",), ratio=1.0)
    assert [case.name for case in one.cases] == ["fifo", "prophet"]
    assert one.workload is not None
    assert one.workload.compute == pytest.approx(3 * one.workload.size / RATE * 1e12)
    two = experiment("alexnet", hosts=2, rate="1Gbps", servers="colocated", schedules=("p3", "fifo"), ratio=1.0)
    assert [case.name for case in two.cases] == ["p3", "fifo"]
    assert two.workload is not None
    assert two.workload.compute == pytest.approx(two.workload.size / RATE * 1e12)


@pytest.mark.parametrize("servers", [1, 3, "colocated"])
def test_a_fit_is_the_cluster_on_which_a_round_costs_it(servers):
    links = plan_of(hosts=3, rate="1Gbps", servers=servers).links
    per_byte, overhead, latency = 1.25 * nominal(links), 300 * MICROSECOND, 800 * MICROSECOND

    def sample(size: int, depth: int) -> CalibrationSample:
        return CalibrationSample(size, depth, round(overhead + per_byte * size + (latency if depth == 1 else 0)))

    found = fit([sample(1 << 12, 1), *(sample(1 << power, 4) for power in range(12, 21, 2))], nominal(links)).on(links)
    assert found.exchange == links.exchange
    assert found.up == pytest.approx(RATE / 1.25, rel=1e-3)
    assert found.cost.time(1 << 20) == pytest.approx(overhead + per_byte * (1 << 20), rel=1e-3)
    assert dataclasses.replace(found, overhead=0).cost.latency == pytest.approx(latency, rel=1e-3)


@pytest.fixture
def lab(name: str) -> Lab:
    return Lab.up(name, 2)


@pytest.mark.parametrize("servers", [1, "colocated"])
def test_schedules_are_measured_over_servers(name, servers):
    place = {"hosts": 2, "rate": "1Gbps", "servers": servers}
    one = experiment(
        "alexnet",
        **place,
        schedules=("bytescheduler",) if servers == 1 else (),
        step_time=20 * MILLISECOND,
        size=0.004,
        iterations=3,
        rounds=1,
        warmup=1,
        traced=servers == 1,
    )
    plan = dataclasses.replace(plan_of([one], **place), calibration=0.1)
    with Lab.up(name, 2 + plan.dedicated, "1Gbps") as lab:
        (result,) = conduct(plan, on(lab, plan))
        assert network.processes(name) == ()
    assert [one.case.name for one in result.measured] == ["fifo", "bytescheduler"][: len(one.cases)]
    assert result.baseline is not None
    assert result.baseline.case == PLAIN
    for one in result.measured:
        assert one.forecast is not None
        assert one.forecast.cluster.exchange == result.links.exchange
        assert one.idle is not None
        assert 0 < one.idle < 1
        assert len(one.links) == 2 + plan.dedicated
        assert all(0 < share < 1 for both in one.links for share in both)
        if servers == 1:
            assert max(range(3), key=lambda host: sum(one.links[host])) == 2
            assert one.trace is not None
            assert "wire" in one.trace.timeline.lanes()
    assert "fifo" in verdict(result)
    assert "vs fifo" in render(result)


def test_bytes_are_counted_per_host_and_direction(lab):
    """The counters of a namespace are read through a process in it."""
    receiver = subprocess.Popen(
        lab.command(1, [sys.executable, "-c", RECEIVE, lab.hosts[1].address]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        sender = subprocess.Popen(
            lab.command(0, [sys.executable, "-c", SEND, lab.hosts[1].address, port]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert sender.stdin is not None
            assert sender.stdout is not None
            assert sender.stdout.readline().strip() == "connected"
            began = time.perf_counter()
            traffic = LinkTraffic([sender.pid, receiver.pid], 1e6)
            sender.stdin.write("go\n")
            sender.stdin.flush()
            assert receiver.stdout.readline().strip() == "1000000"
            shares = traffic.shares()
            seconds = time.perf_counter() - began
            # At least as many, for the clock here has run longer; and as many out of one as into the other.
            assert shares[0][0] * seconds > 1
            assert shares[0][0] == pytest.approx(shares[1][1], rel=0.1)
            assert shares[1][0] < 0.2 * shares[1][1]
        finally:
            sender.communicate()
    finally:
        receiver.communicate()


RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
count = 0
while count < 1_000_000:
    count += len(peer.recv(1 << 16))
print(count, flush=True)
sys.stdin.read()
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.readline()
peer.sendall(bytes(1_000_000))
sys.stdin.read()
"""


@pytest.mark.smoke
def test_servers_listen_on_their_hosts_and_end_with_the_block(lab):
    with serving(lab, [1, 1], workers=1) as served:
        assert [address.rpartition(":")[0] for address in served.addresses] == [lab.hosts[1].address] * 2
        alive = network.processes(lab.name)
        assert {process.pid for process in alive} == set(served.pids)
        assert all(process.host == 1 and served.secret not in process.command for process in alive)
        code = "import os, socket, sys\nfor each in os.environ['FORETRAIN_SERVERS'].split(','):\n"
        code += "    host, _, port = each.rpartition(':')\n    socket.create_connection((host, int(port))).close()"
        command = [sys.executable, "-I", "-S", "-c", code]
        assert launch(lab, command, ranks=1, secret=served.secret, environment=served.environment) == 0
    assert network.processes(lab.name) == ()


def test_a_server_that_is_killed_is_named(lab):
    plan = plan_of(hosts=2, rate="1Gbps", servers="colocated")
    # As a worker that misses it would end.
    code = "[ $RANK = 0 ] || exit 0; kill -KILL ${FORETRAIN_LAB_SERVERS#*,}; exit 3"
    with pytest.raises(LabError, match=rf"the server on ft-{lab.name}-h1 has ended with -9"):
        on(lab, plan)(["sh", "-c", code], environment={}, timeout=60, on_line=lambda rank, line: None)
    assert network.processes(lab.name) == ()


def test_a_server_that_cannot_start_is_quoted(lab):
    with pytest.raises(LabError, match=r"has ended with 2\n.*is no number of workers"), serving(lab, [0], workers=0):
        pass
    assert network.processes(lab.name) == ()


SCRIPT = """
import sys
from foretrain.lab import Lab, launch
from foretrain.lab.servers import serving

with Lab.up(sys.argv[1], 2) as lab, serving(lab, [0, 1], 2) as served:
    print(*served.pids, flush=True)
    launch(lab, ["sleep", "600"], secret=served.secret)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_who_started_it(name, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (name in labs()) == (number == signal.SIGKILL)
