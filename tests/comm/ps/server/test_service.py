"""A service over real sockets: sums, agreements, ends, and everything that must not harm it."""

import contextlib
import operator
import os
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.client.connection import Links
from foretrain.comm.ps.frames import ABSENT, BESIDE, RETURNS, SEVERAL, TO_SERVER, FrameKind, Header
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.server.job import ServerConfig
from foretrain.comm.ps.server.service import Service
from foretrain.errors import ConfigError, Disagreement, PeerLost
from tests.comm.ps.server.jobs import SECRET, Way, Worker, declaration, message, received, serving, stranger
from tests.waiting import until


def gradients(what, seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(task.size // 4, np.float32) for task in what.tasks]


@contextlib.contextmanager
def job(service, count, what=None):
    name = what.job if what is not None else ""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(service.address, rank, job=name)) for rank in range(count)]
        if what is not None:
            for worker in workers:
                worker.join(what)
        yield workers


def exchange(workers, what, step):
    """One round; everybody has the sum by rank."""
    values = [gradients(what, 100 * step + rank) for rank in range(len(workers))]
    for worker, own in zip(workers, values, strict=True):
        worker.push_all(what, step, own)
    expected = values[0]
    for other in values[1:]:
        expected = [one + two for one, two in zip(expected, other, strict=True)]
    for worker in workers:
        worker.until(lambda worker=worker: worker.told(what, step) is not None)
        for found, right in zip(worker.told(what, step), expected, strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.fixture
def short_grace(monkeypatch):
    """Whoever is gone has a second to come back, for tests in which nobody does."""
    monkeypatch.setattr("foretrain.comm.ps.server.job._GRACE", 1.0)


@pytest.mark.parametrize("count", [1, 3])
def test_all_workers_get_the_sums(count):
    what = declaration(10, 100_000, 3, workers=count)
    with serving(count) as service, job(service, count, what) as workers:
        for step in range(4):
            exchange(workers, what, step)
        assert not service.rejected
        for worker in workers:
            worker.connection.send(Header(FrameKind.BYE))
        workers[0].until(lambda: len(service._job.left) == count)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (declaration(10, 21), b"layer1"),
        (declaration(10, 20, workers=3), b"start it with --workers 3"),
        (msgspec.structs.replace(declaration(10, 20), job="theirs"), b"of job  declares what is another's"),
    ],
)
def test_a_declaration_that_contradicts_the_job_ends_it(what, reason):
    with serving(2) as service, job(service, 2) as (one, other):
        one.join(declaration(10, 20))
        one.wanted()
        other.join(what)
        for worker in (one, other):
            worker.until(lambda worker=worker: bool(worker.kinds(FrameKind.FAIL)))
            assert reason in worker.kinds(FrameKind.FAIL)[0]
        assert isinstance(service.failure, Disagreement | PeerLost)


@pytest.mark.usefixtures("short_grace")
def test_a_disconnected_worker_ends_the_job_of_the_others():
    what = declaration(10)
    with serving(2) as service, job(service, 1, what) as (one,):
        with Worker(service.address, 1) as other:
            other.join(what)
            one.push_all(what, 0, gradients(what, 0))
            other.until(lambda: service._job.parts is not None and bool(service._job.parts.waiting()))
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        text = one.kinds(FrameKind.FAIL)[0].decode()
        assert "worker 1 is lost: its connection is closed" in text
        assert "round 0: part of task 'layer0' waits for worker 1 (40 bytes)" in text
        assert isinstance(service.failure, PeerLost)


@pytest.mark.usefixtures("short_grace")
def test_a_worker_is_not_lost_while_the_server_hardly_runs(monkeypatch):
    what, late = declaration(10), []
    with serving(2) as service, job(service, 1, what) as (one,):
        with Worker(service.address, 1) as other:
            other.join(what)
            other.wanted()
        watch, beside = service._job.watch, service._job.peers.of_rank(1)

        def starved():
            time.sleep(0.4)
            late.extend([time.monotonic() - beside.gone] if beside.gone else ())
            watch()

        monkeypatch.setattr(service._job, "watch", starved)
        one.until(lambda: late and late[-1] > 2)
        assert service.failure is None
        monkeypatch.setattr(service._job, "watch", watch)
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("closes", [True, False])
def test_an_elastic_job_goes_on_without_a_worker_that_closes_or_disconnects(closes):
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 1, what) as (one,):
        with Worker(service.address, 1) as other:
            other.join(what)
            exchange([one, other], what, 0)
            if closes:
                other.connection.send(Header(FrameKind.BYE))
                one.until(lambda: bool(service._job.left))
        one.push_all(what, 1, gradients(what, 1))
        one.until(lambda: one.told(what, 1) is not None)
        # The mean over the remaining workers is the mean that two would have made.
        np.testing.assert_array_equal(one.told(what, 1)[0], 2 * gradients(what, 1)[0])
        assert [header.part for header in one.headers(FrameKind.LOST)] == [1]
        assert service.failure is None


