"""A service over real sockets: sums, agreements, ends, and everything that must not harm it."""

import contextlib
import os
import re
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from foretrain.comm.auth import nonce
from foretrain.comm.ps.client.connection import Links
from foretrain.comm.ps.frames import RETURNS, FrameKind, Header, pack, unpack
from foretrain.comm.ps.placement import LIMIT
from foretrain.comm.ps.server.job import ServerConfig
from foretrain.comm.ps.server.service import Service
from foretrain.comm.ps.session import ZapAuth, untagged
from foretrain.errors import ConfigError, Disagreement, PeerLost
from tests.comm.ps.server.jobs import SECRET, Way, Worker, declaration, serving, stranger


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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_everybody_gets_the_sums(count):
    what = declaration(10, 100_000, 3, workers=count)
    with serving(count) as service, job(service, count, what) as workers:
        for step in range(4):
            exchange(workers, what, step)
        assert not service.rejected
        for worker in workers:
            worker.connection.send(Header(FrameKind.BYE))
        workers[0].until(lambda: len(service._job.left) == count)


def test_the_urgent_come_first_and_no_more_than_the_credit():
    what = declaration(100_000, 100_000, 100_000, limit=1 << 20, workers=1)
    with serving(1, credit=1) as service, job(service, 1, what) as (worker,):
        worker.acknowledges = False
        worker.push(2, 0, np.zeros(100_000, np.float32))
        worker.until(lambda: bool(worker.kinds(FrameKind.VALUE)))
        worker.push(1, 0, np.zeros(100_000, np.float32))
        worker.push(0, 0, np.zeros(100_000, np.float32))
        worker.until(lambda: any(header.offset == 3 for header in worker.headers(FrameKind.RECEIVED)))
        assert len(worker.kinds(FrameKind.VALUE)) == 1
        worker.acknowledges = True
        worker.acknowledge(worker.kinds(FrameKind.VALUE)[0])
        worker.until(lambda: worker.told(what, 0) is not None)
        assert [header.part for header, _ in worker.heard if header.kind is FrameKind.VALUE] == [2, 0, 1]


def test_workers_that_train_something_else():
    with serving(2) as service, job(service, 2) as (one, other):
        one.join(declaration(10, 20))
        one.connection.send(Header(FrameKind.ALIVE))
        other.join(declaration(10, 21))
        for worker in (one, other):
            worker.until(lambda worker=worker: bool(worker.kinds(FrameKind.FAIL)))
            assert b"layer1" in worker.kinds(FrameKind.FAIL)[0]
        assert isinstance(service.failure, Disagreement)


def test_a_worker_that_is_gone_ends_the_job_of_the_others():
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


def test_an_elastic_job_goes_on_without():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 1, what) as (one,):
        with Worker(service.address, 1) as other:
            other.join(what)
            exchange([one, other], what, 0)
        one.push_all(what, 1, gradients(what, 1))
        one.until(lambda: one.told(what, 1) is not None)
        # The mean over those who are left is the mean that two would have made.
        np.testing.assert_array_equal(one.told(what, 1)[0], 2 * gradients(what, 1)[0])
        assert [header.part for header in one.headers(FrameKind.LOST)] == [1]


def test_a_connection_that_breaks_loses_nothing():
    what = declaration(50_000)
    with serving(2) as service, job(service, 1, what) as (one,):
        way = Way(service.address)
        try:
            with Worker(way.address, 1) as other:
                other.join(what)
                exchange([one, other], what, 0)
                one.push_all(what, 1, gradients(what, 1))
                way.cut()
                other.until(lambda: other.connection.sessions == 2)
                other.declare(what, rounds=2)
                other.push_all(what, 1, gradients(what, 2))
                other.until(lambda: other.told(what, 1) is not None)
                one.until(lambda: one.told(what, 1) is not None)
                np.testing.assert_array_equal(one.told(what, 1)[0], gradients(what, 1)[0] + gradients(what, 2)[0])
                # What had been said before the cut is said again, and counts once.
                other.push_all(what, 1, gradients(what, 2))
                other.heard.clear()
                other.until(lambda: other.told(what, 1) is not None)
                exchange([one, other], what, 2)
        finally:
            way.close()
        assert service.failure is None


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_of_both_connections_breaks_a_session_begins_anew(which):
    what = declaration(1000, workers=1)
    with serving(1) as service:
        way = Way(service.address)
        try:
            with Worker(way.address, 0) as worker:
                worker.join(what)
                exchange([worker], what, 0)
                way.cut(which)
                worker.until(lambda: worker.connection.sessions == 2)
                worker.declare(what, rounds=1)
                worker.heard.clear()
                exchange([worker], what, 1)
                worker.until(lambda: any(header.offset == 1 for header in worker.headers(FrameKind.RECEIVED)))
        finally:
            way.close()
        assert service.failure is None


