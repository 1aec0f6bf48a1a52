"""Asynchronous workers: real processes, some slow, some done early, and the loss that they reach."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import SMALL, WARMUP, pair, sgd, steps, train
from tests.plugins.torch.ps.serving import KEY, servers

FAST = 14
"""Steps of the fast worker."""
SLOW = 7
BOUND = 2


def attach_asynchronously(model, optimizer, addresses, consistency, **options):
    os.environ[SECRET] = KEY.hex()
    return attach(
        model, optimizer, SMALL, warmup=WARMUP, transport=ParameterServer(addresses, consistency=consistency), **options
    )


class Board:
    """Where a rank writes which steps it has begun."""

    def __init__(self, name):
        self._store, self._name = _get_default_store(), name

    def write(self, step):
        self._store.set(f"{self._name} {step}", "begun")

    def wait(self, step):
        self._store.wait([f"{self._name} {step}"])

    def begun(self, step):
        return self._store.check([f"{self._name} {step}"])


def slow_and_fast(addresses, consistency, bound):
    """Rank 0 trains as fast as it may; rank 1 only when rank 0 is as far as it may be, and notes if it is further."""
    model, optimizer = pair()
    board = Board(f"{consistency} {addresses}")
    attached = attach_asynchronously(model, optimizer, addresses, consistency)
    further = []

    def net(inputs):
        output = model(inputs)
        if dist.get_rank() == 1 and step > WARMUP:
            further.append(board.begun(step + bound + 2))
        return output

    for step in steps(net, optimizer, FAST if dist.get_rank() == 0 else SLOW):
        if dist.get_rank() == 0:
            board.write(step)
        elif step > WARMUP:
            # One step ahead it has the answer to, one it has begun: its forward pass waits.
            board.wait(min(step + bound + 1, FAST))
    attached.close()
    if dist.get_rank() == 0:
        board.write(FAST)
    return any(further), attached.steps


def test_under_ssp_the_fast_one_goes_as_far_ahead_as_it_may_and_no_further(ranks):
    with servers(2, 2) as (addresses, made):
        (_, fast), (further, slow) = ranks(slow_and_fast, addresses, f"ssp({BOUND})", BOUND)
        assert not any(service.failure or service.rejected for service in made)
    assert not further
    assert (fast, slow) == (FAST - WARMUP, SLOW - WARMUP)


@pytest.mark.smoke
def test_asynchronously_one_may_be_done_before_the_other_has_begun(ranks):
    with servers(2, 2) as (addresses, made):
        (_, fast), (_, slow) = ranks(slow_and_fast, addresses, "async", FAST)
        assert not any(service.failure or service.rejected for service in made)
    assert (fast, slow) == (FAST - WARMUP, SLOW - WARMUP)


# ---------------------------------------------------------------- convergence

ROWS, STEPS = 96, 24


def dataset():
    """Points of two classes that no plane parts: ``(rows, 8)``, and which class."""
    random = torch.Generator().manual_seed(3)
    points = torch.randn(ROWS, 8, generator=random)
    return points, (points[:, :2].prod(1) + 0.3 * points[:, 2] > 0).float()


def classifying(addresses, consistency, rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    points, classes = dataset()
    own = slice(rank, None, ranks)
    with attach_asynchronously(model, optimizer, addresses, consistency) as attached:
        for _ in range(STEPS):
            # How stale gradients are would else depend on which rank the machine happens to hold up.
            dist.barrier()
            output = model(points[own]).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(output, classes[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
        attached.synchronize()
    # Those that are done early have not seen what the others do after that.
    with torch.no_grad():
        loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), classes).item()
    return loss, sorted(optimizer.state_dict()["state"])


def test_all_consistencies_reach_the_same_loss(three):
    losses = {}
    for consistency in ("bsp", "async", "ssp(1)"):
        with servers(1, 3) as (addresses, _):
            # Three times as many updates, each with the noise of one worker's gradient.
            rate = 0.03 if consistency == "bsp" else 0.03 / 3**0.5
            outcomes = three(classifying, addresses, consistency, rate)
        # The last to be done has everybody's updates.
        losses[consistency] = min(loss for loss, _ in outcomes)
        assert all(states == [0, 1, 2, 3] for _, states in outcomes)
    for consistency in ("async", "ssp(1)"):
        assert losses[consistency] - losses["bsp"] < 0.3 * (math.log(2) - losses["bsp"]), losses


# ---------------------------------------------------------------- buffers


def normalized(addresses):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = sgd(model)
    with attach_asynchronously(model, optimizer, addresses, "async"):
        train(lambda inputs: model(inputs[:, :8]), optimizer, (dist.get_rank() + 1) * (WARMUP + 2))
    return model[1].num_batches_tracked.item()


def test_buffers_stay_each_workers_own(ranks):
    with servers(1, 2) as (addresses, _):
        assert ranks(normalized, addresses) == [WARMUP + 2, 2 * (WARMUP + 2)]
