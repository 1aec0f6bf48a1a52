"""Scripts that accumulate, clip, scale or read gradients find those that DDP would have left."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.plugins.torch.models import (
    STEPS,
    WARMUP,
    Attached,
    assert_same,
    batch,
    loop,
    mlp,
    objective,
    pair,
    same_as_ddp,
    sgd,
)

ROUNDING = 1e-5
"""Relative; where DDP reduces a sum that it has partly reduced before, so that the order of additions differs."""


# ---------------------------------------------------------------- accumulation


def accumulating(side, parts, no_sync):
    """As many backward passes as ``parts`` has for each step, in turn."""
    model, optimizer = pair()
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        passes = parts[step % len(parts)]
        for part in range(passes):
            with side.no_sync() if no_sync and part < passes - 1 else contextlib.nullcontext():
                loss = objective(net(batch(10 * step + part)))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("parts", [(2,), (1, 3, 1, 2, 3)], ids=["constant", "changing"])
@pytest.mark.smoke_case("constant")
def test_accumulation_with_no_sync(ranks, parts):
    assert_same(ranks, accumulating, parts, True)


def test_accumulation_without_no_sync(ranks):
    assert_same(ranks, accumulating, (2,), False, tolerance=ROUNDING)


class Coder(nn.Module):
    """Trained by its methods."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(2), mlp(2)

    def encode(self, x):
        return checkpoint(self.encoder, x, use_reentrant=False)

    def forward(self, x):
        return self.decoder(self.encode(x).tanh())


def in_parts(side):
    """DDP has to be called as a whole, with `attach` nobody calls the model itself."""
    torch.manual_seed(0)
    model = Coder()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        for part in range(3):
            with side.no_sync() if part < 2 else contextlib.nullcontext():
                x = batch(3 * step + part)
                y = model.decoder(model.encode(x).tanh()) if isinstance(side, Attached) else net(x)
                loss = objective(y)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_accumulation_with_no_sync_where_only_parts_of_the_model_are_called(ranks):
    seen = assert_same(ranks, in_parts)
    once = sum(parameter.nbytes for parameter in Coder().parameters())
    assert sum(seen[0].sizes[0]) == (STEPS - WARMUP) * once


