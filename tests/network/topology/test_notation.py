"""Topologies as text: what every form means, and what is said of what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network.fabrics import FABRICS
from foretrain.network.fabrics.leaf_spine import leaf_spine
from foretrain.network.fabrics.rail import rail
from foretrain.network.servers import SERVERS, preset
from foretrain.network.topology.notation import topology
from tests.network.ways import equal


@pytest.mark.parametrize("name", FABRICS)
def test_every_example_is_read(name: str):
    made = topology(FABRICS[name].example)
    assert made.name.startswith(name)
    assert topology(made) is made


def test_options_reach_the_fabric():
    text = "leaf_spine: 8x16 @ 100Gbps, oversubscription=2, spines=4, latency=1us"
    expected = leaf_spine(8, 16, 1.25e10, oversubscription=2, spines=4, latency=10**6)
    assert equal(topology(text), expected)
    assert equal(
        topology(text.replace("_", "-").upper().replace("GBPS", "Gbps").lower().replace("gbps", "Gbps")), expected
    )


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "host"])
def test_a_servers_name_is_a_cluster_of_them(name: str):
    assert equal(topology(f"{name}:3"), rail(3, server=preset(name)))
    assert equal(topology(f"rail:3,server={name}"), rail(3, server=preset(name)))


def test_a_rate_replaces_that_of_the_servers_ports():
    made = topology("dgx-h100:2@100Gbps")
    assert set(made.rate[made.between("s0.nic3", "unit0.rail3")]) == {1.25e10}


@given(k=st.integers(1, 4), server=st.sampled_from(["host", "eflops", "dgx-a100"]))
def test_places_hold_what_is_asked_for(k: int, server: str):
    made = topology(f"fat_tree:{2 * k}@10Gbps,server={server}")
    assert len(made.ranks) == 2 * k**3 * preset(server).gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fat_tee:4@1Gbps", "did you mean 'fat_tree'"),
        ("dgx-h10:4", "did you mean 'dgx-h100'"),
        ("4x8xV100@1Gbps", "known: bigraph"),
        ("star:16", "e.g. '100Gbps'"),
        ("star:16@100Gb", "is not a rate"),
        ("star:16@0Gbps", "above 0"),
        ("star@1Gbps", "write e.g. 'star:16@100Gbps'"),
        ("dgx-h100", "write e.g. 'dgx-h100:16'"),
        ("star:-1@1Gbps", "is not a row of whole numbers"),
        ("star:0@1Gbps", "hosts: 0 is not a whole number of at least 1"),
        ("bigraph:8@1Gbps", "is not SWITCHESxHOSTS"),
        ("bigraph:7x2@1Gbps", "is not an even number"),
        ("fat_tree:4@1Gbps,spines=2", "'spines' is unknown"),
        ("fat_tree:4@1Gbps,oversubscription=2.5", "oversubscription: 2.5 is not a whole number"),
        ("leaf_spine:2x2@1Gbps,oversubscription=many", "is not a positive number"),
        ("leaf_spine:2x2@1Gbps,spines=1.5", "spines: 1.5 is not a whole number"),
        ("star:4@1Gbps,latency=5", "latency: '5' is not a time"),
        ("star:4@1Gbps,latency=2e9s", "longer than an hour"),
        ("star:4@1Gbps,latency=1us,latency=2us", "is said twice"),
        ("star:4@1Gbps,latency", "has no value"),
        ("rail:4@1Gbps", "server: None is missing"),
        ("star:4,server=dgx-h10", "did you mean 'dgx-h100'"),
        ("torus:100000x100000@1Gbps", "makes 10000000000 ranks"),
        ("nowhere.toml", "cannot be read"),
        (7, "is not a text"),
    ],
)
def test_mistakes_are_named_with_what_to_write(text, said: str):
    with pytest.raises(ConfigError) as caught:
        topology(text)
    assert said in str(caught.value)
    assert str(text) in str(caught.value)
