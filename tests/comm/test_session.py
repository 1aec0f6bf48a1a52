"""Sessions over plain buffers: the ranks are threads, the sockets real."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import foretrain as ft
from foretrain.comm.bounded import Loss
from foretrain.comm.bounded.guard import FIRST, ROUND
from foretrain.comm.bounded.server import SummingServer
from foretrain.comm.buffers import HostRounding, elements
from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.observation import Ticks
from foretrain.comm.rendezvous import free_port
from foretrain.comm.session import Session
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from tests.comm.bounded.group import has_ipv6
from tests.plugins.torch.ps.serving import KEY, servers
from tests.processes import descendants

COUNTS = (7, 1000, 1, 30_000)
STEPS, WARMUP = 6, 2
TENSORS: list[tuple[str, int, Any]] = [(f"layer{k}.weight", 4 * count, "float32") for k, count in enumerate(COUNTS)]
PATIENCE = ft.Timeouts(peer="60s", stall="60s")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def test_free_ports_are_none_that_the_system_gives_to_others():
    with socket.create_server(("127.0.0.1", 0)) as given:
        ports = {free_port() for _ in range(20)}
        assert len(ports) > 1
        assert all(1024 < port < given.getsockname()[1] for port in ports)


def on_ranks(ranks: int, run: Callable[[Session], Any], *arguments: Any, **options: Any) -> list[Any]:
    """What ``run`` returns, or the error that it ends with, on each rank."""
    address = options.pop("address", None) or free_address()

    def one(rank: int) -> Any:
        try:
            with Session(*arguments, rank=rank, ranks=ranks, address=address, timeouts=PATIENCE, **options) as session:
                return run(session)
        except ForetrainError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def gradient(rank: int, step: int, task: int) -> np.ndarray:
    return np.random.default_rng((rank, step, task)).standard_normal(COUNTS[task]).astype(np.float32)


def train(session: Session, steps: int = STEPS, tensors: Any = TENSORS) -> list[np.ndarray]:
    """Means of all steps, by task: the loop that crosses the barrier."""
    tasks = session.declare(tensors)
    found = [np.zeros(count, np.float32) for count in COUNTS]
    for step in range(steps):
        for task, sums in zip(tasks, found, strict=True):
            sums += task.wait()
        session.begin_step()
        for k in reversed(range(len(tasks))):
            tasks[k].ready(gradient(session.rank, step, k))
    for task, sums in zip(tasks, found, strict=True):
        sums += task.wait()
    return found


def expected(ranks: int, steps: int = STEPS) -> list[np.ndarray]:
    return [
        np.sum([gradient(rank, step, k) for rank in range(ranks) for step in range(steps)], 0) / ranks
        for k in range(len(COUNTS))
    ]


@pytest.mark.parametrize("schedule", ["fifo", "bytescheduler", "prophet", "dear", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_get_the_mean(ranks, schedule):
    threads = set(threading.enumerate())
    outcomes = on_ranks(ranks, train, schedule, warmup=WARMUP)
    for means in outcomes:
        for own, first, right in zip(means, outcomes[0], expected(ranks), strict=True):
            np.testing.assert_array_equal(own, first)
            np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(("gradients", "computed"), [(2, 23), (1, 13)], ids=["all", "one"])
def test_waiting_for_sums_is_not_observed_as_computation(monkeypatch, gradients, computed):
    """Rank 0 computes 5 for each gradient and 3 in the second forward pass; then rank 1 lets it wait for 100."""
    spent, asks, waits = [0, 0], threading.Event(), threading.Event()
    monkeypatch.setattr("foretrain.comm.observation.ticks", lambda: Ticks(0, 0, *spent))

    def spend(own, wall):
        spent[:] = spent[0] + own, spent[1] + wall

    def compute(session):
        tasks, wait = session.declare(TENSORS[:2])[-gradients:], session._in_flight.wait

        def announced(index):
            if session.rank == 0 and asks.is_set():
                asks.clear()
                waits.set()
            wait(index)

        session._in_flight.wait = announced
        for step in range(2):
            if session.rank == 0 and step:
                spend(3, 3)
            session.begin_step()
            if session.rank == 1:
                assert waits.wait(60)
                waits.clear()
                spend(0, 100)
            for task in tasks:
                if session.rank == 0:
                    spend(5, 5)
                task.ready(np.ones(task.count, np.float32))
            if session.rank == 0:
                asks.set()
            tasks[0].wait()
        return session._observer._computed

    assert on_ranks(2, compute, warmup=3)[0][2:] == (computed, computed)


_WAYS = [(1, "ring"), (2, "halving_doubling"), (3, "ring"), (3, "transpose")]


@pytest.mark.parametrize(
    ("schedule", "ranks", "over"),
    [
        *(("bytescheduler", *way) for way in _WAYS),
        *(("dear", *way) for way in _WAYS),
        pytest.param("dear", 3, "ps", marks=pytest.mark.process),  # that of the server
    ],
)
def test_nothing_is_lost_over_udp_without_tolerance(schedule, ranks, over):
    threads = set(threading.enumerate())
    outcomes = on_ranks(ranks, train, schedule, ft.BoundedLoss(0.0, over), warmup=WARMUP)
    for means in outcomes:
        for own, first, right in zip(means, outcomes[0], expected(ranks), strict=True):
            np.testing.assert_array_equal(own, first)
            np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)
    assert set(threading.enumerate()) <= threads


@has_ipv6
@pytest.mark.parametrize("transport", [ft.AllReduce(), ft.BoundedLoss(tolerance=0.0)], ids=["tcp", "udp"])
def test_ranks_meet_over_ipv6(transport):
    for found in on_ranks(3, train, "fifo", transport, address=f"[::1]:{free_port()}"):
        for values, wanted in zip(found, expected(3), strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


def test_a_server_that_sums_and_is_lost_is_named_and_ends_with_its_session():
    def run(session):
        tasks = session.declare(TENSORS)
        for step in range(1000):
            session.begin_step()
            for k in reversed(range(len(tasks))):
                tasks[k].ready(gradient(session.rank, step, k))
            for task in tasks:
                task.wait()
            if session.rank == 0 and step == WARMUP + 1:
                [server] = [pid for pid in descendants(os.getpid()) if "comm.bounded.server" in command_of(pid)]
                os.kill(server, signal.SIGKILL)
        return

    for error in on_ranks(2, run, "fifo", ft.BoundedLoss(0.0, "ps"), warmup=WARMUP):
        assert "the server that sums, a process of rank 0, was lost: " in str(error)
    assert not [pid for pid in descendants(os.getpid()) if "comm.bounded.server" in command_of(pid)]


SERVED = """
import os, signal, time
from foretrain.comm.bounded.server import Opening, SummingServer
server = SummingServer(Opening("127.0.0.1", 2, "00" * 32, False, "share", "packet", 60.0, os.getpid()))
server.row()
if (child := os.fork()) == 0:
    time.sleep(600)
