"""attach(updates="servers"): the same parameters, optimizer states and buffers as DistributedDataParallel's.

Two workers give the same bits; with three, and with passes that DDP sums apart, the order of additions differs.
"""

import os
import re

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer
from foretrain.errors import ConfigError
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import (
    EACH,
    SMALL,
    WARMUP,
    assert_same,
    batch,
    branching,
    loop,
    mlp,
    objective,
    pair,
    plain,
    sgd,
    train,
)
from tests.plugins.torch.ps.serving import KEY, keyed, servers
from tests.plugins.torch.test_attach_gradients import accumulating
from tests.plugins.torch.test_attach_optimizers import unfreezing
from tests.plugins.torch.test_attach_schedules import ROUNDING
from tests.plugins.torch.test_attach_state import adam, looked_at, on_rank_zero

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
}


@pytest.fixture
def same(ranks):
    """`assert_same` on two workers and two servers."""

    def check(recipe, *args, **options):
        with servers(2, 2) as (addresses, made):
            assert_same(ranks, keyed, recipe, *args, transport=ParameterServer(addresses, "servers"), **options)
            assert not any(service.rejected or service.failure for service in made)

    return check


def grouped(side, make, options):
    """Two groups, hyperparameters that change in every step, and a layer too large for one part."""
    model = nn.Sequential(nn.Linear(32, 4096), nn.Tanh(), nn.Linear(4096, 32), mlp(2))
    groups = [{"params": model[:3].parameters(), "lr": 0.001}, {"params": model[3].parameters()}]
    optimizer = make(groups, **options)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
    yield from loop(side, model, optimizer, stepped=lambda step: schedule.step())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_groups_and_a_learning_rate_schedule(same, name):
    same(grouped, *OPTIMIZERS[name], schedule="bytescheduler(partition=100KiB, credit=200KiB)")


@pytest.mark.parametrize("schedule", ["ddp(bucket=4KiB, first=1KiB)", "dear(group=4KiB)"])
def test_buckets_and_schedules_that_push_and_pull_apart(same, schedule):
    same(plain, schedule=schedule)


@pytest.mark.smoke
def test_three_workers(three):
    with servers(2, 3) as (addresses, _):
        options = {"transport": ParameterServer(addresses, "servers")}
        assert_same(three, keyed, plain, tolerance=ROUNDING, **options)


@pytest.mark.parametrize("how", [EACH, "nobody's until late"])
def test_branches(same, how):
    same(branching, how)


def test_compressed_gradients_update_whole_parameters(same):
    same(plain, compression="bf16", tolerance=0.05)


@pytest.mark.parametrize("no_sync", [True, False])
def test_accumulation(same, no_sync):
    same(accumulating, (2,), no_sync, tolerance=0 if no_sync else ROUNDING)


def test_one_rank_writes_checkpoints(same):
    same(on_rank_zero)


def test_a_checkpoint_of_adam_is_whole(same):
    same(looked_at, ["file"] * 9, 1, adam)


def small(side):
    """One part, however many servers there are."""
    yield from loop(side, nn.Linear(4, 1, bias=False), loss=lambda net, step: net(batch(step)[:, :4]).square().sum())


def test_a_server_without_anything_to_do_is_not_waited_for(same):
    same(small)


def test_a_group_added_under_way(same):
    same(unfreezing, 5)


# ---------------------------------------------------------------- what is refused


