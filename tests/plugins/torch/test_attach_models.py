"""Models of every shape: whatever order, reuse, absence or recomputation does to gradients, they end as DDP's."""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from foretrain.comm.options import AllReduce  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    CHOICES,
    STEPS,
    WIDTH,
    Branches,
    assert_same,
    batch,
    branching,
    mlp,
    objective,
    plain,
    sgd,
    tokens,
    trainable,
)


def linear(bias=True):
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def seeded(model_class, *args):
    torch.manual_seed(0)
    return model_class(*args)


# ---------------------------------------------------------------- order and ownership


class Reversed(nn.Module):
    """Registered in the opposite order of execution."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a = linear(), linear(), linear()

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh())


class Owner(nn.Module):
    """The root, a list and a container own parameters that no leaf module covers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2)])
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.last = linear()

    def forward(self, x):
        x = (x * self.scale) @ self.list[0]
        x = x.tanh() @ self.inner.weight @ self.list[1]
        return self.last(x.tanh())


class Functional(nn.Module):
    """Uses the weights of a module without calling it."""

    def __init__(self):
        super().__init__()
        self.first, self.uncalled, self.last = linear(), linear(), linear()

    def forward(self, x):
        x = self.first(x).tanh()
        x = F.linear(x, self.uncalled.weight, self.uncalled.bias).tanh()
        return self.last(x)


class Listed(nn.Module):
    """Keeps the weights that it uses in a list of its own: no module is called, and no attribute read, for them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(bias=False) for _ in range(3)])
        self.weights = [layer.weight for layer in self.layers]

    def forward(self, x):
        for weight in self.weights:
            x = F.linear(x, weight).tanh()
        return x


class Inner(nn.Module):
    """Calls a method of a submodule that is not its forward."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(3), linear()

    def forward(self, x):
        return self.head(self.body[0].forward(x).tanh() + self.body[2:](x))


class Attention(nn.Module):
    """Attention's projections are its own, and that of its output is never called."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.head = linear(), nn.MultiheadAttention(WIDTH, 4, batch_first=True), linear()

    def forward(self, x):
        x = self.embed(x).view(2, 4, WIDTH)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    """An LSTM keeps its parameters in a list of its own as well."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), linear()

    def forward(self, x):
        return self.head(self.rnn(x.view(2, 4, WIDTH))[0])


class Transformer(nn.Module):
    """Dropout too: whoever draws random numbers of the script's generator changes the training."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x.view(2, 4, WIDTH))


class Strided(nn.Module):
    """Weights that are not contiguous: channels last, transposed, and a scalar."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(96, 24).t() / 10)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.convolution(x.view(8, 2, 4, 4)).flatten(1)
        return x @ self.transposed.t() * self.gain


class Twice(nn.Module):
    """One module called three times."""

    def __init__(self):
        super().__init__()
        self.shared, self.last = linear(), linear()

    def forward(self, x):
        for _ in range(3):
            x = self.shared(x).tanh()
        return self.last(x)


class Odd(nn.Module):
    """Sizes that divide by nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 37), nn.Linear(37, 1), nn.Linear(1, 13, bias=False))

    def forward(self, x):
        return self.layers(x)


class Empty(nn.Module):
    """Parameters without elements, trained and frozen, one of them the only one of its type."""

    def __init__(self):
        super().__init__()
        self.nothing, self.inner = nn.Linear(0, WIDTH, bias=False), mlp(3)
        self.pruned = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.empty(3, 0), requires_grad=False)

    def forward(self, x):
        return self.inner(x) + self.nothing(x[:, :0]) + self.pruned.sum().float() + self.fixed.sum()


SHAPES = [Reversed, Owner, Functional, Listed, Inner, Attention, Recurrent, Transformer, Strided, Twice, Odd, Empty]


def shape(side, model_class):
    yield from plain(side, lambda: seeded(model_class))


@pytest.mark.parametrize("model_class", SHAPES, ids=lambda model_class: model_class.__name__)
def test_shapes_of_models(ranks, model_class):
    assert_same(ranks, shape, model_class)


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


def language(side, reentrant, **ddp):
    model = seeded(Tied, reentrant)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer, static_graph=reentrant is not None)
    for step in range(STEPS):
        text = tokens(step, 50)
        loss = F.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_tied_weights(ranks, reentrant):
    assert_same(ranks, language, reentrant)


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


def checkpointed(side, reentrant, shared):
    yield from plain(side, lambda: seeded(Checkpointed, reentrant, shared), static_graph=shared)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(ranks, reentrant, shared):
    assert_same(ranks, checkpointed, reentrant, shared)


# ---------------------------------------------------------------- parameters that have no gradient now and then


EACH = "another each step on each rank"


@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.smoke_case("another each step on each rank")
def test_branches_that_are_not_taken(ranks, how):
    assert_same(ranks, branching, how, True, True)


@pytest.mark.parametrize(("reads", "to_none"), [(True, False), (False, True), (False, False)])
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


ACCUMULATIONS = {"two passes": ((2,), 1), "one, three, two passes": ((1, 3, 2), 1), "cleared every second": ((1,), 2)}


@pytest.mark.parametrize(
    ("how", "accumulation"),
    [*((how, "one, three, two passes") for how in CHOICES), (EACH, "two passes"), (EACH, "cleared every second")],
)
def test_branches_when_gradients_accumulate(ranks, how, accumulation):
    tolerance = ROUNDING if "passes" in accumulation else 0.0
    assert_same(ranks, accumulating, how, *ACCUMULATIONS[accumulation], tolerance=tolerance)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_branches_when_gradients_accumulate_and_the_order_is_replayed(ranks, accumulation):
    assert_same(
        ranks, accumulating, EACH, *ACCUMULATIONS[accumulation], tolerance=ROUNDING, transport=AllReduce("replay")
    )


class Often(Checkpointed):
    """One block, checkpointed as often as the step says: its gradients come once for each."""

    def __init__(self):
        super().__init__(True, True)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.last(x)


def repeated(side, passes):
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


@pytest.mark.parametrize("passes", [1, 2])
def test_a_block_checkpointed_sometimes_more_and_sometimes_less_often(ranks, passes):
    assert_same(ranks, repeated, passes, tolerance=ROUNDING)


def locally_in_between(side, how):
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


@pytest.mark.parametrize("how", ["never the last", "nobody's until late", EACH])
def test_branches_and_a_local_pass_in_between(ranks, how):
    assert_same(ranks, locally_in_between, how, tolerance=ROUNDING)


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
    optimizer = sgd(model)
    net = side.wrap(model, optimizer, broadcast_buffers=broadcast)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss, list(model.buffers())


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "local"])
def test_batch_normalization(ranks, broadcast):
    assert_same(ranks, watched_buffers, broadcast, broadcast_buffers=broadcast)


def test_batch_normalization_when_nobody_reads(ranks):
    assert_same(ranks, plain, normalized)


class Scaled(nn.Module):
    """Saves a buffer for its backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return self.inner(x) * self.scale


