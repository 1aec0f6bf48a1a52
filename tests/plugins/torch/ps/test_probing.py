"""What was measured through servers becomes a cluster on which pushing costs just that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.client.probing import beside, served_cluster
from foretrain.schedule import CostModel
from foretrain.units import MICROSECOND


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