@pytest.mark.parametrize("elastic", [True, False])
def test_a_worker_that_was_only_stopped_is_told_why_it_was_dropped_and_both_of_its_connections_end(elastic):
    what = declaration(10)
    with serving(2, elastic=elastic, peer_timeout=2.0, lives_on=True) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        routes = service._job.peers.of_rank(1).routes
        end = FrameKind.LOST if elastic else FrameKind.FAIL
        # Meanwhile `other` neither sends nor reads.
        one.until(lambda: one.connection.send(Header(FrameKind.ALIVE)) and bool(one.headers(end)))
        other.until(lambda: bool(other.kinds(FrameKind.FAIL)))
        after = "the others go on without it: start again" if elastic else "the job has ended: start again"
        why = rf"server 0 dropped this worker because it was silent for \d+\.\d s; {after} .* longer --timeout"
        assert re.match(why, other.kinds(FrameKind.FAIL)[0].decode())
        refusal = why if elastic else "its job has failed: worker 1 is lost: it was silent for"
        with pytest.raises(PeerLost, match=refusal):  # it connects anew, as its connections have ended
            other.until(lambda: False)
        until(lambda: not service._known.intersection(routes))
        assert set(service.rejected) == {"refused"}


@pytest.mark.parametrize("which", [None, 0, 1], ids=["both", "first", "second"])
def test_a_connection_that_breaks_loses_nothing(which):
    what = declaration(50_000)
    with serving(2) as service, job(service, 1, what) as (one,), contextlib.closing(Way(service.address)) as way:
        with Worker(way.address, 1) as other:
            other.join(what)
            exchange([one, other], what, 0)
            one.push_all(what, 1, gradients(what, 1))
            way.cut(which)
            other.until(lambda: other.connection.sessions == 2)
            other.declare(what, rounds=2)
            other.heard.clear()
            other.push_all(what, 1, gradients(what, 2))
            for worker in (other, one):
                worker.until(lambda worker=worker: worker.told(what, 1) is not None)
            other.until(lambda: bool(other.headers(FrameKind.RECEIVED)))
            np.testing.assert_array_equal(one.told(what, 1)[0], gradients(what, 1)[0] + gradients(what, 2)[0])
            # Pushes from before the cut are resent, and count once.
            other.push_all(what, 1, gradients(what, 2))
            other.heard.clear()
            other.until(lambda: other.told(what, 1) is not None)
            exchange([one, other], what, 2)
        assert service.failure is None


def test_sums_go_to_the_connections_of_a_worker_that_were_made_last():
    what = declaration(1000)
    with serving(2) as service, job(service, 2, what) as (one, other), contextlib.ExitStack() as stack:
        exchange([one, other], what, 0)
        for step in range(1, 4):
            stack.enter_context(stranger(service))
            again = stack.enter_context(Worker(service.address, 1))
            again.join(what)
            again.wanted()
            exchange([one, again], what, step)
        assert not other.headers(FrameKind.VALUE)[2:]
        assert service.failure is None


def hello(other, rank=0, flag=0):
    """Begin a handshake; return the server's nonce."""
    other.sendall(message(Header(FrameKind.HELLO, flag, rank), bytes(32)))
    return received(other, 64 + 32)[64:]


