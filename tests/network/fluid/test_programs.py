"""Random programs: bytes conserved, no link over capacity, causality; local refill = full; compiled = interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import program, waiting

from foretrain.collective import WHOLE
from foretrain.network.fluid import Fluid, run
from foretrain.network.program import Program


def random_program(seed: int, flows: int = 40) -> tuple[Program, np.ndarray, list[tuple[int, ...]]]:
    """A random DAG over an oversubscribed leaf-spine, with steps, latencies, releases and all three kinds of lag."""
    rng = np.random.default_rng(seed)
    lists, links = oracle.fat_tree_paths(rng, 12, int(rng.integers(2, flows)))
    n = len(lists)
    capacity = oracle.RATE * rng.uniform(0.25, 1.5, links)
    base = program(
        lists,
        rng.choice([0.0, 1e5, 1e6, 3e6], n),
        steps=rng.integers(1, 5, n),
        latency=rng.choice([0.0, 1e6, 5e6], n),
        release=rng.choice([0.0, 2e7], n),
        weight=rng.choice([1.0, 2.0], n),
    )
    waits = []
    for flow in range(1, n):
        others = {int(x) for x in rng.integers(0, flow, rng.integers(0, 3))}
        waits += [(flow, other, int(rng.choice([0, 1, 2, WHOLE]))) for other in others]
    return waiting(base, waits), capacity, lists


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_bytes_are_conserved_and_no_link_is_over_capacity(seed: int) -> None:
    whole, capacity, lists = random_program(seed)
    network = Fluid(capacity, bins=64)
    handle = network.add(whole)
    network.advance()
    carried, width = network.utilisation()
    expected = np.zeros(len(capacity))
    for flow, links in enumerate(lists):
        expected[list(links)] += whole.size[flow] * whole.steps[flow]
    assert carried.sum(axis=1) == pytest.approx(expected, rel=1e-9, abs=1e-3)
    assert (carried <= capacity[:, None] * width / 1e12 * (1 + 1e-9) + 1e-6).all()
    assert handle.end is not None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_ends_before_what_it_waits_for_or_faster_than_light(seed: int) -> None:
    whole, capacity, lists = random_program(seed)
    finish = run(whole, capacity).finish
    for flow, links in enumerate(lists):
        alone = whole.steps[flow] * (whole.latency[flow] + whole.size[flow] / capacity[list(links)].min() * 1e12)
        assert finish[flow] >= (whole.release[flow] + alone) * (1 - 1e-12)
        for d in range(whole.first[flow], whole.first[flow + 1]):
            if whole.lag[d] == WHOLE:
                assert finish[flow] >= (finish[whole.after[d]] + alone) * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_local_refill_ends_when_the_full_one_does(seed: int) -> None:
    whole, capacity, _ = random_program(seed)
    assert run(whole, capacity).finish.max() == pytest.approx(run(whole, capacity, full=True).finish.max(), rel=1e-9)


def test_twice_the_same_is_the_same() -> None:
    whole, capacity, _ = random_program(7)
    assert (run(whole, capacity).finish == run(whole, capacity).finish).all()


INTERPRETED = """
import numpy as np
from numba import config
from test_programs import random_program
from oracle import ring, star
from foretrain.network.fluid import run
assert config.DISABLE_JIT
for seed in range(6):
    whole, capacity, _ = random_program(seed, 20)
    print(*map(float.hex, run(whole, capacity).finish.tolist()))
print(*map(float.hex, run(ring(6, 1e8, 1e6), star(6) * np.linspace(0.5, 1.0, 12)).finish.tolist()))
"""


def test_interpreted_kernels_give_the_same_bits() -> None:
    here = str(Path(__file__).parent)
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": here}
    made = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    lines = [" ".join(map(float.hex, run(*random_program(seed, 20)[:2]).finish.tolist())) for seed in range(6)]
    last = run(oracle.ring(6, 1e8, 1e6), oracle.star(6) * np.linspace(0.5, 1.0, 12)).finish.tolist()
    assert made.stdout.splitlines() == [*lines, " ".join(map(float.hex, last))]
