"""Connecting to a server that does not answer, or whose host's name is looked up for long."""

import contextlib
import math
import re
import socket
import threading

import pytest

from foretrain.comm.ps.client.connection import Links
from foretrain.errors import PeerLost
from tests.comm.ps.server.jobs import SECRET, Worker, serving

NAME = "a-server.test"


def given_up(address):
    """What `Links.establish` says after half a second."""
    with contextlib.closing(Links([address], SECRET, "job", 0)) as links, pytest.raises(PeerLost) as error:
        links.establish(0.5)
    return str(error.value)


@pytest.fixture
def lookup(monkeypatch):
    """Name resolution that answers once the event is set: NAME is this host."""
    answers, known = threading.Event(), socket.getaddrinfo

    def look(host, *arguments, **options):
        if host != NAME or options.get("flags", 0) & socket.AI_NUMERICHOST:
            return known(host, *arguments, **options)
        assert answers.wait(600)
        return known("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    yield answers
    answers.set()


def test_a_server_that_accepts_connections_and_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        start = rf"no answer from server 0 at {host}:{port} after 0.5 s: it accepts connections and says nothing"
        assert re.match(start, given_up((host, port)))


def test_a_host_that_swallows_packets_is_given_up():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        host, port = full.getsockname()
        # More connections than wait to be accepted: the kernel drops the packets of others.
        waiting.enter_context(socket.create_connection((host, port)))
        for _ in range(3):
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex((host, port))
        text = given_up((host, port))
    assert text == f"no answer from server 0 at {host}:{port} after 0.5 s: was it started, and is it there?"


def test_a_server_whose_name_is_not_resolved_is_given_up(lookup):
    text = given_up((NAME, 5555))
    assert re.match(rf"no answer from server 0 at {NAME}:5555 after 0.5 s: its host's name has no address", text)


def test_a_server_whose_name_is_resolved_late_is_reached(lookup):
    with serving(1) as service, Worker((NAME, service.address[1]), 0) as worker:
        worker.read()
        assert not worker.connection.established
        lookup.set()
        worker.until(lambda: worker.connection.established)


def test_a_wait_for_messages_ends_when_a_connection_is_to_be_made_again(monkeypatch):
    waits = []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with contextlib.closing(Links([nobody.getsockname()], SECRET, "job", 0)) as links:
            (connection,) = links.connections
            assert connection.due < math.inf  # it has so long to answer
            while connection._retry_at == math.inf:
                links.poll(1.0)
                connection.read()
            with monkeypatch.context() as patch:
                patch.setattr(links._wire, "poll", waits.append)
                links.poll(600.0)
    assert waits[0] <= 0.05
    assert connection.due == math.inf  # it is closed
