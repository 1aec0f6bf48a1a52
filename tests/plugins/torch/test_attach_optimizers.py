"""Deferred updates are those of the optimizer itself, with the settings of their own step."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from foretrain.comm.options import BoundedLoss
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import (
    SMALL,
    STEPS,
    WARMUP,
    assert_same,
    batch,
    loop,
    mlp,
    objective,
    pair,
    same_as_ddp,
    sgd,
    steps,
    trainable,
)

CASES = [
    (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.001, "momentum": 0.9, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    (torch.optim.RMSprop, {"lr": 0.001, "momentum": 0.9, "centered": True, "foreach": False}),
    (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.01, "fused": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
]
"""Every optimizer, with the implementations (single, foreach, fused) in turn."""


def optimized(side, make, options):
    model = mlp()
    yield from loop(side, model, make(model.parameters(), **options))


def unfreezing_under_bounded_loss():
    """What must arrive, and the ledger before and after layers were unfrozen."""
    model, optimizer = pair()
    model[0].requires_grad_(False)
    transport = BoundedLoss(reliable_bytes=0)
    with attach(model, optimizer, schedule=SMALL, warmup=WARMUP, transport=transport) as job:
        for step in range(2 * STEPS):
            if step == STEPS:
                before = job.ledger
                model[0].requires_grad_(True)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = job.ledger
    vital = {name for name, vital in zip(after.names, after._vital, strict=True) if vital}
    return vital, (before.step, after.step, after.sent - before.sent), after.line()


def test_biases_arrive_and_counts_go_on_after_layers_were_unfrozen(ranks):
    for vital, (before, after, sent), line in ranks(unfreezing_under_bounded_loss):
        assert vital == {f"{layer}.bias" for layer in (0, 2, 4, 6)}
        assert 0 < before < after
        assert sent > 0
        assert line == "nothing was lost"


@same_as_ddp()
def test_every_optimizer(side):
    """Each has a layer of one model."""
    model = mlp(len(CASES))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizers = [make(layer.parameters(), **options) for layer, (make, options) in zip(layers, CASES, strict=True)]
    net = side.wrap(model, *optimizers)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def groups(side, make):
    """Weights and biases, and the last layer, with settings of their own; the groups cut across layers."""
    model = mlp()
    named = dict(model.named_parameters())
    last = [named.pop("6.weight"), named.pop("6.bias")]
    optimizer = make(
        [
            {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
            {"params": last, "lr": 0.001},
        ],
        lr=0.01,
    )
    yield from loop(side, model, optimizer)


def test_parameter_groups(ranks):
    assert_same(ranks, groups, torch.optim.AdamW)


# ---------------------------------------------------------------- settings that change from step to step

SCHEDULERS = {
    "steps": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS + 1),
}


def scheduled(side, kind, when, make, options, tensor=False):
    """The scheduler comes before or after attach; OneCycleLR also moves the momentum."""
    model = mlp()
    options = options | ({"lr": torch.tensor(options["lr"])} if tensor else {})
    optimizer = make(model.parameters(), **options)
    scheduler = SCHEDULERS[kind](optimizer) if when == "before" else None
    net = side.wrap(model, optimizer)
    scheduler = scheduler or SCHEDULERS[kind](optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss, scheduler.get_last_lr()


@pytest.mark.parametrize(("kind", "when"), [("steps", "before"), ("one-cycle", "before"), ("one-cycle", "after")])
def test_an_update_uses_the_learning_rate_of_its_own_step(ranks, kind, when):
    assert_same(ranks, scheduled, kind, when, torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})


def test_a_learning_rate_that_is_a_tensor_is_changed_in_place_and_still_belongs_to_its_step(ranks):
    assert_same(ranks, scheduled, "steps", "after", torch.optim.Adam, {"lr": 0.01, "foreach": False}, True)


@same_as_ddp()
def test_settings_changed_by_hand_right_after_step(side):
    """Settings changed right after step(), as scripts without a scheduler do."""
    model, optimizer = pair()

    def change(step):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1 / (step + 1)

    yield from loop(side, model, optimizer, stepped=change)


# ---------------------------------------------------------------- several optimizers, groups that come later


@pytest.mark.parametrize("alternate", [False, True])
@same_as_ddp()
def test_several_optimizers_over_one_model(side, alternate):
    """Body and head have optimizers of their own; with ``alternate`` the body's is stepped in even steps only."""
    model = mlp()
    body = torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(model[4:].parameters(), lr=0.01)
    net = side.wrap(model, body, head)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        head.step()
        if step % 2 == 0 or not alternate:
            body.step()
        head.zero_grad()
        body.zero_grad()
        yield loss


def unfreezing(side, step_of_it):
    model = mlp()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 2):
        if step == step_of_it:
            new = list(model[:4].parameters())
            for parameter in new:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": new, "lr": 0.02})
            net = side.unfrozen(model)
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("step_of_it", [1, 5])
def test_layers_unfrozen_and_added_to_the_optimizer_under_way(ranks, step_of_it):
    assert_same(ranks, unfreezing, step_of_it)


