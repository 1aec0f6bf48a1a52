"""A parameter server in the lab: what is measured over it, and that no server outlives its job."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.errors import ConfigError
from foretrain.lab import Lab, LabError, labs, launch, network
from foretrain.lab.calibration import fit, nominal, with_cpu
from foretrain.lab.compare import conduct, experiment, on, plan_of
from foretrain.lab.iproute import _counted
from foretrain.lab.messages import CalibrationSample, LabProgress
from foretrain.lab.result import PLAIN
from foretrain.lab.servers import serving
from foretrain.network import Cluster
from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.report.lab import render, verdict
from foretrain.simulation import VirtualWorld
from foretrain.simulation.host_cores import ends
from foretrain.simulation.parameter_server import ParameterServerCarrier
from foretrain.tasks import Chunk, Piece, Task
from foretrain.units import MICROSECOND, MILLISECOND, NANOSECOND, per_byte
from tests.lab.forked import launching
from tests.waiting import until

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
        ({"servers": 63}, "too many hosts"),
        ({"servers": 1, "hosts": 1}, "nobody"),
        ({"servers": 1, "buckets": (None,)}, "all-reduces"),
        ({"servers": "colocated", "half_hook": True}, "all-reduces"),
    ],
)
def test_options_that_contradict_servers_are_refused(wrong, words):
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


def counted(sizes: dict[int, int], worker: CpuCost, server: CpuCost) -> list[CalibrationSample]:
    """Return samples of sizes with their depths, with the CPU time of these costs."""
    return [CalibrationSample(size, depth, 0, worker.time(size), server.time(size)) for size, depth in sizes.items()]


def test_cpu_costs_are_those_of_the_smallest_message_alone_and_of_the_largest_ones_bytes():
    worker, server = CpuCost(90 * MICROSECOND, per_byte(1e9)), CpuCost(20 * MICROSECOND, per_byte(3e9))
    samples = counted({1 << 12: 1, 1 << 20: 4}, worker, server)
    # Neither counts those that share wake-ups with others, nor others between.
    samples += [CalibrationSample(1 << 12, 16, 0, 5, 5), CalibrationSample(1 << 16, 16, 0, 7, 7)]
    links = Cluster(3, latency=MILLISECOND, exchange="ps", servers=1)
    found = with_cpu(links, samples, 2).cpu
    assert found is not None
    assert (found.cores, found.together) == (2, True)
    for one, wanted in ((found.worker, worker), (found.server, server)):
        assert one.message == pytest.approx(wanted.message, rel=1e-4)
        assert one.per_byte == pytest.approx(wanted.per_byte, rel=1e-4)


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize("servers", [1, 3, "colocated"])
def test_a_round_alone_takes_as_long_with_its_cpu_time_as_without(servers, cores):
    size = 1 << 12
    links = dataclasses.replace(plan_of(hosts=3, rate="1Gbps", servers=servers).links, latency=MILLISECOND)
    costs = CpuCost(90 * MICROSECOND, per_byte(1e9)), CpuCost(20 * MICROSECOND, per_byte(3e9))
    busy = with_cpu(links, counted({size: 1, 1 << 20: 4}, *costs), cores)
    assert busy.latency < links.latency

    def landed(where: Cluster) -> int:
        times: list[int] = []
        world = VirtualWorld(
            ParameterServerCarrier(
                where.routes(), [Task(0, "w", size, 0)], lambda task: times.append(world.now()), ends=ends(where)
            )
        )
        world.start(Chunk("all_reduce", (Piece(0, 0, size),), size), lambda chunk: None)
        world.run()
        return times[0]

    assert landed(busy) == pytest.approx(landed(links), abs=10 * NANOSECOND)


def test_no_latency_is_negative_and_what_was_not_counted_costs_nothing():
    links = Cluster(3, latency=MICROSECOND, exchange="ps", servers=1)
    costs = CpuCost(MILLISECOND), CpuCost(MILLISECOND)
    assert with_cpu(links, counted({1 << 12: 1, 1 << 20: 4}, *costs), 2).latency >= 0
    assert with_cpu(links, counted({1 << 12: 1, 1 << 20: 4}, CpuCost(), CpuCost()), 2) == links
    # Noise may make a large message cheaper than a small one.
    samples = [CalibrationSample(1 << 12, 1, 0, 90, 20), CalibrationSample(1 << 20, 4, 0, 80, 10)]
    assert with_cpu(links, samples, 2).cpu == HostCpu(2, CpuCost(90), CpuCost(20), together=True)


@pytest.fixture
def lab(name: str) -> Lab:
    return Lab.up(name, 2)


@pytest.mark.parametrize(
    ("servers", "schedules", "names"),
    [
        (None, ("bytescheduler",), ["DDP 1MiB", "DDP fp16 hook", "bytescheduler"]),
        (1, ("bytescheduler",), ["fifo", "bytescheduler"]),
        ("colocated", (), ["fifo"]),
    ],
)
def test_schedules_are_measured_on_a_lab(name, servers, schedules, names):
    place = {"hosts": 2, "rate": "1Gbps", "servers": servers}
    short = {"step_time": 20 * MILLISECOND, "size": 0.004, "iterations": 4, "rounds": 2, "warmup": 1}
    buckets = (1 << 20,) if servers is None else None
    traced = 0 if servers == "colocated" else 3
    one = experiment("alexnet", **place, **short, schedules=schedules, buckets=buckets, traced=traced)
    plan = dataclasses.replace(plan_of([one], **place), calibration=0.1)

    def measured():
        seen: list[LabProgress] = []
        return conduct(plan, on(lab, plan), seen.append), seen

    with Lab.up(name, 2 + plan.dedicated, "1Gbps") as lab:
        (result,), seen = launching(measured)
        assert network.processes(name) == ()
    assert (seen[-1].what, seen[-1].done) == ("done", seen[-1].total)
    assert [one.case.name for one in result.measured] == names
    assert result.baseline is not None
    assert result.baseline.case.name == names[0]
    for one in result.measured:
        assert [len(times) for times in one.rounds] == [2, 2]
        assert one.forecast is not None
        assert one.forecast.cluster.exchange == result.links.exchange
        assert one.idle is not None
        assert 0 < one.idle < 1
        assert len(one.links) == len(one.cores) == 2 + plan.dedicated
        assert one.busy is not None
        assert one.busy > 0
        assert all(waited >= 0 for _, waited in one.cores)
        assert all(0 < share < 1 for both in one.links for share in both)
        scheduler = "foretrain-coordinator" if servers is None else "foretrain-engine"
        assert ((one.threads.get(scheduler) or 0) > 0) == (one.case.kind == "attach")
        if servers == 1:
            assert max(range(3), key=lambda host: sum(one.links[host])) == 2
        if servers != "colocated":
            assert one.trace is not None
            assert len(one.trace.begins) == 4
            assert {"gpu", "wire"} <= set(one.trace.timeline.lanes())
    if servers is None:
        assert result.cluster.cpu is None
    else:
        assert result.cluster.cpu is not None
        assert all(cost.message > 0 for cost in (result.cluster.cpu.worker, result.cluster.cpu.server))
        assert all(one.forecast and one.forecast.cluster == result.cluster for one in result.measured)
        assert result.to_dict()["calibration"]["cpu"]["worker"][0] > 0
        assert result.baseline.case == PLAIN
        assert "fifo" in verdict(result)
        assert "vs fifo" in render(result)


def test_counters_of_all_interfaces_but_the_loopback_are_added():
    text = "Inter-|   Receive\n face |bytes    packets\n" + "".join(
        f"{name}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, received, sent in COUNTERS
    )
    assert _counted(text) == (500, 70)


COUNTERS = [("    lo", 9, 9), ("  fth0", 30, 200), ("  fth1", 40, 300)]


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
        on(lab, plan)(["sh", "-c", code], environment={}, timeout=300, on_line=lambda rank, line: None)
    assert network.processes(lab.name) == ()


def test_a_server_that_cannot_start_is_quoted(lab):
    with pytest.raises(LabError, match=r"has ended with 2\n.*is no number of workers"), serving(lab, [0], workers=0):
        pass
    assert network.processes(lab.name) == ()


def command_of(pid):
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()  # nothing of one that has, and is not waited for
    return b""


SCRIPT = """
import sys
from foretrain.lab import Lab, launch
from foretrain.lab.servers import serving

with Lab.up(sys.argv[1], 2) as lab, serving(lab, [0, 1], 2) as served:
    print(*served.pids, flush=True)
    launch(lab, ["sleep", "600"], secret=served.secret)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_servers_end_with_the_process_that_started_them(name, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=300)
    until(lambda: not any(map(command_of, pids)))
    assert (name in labs()) == (number == signal.SIGKILL)
