"""Updates on a server: gradients are pushed, parameters pulled, and what is lost of these stays what it was."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from foretrain.comm.bounded import Hint
from foretrain.comm.bounded.collectives import BoundedCollectives
from foretrain.comm.bounded.plans import stages
from foretrain.comm.bounded.server import ServerUpdate, UpdateThreads
from foretrain.comm.bounded.server_state import ServerState, answer
from foretrain.comm.collectives import connect_peers
from foretrain.comm.coordinator.link import LinkError
from tests.comm.bounded.group import engines, in_threads
from tests.comm.bounded.relay import Network, losing, losing_data, perfect
from tests.comm.collectives.test_ring import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]

RANKS, COUNT = 2, 100_000


class Subtracting:
    """SGD of rate 1 on one tensor; groups are its rates."""

    def __init__(self):
        self.parameters = np.zeros(COUNT, np.float32)
        self.seen = []

    def declare(self, payload):
        self.seen.append(payload)

    def load(self, tensor, frames):
        self.parameters = np.frombuffer(frames[tensor], np.float32).copy()

    def state(self, tensor):
        return [self.parameters.tobytes()] * (tensor + 1)

    def update(self, gradients, parameters, tensors, groups):
        (_, first, behind), rate = tensors[0], groups[0]["lr"]
        self.parameters[first:behind] -= rate * gradients
        parameters[:] = self.parameters[first:behind]


@contextmanager
def serving(updater, fate=perfect, **options):
    """Collectives of the ranks, and ``step(gradients, pulled, ...)``, which all of them and the server do."""
    with Network(fate) as network, engines(RANKS + 1, network=network) as made:
        members = [BoundedCollectives(each, rank, RANKS, over="ps", **options) for rank, each in enumerate(made)]
        updates, numbers = UpdateThreads(updater, made[RANKS], []), iter(range(1000))

        def step(gradients, pulled, first=0, **hints):
            count = len(gradients[0])
            tensors, hint = [(0, first, first + count)], Hint(**hints)
            summed, sent = (np.zeros(count, np.float32) for _ in range(2))
            updates.expect(next(numbers), ServerUpdate(summed, sent, tensors, [{"lr": 1.0}]))
            works = [one.update(*each, hint=hint) for one, *each in zip(members, gradients, pulled, strict=False)]
            return [*works, members[RANKS].submit("update", summed, hint=hint, pulled=sent)]

        try:
            yield members, step
        finally:
            for each in members:
                each.engine.close()
            updates.close()
            for each in members:
                each.close()


def done(works):
    assert all(work.wait(300) for work in works)
    return works


def test_ranks_get_what_the_server_has_made_of_the_sum():
    updater = Subtracting()
    gradients = [np.full(COUNT, rank + 1, np.float32) for rank in range(RANKS)]
    pulled = [np.full(COUNT, 7, np.float32) for _ in range(RANKS)]
    with serving(updater) as (_, step):
        done(step(gradients, pulled))
        halves = [slice(0, COUNT // 2), slice(COUNT // 2, COUNT)]
        each = [([g[half] for g in gradients], [p[half] for p in pulled], half.start) for half in halves]
        for works in [step(*one) for one in each]:  # both under way at the same time
            done(works)
    for values in (*pulled, updater.parameters):
        np.testing.assert_array_equal(values, -6.0)
    for rank, values in enumerate(gradients):
        np.testing.assert_array_equal(values, rank + 1)


def test_what_is_lost_of_a_pull_keeps_its_previous_value_and_the_next_pull_restores_it():
    updater = Subtracting()
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(COUNT).astype(np.float32) for _ in range(RANKS)]
    pulled = [each.copy() for each in before]
    gradients = [np.ones(COUNT, np.float32) for _ in range(RANKS)]
    vital = np.array([[0, 4], [200_000, 240_000]], np.int64)
    with serving(updater, losing(0.1), tolerance=0.3) as (_, step):
        works = done(step(gradients, pulled, vital=vital))
        missing = np.zeros(COUNT)
        for loss in works[RANKS].losses:
            missing[loss.place // 4 : (loss.place + loss.size) // 4] += 1
        np.testing.assert_array_equal(updater.parameters, missing - RANKS)  # what is lost of a push is zero
        for rank, work in enumerate(works[:RANKS]):
            expected, lost = updater.parameters.copy(), 0
            for loss in (each for each in work.losses if each.source == RANKS):
                place = slice(loss.place // 4, (loss.place + loss.size) // 4)
                expected[place] = before[rank][place]
                lost += loss.size
            assert 0 < lost <= 0.3 * 4 * COUNT
            np.testing.assert_array_equal(pulled[rank].view(np.uint32), expected.view(np.uint32))
            for first, behind in vital // 4:
                np.testing.assert_array_equal(pulled[rank][first:behind], -float(RANKS))
        assert not np.array_equal(*pulled)
        done(step(gradients, pulled, tolerance=0.0))
        for values in pulled:
            np.testing.assert_array_equal(values, updater.parameters)


def test_what_a_pull_has_lost_the_next_one_brings():
    gradients = [np.ones(COUNT, np.float32) for _ in range(RANKS)]
    pulled = [np.zeros(COUNT, np.float32) for _ in range(RANKS)]
    before, lost = [set() for _ in range(RANKS)], 0
    with serving(Subtracting(), losing(0.1), tolerance=0.3) as (_, step):
        for _ in range(8):
            for rank, work in enumerate(done(step(gradients, pulled))[:RANKS]):
                now = {loss.place + k for loss in work.losses for k in range(loss.size)}
                assert now.isdisjoint(before[rank])
                before[rank] = now
                lost += len(now)
    assert lost


def test_what_is_vital_is_never_marked_as_droppable():
    seen = set()

    def note(packet, rng):
        if packet[14] == 0:  # data: its number in the array, and whether it is important
            seen.add((int.from_bytes(packet[24:28], "little"), packet[15] & 1))
        return [packet]

    vital = np.array([[0, 4], [200_000, 240_000]], np.int64)
    values = [np.ones(COUNT, np.float32) for _ in range(RANKS)]
    with serving(Subtracting(), note, tolerance=0.3) as (members, step):
        done(step(values, [each.copy() for each in values], vital=vital))
        payload = members[0].engine.path.payload
    important = {k for first, behind in vital for k in range(first // payload, -(-behind // payload))}
    assert {number for number, is_important in seen if not is_important}.isdisjoint(important)
    assert (1 + max(important), 0) in seen


@pytest.mark.parametrize("options", [{"rescale": True}, {"feedback": True}])
def test_what_pushes_lose_is_made_good_on_the_server_and_not_in_what_is_pulled(options):
    updater = Subtracting()
    gradients = [np.ones(COUNT, np.float32) for _ in range(RANKS)]
    pulled = [np.zeros(COUNT, np.float32) for _ in range(RANKS)]
    with serving(updater, losing_data(0.1), tolerance=0.3, **options) as (_, step):
        for _ in range(2):
            done(step([each.copy() for each in gradients], pulled))
        done(step(gradients, pulled, tolerance=0.0))
    for values in pulled:
        np.testing.assert_array_equal(values, updater.parameters)
    if "feedback" in options:
        np.testing.assert_array_equal(values, -3.0 * RANKS)


def test_a_pull_loses_at_most_the_tolerance_as_a_push_does():
    worker, server = (stages("update", "ps", rank, 2, 1000, 4, 0.1) for rank in (0, 2))
    assert [receive.need for receive in (*worker[1].receives, *server[0].receives)] == [3600] * 3
    assert [receive.pulled for receive in (*worker[1].receives, *server[0].receives)] == [True, False, False]
    assert [(send.pulled, send.reliable) for send in (*worker[0].sends, *server[1].sends)] == [
        (False, False),
        (True, False),
        (True, False),
    ]


def test_a_server_whose_update_fails_ends():
    class Failing(Subtracting):
        def update(self, *arguments):
            raise ValueError("no")

    values = [np.ones(COUNT, np.float32) for _ in range(RANKS)]
    with serving(Failing()) as (_, step):
        for work in step(values, [each.copy() for each in values])[:RANKS]:
            with pytest.raises(LinkError, match="server that sums, a process of rank 0, was lost"):
                work.wait(60)


def failing():
    raise ValueError("why")


def test_ranks_tell_a_server_its_state_and_ask_for_it():
    updater, ports = Subtracting(), [None, None]
    barrier = threading.Barrier(2)

    def linked(rank):
        def meet(address):
            ports[rank] = address
            barrier.wait(60)
            return ports

        return connect_peers("127.0.0.1", meet, bytes(32), rank, 2, 60, wanted=[1 - rank])[1 - rank]

    own, servers = in_threads(2, linked)
    thread = threading.Thread(target=answer, args=(servers, updater, threading.Lock()))
    thread.start()
    state = ServerState(own)
    large = np.arange(5 << 20, dtype=np.float32)  # more than one message
    state.declare(b"what")
    state.load(1, [b"", large.tobytes()])
    state.wait_ready(lambda: None)
    assert updater.seen == [b"what"]
    for (tensor, frames), wanted in zip(state.fetch([2, 0], lambda: None), (2, 0), strict=True):
        assert (tensor, len(frames)) == (wanted, wanted + 1)
        np.testing.assert_array_equal(np.frombuffer(frames[0], np.float32), large)
    state.close()
    for ask in (state.wait_ready, lambda check: next(state.fetch([0], check))):
        with pytest.raises(LinkError, match="the server that updates was lost"):
            ask(lambda: None)
        with pytest.raises(ValueError, match="why"):  # what another thread has found out comes first
            ask(failing)
    thread.join(60)
    assert not thread.is_alive()
    servers.close()
