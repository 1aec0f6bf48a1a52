"""Deferred updates are those of the optimizer itself, with the settings of their own step."""

import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from foretrain.plugins.torch import attach  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    SMALL,
    STEPS,
    WARMUP,
    assert_same,
    batch,
    mlp,
    objective,
    sgd,
    trainable,
)

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.001, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.01}),
}
WAYS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [
    pytest.param(make, options | way, id=f"{name}-{kind}")
    for name, (make, options) in OPTIMIZERS.items()
    for kind, way in WAYS.items()
    if not (kind == "fused" and make is torch.optim.RMSprop)
]


def optimized(side, make, options):
    model = mlp()
    optimizer = make(model.parameters(), **options)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(("make", "options"), CASES)
def test_every_optimizer_in_every_implementation(ranks, make, options):
    assert_same(ranks, optimized, make, options)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    ],
)
def test_the_other_optimizers_defer_or_fall_back_but_are_never_wrong(ranks, make):
    assert_same(ranks, optimized, make, {"lr": 0.01})


def test_maximizing(ranks):
    assert_same(ranks, optimized, torch.optim.SGD, {"lr": 0.001, "momentum": 0.9, "maximize": True})


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
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_parameter_groups(ranks, make):
    assert_same(ranks, groups, make)


# ---------------------------------------------------------------- settings that change from step to step

SCHEDULERS = {
    "steps": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_an_update_uses_the_learning_rate_of_its_own_step(ranks, kind, when):
    assert_same(ranks, scheduled, kind, when, torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_learning_rate_that_is_a_tensor_is_changed_in_place_and_still_belongs_to_its_step(ranks, when):
    assert_same(ranks, scheduled, "steps", when, torch.optim.Adam, {"lr": 0.01, "foreach": False}, True)


def by_hand(side):
    """Settings changed right after step(), as scripts without a scheduler do."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        yield loss


def test_settings_changed_by_hand_right_after_step(ranks):
    assert_same(ranks, by_hand)


# ---------------------------------------------------------------- several optimizers, groups that come later


def several(side, alternate):
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


@pytest.mark.parametrize("alternate", [False, True])
def test_several_optimizers_over_one_model(ranks, alternate):
    assert_same(ranks, several, alternate)


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


def partly(side):
    """A parameter that is trainable, and that no optimizer has: its gradient is reduced and piles up."""
    model = mlp()
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        yield loss


def test_a_parameter_that_no_optimizer_has(ranks):
    assert_same(ranks, partly)


# ---------------------------------------------------------------- ways to step


def with_closure(side):
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        inputs = batch(step)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = objective(net(inputs))
            loss.backward()
            return loss

        yield optimizer.step(closure)


def test_a_closure(ranks):
    assert_same(ranks, with_closure)


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


def hooked(side):
    """Hooks of the optimizer run once a step; the one before it may change gradients, the one after sees new values."""
    model = mlp()
    optimizer = sgd(model)
    calls = []

    def halve(optimizer, args, kwargs):
        for parameter in trainable(model):
            parameter.grad.mul_(0.5)
        calls.append("before")

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append([p.sum().item() for p in model.parameters()]))
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield calls


def test_hooks_of_the_optimizer_run_once_a_step_and_see_what_they_expect(ranks):
    assert_same(ranks, hooked, said="step hooks")


def idle(side):
    """Every third step has no backward pass, as when a batch is skipped on all ranks."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 4):
        loss = objective(net(batch(step)))
        if step % 3 != 2:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_step_without_a_backward_pass_changes_nothing(ranks):
    assert_same(ranks, idle)


def skipping(side):
    """Every third step has a backward pass whose gradients are thrown away, as when the loss is not finite."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 4):
        loss = objective(net(batch(step)))
        loss.backward()
        if step % 3 != 2:
            optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_backward_pass_without_a_step_changes_nothing(ranks):
    assert_same(ranks, skipping)


def hooked_globally(side):
    """Hooks of all optimizers, as profilers and trackers register them: they count steps and look at whole ones."""
    model = mlp()
    optimizer = sgd(model)
    calls = []

    def look(optimizer, args, kwargs):
        calls.append([p.sum().item() for group in optimizer.param_groups for p in group["params"]])

    net = side.wrap(model, optimizer)
    handles = []
    for step in range(STEPS + 4):
        loss = objective(net(batch(step)))
        loss.backward()
        if step == 4:
            handles += [register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(look)]
        if step == 8:
            for handle in handles:
                handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield calls


@pytest.mark.smoke
def test_hooks_of_all_optimizers_run_once_a_step_and_see_whole_ones(ranks):
    assert_same(ranks, hooked_globally, said="every optimizer")


def deferred_around_a_hook():
    """Steps whose updates were deferred; the hook is there in steps 4 and 5."""
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, trace=True) as attached:
        for step in range(STEPS):
            objective(model(batch(step))).backward()
            if step == 4:
                handle = register_optimizer_step_post_hook(lambda *_: None)
            if step == 6:
                handle.remove()
            optimizer.step()
            optimizer.zero_grad()
        attached.synchronize()
        return sorted({WARMUP + batch.step for batch in attached._machinery.updates.applied})


def test_steps_are_deferred_again_when_the_hooks_are_gone(ranks):
    assert ranks(deferred_around_a_hook) == [[2, 3, 6, 7]] * 2


# ---------------------------------------------------------------- what cannot be deferred


class Trust(torch.optim.SGD):
    """Scales every update by the norm of all gradients: no part of it can be done before the last has arrived."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
        for parameter in parameters:
            parameter.grad.div_(norm)
        return super().step(closure)


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


@pytest.mark.parametrize("make", [Trust, Signs])
def test_an_unknown_optimizer_falls_back_to_the_barrier_and_says_so(ranks, make):
    assert_same(ranks, optimized, make, {"lr": 0.01}, said=make.__name__)


def lbfgs(side):
    model = mlp(depth=2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    net = side.wrap(model, optimizer)
    for step in range(STEPS // 2):
        inputs = batch(step)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = objective(net(inputs))
            loss.backward()
            return loss

        yield optimizer.step(closure)


def test_lbfgs_falls_back_to_the_barrier_and_says_so(ranks):
    assert_same(ranks, lbfgs, said="LBFGS")


def beside(side):
    """The optimizer also has a parameter that is none of the model's: it is stepped, and not reduced."""
    model, scale = mlp(), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)) * scale)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss, scale


def test_a_parameter_of_the_optimizer_that_is_none_of_the_model(ranks):
    assert_same(ranks, beside)