def test_nobody_else_can_be_the_second_connection_of_a_worker():
    what = declaration(1000, workers=1)
    with serving(1) as service, job(service, 1, what) as (worker,):
        exchange([worker], what, 0)
        with stranger(service) as other:
            other.send(pack(Header(FrameKind.RECEIVED, sender=0, size=1 << 40)) + bytes(16))
            worker.until(lambda: service.rejected.total() == 1)
        exchange([worker], what, 1)
        assert service.rejected == {"tag": 1}


def test_who_does_not_know_the_secret_is_not_let_in():
    what = declaration(10, workers=1)
    with serving(1) as service, Worker(service.address, 0, os.urandom(32)) as other:
        with pytest.raises(PeerLost, match=r"server 0 at 127.0.0.1:\d+ has another secret"):
            other.until(lambda: other.connection.established)
        with job(service, 1, what) as workers:
            exchange(workers, what, 0)
            workers[0].until(lambda: service.rejected["gate"] > 0)
        assert [*service.rejected] == ["gate"]


def test_the_word_at_the_gate_proves_nothing():
    with serving(1) as service, stranger(service) as other:
        for frames in (untagged(FrameKind.HELLO, 0, nonce()), untagged(FrameKind.PROOF, 0, bytes(32))):
            other.send_multipart(frames)
        assert other.poll(10_000)
        other.recv_multipart()
        with Worker(service.address, 0) as worker:
            worker.until(lambda: worker.connection.established and service.rejected.total() == 1)
        assert service.rejected == {"secret": 1}


def test_who_does_not_know_the_word_is_not_even_read():
    what = declaration(1000, workers=1)
    with serving(1) as service, job(service, 1, what) as workers, zmq.Context() as context:
        host, port = service.address
        with context.socket(zmq.DEALER) as other:
            other.connect(f"tcp://{host}:{port}")
            for _ in range(100):
                other.send(bytes(1 << 20), zmq.SNDMORE)
            workers[0].until(lambda: service.rejected["gate"] > 0)
            other.close(linger=0)
        exchange(workers, what, 0)
        assert [*service.rejected] == ["gate"]


def test_a_worker_too_many_is_told_so():
    with (
        serving(1) as service,
        Worker(service.address, 1) as worker,
        pytest.raises(Disagreement, match="has no place for worker 1: start it with --workers 2 or more"),
    ):
        worker.until(lambda: worker.connection.established)


def test_a_worker_without_whom_the_others_go_on_is_told_so():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 2, what) as (one, other):
        other.connection.send(Header(FrameKind.FAIL), b"it has had enough")
        one.until(lambda: bool(one.kinds(FrameKind.LOST)))
        with (
            Worker(service.address, 1) as late,
            pytest.raises(PeerLost, match="the others go on without worker 1, which was lost"),
        ):
            late.until(lambda: late.connection.established)


def test_a_job_waits_for_the_one_that_is_there():
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


def test_a_job_does_not_wait_for_ever_for_another():
    with serving(1) as service, Worker(service.address, 0, job="mine") as one:
        one.join(msgspec.structs.replace(declaration(10, workers=1), job="mine"))
        links = Links([service.address], SECRET, "theirs", 0)
        try:
            with pytest.raises(PeerLost, match=r"serves job mine, .* after 0.5 s: end that, or start"):
                links.establish(0.5)
        finally:
            links.close()