@pytest.mark.parametrize("knows", ["nonces", "nothing"])
def test_a_stranger_cannot_be_the_second_connection_of_a_worker(knows):
    what = declaration(1000, workers=1)
    with serving(1) as service, job(service, 1, what) as (worker,):
        exchange([worker], what, 0)
        first = worker.connection._first.nonces if knows == "nonces" else bytes(64)
        with stranger(service) as other:
            hello(other, flag=BESIDE)
            other.sendall(message(Header(FrameKind.PROOF), bytes(32) + first))
            assert received(other, 1 << 20)[4 + 2] == FrameKind.STRANGER
        exchange([worker], what, 1)
        until(lambda: service.rejected)
        assert service.rejected == {"secret": 1}


def test_what_is_watched_on_the_wire_lets_nobody_in():
    what = declaration(1000, workers=1)
    with serving(1) as service, contextlib.closing(Way(service.address)) as way, Worker(way.address, 0) as worker:
        worker.join(what)
        exchange([worker], what, 0)
        seen = [said for said in way.said if said]
        for said in seen:
            with stranger(service) as other:
                other.sendall(said)
                assert received(other, 64 + 32)[4 + 2] == FrameKind.CHALLENGE
                answer = received(other, 1 << 20)
                assert not answer or answer[4 + 2] == FrameKind.STRANGER
        worker.until(lambda: service.rejected.total() == len(seen))
        exchange([worker], what, 1)
        assert service.rejected == {"secret": len(seen)}


def test_a_worker_with_another_secret_is_refused():
    what = declaration(1000, workers=1)
    with serving(1) as service, Worker(service.address, 0, os.urandom(32)) as other:
        with pytest.raises(PeerLost, match=r"server 0 at 127.0.0.1:\d+ has another secret"):
            other.until(lambda: other.connection.established)
        with job(service, 1, what) as workers:
            exchange(workers, what, 0)
        until(lambda: service.rejected)
        assert service.rejected == {"secret": 1}


def test_strangers_hold_neither_a_place_nor_memory_for_long(monkeypatch):
    monkeypatch.setattr("foretrain.comm.ps.wire.STRANGERS_TIMEOUT", 0.2)
    what = declaration(1000, workers=1)
    with serving(1) as service, contextlib.ExitStack() as stack, job(service, 1, what) as workers:
        others = [stack.enter_context(stranger(service)) for _ in range(100)]
        for other in others[::2]:
            with contextlib.suppress(OSError):
                other.sendall(message(Header(FrameKind.HELLO), length=32))  # and no nonce
        for other in others:
            assert received(other, 1) == b""
        exchange(workers, what, 0)
        until(lambda: service.rejected.total() == len(others))
        assert set(service.rejected) == {"late", "crowded"}


def test_a_worker_that_is_lost_or_too_many_is_refused_with_the_reason():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 2, what) as (one, other):
        other.connection.send(Header(FrameKind.FAIL), b"it has had enough")
        one.until(lambda: bool(one.kinds(FrameKind.LOST)))
        for rank, kind, reason in (
            (1, PeerLost, "server 0 dropped this worker because it gave up: .* enough; the others go on without it"),
            (2, Disagreement, "has no place for worker 2: start it with --workers 3 or more"),
        ):
            with Worker(service.address, rank) as late, pytest.raises(kind, match=reason):
                late.until(lambda late=late: late.connection.established)


def test_a_job_waits_until_the_present_one_has_ended():
    mine, theirs = (msgspec.structs.replace(declaration(10, workers=1), job=name) for name in ("mine", "theirs"))
    with serving(1) as service, Worker(service.address, 0, job="mine") as one:
        one.join(mine)
        with Worker(service.address, 0, job="theirs") as other:
            other.until(lambda: other.connection.busy is not None)
            assert other.connection.busy.startswith("server 0 serves job mine, which has not ended, and this is theirs")
            exchange([one], mine, 0)
            one.connection.send(Header(FrameKind.BYE))
            other.join(theirs)
            exchange([other], theirs, 0)
        assert service.failure is None


def test_a_job_that_waits_for_another_gives_up_after_its_timeout():
    with serving(1) as service, Worker(service.address, 0, job="mine") as one:
        one.join(msgspec.structs.replace(declaration(10, workers=1), job="mine"))
        links = Links([service.address], SECRET, "theirs", 0)
        try:
            with pytest.raises(PeerLost, match=r"serves job mine, .* after 0.5 s: end that, or start"):
                links.establish(0.5)
        finally:
            links.close()


