"""attach(BoundedLoss(…)) over every way of summing, with packets that are lost: replicas stay the same."""

import logging
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from foretrain.comm.options import BoundedLoss
from foretrain.plugins.torch import attach
from tests.comm.bounded.group import through
from tests.comm.bounded.relay import Network, losing
from tests.plugins.torch.models import WARMUP, batch, copied, objective

STEPS, WIDTH = 8, 64


def losing_packets(over):
    """What each forward pass begins with of BatchNorm's buffers, the parameters in the end, and what was lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.BatchNorm1d(1024), nn.Tanh(), nn.Linear(1024, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, logged = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("foretrain").addHandler(handler)
    logging.getLogger("foretrain").setLevel("INFO")
    model[1].register_forward_pre_hook(lambda norm, _: seen.append(copied([*norm.buffers()])))
    transport = BoundedLoss(0.3, over, reliable_steps=1, reliable_bytes=0)
    with through(Network(losing(0.1))), attach(model, optimizer, "fifo", warmup=WARMUP, transport=transport) as job:
        for step in range(WARMUP + STEPS):
            objective(model(batch(step, width=WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (job.ledger.line() in "".join(logged)) == (job.rank == 0)
    return seen, copied([*model.parameters()]), job.ledger.by_tensor(), job.ledger.line()


@pytest.mark.parametrize("over", ["transpose", "ring", "halving_doubling", "ps"])
def test_parameters_and_buffers_of_all_ranks_are_the_same_though_gradients_are_lost(ranks, over):
    (seen, parameters, lost, line), (others_seen, others, _, _) = ranks(losing_packets, over)
    assert len(seen) == len(others_seen) == WARMUP + STEPS
    for mine, theirs in zip([*seen, parameters], [*others_seen, others], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
    assert all(not torch.equal(before[0], after[0]) for before, after in pairwise(seen))
    assert lost.keys() == {"0.weight", "3.weight"}  # and nothing of biases and norms
    assert re.match(
        r"\d+\.\d\d% of the gradients' bytes were lost, most of [03].weight, [03].weight, \d+% from rank [01]$", line
    )