def twice(side):
    """Buffers are shared before the second forward pass, and the backward pass needs those of the first."""
    model = Scaled()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step))) + objective(net(batch(step + 100)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_buffer_that_the_backward_pass_needs(ranks):
    assert_same(ranks, twice)


# ---------------------------------------------------------------- training loops that are not one forward, one backward


def siamese(side):
    """Two forward passes, one backward pass."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = (net(batch(step)) - net(batch(step + 100))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_two_forward_passes_and_one_backward_pass(ranks):
    assert_same(ranks, siamese)


def regularized(side):
    """Reads weights outside of any forward pass."""
    model = mlp()
    first, last = model[0].weight, model[-1].weight
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step))) + 0.1 * (first.square().sum() + last.abs().sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_penalty_on_weights_after_the_forward_pass(ranks):
    assert_same(ranks, regularized)


class Temperature(nn.Module):
    """Has a parameter that is used outside of the forward pass only."""

    def __init__(self):
        super().__init__()
        self.body = mlp(2)
        self.temperature = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.body(x)


def outside(side):
    """The loss uses a parameter of the model through a name from before the wrap."""
    model = Temperature()
    temperature = model.temperature
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)) * temperature.mean()) + temperature.square().sum() / 100
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_parameter_used_only_outside_of_the_forward_pass(ranks):
    assert_same(ranks, outside)


def contrasting(side):
    """A frozen copy of the model gives the target; the model moves its copy after each step."""
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        inputs = batch(step)
        loss = (net(inputs) - teacher(inputs) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        yield loss


def test_a_teacher_that_follows(ranks):
    assert_same(ranks, contrasting)


def adversaries(side, clamp):
    """Two models that train in turn, each through the other; with ``clamp`` weights are cut after each step (WGAN)."""
    generator, critic = mlp(3), mlp(3)
    g_optimizer, c_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01), sgd(critic, lr=0.01)
    g_net, c_net = side.wrap(generator, g_optimizer), side.wrap(critic, c_optimizer)
    for step in range(STEPS):
        real, noise = batch(step), batch(step + 100)
        c_optimizer.zero_grad()
        c_loss = c_net(g_net(noise).detach()).mean() - c_net(real).mean()
        c_loss.backward()
        c_optimizer.step()
        if clamp:
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


@pytest.mark.parametrize("clamp", [False, True], ids=["", "clamped"])
def test_two_models_that_train_each_other(ranks, clamp):
    assert_same(ranks, adversaries, clamp)


def together(side):
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


def test_two_models_in_one_loss(ranks):
    assert_same(ranks, together)


# ---------------------------------------------------------------- torch.compile


def compiled(side, how, backend):
    torch._dynamo.reset()
    model = nn.Sequential(mlp(2), mlp(2), mlp(1))
    for place in range(2):
        if how == "function":
            model[place] = torch.compile(model[place], backend=backend)
        else:
            model[place].compile(backend=backend)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["function", "method"])
def test_blocks_compiled_before(ranks, how, backend):
    assert_same(ranks, compiled, how, backend, timeout=120)


def compiled_whole(side, when):
    """The whole model, compiled as users do it: before or after it is wrapped."""
    torch._dynamo.reset()
    model = mlp()
    optimizer = sgd(model)
    if when == "before":
        model.compile(backend="aot_eager")
        net = side.wrap(model, optimizer)
    else:
        net = torch.compile(side.wrap(model, optimizer), backend="aot_eager")
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_compiled_as_a_whole(ranks, when):
    assert_same(ranks, compiled_whole, when, timeout=120)