print(server._process.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_server_that_sums_ends_with_rank_0_also_where_a_forked_child_lives_on():
    with subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        server, child = map(int, rank_0.stdout.readline().split())
        try:
            assert select.select([os.pidfd_open(server)], [], [], 600)[0]
        finally:
            os.kill(child, signal.SIGKILL)


RANK_1 = """
import sys
import numpy as np
import foretrain as ft
with ft.Session("fifo", ft.BoundedLoss(0.0), rank=1, ranks=2, address=sys.argv[1], warmup=2) as session:
    (task,) = session.declare([("all", 400_000, "float32")])
    for step in range(10):
        session.begin_step()
        task.ready(np.full(100_000, step, np.float32))
        task.wait()
"""


def beside_rank_1(address, disturb=lambda: None):
    """Train as rank 0, whose peer is a process of `RANK_1`, and ``disturb`` it in the middle."""
    with Session("fifo", ft.BoundedLoss(0.0), rank=0, ranks=2, address=address, warmup=2) as session:
        (task,) = session.declare([("all", 400_000, "float32")])
        for step in range(10):
            session.begin_step()
            if step == 6:
                disturb()
            task.ready(np.full(100_000, step + 1, np.float32))
            np.testing.assert_array_equal(task.wait(), step + 0.5)


@pytest.mark.process
def test_a_rank_that_is_killed_is_named_and_once_it_is_started_again_joins_the_next_session():
    address, made = free_address(), []

    def start():
        made.append(subprocess.Popen([sys.executable, "-c", RANK_1, address]))

    def restart():
        made[0].kill()
        start()

    start()
    try:
        with pytest.raises(PeerLost, match="rank 1"):
            beside_rank_1(address, restart)
        assert made[0].wait() == -signal.SIGKILL
        beside_rank_1(address)
        assert made[1].wait(60) == 0
    finally:
        for each in made:
            each.kill()
            each.wait()


@pytest.mark.process
def test_a_rank_that_is_stopped_for_longer_than_udp_waits_goes_on():
    address = free_address()
    with subprocess.Popen([sys.executable, "-c", RANK_1, address]) as rank_1:

        def pause():
            rank_1.send_signal(signal.SIGSTOP)
            resume.start()

        resume = threading.Timer(1.5, rank_1.send_signal, (signal.SIGCONT,))
        try:
            beside_rank_1(address, pause)
            assert rank_1.wait(60) == 0
        finally:
            rank_1.kill()
            resume.join()


def command_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.parametrize(
    "options", [{}, {"over": "ps", "missing": "feedback", "ending": "adaptive_timeout", "hadamard": True}]
)
def test_what_is_lost_over_udp_is_booked(options):
    def run(session):
        assert session.ledger is None
        return train(session), session.ledger

    transport = ft.BoundedLoss(0.3, reliable_steps=1, reliable_bytes=4000, **options)
    (means, ledger), (others, _) = on_ranks(2, run, "bytescheduler", transport, warmup=WARMUP)
    for own, other in zip(means, others, strict=True):
        np.testing.assert_array_equal(own, other)
    for task in range(3):
        np.testing.assert_allclose(means[task], expected(2)[task], rtol=1e-5, atol=1e-5)
    assert ledger.lost[:3].sum() == 0
    assert ledger.sent == sum(4 * count for count in COUNTS) * (STEPS - WARMUP)


def test_an_automatic_tolerance_rises_where_nothing_changes():
    def run(session):
        tasks = session.declare([("layer", 4 * 20_000, "float32")])
        for _ in range(WARMUP + 2 * ROUND + 2):
            session.begin_step()
            tasks[0].ready(np.ones(20_000, np.float32))
            tasks[0].wait()
            if session.ledger is not None:
                session.ledger.observe_loss(1.0)
        return session.ledger

    for ledger in on_ranks(2, run, "fifo", ft.BoundedLoss("auto"), warmup=WARMUP):
        assert ledger.guard.tolerance == 2 * FIRST
        assert ledger.line().endswith("; tolerance 1.00%")


def test_tensors_that_a_session_declares_reliable_arrive_whole():
    def run(session):
        tasks = session.declare(TENSORS, reliable={"layer3.weight"})
        for _ in range(STEPS):
            session.begin_step()
            for task, count in zip(tasks, COUNTS, strict=True):
                task.ready(np.ones(count, np.float32))
            session.wait_all()
        place = session._runtime.gradients.place
        return [session.ledger.hint("all_reduce", [place(task)]).vital.tolist() for task in (1, 3)]

    for found in on_ranks(2, run, "fifo", ft.BoundedLoss(reliable_bytes=0), warmup=WARMUP):
        assert found == [[], [[0, 4 * COUNTS[3]]]]
    for error in on_ranks(1, lambda session: session.declare(TENSORS, reliable=["bias"]), "fifo"):
        assert "reliable: 'bias' is no declared tensor" in str(error)


def test_ranks_that_disagree_on_what_is_reliable_are_refused():
    def run(session):
        session.declare(TENSORS, reliable=["layer0.weight"] * session.rank)

    for error in on_ranks(2, run, "fifo", ft.BoundedLoss()):
        assert isinstance(error, Disagreement)


def test_losses_of_a_server_come_to_rank_0(monkeypatch):
    """The network loses nothing here; the server's answers are in the order of operations, as many as may lose some."""
    told = []
    known = SummingServer.losses
    monkeypatch.setattr(SummingServer, "losses", lambda server: told.append(known(server)) or [Loss(0, 4, 1)])

    def run(session):
        return train(session), session.ledger

    transport = ft.BoundedLoss(0.3, "ps", reliable_steps=0, reliable_bytes=0)
    (_, ledger), (_, other) = on_ranks(2, run, "fifo", transport, warmup=WARMUP)
    assert len(told) == (STEPS - WARMUP) * len(COUNTS)
    assert ledger.lost[:, 1].tolist() == [4 * (STEPS - WARMUP)] * len(COUNTS)
    assert other.lost.sum() == 0
    share = len(COUNTS) / (2 * sum(COUNTS))  # of two ranks' bytes
    assert ledger.line().startswith(f"{share:.2%} of the gradients' bytes were lost, most of")
    assert "as far as this rank knows" in other.line()


def test_what_ranks_have_lost_is_collected_from_those_that_come_to_the_end():
    def run(session):
        control, waits = session._control, threading.Event()
        if session.rank == 2:
            waits.wait(0.2 if session.rank else 0)
        first = control.collect([session.rank, 7], 30)
        if session.rank == 1:
            return first
        return first, control.collect([session.rank], 0.1)

    rank_0, rank_1, _ = on_ranks(3, run, "fifo")
    assert rank_0 == ([[0, 7], [1, 7], [2, 7]], None)
    assert rank_1 is None


def test_halving_and_doubling_needs_a_power_of_two():
    for error in on_ranks(3, train, "fifo", ft.BoundedLoss(over="halving_doubling")):
        assert "over: 'halving_doubling' needs a power of two of ranks, not 3" in str(error)


UNCLOSED = """
import sys
import numpy as np
import foretrain as ft
session = ft.Session("fifo", ft.ParameterServer(sys.argv[1]), rank=0, ranks=1)
[task] = session.declare([("weight", 400, "float32")])
session.begin_step()
task.ready(np.ones(100, np.float32))
print(task.wait().sum())
"""


@pytest.mark.process
def test_a_script_that_does_not_close_its_session_over_servers_ends_in_good_order():
    with servers(1, 1) as (addresses, (service,)):
        script = subprocess.run(
            [sys.executable, "-c", UNCLOSED, addresses], capture_output=True, text=True, check=False
        )
    assert (script.returncode, script.stdout, script.stderr) == (0, "100.0\n", "")
    assert service.failure is None


@pytest.mark.parametrize("schedule", ["fifo", "prophet"])
def test_servers_sum_what_ranks_push(schedule):
    with servers(1, 2) as (addresses, _):
        outcomes = on_ranks(2, train, schedule, ft.ParameterServer(addresses), warmup=WARMUP)
    for means in outcomes:
        for own, right in zip(means, expected(2), strict=True):
            np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)