@same_as_ddp()
def test_a_parameter_that_no_optimizer_has(side):
    """A parameter that is trainable, and that no optimizer has: its gradient is reduced."""
    model = mlp()
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    yield from loop(side, model, optimizer, stepped=lambda step: model.zero_grad())


# ---------------------------------------------------------------- ways to step


def with_closure(side, make, count=STEPS):
    model = mlp(2)
    optimizer = make(model)
    net = side.wrap(model, optimizer)
    for step in range(count):
        inputs = batch(step)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = objective(net(inputs))
            loss.backward()
            return loss

        yield optimizer.step(closure)


def test_a_closure(ranks):
    assert_same(ranks, with_closure, sgd)


def evaluating(make, count):
    """Whether rank 0 orders everything after each evaluation's backward pass, though nobody has asked for it yet."""
    model = mlp(depth=2)
    optimizer = make(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    overlapped = []

    def closure():
        optimizer.zero_grad()
        loss = objective(model(batch(0)))
        loss.backward()
        if attached.schedule is not None:
            sent = attached.steps * size
            overlapped.append(dist.get_rank() > 0 or soon(lambda: sum(d.chunk.size for d in attached.log) == sent))
            dist.barrier()
        return loss

    with attach(model, optimizer, SMALL, warmup=WARMUP) as attached:
        for _ in range(WARMUP + count):
            optimizer.step(closure)
    return overlapped


def soon(condition):
    """Whether it becomes true."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def three_evaluations(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(("make", "evaluations"), [(sgd, 1), (three_evaluations, 3)])
def test_gradients_of_a_closure_are_sent_during_its_backward_pass(ranks, make, evaluations):
    for overlapped in ranks(evaluating, make, 3):
        assert overlapped == [True] * 3 * evaluations


@same_as_ddp(said="step hooks")
def test_hooks_of_the_optimizer_run_once_a_step_and_see_what_they_expect(side):
    """Hooks of the optimizer run once a step; the one before it may change gradients, the one after sees new values."""
    model, optimizer = pair()
    calls = []

    def halve(optimizer, args, kwargs):
        for parameter in trainable(model):
            parameter.grad.mul_(0.5)
        calls.append("before")

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append([p.sum().item() for p in model.parameters()]))
    yield from loop(side, model, optimizer)
    yield calls


@pytest.mark.parametrize("what", ["backward", "step"])
@same_as_ddp()
def test_steps_without_a_backward_pass_or_without_step(side, what):
    """Every third step has no backward pass, or no step(), as when a batch is skipped or its loss not finite."""
    model, optimizer = pair()
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 4):
        loss = objective(net(batch(step)))
        if step % 3 != 2 or what != "backward":
            loss.backward()
        if step % 3 != 2 or what != "step":
            optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.smoke
@same_as_ddp(said="every optimizer")
def test_hooks_of_all_optimizers_run_once_a_step_and_see_whole_ones(side):
    """Hooks of all optimizers, as profilers and trackers register them: they count steps and look at whole ones."""
    model, optimizer = pair()
    calls = []

    def look(optimizer, args, kwargs):
        calls.append([p.sum().item() for group in optimizer.param_groups for p in group["params"]])

    handles = []

    def hook(step):
        if step == 4:
            handles.extend([register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(look)])
        if step == 8:
            for handle in handles:
                handle.remove()

    yield from loop(side, model, optimizer, steps=STEPS + 4, ready=hook)
    yield calls


def deferred_around_a_hook():
    """Steps whose updates were deferred; the hook is there in steps 4 and 5."""
    model, optimizer = pair()
    with attach(model, optimizer, SMALL, warmup=WARMUP, trace=True) as attached:
        for step in steps(model, optimizer):
            if step == 4:
                handle = register_optimizer_step_post_hook(lambda *_: None)
            if step == 6:
                handle.remove()
        attached.synchronize()
        return sorted({WARMUP + batch.step for batch in attached._runtime.updates.applied})


def test_steps_are_deferred_again_when_the_hooks_are_gone(ranks):
    assert ranks(deferred_around_a_hook) == [[2, 3, 6, 7]] * 2


# ---------------------------------------------------------------- what cannot be deferred


class Signs(torch.optim.Optimizer):
    """An optimizer of someone's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def test_an_unknown_optimizer_falls_back_to_the_barrier_and_says_so(ranks):
    assert_same(ranks, optimized, Signs, {"lr": 0.01}, said="Signs")


def test_lbfgs_falls_back_to_the_barrier_and_says_so(ranks):
    assert_same(ranks, with_closure, three_evaluations, STEPS // 2, said="LBFGS")


def beside(side):
    """The optimizer also has a parameter that is none of the model's: it is stepped, and not reduced."""
    model, scale = mlp(), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    loss = lambda net, step: objective(net(batch(step)) * scale)  # noqa: E731
    yield from loop(side, model, optimizer, loss=loss, cleared=lambda step: scale)


def test_a_parameter_of_the_optimizer_that_is_none_of_the_model(ranks):
    assert_same(ranks, beside)
