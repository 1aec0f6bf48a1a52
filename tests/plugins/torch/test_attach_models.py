"""Models of every shape end as with DDP: order, reuse, absence and recomputation of gradients."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from foretrain.comm.options import AllReduce
from tests.plugins.torch.models import (
    CHOICES,
    EACH,
    STEPS,
    WIDTH,
    Branches,
    assert_same,
    batch,
    branching,
    loop,
    mlp,
    objective,
    plain,
    same_as_ddp,
    sgd,
    tokens,
    trainable,
)


class Net(nn.Module):
    """Owns ``parts`` and computes ``call(self, x)``."""

    def __init__(self, call, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape) / 6)


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args)


# ---------------------------------------------------------------- order and ownership


def attention():
    def call(net, x):
        x = net.embed(x).view(2, 4, WIDTH)
        return net.head(net.attention(x, x, x, need_weights=False)[0])

    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    return Net(call, embed=linear(), attention=attention, head=linear())


def listed():
    def call(net, x):
        for weight in net.weights:
            x = F.linear(x, weight).tanh()
        return x

    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    return Net(call, layers=layers, weights=[layer.weight for layer in layers])


def strided():
    convolution = nn.Conv2d(2, 6, 3, padding=1).to(memory_format=torch.channels_last)
    return Net(
        lambda net, x: net.convolution(x.view(8, 2, 4, 4)).flatten(1) @ net.transposed.t() * net.gain,
        convolution=convolution,
        transposed=nn.Parameter(torch.randn(96, 24).t() / 10),
        gain=nn.Parameter(torch.tensor(1.5)),
    )


def dropout():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda net, x: net.encoder(x.view(2, 4, WIDTH)), encoder=encoder)


SHAPES = {
    "registered in the opposite order of execution": lambda: Net(
        lambda net, x: net.c(net.b(net.a(x).tanh()).tanh()), c=linear(), b=linear(), a=linear()
    ),
    "parameters of the root and of a list": lambda: Net(
        lambda net, x: net.last((((x * net.scale) @ net.list[0]).tanh() @ net.list[1]).tanh()),
        scale=nn.Parameter(torch.ones(WIDTH)),
        list=nn.ParameterList([weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)]),
        last=linear(),
    ),
    "weights of a module that is not called": lambda: Net(
        lambda net, x: net.last(F.linear(net.first(x).tanh(), net.uncalled.weight, net.uncalled.bias).tanh()),
        first=linear(),
        uncalled=linear(),
        last=linear(),
    ),
    "weights in a list, without reading an attribute": listed,
    "a method of a submodule that is not its forward": lambda: Net(
        lambda net, x: net.head(net.body[0].forward(x).tanh() + net.body[2:](x)), body=mlp(3), head=linear()
    ),
    "attention, whose last projection is not called": attention,
    "an LSTM, which lists its parameters": lambda: Net(
        lambda net, x: net.head(net.rnn(x.view(2, 4, WIDTH))[0]),
        rnn=nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
        head=linear(),
    ),
    "dropout, which draws the script's random numbers": dropout,
    "channels last, transposed, and a scalar": strided,
    "one module called three times": lambda: Net(
        lambda net, x: net.last(net.shared(net.shared(net.shared(x).tanh()).tanh()).tanh()),
        shared=linear(),
        last=linear(),
    ),
    "sizes that divide by nothing": lambda: nn.Sequential(
        nn.Linear(WIDTH, 37), nn.Linear(37, 1), nn.Linear(1, 13, bias=False)
    ),
    "parameters without elements": lambda: Net(
        lambda net, x: net.inner(x) + net.nothing(x[:, :0]) + net.pruned.sum().float() + net.fixed.sum(),
        nothing=nn.Linear(0, WIDTH, bias=False),
        inner=mlp(3),
        pruned=nn.Parameter(torch.empty(0, dtype=torch.float64)),
        fixed=nn.Parameter(torch.empty(3, 0), requires_grad=False),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@same_as_ddp()
def test_shapes_of_models(side, name):
    yield from loop(side, seeded(SHAPES[name]))


# ---------------------------------------------------------------- tied weights


class Tied(nn.Module):
    """A language model whose embedding is its head: used first and last."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(50, WIDTH), linear(), nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def block(self, x):
        return F.linear(self.middle(x).tanh(), self.embed.weight[:WIDTH])

    def forward(self, x):
        x = self.embed(x)
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@same_as_ddp()
def test_tied_weights(side, reentrant):
    def loss(net, step):
        text = tokens(step, 50)
        return F.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    yield from loop(side, seeded(Tied, reentrant), loss=loss, static_graph=reentrant is not None)