def test_two_jobs_that_wait_do_not_get_a_server_each():
    def train(name):
        with contextlib.closing(Links([one.address, other.address], SECRET, name, 0)) as links:
            links.establish(60)
            if name == "first":
                began.set()
                assert both.wait(60)
            for connection in links.connections:
                connection.send(Header(FrameKind.BYE))
            links.close(1)
        return name

    began, both = threading.Event(), threading.Event()
    with serving(1) as one, serving(1, shard=1, shards=2) as other, ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(train, "first")]
        assert began.wait(60)
        jobs += [pool.submit(train, name) for name in ("second", "third")]
        both.set()
        assert [each.result() for each in jobs] == ["first", "second", "third"]


def test_a_deserted_job_makes_room_for_the_next():
    with serving(2, elastic=True, peer_timeout=0.5) as service:
        with Worker(service.address, 0, job="mine") as one:
            one.join(msgspec.structs.replace(declaration(10), job="mine"))
            one.wanted()
        with Worker(service.address, 0, job="theirs") as other:
            other.until(lambda: other.connection.established)
        with (
            Worker(service.address, 0, job="mine") as late,
            pytest.raises(PeerLost, match="the others went on without it, and have ended"),
        ):
            late.until(lambda: late.connection.established)


def test_a_worker_that_announces_its_return_keeps_its_servers():
    what = msgspec.structs.replace(declaration(10, workers=1), job="mine")
    with serving(1) as service, Worker(service.address, 0, job="theirs") as other:
        with Worker(service.address, 0, job="mine") as one:
            one.join(what)
            exchange([one], what, 0)
            one.connection.send(Header(FrameKind.BYE, RETURNS))
            other.until(lambda: other.connection.busy is not None and not service._job.peers.ranks)
        with Worker(service.address, 0, job="mine") as one:
            one.until(lambda: one.connection.established)
            one.connection.send(Header(FrameKind.DECLARE, step=1), what.encode())
            exchange([one], what, 0)
            assert not other.connection.established
            one.connection.send(Header(FrameKind.BYE))
            other.until(lambda: other.connection.established)
        assert service.failure is None


@pytest.mark.parametrize(("kind", "payload"), [(FrameKind.WELCOME, bytes(32)), (FrameKind.REFUSED, bytes(40))])
def test_a_server_without_the_secret_can_neither_admit_nor_refuse(kind, payload):
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        Worker(other.getsockname(), 0) as worker,
        contextlib.closing(other.accept()[0]) as one,
        contextlib.closing(other.accept()[0]) as two,
    ):
        worker.until(lambda: worker.connection._pending is not None)
        for each in (one, two):  # the worker greets on the first of its connections
            each.sendall(message(Header(FrameKind.CHALLENGE), bytes(32)) + message(Header(kind), payload))
        with pytest.raises(PeerLost, match="server 0 does not know the job's secret"):
            worker.until(lambda: worker.connection.established)


def test_another_service_is_reported_as_no_server():
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        Worker(other.getsockname(), 0) as worker,
        contextlib.closing(other.accept()[0]) as one,
    ):
        one.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
        port = other.getsockname()[1]
        with pytest.raises(PeerLost, match=rf"127.0.0.1:{port} is no server of foretrain, or of another version"):
            worker.until(lambda: worker.connection.established)


def noise_of_strangers():
    for kind in FrameKind:
        yield message(Header(kind, sender=1, size=3), b"abc")
    for length in (64, 65, 500, 4096):
        yield os.urandom(length)
    yield message(Header(FrameKind.PUSH, sender=9), b"abc")
    yield message(Header(FrameKind.PUSH)).replace(b"fs\x07", b"fs\x63")
    yield message(Header(FrameKind.HELLO, sender=77), bytes(33))
    yield message(Header(FrameKind.PUSH), bytes(100_000))
    yield message(Header(FrameKind.HELLO), length=(1 << 32) - 1)
    yield b"GET / HTTP/1.1\r\n\r\n" * 4


def test_noise_of_strangers_is_rejected_and_counted_and_the_job_goes_on():
    what = declaration(1000)
    with serving(2) as service, job(service, 2, what) as workers:
        exchange(workers, what, 0)
        noise = [*noise_of_strangers()]
        for each in noise:
            with stranger(service) as other:
                with contextlib.suppress(OSError):
                    other.sendall(each)
                assert received(other, 1 << 20) == b""
        workers[0].until(lambda: service.rejected.total() == len(noise))
        exchange(workers, what, 1)
        assert service.failure is None


