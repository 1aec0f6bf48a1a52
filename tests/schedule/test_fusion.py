"""Horovod's tensor fusion: cycles, and the greedy buffer."""

import random

import pytest

from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.tasks import Ready
from foretrain.units import MICROSECOND
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import EXACT, random_cluster, random_workload, replay

CYCLE = 10 * MICROSECOND


def released_at(*rows):
    """Gradients (release, size) of one layer whose backward pass ends with the last."""
    gradients = tuple(Gradient(f"w{i}", size, 0, release) for i, (release, size) in enumerate(rows))
    return Workload("fused", 1, (Layer("l", 1, max(g.release for g in gradients)),), gradients)


def sent(workload, **knobs):
    run = simulate(workload, EXACT, Spec("fusion", {"cycle": CYCLE, **knobs}), steps=1)
    return [(decision.time, tuple(piece.task for piece in decision.chunk.pieces)) for decision in run.log]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(0, 1)], [(0, (0,))], id="a cycle begins with the step"),
        pytest.param([(1, 1)], [(CYCLE, (0,))], id="waits for the next"),
        pytest.param([(CYCLE, 1)], [(CYCLE, (0,))], id="ready with the cycle"),
        pytest.param([(1, 1), (CYCLE, 1)], [(CYCLE, (0, 1))], id="fused"),
        pytest.param([(1, 1), (CYCLE + 1, 1)], [(CYCLE, (0,)), (2 * CYCLE, (1,))], id="apart"),
        pytest.param([(1, 600), (2, 424)], [(CYCLE, (0, 1))], id="exactly full"),
        pytest.param([(1, 600), (2, 425)], [(CYCLE, (0,)), (CYCLE, (1,))], id="overfull"),
        pytest.param([(1, 5000), (2, 5)], [(CYCLE, (0,)), (CYCLE, (1,))], id="larger than the buffer"),
        pytest.param([(1, 600), (2, 600), (3, 5)], [(CYCLE, (0,)), (CYCLE, (1, 2))], id="in order, never back"),
        pytest.param([(3, 1), (2, 2), (1, 3)], [(CYCLE, (2, 1, 0))], id="in the order of readiness"),
    ],
)
def test_by_hand(rows, expected):
    assert sent(released_at(*rows), threshold=1024) == expected


def test_cycles_hold_fuse_greedily_and_lose_nothing():
    rng = random.Random(1)
    for _ in range(200):
        workload = random_workload(rng, scale=20 * CYCLE // 8)
        threshold = max(1024, int(workload.size * rng.uniform(0.05, 1)))
        plan = Spec("fusion", {"threshold": threshold, "cycle": CYCLE})
        watched, run, _ = replay(workload, random_cluster(rng), plan)
        sizes = [gradient.size for gradient in workload.gradients]
        ready: list[int] = []
        for seen in watched.seen:
            if isinstance(seen.event, Ready):
                ready.append(seen.event.task)
                assert not seen.chunks
            if not seen.chunks:
                continue
            begun = max(begin for begin in run.begins if begin <= seen.time)
            assert (seen.time - begun) % CYCLE == 0
            assert [piece.task for chunk in seen.chunks for piece in chunk.pieces] == ready
            ready.clear()
            for chunk in seen.chunks:
                assert chunk.size <= threshold or len(chunk.pieces) == 1
            for chunk, following in zip(seen.chunks, seen.chunks[1:], strict=False):
                assert chunk.size + sizes[following.pieces[0].task] > threshold
