"""What was measured through servers becomes a cluster on which pushing costs just that."""

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.client import probing
from foretrain.comm.ps.client.probing import PushProbe, beside, served_cluster
from foretrain.comm.ps.frames import FrameKind, Header, bundle, unbundle
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, MICROSECOND

ROUND_TRIP, SERVICE = 1_000_000, 400_000
"""Nanoseconds."""


class ScriptedServer:
    """Server that answers a push after a round trip, and one per `SERVICE` at most."""

    address, sessions = ("here", 1), 0

    def __init__(self, shard, clock):
        self.shard, self._clock = shard, clock
        self.answers: deque[tuple[int, Header, memoryview]] = deque()
        self._free = 0

    def send(self, header, payload=b""):
        if header.kind is FrameKind.PUSH:
            pieces = payload if isinstance(payload, tuple) else (payload,)
            for part, offset, size, data in unbundle(header, memoryview(b"".join(pieces))):
                if data:
                    self._free = max(self._free, self._clock.now) + SERVICE
                value, sum_of = bundle(Header(FrameKind.VALUE, step=header.step), [(part, offset, size, data)])
                due = max(self._free, self._clock.now + ROUND_TRIP)
                self.answers.append((due, value, memoryview(b"".join(sum_of))))

    def read(self):
        found = []
        while self.answers and self.answers[0][0] <= self._clock.now:
            found.append(self.answers.popleft()[1:])
        return found


class ScriptedLinks:
    """Links to as many servers, in a time that passes where a worker waits for them."""

    def __init__(self, servers):
        self.now = 0
        self.connections = [ScriptedServer(shard, self) for shard in range(servers)]

    def poll(self, seconds):
        due = [each.answers[0][0] for each in self.connections if each.answers]
        if seconds and due:
            self.now = max(self.now, min(due))

    def live(self):
        pass


def probed(servers, monkeypatch):
    links = ScriptedLinks(servers)
    clock = SimpleNamespace(perf_counter_ns=lambda: links.now, monotonic=lambda: links.now / 1e9)
    monkeypatch.setattr(probing, "time", clock)
    return PushProbe(links, 2, "job", 0, 60).cost()


def test_several_servers_carry_as_many_times_the_messages_of_one(monkeypatch):
    alone = probed(1, monkeypatch)
    assert alone.per_byte == pytest.approx(SERVICE * 1000 * 2**COST_SHIFT / 2**20, rel=0.01)
    for servers in (2, 3, 4):
        together = probed(servers, monkeypatch)
        assert together.per_byte == pytest.approx(alone.per_byte / servers, rel=0.02)
        assert together.overhead == pytest.approx(alone.overhead / servers, rel=0.02)
        assert together.latency + together.overhead == alone.latency + alone.overhead


@given(
    st.builds(
        CostModel, overhead=st.integers(0, 10**9), per_byte=st.integers(10**11, 10**16), latency=st.integers(0, 10**9)
    ),
    st.integers(2, 16),
    st.integers(1, 8),
    st.booleans(),
)
def test_the_cluster_costs_what_was_measured(cost, workers, servers, shared):
    found = served_cluster(cost, workers, servers, beside=shared).cost
    assert found.per_byte == pytest.approx(cost.per_byte, rel=1e-4)
    assert (found.overhead, found.latency) == (pytest.approx(cost.overhead, abs=1), pytest.approx(cost.latency, abs=1))


def test_servers_beside_workers_share_their_links():
    cost = CostModel(overhead=50 * MICROSECOND, per_byte=10**13, latency=0)
    assert served_cluster(cost, 3, 3, beside=True).exchange == "ps_colocated"
    assert served_cluster(cost, 3, 3).exchange == "ps"


@pytest.mark.parametrize(
    ("servers", "workers", "expected"),
    [
        (["127.0.0.1"], 1, False),
        (["127.0.0.1", "127.0.0.2"], 2, True),
        (["127.0.0.1", "127.0.0.1"], 2, False),  # one host
        (["127.0.0.1"], 2, False),
        (["203.0.113.1", "203.0.113.2"], 2, False),  # elsewhere
    ],
)
def test_servers_are_beside_workers_where_each_host_has_one(servers, workers, expected, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert beside([(host, 5555) for host in servers], workers) is expected