fields = st.one_of(st.integers(0, 3), st.sampled_from([40, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
headers = st.builds(
    Header,
    st.one_of(st.sampled_from(sorted(TO_SERVER)), st.integers(0, 255)),  # pyright: ignore[reportArgumentType]
    st.one_of(st.sampled_from([0, ABSENT, SEVERAL]), st.integers(0, 255)),
    st.integers(0, 3),
    st.just(0),
    fields.map(lambda number: number % (1 << 32)),
    *(fields, fields, fields),
)
tables = st.lists(st.tuples(fields, fields, fields, fields), max_size=3).map(
    lambda rows: b"".join(struct.pack("<QQQQ", *row) for row in rows)
)
payloads = st.one_of(
    st.just(b""),
    st.binary(max_size=200),
    st.sampled_from([4, 32, 40, 96]).map(bytes),
    st.builds(operator.add, tables, st.binary(max_size=80)),
    st.just(declaration(10).encode()),
)


@given(st.lists(st.tuples(headers, payloads, st.none() | st.integers(0, (1 << 32) - 1)), min_size=1, max_size=4))
def test_whatever_strangers_say_the_job_goes_on(said):
    what = declaration(1000)
    with serving(2) as service, job(service, 2, what) as workers:
        exchange(workers, what, 0)
        for header, payload, length in said:
            with stranger(service) as other:
                with contextlib.suppress(OSError):
                    other.sendall(message(header, payload, length=length))
                    other.shutdown(socket.SHUT_WR)
                received(other, 1 << 20)  # to the end, which the server makes
        exchange(workers, what, 1)
        assert service.failure is None


@given(st.lists(st.tuples(headers, payloads), min_size=1, max_size=4))
def test_whatever_a_worker_says_its_server_finds_what_is_wrong_and_serves_the_next_job(said):
    first, second = (msgspec.structs.replace(declaration(10), job=name) for name in ("first", "second"))
    with serving(2, lives_on=True) as service:
        with job(service, 2, first) as (one, other):
            exchange([one, other], first, 0)
            for header, payload in said:
                other.connection.send(header, payload)
            one.connection.send(Header(FrameKind.FAIL), b"enough")
            until(lambda: "first" in service._ended)
        assert "server 0 failed" not in service._ended["first"]
        with job(service, 2, second) as workers:
            exchange(workers, second, 0)


@pytest.mark.parametrize("reason", ["too_large", "forged"])
def test_a_message_that_is_too_large_or_forged_ends_its_connection_and_not_the_job(reason):
    what = declaration(1000, workers=1)
    with serving(1) as service, contextlib.closing(Way(service.address)) as way, Worker(way.address, 0) as worker:
        worker.join(what)
        exchange([worker], what, 0)
        _, towards_server = way._pairs[0]
        towards_server.sendall(message(Header(FrameKind.PUSH), length=LIMIT + 1 if reason == "too_large" else 0))
        worker.until(lambda: worker.connection.sessions == 2)
        until(lambda: service.rejected)
        assert service.rejected == {reason: 1}
        worker.declare(what, rounds=1)
        exchange([worker], what, 1)
        assert service.failure is None


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "0", "0.0"])
def test_a_service_refuses_to_listen_on_every_address(host):
    with pytest.raises(ConfigError, match="every address"):
        Service(host, SECRET, ServerConfig(1))


def test_an_address_in_use_or_of_another_host_is_refused():
    with Service("127.0.0.1", SECRET, ServerConfig(1)) as service:
        _, port = service.address
        with pytest.raises(ConfigError, match="cannot be listened on"):
            Service("127.0.0.1", SECRET, ServerConfig(1), port)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Service("192.0.2.1", SECRET, ServerConfig(1))
    with pytest.raises(ConfigError, match="workers: 0"):
        Service("127.0.0.1", SECRET, ServerConfig(0))


def test_a_server_serves_the_next_job_when_one_has_failed_or_ended():
    with serving(2, lives_on=True) as service:
        what = declaration(10)
        with job(service, 2, what) as (one, other):
            exchange([one, other], what, 0)
            one.connection.send(Header(FrameKind.FAIL), b"it has had enough")
            other.until(lambda: bool(other.kinds(FrameKind.FAIL)))
            assert other.kinds(FrameKind.FAIL) == [b"worker 0 gave up: it has had enough"]
            with Worker(service.address, 1) as late, pytest.raises(PeerLost, match="worker 0 gave up: it has had"):
                late.until(lambda: late.connection.established)
        for name in ("another", "third"):
            what = msgspec.structs.replace(what, job=name)
            with job(service, 2, what) as workers:
                exchange(workers, what, 0)
                for worker in workers:
                    worker.connection.send(Header(FrameKind.BYE))
                workers[0].until(lambda: len(service._job.left) == 2)


def test_a_worker_that_does_not_reconnect_to_a_restarted_server_is_named():
    what = declaration(10)
    with serving(2, peer_timeout=0.5) as service, job(service, 1) as (one,):
        one.until(lambda: one.connection.established)
        one.declare(what, rounds=3)
        one.until(lambda: one.connection.send(Header(FrameKind.ALIVE)) and bool(one.kinds(FrameKind.FAIL)))
        assert one.kinds(FrameKind.FAIL)[0].startswith(b"worker 1 is lost: it has not come back since this server was")


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("kind", "late"), [(FrameKind.DONE, False), (FrameKind.BYE, True)])
def test_a_round_that_needs_a_worker_that_has_closed_fails(kind, late):
    """Its message arrives before or after others have begun one."""
    what = declaration(10)
    with serving(2) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        if late:
            other.push_all(what, 1, gradients(what, 1))
            other.until(lambda: service._job.parts.blocking_round(0) == 1)
        one.connection.send(Header(kind))
        other.until(lambda: bool(service._job.done | service._job.left))
        if not late:
            other.push_all(what, 1, gradients(what, 1))
        other.until(lambda: bool(other.kinds(FrameKind.FAIL)))
        assert other.kinds(FrameKind.FAIL) == [b"worker 0 closed its attachment before round 1, which others are in"]


