import pytest

from foretrain.errors import ConfigError
from foretrain.network import cluster
from foretrain.network.deployment_notation import deployment_of, single
from foretrain.network.switch_cluster import Cluster


def laid_out(text: str):
    found = cluster(text)
    assert isinstance(found, Cluster)
    return deployment_of(found)


def test_hosts_around_a_switch_take_as_long_as_the_formula() -> None:
    text = "4x1xV100@10Gbps,latency=10us"
    where, size = laid_out(text), 1 << 28
    ring = 2 * 3 / 4 * size / 1.25e9
    assert where.carried_by("ring").duration("all_reduce", size) / 1e12 == pytest.approx(ring, rel=1e-2)
    assert where.total_gpus == 4
    assert where.device == "V100"


def test_gpus_of_a_server_share_its_link_and_are_near_each_other() -> None:
    where, size = laid_out("2x8xA100@100Gbps").carried_by("ring"), 1 << 30
    assert where.total_gpus == 16
    # A ring over all ranks crosses each server's link once in each direction.
    assert where.duration("all_reduce", size) / 1e12 == pytest.approx(2 * 15 / 16 * size / 12.5e9, rel=0.02)


def test_lower_rate_counts_where_a_host_has_two() -> None:
    slow = laid_out("4x1xV100@10Gbps/5Gbps").carried_by("ring").duration("all_reduce", 1 << 28)
    assert slow == laid_out("4x1xV100@5Gbps").carried_by("ring").duration("all_reduce", 1 << 28)


def test_one_gpu_is_a_job_of_its_own() -> None:
    where = single("h100")
    assert where.total_gpus == 1
    assert str(where) == "1 H100"
    assert where.carried_by("nccl").total_gpus == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("4x1xV100@10Gbps,ps=2", "has parameter servers"), ("4x1@10Gbps", "does not say which GPUs it has")],
)
def test_what_a_script_cannot_run_on(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        laid_out(text)
