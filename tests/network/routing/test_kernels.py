import dataclasses
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.network.routing import kernels, router
from foretrain.network.routing.route_search import Ways
from tests.network.routing.networks import all_pairs, fat_tree, leaf_spine, random_network, server
from tests.network.ways import interpreted


def same(one, other):
    return np.array_equal(one.paths.first, other.paths.first) and np.array_equal(one.paths.links, other.paths.links)


@given(
    st.builds(random_network, st.integers(0, 10**6), metrics=st.sampled_from([1, 3]))
    | st.sampled_from([fat_tree(), server(), leaf_spine(cables=2)]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 25, 1000]),
)
def test_a_search_from_both_ends_finds_what_a_whole_one_finds(topology, ball):
    flows = all_pairs(topology, connections=2)
    whole = dataclasses.replace(Ways.of(topology), pairs=0)
    bounded = dataclasses.replace(whole, ball=ball, pairs=len(flows[0]))
    assert same(whole.by_hop(*flows, spread=True), bounded.by_hop(*flows, spread=True))
    sizes = np.ones(len(flows[0]))
    load = np.zeros((2, topology.links))
    assert same(whole.by_load(*flows[:2], sizes, load[0]), bounded.by_load(*flows[:2], sizes, load[1]))
    assert np.array_equal(load[0], load[1])


def test_either_search_says_who_cannot_be_reached():
    topology = leaf_spine(leaves=2, spines=2, hosts=2)
    up = topology.up.copy()
    up[topology.target == topology.node("h3")] = False
    ways = Ways.of(dataclasses.replace(topology, up=up))
    flows = all_pairs(topology)
    for pairs in (0, 99):
        found = dataclasses.replace(ways, pairs=pairs).by_hop(*flows, spread=True)
        assert found.lost.tolist() == np.flatnonzero(flows[1] == topology.node("h3")).tolist()


def test_hosts_of_a_switch_share_a_search_and_gpus_with_two_links_do_not():
    topology = leaf_spine(leaves=2, hosts=3)
    anchors = [topology.nodes[node].name for node in Ways.of(topology).anchor[topology.ranks]]
    assert anchors == ["leaf0"] * 3 + ["leaf1"] * 3
    gpus = server()
    assert np.array_equal(Ways.of(gpus).anchor[gpus.ranks], gpus.ranks)
    one_left = gpus.changed(gpus.between("s0.nvswitch", "s0.gpu0"), up=False)
    assert one_left.nodes[Ways.of(one_left).anchor[one_left.ranks[0]]].name == "s0.pcie0"


LARGEST = 2**32 - 1


def digest() -> str:
    """Of the paths of every policy in a few networks."""
    found = hashlib.sha256()
    for topology in (fat_tree(4), server(), *(random_network(seed, metrics=3) for seed in range(3))):
        for policy in ("shortest", "ecmp", "spray", "adaptive"):
            if policy == "spray" and not topology.name.startswith("fat_tree"):
                continue
            for seed in (0, LARGEST):
                paths = router(topology, policy, seed=seed).paths(*all_pairs(topology, connections=2))
                found.update(paths.first.tobytes() + paths.links.tobytes())
        paths = router(topology, "ecmp", polarised=True).paths(*all_pairs(topology))
        found.update(paths.links.tobytes())
        bounded = dataclasses.replace(Ways.of(topology), ball=3, pairs=1000)
        found.update(bounded.by_hop(*all_pairs(topology), spread=True).paths.links.tobytes())
    return found.hexdigest()


@pytest.mark.smoke
def test_plain_python_chooses_as_the_compiled_kernels_do():
    assert interpreted("from tests.network.routing.test_kernels import digest; print(digest())") == digest()


def mixed(x: int) -> int:
    """The same hash with integers of any size."""
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return x ^ x >> 15


def test_a_hash_has_32_bits_in_either_world():
    python = getattr(kernels.mix, "py_func", kernels.mix)
    for x in (0, 1, 2**31 - 1, 2**31, LARGEST, *np.random.default_rng(0).integers(2**32, size=50).tolist()):
        assert kernels.mix(x) == python(np.int64(x)) == mixed(x), x


def test_each_bit_turns_half_the_bits():
    draws = np.random.default_rng(1).integers(2**32, size=2000)
    for bit in range(32):
        turned = np.array([kernels.mix(x) ^ kernels.mix(x ^ (1 << bit)) for x in draws.tolist()])
        share = [((turned >> out) & 1).mean() for out in range(32)]
        assert min(share) > 0.4
        assert max(share) < 0.6


def test_a_hash_tells_all_parts_of_a_flow_apart():
    hashes = {
        kernels.flow_hash(source, target, connection, seed)
        for source in range(8)
        for target in range(8)
        for connection in (0, 1, 2, 0x4000, 0x100000)
        for seed in (0, 1, LARGEST)
    }
    # Source ports have 14 bits: connections 0x4000 and 0x100000 are folded onto 1, as flow labels are.
    assert len(hashes) == 8 * 8 * 3 * 3


def test_importing_the_network_does_not_import_numba():
    code = "import sys, foretrain.network, foretrain.network.routing; sys.exit('numba' in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert run.returncode == 0
