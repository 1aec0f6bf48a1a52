import pytest

from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import place


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [
        ("dgx-h100:2", 16, "H100"),
        ("dgx-h100:2,ranks=0-11", 12, "H100"),
        ("dgx-a100:1,ranks=5", 1, "A100"),
        ("p3.16xlarge:1", 8, "V100"),
        ("bytescheduler:2", 16, "V100"),
        ("2x8xA100@100Gbps", 16, "A100"),
        ("4x1xT4@10Gbps", 4, "T4"),
        ("star:4@100Gbps,device=A100", 4, "A100"),
        ("H100", 1, "H100"),
        ("1xV100", 1, "V100"),
        ("1x1xV100@10Gbps", 1, "V100"),
    ],
)
def test_clusters_of_all_notations(text: str, gpus: int, device: str) -> None:
    where = place(text)
    assert (where.total_gpus, where.device) == (gpus, device)
    assert where.collective == "nccl"


def test_collective_that_is_asked_for() -> None:
    assert place("dgx-h100:1,collective=ring").collective == "ring"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H101", "is neither a GPU nor a cluster"),
        ("star:4@100Gbps", "does not say which GPUs it has"),
        ("4x1xV100@10Gbps,ps", "has parameter servers"),
        ("dgx-h100:0", "is not a whole number of at least 1"),
        ("", "is unknown"),
    ],
)
def test_what_is_no_cluster(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(text)
