"""A server that sums, in a process beside rank 0: ranks that are slow, and ranks that are lost."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from foretrain.comm.bounded import Hint
from foretrain.comm.bounded.server import SummingServer
from foretrain.comm.coordinator.addresses import decoded, encoded
from foretrain.comm.coordinator.link import LinkError
from foretrain.comm.options import BoundedLoss
from foretrain.comm.rendezvous import _connect_bounded
from tests.comm.bounded.group import in_threads
from tests.comm.bounded.relay import Network
from tests.comm.collectives.test_ring import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]

RANKS, COUNT = 2, 100_000
DATA = 0
"""Kind of a packet, in its byte 14."""
LOSSY = Hint(tolerance=0.3)


class Control:
    """Agreements among ranks that are threads of this process."""

    ranks = RANKS

    def __init__(self, rank, barrier, rows):
        self.rank, self._barrier, self._rows = rank, barrier, rows

    def _of_all(self, value):
        self._rows[self.rank] = value
        self._barrier.wait(60)
        found = list(self._rows)
        self._barrier.wait(60)
        return found

    def gather(self, values):
        return self._of_all(list(values))

    def share(self, value):
        return self._of_all(value)[0]


@contextmanager
def served(timeout):
    """Collectives of the ranks over a server."""
    barrier, rows = threading.Barrier(RANKS), [None] * RANKS

    def connected(rank):
        return _connect_bounded(Control(rank, barrier, rows), BoundedLoss(0.3, "ps"), "127.0.0.1", bytes(32), timeout)

    members = in_threads(RANKS, connected)
    try:
        yield members
    finally:
        in_threads(RANKS, lambda rank: members[rank].close())


def ones():
    return np.ones(COUNT, np.float32)


def test_a_rank_that_falls_silent_after_its_push_keeps_rank_0_neither_waiting_nor_from_closing():
    """The server waits for it until the timeout: it has not said that it has the sum."""
    with served(timeout=5.0) as (one, other):
        other.all_reduce(ones(), hint=LOSSY)
        time.sleep(0.5)
        other.engine._library.foretrain_bounded_close(other.engine._handle)
        values = ones()
        work = one.all_reduce(values, hint=LOSSY)
        assert work.wait(60)
        assert values.max() == RANKS
        with pytest.raises(LinkError, match="rank 1 was lost"):
            one.all_reduce(ones(), hint=LOSSY).wait(60)
        one.close()
        assert work.losses_elsewhere() is not None


def test_a_server_that_is_told_to_end_sees_through_what_is_under_way(monkeypatch):
    """No data comes to rank 1 until rank 0 closes."""
    held, told, tell = threading.Event(), [], SummingServer.tell
    with Network(lambda packet, rng: [] if held.is_set() and packet[14] == DATA else [packet]) as network:

        def tell_behind(server, message):
            if isinstance(message, list):
                told.append(message)
                if len(told) == 2:  # the addresses of UDP
                    message = [message[0], encoded(*network.in_front_of(decoded(message[1]))), message[2]]
            tell(server, message)

        monkeypatch.setattr(SummingServer, "tell", tell_behind)
        with served(timeout=30.0) as (one, other):
            held.set()
            values = ones()
            late = other.all_reduce(values, hint=LOSSY)
            assert one.all_reduce(ones(), hint=LOSSY).wait(60)
            closing = threading.Thread(target=one.close)
            closing.start()
            time.sleep(0.3)
            held.clear()
            assert late.wait(60)
            assert values.max() == RANKS
            closing.join(60)
            assert not closing.is_alive()