def test_two_jobs_that_wait_do_not_get_a_server_each():
    def team(name):
        return Links([one.address, other.address], SECRET, name, 0)

    def train(name):
        links = team(name)
        try:
            links.establish(30)
            order.append(name)
            for connection in links.connections:
                connection.send(Header(FrameKind.BYE))
        finally:
            links.close(1)

    order = []
    with serving(1) as one, serving(1, shard=1, shards=2) as other:
        first = team("first")
        first.establish(10)
        threads = [threading.Thread(target=train, args=(name,)) for name in ("second", "third")]
        for thread in threads:
            thread.start()
        for connection in first.connections:
            connection.send(Header(FrameKind.BYE))
        first.close(1)
        for thread in threads:
            thread.join(30)
        assert sorted(order) == ["second", "third"]


def test_a_job_that_nobody_comes_back_to_keeps_nobody_out():
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


def test_who_says_that_it_returns_keeps_its_servers():
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


def test_who_refuses_must_know_the_secret():
    with serving(1) as service, job(service, 1) as (worker,):
        answer = worker.connection._main.read

        def altered():
            frames = answer()
            header = None if frames is None else unpack(frames[0].bytes)[0]
            if header is not None and header.kind is FrameKind.WELCOME:
                frames = [zmq.Frame(each) for each in untagged(FrameKind.REFUSED, 0, bytes(32) + b"go away")]
            return frames

        worker.connection._main.read = altered
        with pytest.raises(PeerLost, match="server 0 does not know the job's secret"):
            worker.until(lambda: worker.connection.established)


def test_nobody_declares_for_another_job():
    with serving(1) as service, Worker(service.address, 0, job="mine") as one:
        one.join(msgspec.structs.replace(declaration(10, workers=1), job="theirs"))
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        assert b"of job mine declares what is another's" in one.kinds(FrameKind.FAIL)[0]


def test_a_server_that_does_not_know_the_secret_is_not_believed():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        gate = ZapAuth(context, SECRET, impostor)  # it knows the word, and nothing else
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with Worker(("127.0.0.1", port), 0) as worker:
            for answer in (untagged(FrameKind.CHALLENGE, 0, nonce()), untagged(FrameKind.WELCOME, 0, nonce())):
                deadline = time.monotonic() + 10
                while not impostor.poll(10) and time.monotonic() < deadline:
                    gate.answer()
                    worker.read()
                route, *_ = impostor.recv_multipart(zmq.NOBLOCK)
                impostor.send_multipart([route, *answer])
            with pytest.raises(PeerLost, match="server 0 does not know the job's secret"):
                worker.until(lambda: worker.connection.established)
        gate.close()


def test_what_is_no_server_is_told_so():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with (
            Worker(("127.0.0.1", port), 0) as worker,
            pytest.raises(PeerLost, match=rf"127.0.0.1:{port} is no server of foretrain, or of another version"),
        ):
            worker.until(lambda: worker.connection.established)


def frames_of_strangers():
    random = np.random.default_rng(5)
    for kind in FrameKind:
        yield [pack(Header(kind, sender=1, size=3)) + bytes(16), b"abc"]
    for length in (0, 1, 16, 59, 60, 61, 500):
        yield [random.bytes(length)]
        yield [random.bytes(length)] * 3
    for _ in range(200):
        header = bytearray(pack(Header(FrameKind.PUSH, sender=0)) + bytes(16))
        for _ in range(random.integers(1, 5)):
            header[random.integers(len(header))] = random.integers(256)
        yield [bytes(header), random.bytes(random.integers(100))]
    yield [pack(Header(FrameKind.HELLO, sender=77)) + bytes(16), bytes(32)]
    yield [pack(Header(FrameKind.PUSH)) + bytes(16), bytes(100_000)]


