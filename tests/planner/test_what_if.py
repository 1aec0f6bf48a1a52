"""What-ifs: one change at a time, each with the schedule that suits it."""

import pytest

from foretrain.errors import ConfigError
from foretrain.network import cluster
from foretrain.planner import choose, engines
from foretrain.planner.what_if import NOW, scaled, usual, what_if
from foretrain.workload import zoo

VGG, WHERE = zoo("vgg16"), cluster("4x1xV100@10Gbps")


def test_every_case_is_a_choice_of_its_own():
    found = what_if(VGG, WHERE, ["rate=40Gbps", "compression=fp16", "batch=64"])
    now, faster, smaller, larger = found.cases
    assert [case.label for case in found.cases] == [NOW, "rate=40Gbps", "compression=fp16", "batch=64"]
    assert now.choice.time == choose(VGG, engines(WHERE)).time
    assert faster.choice.time == choose(VGG, engines(cluster("4x1xV100@40Gbps"))).time
    assert smaller.choice.chosen.compression == "fp16"
    assert larger.workload.batch == 64
    assert found.most is faster
    assert found.advice.startswith("rate=40Gbps helps most: 3.")
    assert found.factor(now) == 1
    assert [row["case"] for row in found.to_dict()["cases"]] == [case.label for case in found.cases]


def test_hosts_servers_and_topologies_can_change_and_a_change_that_helps_nothing_is_told():
    assert "No single change" in what_if(VGG, WHERE, ["rate=10Gbps"]).advice
    found = what_if(zoo("alexnet"), WHERE, ["hosts=8", "servers=4", "topology=star:4@10Gbps"])
    now, more, served, star = found.cases
    assert more.place.workers == 8
    assert more.throughput < 2 * now.throughput
    assert served.place.servers == 4
    assert served.throughput > 1.2 * now.throughput
    assert star.place.total_gpus == 4


def test_what_one_would_ask_first():
    assert usual(VGG, WHERE) == ("rate=20Gbps", "hosts=8", "batch=64", "compression=fp16")
    assert len(usual(zoo("gpt2", device="A100", precision="bf16"), WHERE)) == 3


def test_a_recorded_step_computes_in_proportion_to_its_batch():
    twice = scaled(VGG, 2 * VGG.batch)
    assert twice.compute == 2 * VGG.compute
    assert twice.update == VGG.update
    assert twice.size == VGG.size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rte=1Gbps", ("what-if", "did you mean 'rate'")),
        ("rate", ("has no value", "rate=25Gbps")),
        ("rate=fast", ("rate", "'fast' is not a rate")),
        ("hosts=0", ("hosts", "hosts=8")),
        ("batch=1000000", ("batch", "from 1 to 999999")),
        ("compression=fp8", ("compression", "bf16")),
        ("topology=nowhere:3", ("what-if",)),
    ],
)
def test_wrong_changes_are_named_with_their_remedy(change, words):
    with pytest.raises(ConfigError) as caught:
        what_if(VGG, WHERE, [change])
    for word in words:
        assert word in str(caught.value)