ACTIONS = {
    "backward": lambda model, optimizer, attached: objective(model(batch(0))).backward(),
    "step": lambda model, optimizer, attached: optimizer.step(),
    "zero_grad": lambda model, optimizer, attached: optimizer.zero_grad(),
    "clip": lambda model, optimizer, attached: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "accumulate": lambda model, optimizer, attached: accumulate(model, attached),
    "write": lambda model, optimizer, attached: model[0].weight.detach().clamp_(-0.1, 0.1),
    "write data": lambda model, optimizer, attached: model[0].weight.data.clamp_(-0.1, 0.1),
    "change rate": lambda model, optimizer, attached: optimizer.param_groups[0].update(lr=0.3),
    "closure": lambda model, optimizer, attached: optimizer.step(lambda: objective(model(batch(0)))),
    "load": lambda model, optimizer, attached: optimizer.load_state_dict(optimizer.state_dict()),
    "save": lambda model, optimizer, attached: optimizer.state_dict(),
}
REFUSED = {
    "backward, clip": r"gradient: '\.grad' is read .* write updates='workers'",
    "backward, zero_grad, backward": r"optimizer\.step\(\): '' was not called for gradients with which servers",
    "backward, zero_grad, step": r"optimizer: 'step\(\)' steps with other gradients",
    "backward, step, backward": r"gradient: 'task \d+' was not cleared",
    "backward, step, accumulate": r"gradient: 'task \d+' was not cleared",
    "write, backward": r"parameter: 'task 0' of shape \(32, 32\) was written to, and servers do not know",
    "write data, backward": r"parameter: 'task 0' of shape \(32, 32\) was written to, and servers do not know",
    "backward, change rate, step": r"optimizer\.lr: 0\.3 was 0\.1 when backward\(\) began",
    "closure": r"optimizer: 'step\(\)' cannot run on servers: its step\(\) is given a closure",
    "load": r"optimizer: 'load_state_dict\(\)' comes when servers have its state",
    "backward, save": r"optimizer\.step\(\): '' was not called",
}
"""What a script does after its first scheduled step, and the error."""


def accumulate(model, attached):
    with attached.no_sync():
        objective(model(batch(0))).backward()


def refusing(script, addresses):
    os.environ[SECRET] = KEY.hex()
    model, optimizer = pair()
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, transport=ParameterServer(addresses, "servers"))
    train(model, optimizer, WARMUP + 1)
    try:
        for action in script.split(", "):
            ACTIONS[action](model, optimizer, attached)
    except ConfigError as error:
        # So that the other, which may not be as far, ends with it.
        attached._abandon(str(error))
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("script", REFUSED)
def test_scripts_that_would_train_wrongly_get_an_error(job, script):
    with servers(1, 2) as (addresses, _):
        for outcome in job(2).outcomes(refusing, script, addresses):
            assert re.search(REFUSED[script], outcome.value or outcome.error), outcome


class Own(torch.optim.SGD):
    """Might do anything."""


def attaching(make, options):
    model = mlp()
    try:
        attach(model, make(model), SMALL, transport=ParameterServer("127.0.0.1:1", **options))
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def own(model):
    return Own(model.parameters(), 0.1)


def strange(model):
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], 0.1)


def shared(model):
    return [sgd(model), sgd(model)]


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def unbounded(model):
    return sgd(model, lr=float("inf"))


SERVERS = {"updates": "servers"}


NONSENSE = [
    (own, SERVERS, r"optimizer: 'Own' cannot run on servers: Own is not known to update each parameter"),
    (lbfgs, SERVERS, r"'LBFGS' cannot run on servers: .* write updates='workers', or one of SGD, Adam, AdamW"),
    (strange, SERVERS, r"optimizer: 'SGD' has parameters that are none of the model's"),
    (shared, SERVERS, r"optimizer: 'SGD' has a parameter that another has, too"),
    (unbounded, SERVERS, r"optimizer\.lr: inf is nothing that servers can be told"),
    (sgd, {"updates": "nobody"}, r"updates: 'nobody' is unknown"),
    (sgd, {"consistency": "async", "updates": "workers"}, r"consistency: 'async' cannot be with optimizers on the"),
    (sgd, {"consistency": "ssp(-1)"}, r"consistency: 'ssp\(-1\)' is unknown"),
]


def test_optimizers_and_arguments_that_make_no_sense(ranks):
    for make, options, said in NONSENSE:
        for text in ranks(attaching, make, options):
            assert re.search(said, text), text
