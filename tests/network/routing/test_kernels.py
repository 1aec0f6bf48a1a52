import dataclasses
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from foretrain.network.routing import kernels, router
from foretrain.network.routing.route_search import Ways
from tests.network.routing.networks import all_pairs, fat_tree, random_network, server

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
    code = "from tests.network.routing.test_kernels import digest; print(digest())"
    plain = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain.stdout.strip() == digest(), plain.stderr


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
