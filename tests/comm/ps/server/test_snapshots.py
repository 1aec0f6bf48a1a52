"""Snapshots: what is written is read, what is not whole or another's is not, and a shard goes on from the last."""

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.frames import CLOSED, STATEFUL, FrameKind, Header
from foretrain.comm.ps.server import job as module
from foretrain.comm.ps.server import snapshots
from foretrain.comm.ps.server.snapshots import Damaged, SnapshotPolicy, Snapshots, packed, read
from tests.comm.ps.server.jobs import Worker, declaration, serving
from tests.comm.ps.server.stateful import RATE, Sgd


def test_a_written_state_is_read_again(tmp_path):
    leaves = [None, True, -(1 << 63), (1 << 64) - 1, 0.1, "text", b"bytes", {"key": [], 3: {}}]
    arrays = [np.arange(6).astype(kind).reshape(2, 3) for kind in ("float32", "float64", "int64", "uint8", "bool")]
    arrays += [np.float32(1.5), np.zeros((0, 3)), np.array(2), np.arange(9.0)[::2]]
    path = tmp_path / "state"
    path.write_bytes(b"".join(packed({"state": {"leaves": leaves, "arrays": arrays}})))
    found = read(path)["state"]
    assert found["leaves"] == leaves
    assert [type(each) for each in found["leaves"]] == [type(each) for each in leaves]
    for array, read_again in zip(arrays, found["arrays"], strict=True):
        assert (read_again.dtype, read_again.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read_again, array)


@given(place=st.integers(0, 400), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_snapshot_is_not_read(tmp_path_factory, place, flip, cut):
    path = tmp_path_factory.getbasetemp() / "damaged"
    whole = bytearray(b"".join(packed({"state": {"a": np.arange(60.0), "b": "text"}})))
    place %= len(whole)
    if cut:
        del whole[place:]
    else:
        whole[place] ^= flip
    path.write_bytes(whole)
    with pytest.raises(Damaged):
        read(path)


def test_a_state_that_cannot_be_written_is_refused():
    with pytest.raises(TypeError, match="object in a shard's state is neither plain nor an array"):
        list(packed({"a": object()}))


class Counting:
    """As many rounds as it is told."""

    begun, left, living = True, (), (0,)

    def __init__(self, rounds=0):
        self.done, self.array = [rounds], np.zeros(3)

    def state(self):
        return {"done": self.done, "array": self.array}

    def restore(self, state):
        self.done, self.array = state["done"], state["array"]


def kept(folder, what=None, every=2, shard=0):
    return Snapshots(folder, every, what or declaration(10), 1, shard, 2)


def test_the_last_snapshot_is_kept_and_read_if_it_is_complete(tmp_path, caplog):
    one = kept(tmp_path)
    shard = Counting()
    for rounds in range(1, 9):
        shard.done, shard.array[:] = [rounds], rounds
        assert one.offer(shard) == (rounds % 2 == 0)
        shard.array[:] = -1  # it goes on, and what is written is what it was
        one.close()
        assert list(one.saved) == [rounds // 2 * 2][: rounds // 2]
    (newest,) = tmp_path.rglob("*.shard")
    assert newest.name == "after-000000000008-rounds.shard"
    found = Counting()
    kept(tmp_path).restore(found)
    assert (found.done, list(found.array)) == ([8], [8, 8, 8])
    newest.write_bytes(newest.read_bytes()[:-1])
    newest.with_name(".half.tmp").write_bytes(b"of one that was killed")
    kept(tmp_path).restore(shard := Counting())
    assert shard.done == [0]
    assert f"snapshot {newest} is passed over: is damaged" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))


def test_snapshots_of_another_shard_are_not_read(tmp_path, caplog):
    shard = Counting(2)
    for number in (0, 1):
        one = kept(tmp_path, shard=number)
        one.offer(shard)
        one.close()
    theirs, mine = sorted(tmp_path.rglob("*.shard"))
    mine.write_bytes(theirs.read_bytes())
    found = Counting()
    kept(tmp_path, shard=1).restore(found)
    assert found.done == [0]
    assert "is of another job or shard: shard 0 against 1" in caplog.text


def test_serving_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    writing, may = threading.Event(), threading.Semaphore(0)

    def slow(path, pieces):
        writing.set()
        assert may.acquire(timeout=60)
        list(pieces)

    monkeypatch.setattr(snapshots, "write_atomically", slow)
    one = kept(tmp_path, every=1)
    keeping = SnapshotPolicy(shard := Counting(), one)
    shard.done = [1]
    assert keeping.news() == {0: (1, 0, False)}
    assert writing.wait(60)
    shard.done = [2]
    assert keeping.news() == {0: (2, 0, False)}
    assert keeping.news() == {}
    may.release()
    keeping.close()
    assert keeping.news() == {0: (2, 1, False)}
    may.release()
    keeping.close()
    assert keeping.news() == {0: (2, 2, False)}


def test_a_requested_snapshot_that_failed_is_tried_again(tmp_path):
    one = kept(tmp_path, every=100)
    keeping = SnapshotPolicy(shard := Counting(), one)
    folder = next(tmp_path.iterdir())
    folder.rmdir()
    shard.done, shard.left = [1], (0,)
    keeping.want()
    keeping.news()
    one.close()
    assert one.failed == 1
    folder.mkdir()
    told = {**keeping.news()}  # it may be written by then
    one.close()
    assert told | {**keeping.news()} == {0: (1, 1, True)}