def test_noise_of_strangers_is_rejected_counted_and_harms_nobody():
    what = declaration(1000)
    with serving(2) as service, job(service, 2, what) as workers:
        host, port = service.address
        exchange(workers, what, 0)
        sent = 0
        with stranger(service) as other:
            for frames in frames_of_strangers():
                other.send_multipart(frames)
                sent += 1
            workers[0].until(lambda: service.rejected.total() >= sent - 2)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), struct.pack(">BQ", 3, 1 << 40)):
            with socket.create_connection((host, port)) as raw, contextlib.suppress(OSError):
                raw.sendall(noise)
        exchange(workers, what, 1)
        assert service.failure is None


def test_what_is_too_large_is_not_even_taken():
    what = declaration(1000, workers=1)
    with serving(1) as service, job(service, 1, what) as workers:
        with stranger(service) as other:
            events = other.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            other.send_multipart([pack(Header(FrameKind.PUSH)) + bytes(16), bytes(64 << 20)])
            assert events.poll(10_000)
            other.disable_monitor()
            events.close(0)
        exchange(workers, what, 0)


def test_what_is_a_little_too_large_is_counted():
    what = declaration(1000, workers=1)
    with serving(1) as service, job(service, 1, what) as workers:
        with stranger(service) as other:
            other.send_multipart([pack(Header(FrameKind.PUSH)) + bytes(16), bytes(LIMIT + 1)])
            workers[0].until(lambda: service.rejected["oversized"] == 1)
        exchange(workers, what, 0)


def test_messages_of_a_worker_are_not_taken_twice():
    what = declaration(10)
    with serving(2) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        sent = []
        hand_over = one.connection._main.send

        def keeping(frames):
            sent.append([bytes(frame) for frame in frames])
            return hand_over(frames)

        one.connection._main.send = keeping
        one.push_all(what, 1, gradients(what, 1))
        pushes = sent[:]
        for frames in pushes:
            hand_over(frames)
        other.push_all(what, 1, gradients(what, 2))
        one.until(lambda: one.told(what, 1) is not None)
        np.testing.assert_array_equal(one.told(what, 1)[0], gradients(what, 1)[0] + gradients(what, 2)[0])
        assert service.rejected == {"replay": len(pushes)}


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "0", "0.0"])
def test_never_on_every_address(host):
    with pytest.raises(ConfigError, match="every address"):
        Service(host, SECRET, ServerConfig(1))


def test_an_address_that_is_taken_or_elsewhere():
    with Service("127.0.0.1", SECRET, ServerConfig(1)) as service:
        _, port = service.address
        with pytest.raises(ConfigError, match="cannot be listened on"):
            Service("127.0.0.1", SECRET, ServerConfig(1), port)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Service("192.0.2.1", SECRET, ServerConfig(1))
    with pytest.raises(ConfigError, match="workers: 0"):
        Service("127.0.0.1", SECRET, ServerConfig(0))


def test_workers_of_another_number():
    with serving(2) as service, job(service, 1, declaration(10, workers=3)) as (one,):
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        assert one.kinds(FrameKind.FAIL)[0].endswith(b"start it with --workers 3")


def test_a_server_may_live_on_when_a_job_has_failed():
    what = declaration(10)
    with Service("127.0.0.1", SECRET, ServerConfig(2)) as service:
        thread = threading.Thread(target=service.run, kwargs={"lives_on": True})
        thread.start()
        try:
            with job(service, 2, what) as (one, other):
                exchange([one, other], what, 0)
                one.connection.send(Header(FrameKind.FAIL), b"it has had enough")
                other.until(lambda: bool(other.kinds(FrameKind.FAIL)))
                assert other.kinds(FrameKind.FAIL) == [b"worker 0 gave up: it has had enough"]
                with (
                    Worker(service.address, 1) as late,
                    pytest.raises(PeerLost, match="worker 0 gave up: it has had enough"),
                ):
                    late.until(lambda: late.connection.established)
            another = msgspec.structs.replace(what, job="another")
            with job(service, 2, another) as workers:
                exchange(workers, another, 0)
                for worker in workers:
                    worker.connection.send(Header(FrameKind.BYE))
                workers[0].until(lambda: len(service._job.left) == 2)
        finally:
            service.stop()
            thread.join(10)
            assert not thread.is_alive()


