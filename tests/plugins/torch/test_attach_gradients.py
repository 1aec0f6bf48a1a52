"""Whoever accumulates, clips, scales or reads gradients finds those that DDP would have left."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.plugins.torch.models import (  # noqa: E402
    STEPS,
    WARMUP,
    WIDTH,
    Attached,
    assert_same,
    batch,
    mlp,
    objective,
    sgd,
)

ROUNDING = 1e-5
"""Relative; where DDP reduces a sum that it has partly reduced before, so that the order of additions differs."""


# ---------------------------------------------------------------- accumulation


def accumulating(side, parts, no_sync):
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        for part in range(parts):
            last = part == parts - 1
            with side.no_sync() if no_sync and not last else contextlib.nullcontext():
                loss = objective(net(batch(step * parts + part)))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.smoke_case("2")
def test_accumulation_with_no_sync(ranks, parts):
    assert_same(ranks, accumulating, parts, True)


def test_accumulation_without_no_sync(ranks):
    assert_same(ranks, accumulating, 2, False, tolerance=ROUNDING)


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


def uneven(side):
    """As many parts as the step's number says, and the last steps have only one."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step, parts in enumerate((1, 3, 1, 2, 3, 1, 2, 1)):
        for part in range(parts):
            with side.no_sync() if part < parts - 1 else contextlib.nullcontext():
                loss = objective(net(batch(10 * step + part)))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_the_number_of_parts_may_change_from_step_to_step(ranks):
    assert_same(ranks, uneven)


def inside_and_out(side):
    """Under no_sync only the forward pass matters to DDP; a whole step may also be local, and its gradients kept."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        with side.no_sync():
            objective(net(batch(2 * step))).backward()
            yield [p.grad for p in model.parameters()]
        objective(net(batch(2 * step + 1))).backward()
        yield [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_read_under_no_sync_are_this_ranks_own(ranks):
    assert_same(ranks, inside_and_out)


# ---------------------------------------------------------------- zero_grad

CLEARINGS = {
    "to none": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by the model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "to zero by hand": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


def clearing(side, how, when):
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    clear = CLEARINGS[how]
    for step in range(STEPS):
        if when == "first":
            clear(model, optimizer)
        output = net(batch(step))
        if when == "before backward":
            clear(model, optimizer)
        loss = objective(output)
        loss.backward()
        optimizer.step()
        if when == "last":
            clear(model, optimizer)
        yield loss


@pytest.mark.parametrize("when", ["first", "before backward", "last"])
@pytest.mark.parametrize("how", CLEARINGS)
def test_gradients_may_be_cleared_in_any_way_at_any_time(ranks, how, when):
    assert_same(ranks, clearing, how, when)


def never_cleared(side):
    model = mlp()
    optimizer = sgd(model, lr=0.01)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        yield loss


def test_gradients_that_are_never_cleared_pile_up(ranks):
    assert_same(ranks, never_cleared, tolerance=ROUNDING)


def stored(side):
    """Parameters held in a list from before the wrap: nothing is enumerated that could be noticed."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        yield loss


def test_gradients_cleared_through_a_list_of_old(ranks):
    assert_same(ranks, stored)


# ---------------------------------------------------------------- reading and changing gradients before the step

READERS = {
    "clip the norm": lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    "clip the largest": lambda params: nn.utils.clip_grad_norm_(params, 0.01, norm_type=float("inf")),
    "clip the norm, single": lambda params: nn.utils.clip_grad_norm_(params, 0.05, foreach=False),
    "clip values": lambda params: nn.utils.clip_grad_value_(params, 0.001),
    "read": lambda params: [p.grad for p in params],
    "norm": lambda params: torch.stack([p.grad.norm() for p in params]).norm(),
    "halve": lambda params: [p.grad.mul_(0.5) for p in params],
    "replace": lambda params: [setattr(p, "grad", p.grad.sign()) for p in params],
    "drop one": lambda params: setattr(params[2], "grad", None),
}


def reading(side, how, late):
    """``late`` enumerates the parameters when they are needed; else they were put into a list before the wrap."""
    model = mlp()
    optimizer = sgd(model)
    old = list(model.parameters())
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        yield loss, READERS[how](list(model.parameters()) if late else old)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("late", [True, False], ids=["enumerated", "stored"])
@pytest.mark.parametrize("how", READERS)
def test_who_reads_gradients_gets_the_reduced_ones(ranks, how, late):
    assert_same(ranks, reading, how, late)


def now_and_then(side):
    """Steps that clip and steps that do not, steps that read after step() and some that do both."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 4):
        loss = objective(net(batch(step)))
        loss.backward()
        if step % 2:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if step % 3:
            yield [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        yield loss


def test_reading_now_and_then(ranks):
    assert_same(ranks, now_and_then)


def synchronized(side):
    """The documented way to read: after synchronize() everything is where DDP has it."""
    model = mlp()
    held = [(p, model[0].weight) for p in model.parameters()]
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        side.synchronize()
        yield [p.grad for p, _ in held]
        optimizer.step()
        side.synchronize()
        yield [p for p, _ in held]
        optimizer.zero_grad()
        yield loss


def test_synchronize_before_and_after_step(ranks):
    assert_same(ranks, synchronized)


def on_one_rank(side):
    """Rank 0 alone looks at gradients and parameters, as for a log: that must not become collective."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    lead = torch.distributed.get_rank() == 0
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        if lead:
            yield [p.grad for p in model.parameters()]
        optimizer.step()
        if lead:
            yield list(model.parameters())
        optimizer.zero_grad()
        yield loss


def test_one_rank_alone_may_read(ranks):
    assert_same(ranks, on_one_rank)


# ---------------------------------------------------------------- hooks of the user


def tensor_hooks(side, after):
    """A hook on the gradient changes it before it is reduced; one behind the accumulation sees this rank's own."""
    model = mlp()
    optimizer = sgd(model)
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


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_hooks_of_the_user_work_on(ranks, after):
    assert_same(ranks, tensor_hooks, after)


def penalized(side):
    """A gradient of a gradient: autograd.grad runs no hooks, and the penalty's backward pass those of the step."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        inputs = batch(step).requires_grad_()
        output = net(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        loss = objective(output) + slope.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_gradient_penalty(ranks):
    assert_same(ranks, penalized)


# ---------------------------------------------------------------- mixed precision


def scaled(side, overflow, clip, dtype, make=torch.optim.SGD):
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


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("overflow", [False, True], ids=["", "overflow"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_gradient_scaling(ranks, overflow, clip, dtype):
    assert_same(ranks, scaled, overflow, clip, dtype)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_gradient_scaling_with_other_optimizers(ranks, make):
    assert_same(ranks, scaled, True, False, torch.float16, make)


def autocast(side):
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objective(net(batch(step)).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_bf16_autocast(ranks):
    assert_same(ranks, autocast)


def low_precision(side):
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

    net = side.wrap(Casting(), optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step, width=WIDTH)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_parameters_of_several_types(ranks):
    assert_same(ranks, low_precision)