def anew(service, one, what, since):
    """Worker 0 comes in round 8 to a server that was started anew, and knows that worker 1 was lost in ``since``."""
    one.until(lambda: one.connection.established)
    one.declare(what, rounds=9)
    one.connection.send(Header(FrameKind.LOST, part=1, step=since, offset=8))
    one.until(lambda: bool(one.headers(FrameKind.LOST)) or bool(one.kinds(FrameKind.FAIL)))


def test_a_lost_worker_stays_lost_for_a_restarted_server():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 1) as (one,):
        anew(service, one, what, since=6)
        one.push_all(what, 8, gradients(what, 1))
        one.until(lambda: one.told(what, 8) is not None)
        np.testing.assert_array_equal(one.told(what, 8)[0], 2 * gradients(what, 1)[0])


@pytest.mark.parametrize("elastic", [True, False])
def test_a_worker_and_a_server_that_are_lost_in_one_round_end_the_job(elastic):
    """Some may have sums with that worker's gradients, and others would get sums without."""
    with serving(2, elastic=elastic) as service, job(service, 1) as (one,):
        anew(service, one, declaration(10), since=7 if elastic else 2)
        assert re.match(rb"worker 1 was lost in round \d, and then this server", one.kinds(FrameKind.FAIL)[0])


@pytest.mark.usefixtures("short_grace")
def test_a_worker_that_is_lost_while_rounds_are_repeated_ends_the_job():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 1) as (one,):
        with Worker(service.address, 1) as other:
            for worker in (one, other):
                worker.until(lambda worker=worker: worker.connection.established)
                worker.declare(what, rounds=9)
                worker.wanted()
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        assert b"others may have sums with it from before this server was started anew" in one.kinds(FrameKind.FAIL)[0]


def test_messages_count_only_once_their_sender_has_made_the_latest_declaration():
    what = declaration(10)
    with serving(2) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        other.connection.send(Header(FrameKind.DECLARE, step=1), what.encode())
        other.until(lambda: service._job._epoch == 1)
        one.push_all(what, 9, gradients(what, 9))
        one.connection.send(Header(FrameKind.DECLARE, step=1), what.encode())
        exchange([one, other], what, 1)
        assert service.failure is None
