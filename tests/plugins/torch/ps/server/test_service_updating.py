"""A service that updates, over real sockets, in every mode: nothing is applied twice, and who closes is answered."""

import contextlib
import threading

import numpy as np
import pytest
import torch

from foretrain.comm.ps.consistency import encode_groups
from foretrain.comm.ps.frames import CLOSED, FrameKind, Header
from foretrain.comm.ps.placement import Declaration, Declared, Optimized, Placement
from foretrain.comm.ps.server import snapshots
from foretrain.plugins.torch.ps.server.parameter_store import PartState, decode, encode
from tests.comm.ps.server.jobs import Way, Worker, serving

COUNT = 500_000
"""Elements: eight parts, and answers of several messages."""


def declared(consistency, workers=2):
    optimized = Optimized(("SGD",), (0,), ("float32",), consistency)
    tasks = (Declared("layer", 4 * COUNT, "float32", 0),)
    return Declaration(tasks, workers, limit=1 << 18, optimized=optimized)


def seed(worker, what, value=0.0):
    """Rank 0 says what the servers begin with."""
    for part in Placement(what, 1).parts:
        frames = encode(PartState(torch.full((part.size // 4,), value), {}))
        for number, frame in enumerate(frames):
            header = Header(FrameKind.INIT, part=part.number, step=number, offset=len(frames), size=len(frame))
            worker.connection.send(header, frame)
    worker.until(lambda: len(worker.kinds(FrameKind.STATE)) == len(Placement(what, 1).parts))


def rule(worker, step, **settings):
    worker.connection.send(Header(FrameKind.RULE, step=step), encode_groups([settings]))


@pytest.mark.parametrize("consistency", ["bsp", "async", "ssp(1)"])
def test_a_connection_that_breaks_applies_nothing_twice(consistency):
    what = declared(consistency)
    ones = np.ones(COUNT, np.float32)
    with serving(2) as service, Worker(service.address, 0) as one:
        way = Way(service.address)
        try:
            with Worker(way.address, 1) as other:
                one.join(what)
                seed(one, what)
                other.join(what)
                rule(one, 0, lr=1.0)
                rule(other, 0, lr=1.0)
                one.push_all(what, 0, [ones])
                other.push_all(what, 0, [ones])
                way.cut()
                other.until(lambda: other.connection.sessions == 2)
                other.connection.send(Header(FrameKind.DECLARE), what.encode())
                rule(other, 0, lr=1.0)
                for _ in range(2):
                    other.push_all(what, 0, [ones])
                for worker in (one, other):
                    worker.until(lambda worker=worker: worker.told(what, 0) is not None)
                # Two gradients of ones, together or one after the other.
                other.connection.send(Header(FrameKind.GET_STATE, part=7))
                other.until(lambda: len(other.kinds(FrameKind.STATE)) == 2)
                assert (decode(other.kinds(FrameKind.STATE)).parameter == -2).all()
                np.testing.assert_array_equal(other.told(what, 0)[0], -2 * ones)
        finally:
            way.close()
        assert service.failure is None


def again(worker, what, rounds):
    """Declares to the server that has come after the one it knew."""
    worker.until(lambda: worker.connection.sessions == 2)
    worker.heard.clear()
    worker.declare(what, rounds=rounds)


def step(team, what, number):
    for worker in team:
        worker.push_all(what, number, [np.ones(COUNT, np.float32)])
    for worker in team:
        worker.until(lambda worker=worker: worker.told(what, number) is not None)


def test_what_a_server_begins_with_outlives_it_before_anybody_has_pushed(tmp_path):
    what = declared("bsp")
    with contextlib.ExitStack() as stack:
        with serving(2, snapshots=tmp_path) as service:
            address = service.address
            team = [stack.enter_context(Worker(address, rank)) for rank in range(2)]
            for worker in team:
                worker.join(what)
            seed(team[0], what, 3.0)
        with serving(2, port=address[1], snapshots=tmp_path) as service:
            for worker in team:
                again(worker, what, rounds=0)
                rule(worker, 0, lr=1.0)
            step(team, what, 0)
            assert (team[0].told(what, 0)[0] == 1).all()
            for worker in team:
                worker.connection.send(Header(FrameKind.BYE))
            team[0].until(lambda: not list(tmp_path.iterdir()))
            assert service.failure is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("consistency", ["bsp", "async", "ssp(1)"])
def test_a_worker_that_closes_is_answered_although_the_server_died_while_it_wrote_a_snapshot(
    tmp_path, monkeypatch, consistency
):
    """Half a file is left of the snapshot with the last round and both closes; the one before has neither."""
    what, options = declared(consistency), {"snapshots": tmp_path, "every": 1}
    write, dies, died = snapshots.write_atomically, threading.Event(), threading.Semaphore(0)

    def write_or_die(path, pieces):
        if not dies.is_set():
            return write(path, pieces)
        whole = b"".join(pieces)
        path.with_name(f".{path.name}.tmp").write_bytes(whole[: len(whole) // 2])
        died.release()
        raise SystemExit  # of the thread that writes; the server is stopped below

    def closed(worker):
        return any(header.flag & CLOSED and header.step == 2 for header in worker.headers(FrameKind.COMMITTED))

    monkeypatch.setattr(snapshots, "write_atomically", write_or_die)
    with contextlib.ExitStack() as stack:
        with serving(2, **options) as service:
            address = service.address
            team = [stack.enter_context(Worker(address, rank)) for rank in range(2)]
            for worker in team:
                worker.join(what)
                rule(worker, 0, lr=1.0)
            seed(team[0], what)
            step(team, what, 0)
            for worker in team:
                worker.until(lambda worker=worker: any(h.step == 1 for h in worker.headers(FrameKind.COMMITTED)))
            dies.set()
            step(team, what, 1)
            for worker in team:
                worker.connection.send(Header(FrameKind.DONE))
            assert died.acquire(timeout=60)
            worker.until(lambda: died.acquire(blocking=False))  # that of the round, then that of a close
        assert len(list(tmp_path.rglob(".*.tmp"))) == 1
        assert not any(closed(worker) for worker in team)
        dies.clear()
        with serving(2, port=address[1], **options) as service:
            for worker in team:
                again(worker, what, rounds=2)
                worker.wanted()
                assert [header.step for header in worker.headers(FrameKind.WANTED)] == [1]
                rule(worker, 1, lr=1.0)
            step(team, what, 1)
            team[0].connection.send(Header(FrameKind.GET_STATE, part=7))
            team[0].until(lambda: bool(team[0].kinds(FrameKind.STATE)))
            assert (decode(team[0].kinds(FrameKind.STATE)).parameter == -4).all()  # each push once
            for worker in team:
                worker.connection.send(Header(FrameKind.DONE))
            for worker in team:
                worker.until(lambda worker=worker: closed(worker))
                worker.connection.send(Header(FrameKind.BYE))
            team[1].until(lambda: not any(tmp_path.iterdir()))  # the job's folder goes with its last snapshot
            assert service.failure is None


def test_a_server_dies_after_a_worker_and_a_snapshot_without_it(tmp_path):
    what, options = declared("bsp", 3), {"elastic": True, "snapshots": tmp_path, "every": 1}
    with contextlib.ExitStack() as stack:
        with serving(3, **options) as service:
            address = service.address
            *team, lost = (stack.enter_context(Worker(address, rank)) for rank in range(3))
            for worker in (*team, lost):
                worker.join(what)
                rule(worker, 0, lr=0.25)
            seed(team[0], what, 10.0)
            step((*team, lost), what, 0)
            lost.connection.send(Header(FrameKind.FAIL), b"it has had enough")
            for worker in team:
                worker.until(lambda worker=worker: bool(worker.headers(FrameKind.LOST)))
            step(team, what, 1)
            team[0].until(lambda: any(header.step == 2 for header in team[0].headers(FrameKind.COMMITTED)))
        with serving(3, port=address[1], **options) as service:
            for worker in team:
                again(worker, what, rounds=2)
                worker.connection.send(Header(FrameKind.LOST, part=2, step=0, offset=1))
                rule(worker, 0, lr=0.25)
            step(team, what, 2)
            # What is missing is the others' mean: three rounds of three ones each.
            assert (team[1].told(what, 2)[0] == 10 - 3 * 0.75).all()
            assert service.failure is None


def test_rules_for_sums_make_no_sense():
    what = Declaration((Declared("layer", 8, "float32", 0),), 1)
    with serving(1) as service, Worker(service.address, 0) as one:
        one.join(what)
        rule(one, 0, lr=1.0)
        one.until(lambda: bool(one.kinds(FrameKind.FAIL)))
        assert b"RULE of worker 0, where only sums are made" in one.kinds(FrameKind.FAIL)[0]