@same_as_ddp()
def test_gradients_read_under_no_sync_are_this_ranks_own(side):
    """Under no_sync only the forward pass matters to DDP; a whole step may also be local, and its gradients kept."""
    model, optimizer = pair()
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        with side.no_sync():
            objective(net(batch(2 * step))).backward()
            yield [p.grad for p in model.parameters()]
        objective(net(batch(2 * step + 1))).backward()
        yield [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- zero_grad

CLEARINGS = {
    "to none": lambda model, optimizer, old: optimizer.zero_grad(),
    "to zero": lambda model, optimizer, old: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer, old: model.zero_grad(),
    "by the model to zero": lambda model, optimizer, old: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer, old: [setattr(p, "grad", None) for p in old],
    "to zero by hand": lambda model, optimizer, old: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


def clearing(side, how, when):
    model = mlp()
    old = list(model.parameters())
    optimizer = sgd(model, lr=0.01)
    net = side.wrap(model, optimizer)
    clear = CLEARINGS[how]
    for step in range(STEPS):
        if when == "first":
            clear(model, optimizer, old)
        output = net(batch(step))
        if when == "before backward":
            clear(model, optimizer, old)
        loss = objective(output)
        loss.backward()
        optimizer.step()
        if when == "last":
            clear(model, optimizer, old)
        yield loss


@pytest.mark.parametrize(
    ("how", "when"), [*((how, "last") for how in CLEARINGS), ("to none", "first"), ("to zero", "before backward")]
)
def test_gradients_may_be_cleared_in_any_way_at_any_time(ranks, how, when):
    assert_same(ranks, clearing, how, when)


def test_gradients_that_are_never_cleared_pile_up(ranks):
    assert_same(ranks, clearing, "to none", "never", tolerance=ROUNDING)


# ---------------------------------------------------------------- reading and changing gradients before the step

READERS = {
    "clip the norm": lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    "clip values": lambda params: nn.utils.clip_grad_value_(params, 0.001),
    "read": lambda params: [p.grad for p in params],
    "halve": lambda params: [p.grad.mul_(0.5) for p in params],
    "replace": lambda params: [setattr(p, "grad", p.grad.sign()) for p in params],
    "drop one": lambda params: setattr(params[2], "grad", None),
}


@pytest.mark.parametrize(("how", "late"), [*((how, False) for how in READERS), ("clip the norm", True)])
@same_as_ddp()
def test_readers_of_gradients_get_the_reduced_ones(side, how, late):
    """``late`` enumerates the parameters when they are needed; else they were put into a list before the wrap."""
    model = mlp()
    old = list(model.parameters())
    yield from loop(side, model, ready=lambda step: READERS[how](list(model.parameters()) if late else old))


@same_as_ddp()
def test_reading_now_and_then(side):
    """Steps that clip and steps that do not, steps that read after step() and some that do both."""
    model = mlp()

    def clip(step):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05) if step % 2 else None

    def read(step):
        return [p.grad for p in model.parameters()] if step % 3 else None

    yield from loop(side, model, steps=STEPS + 4, ready=clip, stepped=read)


@same_as_ddp()
def test_synchronize_before_and_after_step(side):
    """The documented way to read: after synchronize() everything is where DDP has it."""
    model = mlp()
    kept = list(model.parameters())

    def after_synchronize(read):
        side.synchronize()
        return read()

    yield from loop(
        side,
        model,
        ready=lambda step: after_synchronize(lambda: [p.grad for p in kept]),
        stepped=lambda step: after_synchronize(lambda: kept),
    )


@same_as_ddp()
def test_one_rank_alone_may_read(side):
    """Rank 0 alone looks at gradients and parameters, as for a log: that must not become collective."""
    model = mlp()
    lead = torch.distributed.get_rank() == 0
    yield from loop(
        side,
        model,
        ready=lambda step: [p.grad for p in model.parameters()] if lead else None,
        stepped=lambda step: list(model.parameters()) if lead else None,
    )


# ---------------------------------------------------------------- hooks of the user


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@same_as_ddp()
def test_hooks_of_the_user_work_on(side, after):
    """A hook on the gradient changes it before it is reduced; one behind the accumulation sees this rank's own."""
    model, optimizer = pair()
    seen = []

    def register():
        model[2].weight.register_hook(lambda grad: grad * 0.5)
        model[0].register_full_backward_hook(lambda *_: seen.append("module"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("parameter"))

    if not after:
        register()
    net = side.wrap(model, optimizer)
    if after:
        register()
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield seen


@same_as_ddp()
def test_a_gradient_penalty(side):
    """A gradient of a gradient: autograd.grad runs no hooks, and the penalty's backward pass those of the step."""

    def loss(net, step):
        inputs = batch(step).requires_grad_()
        output = net(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return objective(output) + slope.square().mean()

    yield from loop(side, loss=loss)


# ---------------------------------------------------------------- mixed precision


@pytest.mark.parametrize(
    ("overflow", "clip", "dtype", "make"),
    [
        (True, True, torch.float16, torch.optim.SGD),
        (True, False, torch.bfloat16, torch.optim.AdamW),
        (False, False, torch.float16, torch.optim.RMSprop),
    ],
)
@same_as_ddp()
def test_gradient_scaling(side, overflow, clip, dtype, make):
    """With ``overflow`` the loss of rank 1 alone is infinite in steps 1, 4 and 5: no rank may update in them."""
    model = mlp()
    optimizer = make(model.parameters(), lr=0.01)
    net = side.wrap(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS + 2):
        with torch.autocast("cpu", dtype=dtype):
            loss = objective(net(batch(step)).float())
        if overflow and step in (1, 4, 5) and torch.distributed.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss, scaler.get_scale()


@same_as_ddp()
def test_parameters_of_several_types(side):
    """Parameters of three types in one model, the middle ones in bf16."""
    model = mlp()
    model[2].to(torch.bfloat16)
    model[4].to(torch.float64)
    optimizer = sgd(model)

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype) if isinstance(layer, nn.Linear) else x)
            return x

    yield from loop(side, Casting(), optimizer)
