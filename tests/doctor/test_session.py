"""Hosts measure each other over real sockets on loopback; strangers and hosts that are not there are named."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from foretrain.comm.coordinator.link import LinkError
from foretrain.doctor import session
from foretrain.doctor.facts import HostFacts
from foretrain.doctor.session import diagnose

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def short_flows(monkeypatch):
    monkeypatch.setattr(session, "_FLOW", 0.05)


def addresses(count):
    """Return places on loopback that no other test takes: each has a host of its own."""
    return [(f"127.{'.'.join(str(1 + secrets.randbelow(254)) for _ in range(3))}", 29600) for _ in range(count)]


def start(pool, rank, places, secret=SECRET, timeout=10.0):
    return pool.submit(diagnose, rank, places, secret, HostFacts(f"node{rank}"), timeout, lambda done, every: None)


def test_every_two_of_three_hosts_are_measured():
    places = addresses(3)
    before = threading.active_count()
    with ThreadPoolExecutor(3) as pool:
        first, *others = [start(pool, rank, places) for rank in range(3)]
        found = first.result()
        assert [other.result() for other in others] == [None, None]
    assert threading.active_count() == before
    assert {rank: facts.name for rank, facts in found.hosts.items()} == {0: "node0", 1: "node1", 2: "node2"}
    assert [pair.hosts for pair in found.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert found.failures == ()
    for pair in found.pairs:
        assert pair.interfaces == ("lo", "lo")
        assert abs(pair.skew) <= pair.skew_error  # they read the same clock
        assert min(pair.round_trip, pair.overhead, *pair.rates) > 0


def test_a_host_that_is_not_there_is_named_and_the_others_are_measured():
    places = addresses(3)
    with ThreadPoolExecutor(2) as pool:
        first, last = (start(pool, rank, places, timeout=5.0) for rank in (0, 2))
        found = first.result()
        last.result()
    (text,) = found.failures
    assert text.startswith(f"host {places[1][0]}:29600 did not answer within 5 s; is foretrain doctor running")
    assert [pair.hosts for pair in found.pairs] == [(0, 2)]


def test_without_rank_0_the_others_end_with_its_name():
    places = addresses(2)
    with pytest.raises(LinkError, match=rf"host {places[0][0]}:29600 did not answer within 0.5 s"):
        diagnose(1, places, SECRET, HostFacts("node1"), 0.5, lambda done, every: None)


def test_who_has_another_secret_is_refused():
    places = addresses(2)
    with ThreadPoolExecutor(2) as pool:
        first, stranger = start(pool, 0, places, timeout=3.0), start(pool, 1, places, bytes(32), timeout=3.0)
        with pytest.raises(LinkError, match="it has another secret"):
            stranger.result()
        found = first.result()
    assert found.hosts.keys() == {0}
    assert "is the secret the same?" in found.failures[0]


def test_a_host_that_is_lost_in_the_middle_is_named(monkeypatch):
    places = addresses(2)

    def die(peer):
        raise LinkError("gone", 0)

    monkeypatch.setattr("foretrain.doctor.session.follow", die)
    with ThreadPoolExecutor(2) as pool:
        first, other = (start(pool, rank, places) for rank in range(2))
        with pytest.raises(LinkError, match="gone"):
            other.result()
        (text,) = first.result().failures
    assert text.startswith("hosts 0 and 1 could not measure")


@pytest.mark.parametrize("waits", [(), (0.3,), (0.0,), (0.1, 0.7), (0.9,)])
def test_a_rate_is_never_more_than_what_came(waits):
    """At 1 byte per µs, looked at every ms, but for waits of 0.2 s; the last look may come late."""
    looks = [step / 1000 for step in range(1, 1001) if not any(wait < step / 1000 < wait + 0.2 for wait in waits)]
    marks = [(0.0, 0), *((look, round(look * 1e6)) for look in looks), (1.05, 1_000_000)]
    assert session.rate_of(marks) == pytest.approx(1e6, rel=0.07)
    assert session.rate_of(marks) <= 1.001e6


def test_a_flow_that_came_before_anybody_looked_counts_from_the_request():
    assert session.rate_of([(0.0, 0), (2.0, 900), (2.1, 1000), (2.2, 1000)]) == pytest.approx(1000 / 2.1)
