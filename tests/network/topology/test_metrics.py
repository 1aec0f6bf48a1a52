"""How far and how much: closed forms, and networkx as an oracle."""

from itertools import combinations

import numpy as np
import pytest

from foretrain.network.deployment_notation import topology
from foretrain.network.topology.metrics import bisection, diameter, oversubscription
from tests.network.test_fabrics import crossing
from tests.network.ways import shortest

GBPS = 1.25e8


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("star:4@1Gbps", 2),
        ("fat_tree:4@1Gbps", 6),
        ("leaf_spine:3x2@1Gbps", 4),
        ("bigraph:6x2@1Gbps", 4),
        ("torus:4x5@1Gbps", 4),
        ("torus:24x24@1Gbps", 24),
        ("dragonfly:4x2x2@1Gbps", 5),
        ("dgx-h100:40", 8),
        ("dgx-h100:1", 2),
        ("star:2,server=eflops-baseline", 8),
    ],
)
def test_diameter(text: str, links: int):
    assert diameter(topology(text)) == links


@pytest.mark.parametrize("text", ["dgx-v100:2", "torus:3x4@1Gbps", "dragonfly:2x2x1@1Gbps", "rail:2,server=eflops"])
def test_diameter_is_that_of_the_ways_that_routing_takes(text: str):
    made = topology(text)
    pairs = combinations(range(len(made.ranks)), 2)
    assert diameter(made) == max(min(len(way) - 1 for way in shortest(made, a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("star:16@1Gbps", 8),
        ("fat_tree:8@1Gbps", 64),
        ("fat_tree:8@1Gbps,oversubscription=2", 64),
        ("leaf_spine:4x4@1Gbps,oversubscription=4", 2),
        ("bigraph:8x4@1Gbps", 16),
        ("torus:4x4@1Gbps", 8),
        ("torus:8@1Gbps", 2),
        ("torus:4x4x4@1Gbps", 32),
        ("torus:2x2x2@1Gbps", 4),
        ("dgx-h100:16", 16 * 8 * 400 / 2),
    ],
)
def test_bisection(text: str, rate: float):
    assert bisection(topology(text)) == pytest.approx(rate * GBPS)


@pytest.mark.parametrize("text", ["dragonfly:3x2x1@1Gbps", "torus:3x3@1Gbps", "fat_tree:4@1Gbps", "bigraph:6x2@1Gbps"])
def test_bisection_is_the_flow_between_the_halves(text: str):
    made = topology(text)
    half = set(range((len(made.ranks) + 1) // 2))
    assert bisection(made) == pytest.approx(crossing(made, half))
    assert bisection(topology("star:1@1Gbps")) is None


def test_what_is_down_or_used_by_others_does_not_count():
    made = topology("leaf_spine:2x2@1Gbps,spines=2")
    less = made.changed(np.concatenate([made.between("leaf0", "spine0"), made.between("spine0", "leaf0")]), up=False)
    assert bisection(less) == pytest.approx(GBPS)
    assert oversubscription(less) == {1: pytest.approx(4 / 3)}


def test_oversubscription_by_tier():
    assert oversubscription(topology("star:4@1Gbps")) == {}
    assert oversubscription(topology("fat_tree:4@1Gbps")) == {1: 1.0, 2: 1.0}
    assert oversubscription(topology("fat_tree:4@1Gbps,oversubscription=3")) == {1: 3.0, 2: 1.0}
    assert oversubscription(topology("bigraph:4x6@1Gbps")) == {1: 3.0}
    assert oversubscription(topology("dgx-h100:64,oversubscription=2")) == {1: pytest.approx(2)}