# ---------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    """Two checkpointed blocks, one layer before and one behind; with ``shared`` the blocks are one."""

    def __init__(self, reentrant, shared):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.blocks = nn.ModuleList([mlp(2), mlp(2)])
        if shared:
            self.blocks[1] = self.blocks[0]
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@same_as_ddp()
def test_activation_checkpointing(side, reentrant, shared):
    yield from loop(side, seeded(Checkpointed, reentrant, shared), static_graph=shared)


# ---------------------------------------------------------------- parameters that have no gradient now and then


@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.smoke_case("another each step on each rank")
def test_branches_that_are_not_taken(ranks, how):
    assert_same(ranks, branching, how, True, True)


@pytest.mark.parametrize(("reads", "to_none"), [(True, False), (False, False)])
def test_branches_whoever_reads_gradients_and_however_they_are_cleared(ranks, reads, to_none):
    assert_same(ranks, branching, EACH, reads, to_none)


ROUNDING = 1e-5
"""Relative; several backward passes are summed here once, and by DDP after each, in another order."""


def accumulating(side, how, passes, clears):
    """Branches, in as many backward passes per step as ``passes`` says in turn; cleared every ``clears`` steps."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = sgd(model, lr=0.03)
    net = side.wrap(model, optimizer, find_unused_parameters=True)
    turn = 0
    for step in range(STEPS + 1):
        for _ in range(passes[step % len(passes)]):
            loss = objective(net(batch(turn), CHOICES[how](turn, dist.get_rank())))
            loss.backward()
            turn += 1
        optimizer.step()
        yield loss, [p.grad is None for p in model.parameters()] if step % 3 == 2 else None
        if step % clears == clears - 1:
            optimizer.zero_grad()


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_branches_when_gradients_are_cleared_every_second_step(ranks, order):
    assert_same(ranks, accumulating, EACH, (1,), 2, transport=AllReduce(order))


@pytest.mark.parametrize("how", [EACH, "nobody's until late"])
def test_branches_when_gradients_accumulate_over_one_three_and_two_passes(ranks, how):
    assert_same(ranks, accumulating, how, (1, 3, 2), 1, tolerance=ROUNDING)


def test_branches_when_gradients_accumulate_and_the_order_is_replayed(ranks):
    assert_same(ranks, accumulating, EACH, (1, 3, 2), 1, tolerance=ROUNDING, transport=AllReduce("replay"))


class Often(Checkpointed):
    """One block, checkpointed as often as the step says: its gradients come once for each."""

    def __init__(self):
        super().__init__(True, True)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.last(x)


@pytest.mark.parametrize("passes", [1, 2])
@same_as_ddp(tolerance=ROUNDING)
def test_a_block_checkpointed_sometimes_more_and_sometimes_less_often(side, passes):
    """DDP has no such models, but what it does with each pass, or all of them, can be done by hand."""
    model = seeded(Often)
    optimizer = sgd(model, lr=0.03)
    ours = hasattr(side, "options")
    net = side.wrap(model, optimizer) if ours else model
    side.models, side.optimizers = [model], [optimizer]
    for step in range(STEPS + 2):
        for part in range(passes):
            loss = objective(net(batch(passes * step + part), (2, 3, 1)[step // 4]))
            loss.backward()
        if not ours:
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("how", ["nobody's until late", EACH])
@same_as_ddp(tolerance=ROUNDING)
def test_branches_and_a_local_pass_in_between(side, how):
    """A pass under no_sync between two that are not, each through other branches."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = sgd(model, lr=0.03)
    net = side.wrap(model, optimizer, find_unused_parameters=True)
    for step in range(STEPS):
        for part in range(3):
            with side.no_sync() if part == 1 else contextlib.nullcontext():
                loss = objective(net(batch(3 * step + part), CHOICES[how](3 * step + part, dist.get_rank())))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


