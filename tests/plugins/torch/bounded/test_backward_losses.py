"""Losses of backward passes, which the guard of an automatic tolerance sees without the script saying them."""

from unittest import mock

import pytest
import torch
from torch import nn

from foretrain.comm.bounded.guard import Guard
from foretrain.comm.options import BoundedLoss
from foretrain.plugins.torch import access_guards, attach
from foretrain.plugins.torch.bounded.backward_losses import BackwardLosses, loss_of
from tests.plugins.torch.models import WARMUP, batch


class Shown:
    """Stands for a ledger."""

    def __init__(self):
        self.losses = []

    def watch_loss(self, value):
        self.losses.append(value)


@pytest.fixture
def watched():
    """Weights, and what hears of their backward passes."""
    access_guards.install()
    losses, weights = BackwardLosses(), nn.Parameter(torch.ones(4))
    weights.register_post_accumulate_grad_hook(lambda _: losses.gradient())
    end = losses.watch()
    yield weights, losses
    end()
    access_guards.remove()
    assert not access_guards.pass_begins


def test_a_steps_loss_is_the_mean_of_its_micro_batches(watched):
    weights, losses = watched
    shown = Shown()
    for step in ([8.0], [2.0, 6.0], []):
        for loss in step:
            (weights.sum() * 0 + loss).backward()
        losses.step(shown)
    assert shown.losses == [8.0, 4.0]


def test_passes_of_other_models_and_penalties_are_not_the_models(watched):
    weights, losses = watched
    shown, other = Shown(), nn.Parameter(torch.ones(4))
    (other.sum() + 5).backward()
    torch.autograd.grad(weights.sum(), weights)
    losses.step(shown)
    assert shown.losses == []


def test_the_factor_of_a_scaler_is_left_out():
    loss = nn.Parameter(torch.ones(4)).square().mean() + 2.0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert loss_of([loss]) == loss_of([scaler.scale(loss)]) == 3.0
    assert loss_of([loss * loss]) == 9.0


def test_what_is_no_single_number_is_no_loss():
    weights = nn.Parameter(torch.ones(4))
    assert loss_of([weights * 2]) is None
    assert loss_of([weights.sum(), weights.sum()]) is None
    assert loss_of([torch.ones((), device="meta")]) is None


def automatic(accumulated):
    """Trains under an automatic tolerance; the losses that the guard has seen, and those of all steps."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, computed = [], []
    note = mock.patch.object(Guard, "observe", lambda _, step, name, value: name == "loss" and seen.append(value))
    with note, attach(model, optimizer, "fifo", warmup=WARMUP, transport=BoundedLoss("auto")):
        for step in range(WARMUP + 4):
            optimizer.zero_grad()
            losses = [model(batch(step + k, width=64)).square().mean() / accumulated for k in range(accumulated)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            computed.append(sum(losses).item() / accumulated)
    return seen, computed


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_guard_sees_the_losses_of_an_unmodified_loop(ranks, accumulated):
    for seen, computed in ranks(automatic, accumulated):
        assert len(seen) >= 3
        assert seen == pytest.approx(computed[-len(seen) :])
