"""A server that sums, in a process beside rank 0: ranks that are slow, and ranks that are lost."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from foretrain.comm.bounded import Hint, server
from foretrain.comm.bounded.server import Opening, SummingServer
from foretrain.comm.coordinator.addresses import decoded, encoded
from foretrain.comm.coordinator.link import LinkError
from foretrain.comm.options import BoundedLoss
from foretrain.comm.rendezvous import _connect_bounded
from tests.comm.bounded.group import controls, in_threads
from tests.comm.bounded.relay import Network
from tests.comm.collectives.test_ring import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]
pytestmark = pytest.mark.process  # that of the server

RANKS, COUNT = 2, 100_000
DATA = 0
"""Kind of a packet, in its byte 14."""
LOSSY = Hint(tolerance=0.3)


def connected(timeout):
    """Return a function that connects a rank; all have to be at the same time."""
    planes = controls(RANKS)
    return lambda rank: _connect_bounded(planes[rank], BoundedLoss(0.3, "ps"), "127.0.0.1", bytes(32), timeout)


@contextmanager
def served(timeout):
    """Collectives of the ranks over a server."""
    members = in_threads(RANKS, connected(timeout))
    try:
        yield members
    finally:
        in_threads(RANKS, lambda rank: members[rank].close())


def error_of(call):
    """Return the text of the LinkError that ``call`` raises."""
    with pytest.raises(LinkError) as raised:
        call()
    return str(raised.value)


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


def test_a_server_that_hangs_while_it_starts_is_killed_and_named(monkeypatch):
    monkeypatch.setattr(server, "_STARTS", 1.0)
    tell = SummingServer.tell

    def tell_and_stop(self, message):
        tell(self, message)
        if isinstance(message, Opening):
            os.kill(self._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(SummingServer, "tell", tell_and_stop)
    connect = connected(timeout=1.0)
    why = ["it did not answer within 1 s, and was killed", "the output of rank 0 says why"]
    assert in_threads(RANKS, lambda rank: error_of(lambda: connect(rank))) == [
        f"the server that sums, a process of rank 0, has not started: {each}" for each in why
    ]


@pytest.mark.smoke
def test_rank_0_says_how_its_server_ended(caplog):
    with served(timeout=5.0) as members:
        members[0]._server._process.kill()
        for error in in_threads(RANKS, lambda rank: error_of(lambda: members[rank].all_reduce(ones()).wait(60))):
            assert "the server that sums, a process of rank 0, was lost" in error
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said == ["the server that sums, a process of rank 0: it was killed by signal 9 (Killed)"]


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