# ---------------------------------------------------------------- frozen layers and buffers


def frozen():
    model = mlp(5)
    for layer in (model[0], model[4]):
        layer.requires_grad_(False)
    return model


def test_frozen_layers(ranks):
    assert_same(ranks, plain, frozen)


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear(), nn.BatchNorm1d(WIDTH), linear())


def watched_buffers(side, broadcast):
    """The running statistics after every step; each rank feeds them other data."""
    model = normalized()
    yield from loop(side, model, cleared=lambda step: list(model.buffers()), broadcast_buffers=broadcast)


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "local"])
def test_batch_normalization(ranks, broadcast):
    assert_same(ranks, watched_buffers, broadcast, broadcast_buffers=broadcast)


class Scaled(nn.Module):
    """Saves a buffer for its backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return self.inner(x) * self.scale


@same_as_ddp()
def test_a_buffer_that_the_backward_pass_needs(side):
    """Buffers are shared before the second forward pass, and the backward pass needs those of the first."""
    yield from loop(
        side, Scaled(), loss=lambda net, step: objective(net(batch(step))) + objective(net(batch(step + 100)))
    )


# ---------------------------------------------------------------- training loops that are not one forward, one backward


@same_as_ddp()
def test_parameters_used_outside_of_the_forward_pass(side):
    """The loss has a penalty on weights, and a parameter that is used nowhere else."""
    model = Net(lambda net, x: net.body(x), body=mlp(2), temperature=nn.Parameter(torch.ones(64)))
    temperature, first = model.temperature, model.body[0].weight

    def loss(net, step):
        output = net(batch(step)) * temperature.mean()
        return objective(output) + temperature.square().sum() / 100 + 0.1 * first.square().sum()

    yield from loop(side, model, loss=loss)


@same_as_ddp()
def test_a_teacher_that_follows(side):
    """A frozen copy of the model gives the target; the model moves its copy after each step."""
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(net, step):
        inputs = batch(step)
        return (net(inputs) - teacher(inputs) - 0.1).square().mean()

    @torch.no_grad()
    def follow(step):
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)

    yield from loop(side, model, loss=loss, cleared=follow)


@same_as_ddp()
def test_two_models_that_train_each_other(side):
    """Two models that train in turn, each through the other; weights are clamped after each step (WGAN)."""
    generator, critic = mlp(3), mlp(3)
    g_optimizer, c_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01), sgd(critic, lr=0.01)
    g_net, c_net = side.wrap(generator, g_optimizer), side.wrap(critic, c_optimizer)
    for step in range(STEPS):
        real, noise = batch(step), batch(step + 100)
        c_optimizer.zero_grad()
        c_loss = c_net(g_net(noise).detach()).mean() - c_net(real).mean()
        c_loss.backward()
        c_optimizer.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)
        if step % 2:
            yield c_loss
            continue
        for parameter in trainable(critic):
            parameter.requires_grad_(False)
        g_optimizer.zero_grad()
        g_loss = -c_net(g_net(noise)).mean()
        g_loss.backward()
        g_optimizer.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        yield c_loss, g_loss


@same_as_ddp()
def test_two_models_in_one_loss(side):
    """Two models in one loss, two optimizers, one backward pass."""
    encoder, decoder = mlp(3), mlp(2)
    first, second = sgd(encoder), torch.optim.AdamW(decoder.parameters(), lr=0.01)
    encode, decode = side.wrap(encoder, first), side.wrap(decoder, second)
    for step in range(STEPS):
        loss = objective(decode(encode(batch(step)).tanh()))
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        yield loss


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("how", ["blocks by function", "blocks by method", "whole before", "whole after"])
@same_as_ddp()
def test_compiled_models(side, how):
    """Blocks compiled before the model is attached, and the whole model compiled before or after."""
    torch._dynamo.reset()
    model = nn.Sequential(mlp(2), mlp(2), mlp(1))
    for place in range(2):
        if how == "blocks by function":
            model[place] = torch.compile(model[place], backend="aot_eager")
        elif how == "blocks by method":
            model[place].compile(backend=("eager", "aot_eager")[place])
    if how == "whole before":
        model.compile(backend="aot_eager")
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    if how == "whole after":
        net = torch.compile(net, backend="aot_eager")
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
