"""attach(updates="servers"): the same parameters, optimizer states and buffers as DistributedDataParallel's.

Two workers give the same bits; with three, and with passes that DDP sums apart, the order of additions differs.
"""

import os
import re

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from foretrain.comm.options import ParameterServer  # noqa: E402
from foretrain.errors import ConfigError  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from foretrain.plugins.torch.rendezvous import SECRET  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    SMALL,
    STEPS,
    WARMUP,
    assert_same,
    batch,
    branching,
    mlp,
    objective,
    plain,
    sgd,
)
from tests.plugins.torch.ps.serving import KEY, servers  # noqa: E402
from tests.plugins.torch.ps.test_attach_served import keyed  # noqa: E402
from tests.plugins.torch.test_attach_gradients import accumulating  # noqa: E402
from tests.plugins.torch.test_attach_optimizers import unfreezing  # noqa: E402
from tests.plugins.torch.test_attach_schedules import ROUNDING  # noqa: E402
from tests.plugins.torch.test_attach_state import adam, looked_at, on_rank_zero  # noqa: E402

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
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_groups_and_a_learning_rate_schedule(same, name):
    same(grouped, *OPTIMIZERS[name], schedule="bytescheduler(partition=100KiB, credit=200KiB)")


@pytest.mark.parametrize("schedule", ["fifo", "ddp(bucket=4KiB, first=1KiB)", "p3(slice=1KiB)", "dear(group=4KiB)"])
def test_every_kind_of_schedule(same, schedule):
    same(plain, schedule=schedule)


@pytest.mark.smoke
def test_three_workers(three):
    with servers(2, 3) as (addresses, _):
        options = {"transport": ParameterServer(addresses, "servers")}
        assert_same(three, keyed, plain, tolerance=ROUNDING, **options)


@pytest.mark.parametrize("how", ["never the last", "another each step on each rank", "nobody's until late"])
def test_branches(same, how):
    same(branching, how)


def test_parts_without_a_gradient_on_any_worker_are_not_updated(same):
    same(branching, "nobody's from late on")


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_update_whole_parameters(same, compression):
    same(plain, compression=compression, tolerance=0.05)


@pytest.mark.parametrize("no_sync", [True, False])
def test_accumulation(same, no_sync):
    same(accumulating, 2, no_sync, tolerance=0 if no_sync else ROUNDING)


def test_one_rank_writes_checkpoints(same):
    same(on_rank_zero)


def test_a_checkpoint_of_adam_is_whole(same):
    same(looked_at, "both", True, adam)


def small(side):
    """One part, however many servers there are."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = net(batch(step)[:, :4]).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_server_without_anything_to_do_is_not_waited_for(same):
    same(small)


def test_a_group_added_under_way(same):
    same(unfreezing, 5)


# ---------------------------------------------------------------- what is refused


def reads(model, optimizer, attached):
    objective(model(batch(0))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def leaves_out_a_step(model, optimizer, attached):
    for _ in range(2):
        objective(model(batch(0))).backward()
        optimizer.zero_grad()


def clears_too_early(model, optimizer, attached):
    objective(model(batch(0))).backward()
    optimizer.zero_grad()
    optimizer.step()


def never_clears(model, optimizer, attached):
    for _ in range(2):
        objective(model(batch(0))).backward()
        optimizer.step()


def never_clears_what_it_accumulates(model, optimizer, attached):
    never = [attached.no_sync]
    objective(model(batch(0))).backward()
    optimizer.step()
    with never[0]():
        objective(model(batch(0))).backward()


def writes(model, optimizer, attached):
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    objective(model(batch(0))).backward()


def writes_past_the_version(model, optimizer, attached):
    model[0].weight.data.clamp_(-0.1, 0.1)
    objective(model(batch(0))).backward()


def changes_the_rate_late(model, optimizer, attached):
    objective(model(batch(0))).backward()
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()


def has_a_closure(model, optimizer, attached):
    optimizer.step(lambda: objective(model(batch(0))))


def loads(model, optimizer, attached):
    optimizer.load_state_dict(optimizer.state_dict())


def saves_too_early(model, optimizer, attached):
    objective(model(batch(0))).backward()
    optimizer.state_dict()


REFUSED = {
    reads: r"gradient: '\.grad' is read .* write updates='workers'",
    leaves_out_a_step: r"optimizer\.step\(\): '' was not called for gradients with which servers have updated",
    clears_too_early: r"optimizer: 'step\(\)' steps with other gradients",
    never_clears: r"gradient: 'task \d+' was not cleared",
    never_clears_what_it_accumulates: r"gradient: 'task \d+' was not cleared",
    writes: r"parameter: 'task 0' of shape \(32, 32\) was written to, and servers do not know",
    writes_past_the_version: r"parameter: 'task 0' of shape \(32, 32\) was written to, and servers do not know",
    changes_the_rate_late: r"optimizer\.lr: 0\.3 was 0\.1 when backward\(\) began",
    has_a_closure: r"optimizer: 'step\(\)' cannot run on servers: its step\(\) is given a closure",
    loads: r"optimizer: 'load_state_dict\(\)' comes when servers have its state",
    saves_too_early: r"optimizer\.step\(\): '' was not called",
}


def refusing(fault, addresses):
    os.environ[SECRET] = KEY.hex()
    model = mlp()
    optimizer = sgd(model)
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, transport=ParameterServer(addresses, "servers"))
    for step in range(WARMUP + 1):
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        fault(model, optimizer, attached)
    except ConfigError as error:
        # So that the other, which may not be as far, ends with it.
        attached._abandon(str(error))
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.__name__)
def test_what_would_be_silently_wrong_is_refused(job, fault):
    with servers(1, 2) as (addresses, _):
        for outcome in job(2).outcomes(refusing, fault, addresses, timeout=60):
            assert re.search(REFUSED[fault], outcome.value or outcome.error), outcome


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


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (own, SERVERS, r"optimizer: 'Own' cannot run on servers: Own is not known to update each parameter"),
        (lbfgs, SERVERS, r"'LBFGS' cannot run on servers: .* write updates='workers' .*, or one of SGD, Adam, AdamW"),
        (strange, SERVERS, r"optimizer: 'SGD' has parameters that are none of the model's"),
        (shared, SERVERS, r"optimizer: 'SGD' has a parameter that another has, too"),
        (unbounded, SERVERS, r"optimizer\.lr: inf is nothing that servers can be told"),
        (sgd, {"updates": "nobody"}, r"updates: 'nobody' is unknown"),
        (sgd, {"consistency": "async", "updates": "workers"}, r"consistency: 'async' cannot be with optimizers on the"),
        (sgd, {"consistency": "ssp(-1)"}, r"consistency: 'ssp\(-1\)' is unknown"),
    ],
)
def test_arguments_that_make_no_sense(ranks, make, options, said):
    for text in ranks(attaching, make, options):
        assert re.search(said, text), text
