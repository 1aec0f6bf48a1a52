"""The coordinator's threads: no completion, ready task or message is left lying, whoever turns the engine."""

import queue
import random
import threading
import time
from contextlib import closing

import pytest

from foretrain.comm.coordinator import coordinator as module
from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.comm.coordinator.protocol import CoordinatorMessage, pack_ready, ready_word, unpack
from foretrain.errors import PeerLost
from foretrain.schedule import CostModel, Job, spec
from foretrain.units import COST_SHIFT, MILLISECOND, NANOSECOND
from tests.comm.coordinator.test_link import beside, linked
from tests.scenario import layered

PATIENCE = 120.0
"""Seconds until a test that hangs fails instead."""
SIZES = tuple(1_000 * (1 + i % 7) for i in range(40))
STEPS = 20


class InOrder:
    """A `CommandExecutor` whose thread completes commands in order, as soon as it may."""

    def __init__(self):
        self.sequence, self.digest, self.started = 0, b"", []
        self.may = threading.Semaphore(0)
        self._queue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0
        threading.Thread(target=self._complete, daemon=True).start()

    def start(self, command, done):
        with self._changed:
            assert command.sequence == self.sequence
            self.sequence += 1
            self.started.append(command.chunk)
            self._changed.notify_all()
        self._queue.put((command, done))

    def last(self):
        return f"last sequence {self.sequence - 1}"

    def _complete(self):
        while (given := self._queue.get()) is not None:
            assert self.may.acquire(timeout=PATIENCE)
            command, done = given
            done(command)
            with self._changed:
                self._left += command.chunk.size
                self._changed.notify_all()

    def wait_bytes(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: self._left >= count, PATIENCE), f"{self._left} of {count} bytes"

    def wait_started(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: self.sequence >= count, PATIENCE), f"{self.sequence} of {count}"

    def close(self):
        self._queue.put(None)


def job():
    times = [MILLISECOND] * len(SIZES)
    return Job.of(layered(times, times, SIZES), CostModel(0, NANOSECOND << COST_SHIFT))


def made(executor, links, policy, failures, **named):
    times = {"peer_timeout": PATIENCE, "stall_timeout": PATIENCE, "check_every": 0, "origin": 0}
    return Coordinator(job(), spec(policy), executor, links, failed=failures.append, **times, **named)


def begin(coordinator, link, task):
    """Let both ranks open the first step and report ``task``."""
    link.send(CoordinatorMessage.OPEN)
    link.send(CoordinatorMessage.READY, body=pack_ready([ready_word(task, True)]))
    coordinator.open(0, False)
    coordinator.ready(task, True)


def peer(link, steps):
    """Rank 1: reports its tasks in an order of its own; returns the chunks that it was told to send."""
    told, total = [], 0
    for step in range(steps):
        link.send(CoordinatorMessage.OPEN, 0, step)
        order = random.Random(step).sample(range(len(SIZES)), len(SIZES))
        while order:
            some, order = order[:3], order[3:]
            link.send(CoordinatorMessage.READY, body=pack_ready([ready_word(task, True) for task in some]))
        total += sum(SIZES)
        while sum(chunk.size for chunk in told) < total:
            messages = link.receive(PATIENCE)
            assert messages, f"{len(told)} orders, and then nothing"
            for each in messages:
                assert each.kind == CoordinatorMessage.ORDER
                told.append(unpack(each.value, each.flag, each.body, job().tasks).chunk)
    return told


@pytest.mark.parametrize("credit", ["2kB", "30kB"], ids=["one in flight", "many in flight"])
@pytest.mark.parametrize("small", [0, 6_000])
def test_nothing_is_left_lying(monkeypatch, credit, small):
    monkeypatch.setattr(module, "_DEAF", PATIENCE)  # a wake-up that is lost is not made up for
    failures, executor = [], InOrder()
    with linked() as (ours, theirs), closing(executor), beside(peer, theirs, STEPS) as other:
        coordinator = made(executor, {1: ours}, f"bytescheduler(partition=2kB, credit={credit})", failures, small=small)
        try:
            executor.may.release(1_000_000)
            for step in range(STEPS):
                coordinator.open(step, False)
                for task in reversed(range(len(SIZES))):
                    coordinator.ready(task, True)
                coordinator.flush()
                executor.wait_bytes((step + 1) * sum(SIZES))
            assert other.result(PATIENCE) == executor.started
        finally:
            coordinator.close()
    assert not failures


def test_while_enough_is_in_flight_who_completes_reads_the_links(monkeypatch):
    monkeypatch.setattr(module, "_DEAF", PATIENCE)
    failures, executor = [], InOrder()
    with linked() as (ours, theirs), closing(executor):
        coordinator = made(executor, {1: ours}, "bytescheduler(partition=1KiB, credit=3kB)", failures)
        try:
            begin(coordinator, theirs, 3)
            executor.wait_started(3)
            # More urgent; heard when a piece of the other has completed, or by a wake-up from before.
            theirs.send(CoordinatorMessage.READY, body=pack_ready([ready_word(0, True)]))
            coordinator.ready(0, True)
            while not ours.unread() and not coordinator._masks[0][0] & 2:
                time.sleep(0.001)
            executor.may.release()
            executor.wait_started(4)
            assert [chunk.pieces[0].task for chunk in executor.started] == [3, 3, 3, 0]
        finally:
            executor.may.release(100)
            coordinator.close("the test is over")
    assert not failures


def test_an_error_on_the_executor_s_thread_ends_the_job(monkeypatch):
    failures, executor = [], InOrder()
    ended = threading.Event()
    with linked() as (ours, theirs), closing(executor):
        coordinator = made(executor, {1: ours}, "fifo", failures)
        monkeypatch.setattr(coordinator, "_failed", lambda error: (failures.append(error), ended.set()))
        try:
            begin(coordinator, theirs, 0)
            executor.wait_started(1)

            def fail(*arguments):
                raise PeerLost("rank 1 is gone")

            monkeypatch.setattr(coordinator, "_take", fail)
            executor.may.release()
            assert ended.wait(PATIENCE)
        finally:
            coordinator.close()
    (failure,) = failures
    assert str(failure) == "rank 1 is gone"


def test_a_goodbye_that_no_rank_answers_ends_the_thread(monkeypatch):
    monkeypatch.setattr(module, "_BYE_TIMEOUT", 0.2)
    failures, executor = [], InOrder()
    with linked() as (ours, theirs), closing(executor):
        coordinator = made(executor, {1: ours}, "fifo", failures)
        coordinator.close()
        assert not coordinator._thread.is_alive()
        assert theirs.receive(PATIENCE)[0].kind == CoordinatorMessage.BYE
    assert not failures