def test_every_step_is_traced_and_has_an_optimum():
    def run(session):
        train(session)
        return session.schedule, session.bound, session.cluster, session.timeline, session.steps, session.log

    (schedule, bound, cluster, timeline, steps, log), _ = on_ranks(2, run, "bytescheduler", warmup=WARMUP, trace=True)
    assert schedule.name == "bytescheduler"
    assert bound.time > 0
    assert cluster.workers == 2
    assert {"gpu", "wire"} <= set(timeline.lanes())
    assert steps == STEPS
    assert log


def test_buffers_that_can_be_written_get_the_mean_and_sums_need_no_mean():
    def run(session):
        (task,) = session.declare([("w", 16, "float32")])
        buffer = np.full(4, session.rank + 1, np.float32)
        session.begin_step()
        handle = task.ready(buffer)
        assert handle.wait().tolist() == [3] * 4
        return buffer.tolist()

    assert on_ranks(2, run, "fifo", average=False) == [[3] * 4] * 2


def test_what_waits_for_a_sum_is_called_once_and_reads_it():
    def run(session: Session) -> tuple[list[bool], bool]:
        (task,) = session.declare([("a", 12, "float32")])
        calls, came = [], threading.Semaphore(0)
        session.before_close(lambda: calls.append(np.array_equal(task.read(), np.full(3, 0.5))))
        for _ in range(STEPS):
            session.begin_step()
            task.ready(np.full(3, session.rank, np.float32), came.release)
            session.end_step()
            assert came.acquire(timeout=60)
            calls.append(np.array_equal(task.read(), np.full(3, 0.5)))
        return calls, came.acquire(blocking=False)

    assert on_ranks(2, run, warmup=WARMUP) == [([True] * (STEPS + 1), False)] * 2


