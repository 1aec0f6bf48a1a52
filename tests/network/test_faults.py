"""Links and GPUs that are worse than their kind, by their notation."""

import re

import pytest

from foretrain.cli.search import SearchOptions
from foretrain.cli.simulate import SimulateOptions
from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import deployment, place, with_faults

WHERE = place("dgx-h100:2")


def test_a_link_carries_less_both_ways_and_nothing_when_down():
    usual = WHERE.topology
    slow = with_faults(WHERE, ["link:unit0.rail0-s0.nic0=10%"]).topology
    for ends in (("unit0.rail0", "s0.nic0"), ("s0.nic0", "unit0.rail0")):
        link = slow.between(*ends)
        assert slow.rate[link] == pytest.approx(0.1 * usual.rate[link])
    assert slow.faulty_links
    assert (slow.rate != usual.rate).sum() == 2
    down = with_faults(WHERE, ["link:unit0.rail0-s0.nic0=down"]).topology
    assert (~down.up).sum() == 2


def test_a_gpu_computes_longer():
    made = with_faults(WHERE, ["gpu:s1.gpu3=80%"])
    assert made.slowdown == pytest.approx(1.25)
    assert not made.topology.faulty_links
    assert WHERE.slowdown == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("link:a-b", "is no fault; write e.g. link:unit0.rail0-s0.nic0=10%"),
        ("link:unit0.rail0-s0.nic0=110%", "is no fault"),
        ("gpu:s0.gpu0=0%", "is no fault"),
        ("gpu:s0.gpu0=down", "is no fault"),
        ("gpu:s0.gpu99=50%", "did you mean"),
        ("link:s0.gpu0-s1.gpu0=50%", "does not exist; s0.gpu0 is linked to"),
    ],
)
def test_what_is_no_fault_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        with_faults(WHERE, [text])


def test_a_gpu_that_the_job_does_not_use_has_no_fault():
    with pytest.raises(ConfigError, match=r"is of a GPU without a rank of the job; the job has s0.gpu0 to s0.gpu3"):
        with_faults(deployment("dgx-h100:1,ranks=0-3"), ["gpu:s0.gpu7=50%"])


def test_an_unknown_node_is_told_near_names_and_one_of_each_kind():
    with pytest.raises(ConfigError) as refused:
        with_faults(WHERE, ["link:leaf3-spine1=10%"])
    assert "'leaf3' is unknown; known: e.g. spine0, unit0.rail0, s0.gpu0, s0.nic0, " in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("options", [SearchOptions("space.toml"), SimulateOptions()], ids=["search", "simulate"])
def test_faults_that_help_shows_are_of_the_cluster_that_is_taken_without_another(options):
    shown = re.findall(r"(?:link|gpu):[\w.-]+=\w+%?", " ".join((options.__doc__ or "").split()))
    assert len(shown) >= 2
    assert with_faults(place(options.cluster), shown).slowdown > 1