def test_one_job_after_another():
    with serving(2, elastic=True) as service:
        for name in ("one", "other"):
            what = msgspec.structs.replace(declaration(10), job=name)
            with job(service, 2, what) as workers:
                exchange(workers, what, 0)
                exchange(workers, what, 1)
                for worker in workers:
                    worker.connection.send(Header(FrameKind.BYE))
                workers[0].until(lambda: len(service._job.left) == 2)


def test_a_server_that_is_started_anew_is_made_whole_by_its_workers():
    what, values = declaration(10, 20), {}
    with contextlib.ExitStack() as stack:
        with serving(2) as service:
            address = service.address
            one, other = (stack.enter_context(Worker(address, rank)) for rank in range(2))
            for worker in (one, other):
                worker.join(what)
            exchange([one, other], what, 0)
            first = one.wanted()
        with serving(2, port=address[1]) as service:
            for worker in (one, other):
                worker.until(lambda worker=worker: worker.connection.sessions == 2)
                worker.declare(what, rounds=2)
                worker.until(lambda worker=worker: len(worker.numbers()) == 2)
            assert one.wanted() == other.wanted() != first
            values = [gradients(what, seed) for seed in range(2)]
            for step in (0, 1):
                one.push_all(what, step, values[0])
            other.push_all(what, 1, values[1])
            one.until(lambda: one.told(what, 1) is not None)
            np.testing.assert_array_equal(one.told(what, 1)[0], values[0][0] + values[1][0])
            exchange([one, other], what, 2)
            assert service.failure is None


def test_a_worker_that_does_not_come_back_to_a_server_started_anew_is_named():
    what = declaration(10)
    with serving(2, peer_timeout=0.5) as service, job(service, 1) as (one,):
        one.until(lambda: one.connection.established)
        one.declare(what, rounds=3)
        one.until(lambda: one.connection.send(Header(FrameKind.ALIVE)) and bool(one.kinds(FrameKind.FAIL)))
        assert one.kinds(FrameKind.FAIL)[0].startswith(b"worker 1 is lost: it has not come back since this server was")


def test_who_is_done_stays_until_all_are():
    what = declaration(10)
    with serving(2) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        one.connection.send(Header(FrameKind.DONE))
        other.until(lambda: bool(service._job.done))
        assert not one.kinds(FrameKind.DONE)
        other.connection.send(Header(FrameKind.DONE))
        for worker in (one, other):
            worker.until(lambda worker=worker: bool(worker.kinds(FrameKind.DONE)))


@pytest.mark.parametrize("kind", [FrameKind.DONE, FrameKind.BYE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_who_has_closed_takes_part_in_no_further_round(kind, late):
    """It says so before or after others have begun one."""
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


def test_who_was_lost_before_stays_lost_for_a_server_that_is_started_anew():
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


def test_a_worker_that_is_lost_while_rounds_are_made_anew_ends_the_job():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 1) as (one,):
        with Worker(service.address, 1) as other:
            for worker in (one, other):
                worker.until(lambda worker=worker: worker.connection.established)
                worker.declare(what, rounds=9)
                worker.wanted()
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        assert b"others may have sums with it from before this server was started anew" in one.kinds(FrameKind.FAIL)[0]


def test_who_closes_early_is_done_without_in_an_elastic_job():
    what = declaration(10)
    with serving(2, elastic=True) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        one.connection.send(Header(FrameKind.BYE))
        own = gradients(what, 1)
        other.push_all(what, 1, own)
        other.until(lambda: other.told(what, 1) is not None)
        np.testing.assert_array_equal(other.told(what, 1)[0], 2 * own[0])
        assert service.failure is None


def test_what_is_said_after_another_declaration_counts_when_its_sender_has_declared_it():
    what = declaration(10)
    with serving(2) as service, job(service, 2, what) as (one, other):
        exchange([one, other], what, 0)
        other.connection.send(Header(FrameKind.DECLARE, step=1), what.encode())
        other.until(lambda: service._job._epoch == 1)
        one.push_all(what, 9, gradients(what, 9))
        one.connection.send(Header(FrameKind.DECLARE, step=1), what.encode())
        exchange([one, other], what, 1)
        assert service.failure is None