def test_what_waits_for_a_sum_is_called_where_the_job_fails():
    def run(session: Session) -> str:
        tasks = session.declare([("a", 12, "float32"), ("b", 12, "float32")])
        session.begin_step()
        if session.rank:
            raise ForetrainError("no more")
        came = threading.Event()
        tasks[0].ready(np.zeros(3, np.float32), came.set)
        assert came.wait(60)
        with pytest.raises(ForetrainError) as error:
            tasks[0].read()
        return str(error.value)

    first, _ = on_ranks(2, run)
    assert "no more" in str(first)


@pytest.mark.parametrize(("dtype", "kind"), [("float64", np.float64), ("float16", np.float16), ("bfloat16", np.uint16)])
def test_other_types(dtype, kind):
    one = {"bfloat16": 0x3F80}.get(dtype, 1)

    def run(session):
        (task,) = session.declare([("w", 4 * np.dtype(kind).itemsize, dtype)])
        session.begin_step()
        return task.ready(np.full(4, one, kind)).wait().tolist()

    assert on_ranks(2, run, "fifo") == [[one] * 4] * 2


@pytest.mark.parametrize(("compression", "error"), [("fp16", 4e-3), ("bf16", 4e-2)])
@pytest.mark.parametrize("served", [False, True])
def test_gradients_are_sent_in_half_precision_and_rounding_errors_later(compression, error, served):
    def run(session):
        return train(session), session.workload.size

    with servers(1, 2) if served else nullcontext((None, None)) as (addresses, _):
        transport = ft.ParameterServer(addresses) if served else None
        outcomes = on_ranks(2, run, "bytescheduler", transport, warmup=WARMUP, compression=compression)
    for means, size in outcomes:
        assert size == 2 * sum(COUNTS)
        for own, first, right in zip(means, outcomes[0][0], expected(2), strict=True):
            np.testing.assert_array_equal(own, first)
            assert own.dtype == np.float32
            # The sum of all steps is off by what the last rounding and the sums' own have lost, not by all of them.
            np.testing.assert_allclose(own, right, atol=error * STEPS**0.5)