def test_snapshots_are_given_up_after_repeated_failures(tmp_path, caplog):
    one = kept(tmp_path, every=2)
    keeping = SnapshotPolicy(shard := Counting(), one)
    next(tmp_path.iterdir()).rmdir()
    for rounds in range(1, 8):
        shard.done = [rounds]
        assert keeping.news() == {0: (rounds, 0, False)}
        one.close()
    shard.done = [8]
    keeping.news()
    one.close()  # the fourth has failed now, if it had not before
    shard.done = [9]
    assert keeping.news() == {0: (9, 9, False)}
    assert "no snapshot after round" in caplog.text
    assert "no more snapshots are tried, as 4 could not be written: this server must not die" in caplog.text


def test_writing_that_is_slower_than_training_is_logged_once(tmp_path, caplog, monkeypatch):
    may = threading.Semaphore(0)
    monkeypatch.setattr(snapshots, "write_atomically", lambda path, pieces: may.acquire(timeout=60))
    keeping = SnapshotPolicy(shard := Counting(), one := kept(tmp_path, every=2))
    for rounds in range(1, 12):
        shard.done = [rounds]
        assert keeping.news()[0].saved == 0
    assert caplog.text.count("snapshots are written slower than rounds pass") == 1
    may.release()
    one.close()
    assert keeping.news() == {0: (11, 2, False)}
    may.release()
    keeping.close()


@pytest.fixture
def stateful(monkeypatch):
    """Services of declared sums keep parameters instead."""
    monkeypatch.setattr(
        module, "mode", lambda declaration, mine, workers, lost, restarted, _: Sgd(mine, declaration.tasks, workers)
    )


@contextlib.contextmanager
def team_of(address, what):
    """Two workers that have declared ``what``."""
    with Worker(address, 0) as one, Worker(address, 1) as other:
        one.join(what)
        other.join(what)
        yield one, other


@pytest.mark.usefixtures("stateful")
def test_a_job_that_fails_leaves_no_snapshots(tmp_path):
    what = declaration(10)
    with serving(2, snapshots=tmp_path, every=1) as service, team_of(service.address, what) as team:
        rounds(team, what, range(2))
        team[0].until(lambda: bool(list(tmp_path.rglob("*.shard"))))
        team[0].connection.send(Header(FrameKind.FAIL, size=4), b"no..")
        team[1].until(lambda: bool(team[1].kinds(FrameKind.FAIL)))
    assert not list(tmp_path.rglob("*"))


def gradient(rank, step):
    return np.random.default_rng(10 * step + rank).standard_normal(10).astype(np.float32)


def parameters(rounds):
    found = np.zeros(10, np.float32)
    for step in range(rounds):
        found -= RATE * (gradient(0, step) + gradient(1, step))
    return found


def rounds(team, what, steps):
    for step in steps:
        for worker in team:
            worker.push_all(what, step, [gradient(worker.rank, step)])
        for worker in team:
            worker.until(lambda worker=worker, step=step: worker.told(what, step) is not None)


@pytest.mark.usefixtures("stateful")
def test_a_stateful_shard_continues_from_its_last_snapshot(tmp_path):
    """The server dies three rounds after a snapshot; those are resent, and all later results are the same."""
    what, options = declaration(10), {"snapshots": tmp_path, "every": 4}
    with contextlib.ExitStack() as stack:
        with serving(2, **options) as service:
            address = service.address
            team = stack.enter_context(team_of(address, what))
            rounds(team, what, range(4))
            team[0].until(lambda: any(header.step == 4 for header in team[0].headers(FrameKind.COMMITTED)))
            rounds(team, what, range(4, 7))
        service = stack.enter_context(serving(2, port=address[1], **options))
        for worker in team:
            worker.until(lambda worker=worker: worker.connection.sessions == 2)
            worker.heard.clear()
            worker.declare(what, rounds=7)
            worker.until(lambda worker=worker: bool(worker.headers(FrameKind.WANTED)))
            (wanted,) = worker.headers(FrameKind.WANTED)
            assert (wanted.step, wanted.flag) == (4, STATEFUL)
        rounds(team, what, range(4, 9))
        np.testing.assert_array_equal(team[1].told(what, 8)[0], parameters(9))
        assert service.failure is None


@pytest.mark.usefixtures("stateful")
def test_a_worker_that_closes_is_answered_by_a_server_whose_snapshot_says_that_all_have(tmp_path):
    """The server dies when the snapshot of the last close is written, and one worker may not have been told."""
    what, options = declaration(10), {"snapshots": tmp_path, "every": 1}
    with contextlib.ExitStack() as stack:

        def told(worker):
            return any(header.flag & CLOSED and header.step == 2 for header in worker.headers(FrameKind.COMMITTED))

        with serving(2, **options) as service:
            address = service.address
            team = stack.enter_context(team_of(address, what))
            rounds(team, what, range(2))
            for worker in team:
                worker.connection.send(Header(FrameKind.DONE))
                worker.until(lambda worker=worker: told(worker))
        service = stack.enter_context(serving(2, port=address[1], **options))
        for worker in team:
            worker.until(lambda worker=worker: worker.connection.sessions == 2)
            worker.heard.clear()
            worker.declare(what, rounds=2)
            worker.until(lambda worker=worker: told(worker))
            worker.connection.send(Header(FrameKind.BYE))
        team[1].until(lambda: not any(tmp_path.iterdir()))  # the job's folder goes with its last snapshot
        assert service.failure is None