@given(st.lists(arrays(np.float32, 5, elements=st.floats(-100, 100, width=32)), min_size=1, max_size=20))
@pytest.mark.parametrize(("compression", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_what_rounding_loses_is_sent_later(compression, error, steps):
    rounding = HostRounding([5], ["float32"], compression)
    sent = [rounding.restored(0, rounding.round(0, values, 0.5)) for values in steps]
    exact = np.sum(steps, 0, np.float64) / 2
    np.testing.assert_allclose(np.sum(sent, 0, np.float64), exact, rtol=0, atol=100 * error + 1e-4)


def test_an_overflow_is_seen_and_not_fed_back():
    rounding = HostRounding([1], ["float32"], "fp16")
    assert np.isinf(rounding.round(0, np.full(1, 1e6, np.float32), 1.0))
    assert rounding.round(0, np.ones(1, np.float32), 1.0) == 1


def test_a_rank_without_a_gradient_gets_the_others():
    def run(session):
        first, second = session.declare([("a", 4, "float32"), ("b", 4, "float32")])
        for _ in range(WARMUP + 1):
            session.begin_step()
            if session.rank == 0:
                first.ready(np.ones(1, np.float32))
            second.ready(np.ones(1, np.float32))
            session.end_step()
        return first.wait().tolist(), second.wait().tolist()

    assert on_ranks(2, run, "fifo", warmup=WARMUP) == [([0.5], [1.0])] * 2


def test_a_rank_that_closes_early_is_named():
    def run(session):
        return train(session, STEPS if session.rank else WARMUP + 1)

    _, error = on_ranks(2, run, "fifo", warmup=WARMUP)
    assert isinstance(error, PeerLost)
    assert "rank 0" in str(error)


def test_a_rank_that_fails_is_named_with_its_reason():
    def run(session):
        train(session)
        if session.rank:
            raise PeerLost("out of luck")
        for task in session._tasks:
            task.wait()
        session.begin_step()
        session._tasks[0].ready(gradient(0, 0, 0))
        return session._tasks[0].wait()

    error, _ = on_ranks(2, run, "fifo", warmup=WARMUP)
    assert isinstance(error, PeerLost)
    assert "rank 1" in str(error)
    assert "out of luck" in str(error)


def test_ranks_that_disagree_are_refused():
    def other(session):
        return train(session, 1, [*TENSORS[:3], (f"layer3.weight{session.rank}", *TENSORS[3][1:])])

    errors = on_ranks(2, other, "fifo")
    assert all(isinstance(error, Disagreement) and "layer3.weight" in str(error) for error in errors)


WRONG = {
    "twice": ([("w", 4, "float32")] * 2, "'w' is declared twice"),
    "no type": ([("w", 4, "int4")], "dtype.*'int4'"),
    "half an element": ([("w", 6, "float32")], "6 bytes are no whole number of elements of float32"),
    "nothing": ([], "are none"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_make_no_sense_are_refused(what):
    tensors, said = WRONG[what]
    with Session(rank=0, ranks=1) as session, pytest.raises(ConfigError, match=said):
        session.declare(tensors)


def test_calls_out_of_order_are_refused():
    with Session(rank=0, ranks=1) as session:
        with pytest.raises(ConfigError, match="declare"):
            session.begin_step()
        (task,) = session.declare([("w", 8, "float32")])
        with pytest.raises(ConfigError, match=r"begin_step\(\)"):
            task.ready(np.zeros(2, np.float32))
        session.begin_step()
        task.ready(np.zeros(2, np.float32))
        with pytest.raises(ConfigError, match="twice in a step"):
            task.ready(np.zeros(2, np.float32))
        with pytest.raises(ConfigError, match="declared already"):
            session.declare([("w", 8, "float32")])
    with pytest.raises(ConfigError, match="exchanges nothing any more"):
        task.wait()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transport": ft.AllReduce(order="replay")}, "process group of PyTorch"),
        ({"transport": ft.ParameterServer("h:1", updates="servers")}, "updates: 'servers' runs PyTorch's optimizers"),
        ({"transport": ft.ParameterServer("h:1", consistency="ssp(3)")}, r"consistency: 'ssp\(3\)' runs PyTorch's"),
        ({"transport": ft.ParameterServer("h:1", elastic=True)}, "only under foretrain.attach"),
        ({"schedule": "nope"}, "nope"),
        ({"warmup": 0}, "watch at least 1"),
        ({"compression": "fp8"}, "fp16"),
        ({"rank": 3, "ranks": 2}, "none of 2 ranks"),
        ({"rank": 0, "ranks": 2, "address": "here"}, "FORETRAIN_ADDRESS"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Session(**{"rank": 0, "ranks": 1, **options})


def test_a_job_without_a_secret_is_refused(monkeypatch):
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match="openssl rand"):
        Session(rank=0, ranks=2, address=free_address())


@pytest.mark.parametrize("launcher", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_the_environment_says_who_and_where(monkeypatch, launcher):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(launcher, ("0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with Session() as session:
        assert (session.rank, session.ranks) == (0, 1)
    monkeypatch.delenv(launcher[1])
    with pytest.raises(ConfigError, match=r"foretrain run, torchrun or mpirun"):
        Session()


def test_what_numpy_can_read_is_a_buffer():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4)
    elements(tensor, "w", 4, "float32")[:] = 1
    assert tensor.tolist() == [1] * 4
    data = bytearray(16)
    elements(memoryview(data), "w", 4, "float32")[:] = 1
    assert np.frombuffer(data, np.float32).tolist() == [1] * 4
    assert elements(torch.ones(2, dtype=torch.bfloat16).view(torch.uint16), "w", 2, "bfloat16").tolist() == [0x3F80] * 2


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (np.zeros(3, np.float32), "3 × float32.*4 × float32"),
        (np.zeros(4), "float64"),
        (np.zeros((4, 2), np.float32)[:, 0], "not contiguous"),
        (object(), "w"),
    ],
)
def test_other_buffers_are_refused(buffer, said):
    with pytest.raises(ConfigError, match=said):
        elements(buffer, "w", 4, "float32")
