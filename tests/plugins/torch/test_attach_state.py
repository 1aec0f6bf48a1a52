"""Readers of the model or the optimizer see whole steps, at any moment."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from foretrain.comm.options import AllReduce
from tests.plugins.torch.models import (
    STEPS,
    WIDTH,
    Attached,
    Branches,
    assert_same,
    batch,
    differences,
    loop,
    mlp,
    objective,
    pair,
    same_as_ddp,
    sgd,
    train,
)


def saved(value):
    """``value`` through torch.save and back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def weights(model):
    """Copies of a model's parameters and buffers, read without its state_dict."""
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


LOOKS = {
    "model": lambda model, optimizer: model.state_dict(),
    "optimizer": lambda model, optimizer: optimizer.state_dict(),
    "optimizer first": lambda model, optimizer: (optimizer.state_dict(), model.state_dict()),
    "copy": lambda model, optimizer: weights(copy.deepcopy(model)),
    "file": lambda model, optimizer: saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
    "file of the model": lambda model, optimizer: weights(saved(model)),
    "parameters": lambda model, optimizer: list(model.parameters()),
    "get_parameter": lambda model, optimizer: model.get_parameter("2.weight"),
    "momentum": lambda model, optimizer: [optimizer.state[p]["momentum_buffer"] for p in model.parameters()],
    "gradients": lambda model, optimizer: [p.grad for p in model.parameters()],
    "groups": lambda model, optimizer: grouped(optimizer),
    "the last of a group": lambda model, optimizer: computed([optimizer.param_groups[0]["params"][-1]]),
    "a slice of a group": lambda model, optimizer: computed(optimizer.param_groups[0]["params"][-2:]),
    "copy of the optimizer": lambda model, optimizer: grouped(copy.deepcopy(optimizer)),
    "file of the optimizer's groups": lambda model, optimizer: saved(optimizer.param_groups)[0]["params"],
}


def grouped(optimizer):
    return computed(parameter for group in optimizer.param_groups for parameter in group["params"])


def computed(parameters):
    """Their values by arithmetic alone, which nothing guards."""
    with torch.no_grad():
        return [parameter * 1 for parameter in parameters]


KEPT = {
    "data": lambda kept, made: [parameter.data for parameter in kept],
    "detach": lambda kept, made: [parameter.detach() for parameter in kept],
    "clone": lambda kept, made: [parameter.clone() for parameter in kept],
    "numpy": lambda kept, made: [parameter.detach().numpy() + 0 for parameter in kept],
    "tolist": lambda kept, made: [parameter.tolist() for parameter in kept],
    "an iterator made before": lambda kept, made: computed(parameter for _, parameter in made),
}


def kept(side):
    """Parameters listed before training are read after step(), in another way each time."""
    model = mlp()
    parameters = list(model.parameters())
    made = []

    @torch.no_grad()
    def read(step):
        # From the last one on: the first is updated first.
        values = [*KEPT.values()][step % len(KEPT)](parameters[::-1], made.pop())
        return [value if isinstance(value, list | torch.Tensor) else value.tolist() for value in values]

    yield from loop(side, model, steps=14, ready=lambda step: made.append(model.named_parameters()), cleared=read)


def test_values_taken_from_parameters_that_were_listed_before(ranks):
    assert_same(ranks, kept)


def looked_at(side, hows, every, make=sgd):
    """Looks right after step(), when everything is in flight, in ``every`` so many steps in another way."""
    model = mlp()
    optimizer = make(model)

    def look(step):
        return LOOKS[hows[step // every]](model, optimizer) if step % every == every - 1 else None

    yield from loop(side, model, optimizer, steps=every * len(hows), stepped=look)


@pytest.mark.parametrize("hows", [[*LOOKS][k : k + 5] for k in range(0, len(LOOKS), 5)], ids=lambda hows: hows[0])
def test_reading_right_after_step_gives_that_step(ranks, hows):
    assert_same(ranks, looked_at, hows, 3)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_checkpoint_of_adam_is_whole(ranks):
    assert_same(ranks, looked_at, ["file"] * STEPS, 1, adam)


@pytest.mark.parametrize("moment", ["cleared", "forward", "backward"])
@same_as_ddp()
def test_what_is_read_at_any_other_moment(side, moment):
    """Looks between zero_grad and the forward pass, between forward and backward, or before step()."""
    model, optimizer = pair()
    seen = []

    def look(here):
        return (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())) if here == moment else None

    def loss(net, step):
        value = objective(net(batch(step)))
        seen.append(look("forward"))
        return value

    yield from loop(
        side, model, optimizer, loss=loss, ready=lambda step: look("backward"), cleared=lambda step: look("cleared")
    )
    yield seen


def on_rank_zero(side):
    """The usual way to write a checkpoint: one rank saves, the other goes on."""
    model, optimizer = pair()
    lead = dist.get_rank() == 0
    yield from loop(side, model, optimizer, stepped=lambda step: LOOKS["file"](model, optimizer) if lead else None)


def test_one_rank_writes_checkpoints(ranks):
    assert_same(ranks, on_rank_zero)


def branches():
    torch.manual_seed(0)
    return Branches()


def on_rank_zero_behind_backward(side, look):
    """Between backward() and step() rank 0 alone looks, and then all meet; each rank uses another branch."""
    model = branches()

    def loss(net, step):
        return objective(net(batch(step), [(step + dist.get_rank()) % 3]))

    def early(step):
        seen = SEEN_EARLY[look](model) if dist.get_rank() == 0 else None
        dist.barrier()
        return seen

    yield from loop(side, model, loss=loss, ready=early, find_unused_parameters=True)


SEEN_EARLY = {
    "at the state": lambda model: model.state_dict(),
    "at gradients": lambda model: [p.grad for p in model.parameters()],
}


@pytest.mark.parametrize("look", SEEN_EARLY)
@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_one_rank_looks_while_the_others_wait_for_it(ranks, look, order):
    assert_same(ranks, on_rank_zero_behind_backward, look, transport=AllReduce(order))


@same_as_ddp(tolerance=1e-5)
def test_one_rank_writes_a_checkpoint_between_two_passes(side):
    """Rank 0 alone reads its state between two passes of a step, the first of which may not have been sent."""
    model = branches()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer, find_unused_parameters=True)
    for step in range(STEPS):
        for part in range(2):
            loss = objective(net(batch(2 * step + part), [(step + part + dist.get_rank()) % 3]))
            loss.backward()
            if dist.get_rank() == 0:
                yield model.state_dict()
            dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(
    ("moment", "what"),
    [("after step", "model"), ("after step", "optimizer"), ("after zero_grad", "model and optimizer")],
)
@same_as_ddp()
def test_loading_a_state_while_updates_are_pending(side, moment, what):
    """In steps 4 and 6 goes back to the state of step 3, with everything under way or not."""
    model, optimizer = pair()
    kept = []

    def load(step, here):
        if step == 3 and here == "after zero_grad":
            kept[:] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step in (4, 6) and moment == here:
            if "model" in what:
                model.load_state_dict(kept[0])
            if "optimizer" in what:
                optimizer.load_state_dict(kept[1])

    def loaded(here):
        return lambda step: load(step, here)

    yield from loop(side, model, optimizer, stepped=loaded("after step"), cleared=loaded("after zero_grad"))


@pytest.mark.smoke
@same_as_ddp()
def test_a_checkpoint_resumes_in_a_new_model(side):
    """A checkpoint taken under way continues in a new model and optimizer, wrapped anew beside the old one."""
    model, optimizer = pair()
    train(side.wrap(model, optimizer), optimizer, 5)
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model = mlp(depth=4)
    optimizer = sgd(model, lr=77.0)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    net = side.wrap(model, optimizer)
    for step in range(5, 11):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("how", ["no_grad", "inference", "part"])
@same_as_ddp()
def test_evaluation_between_steps(side, how):
    """A forward pass without gradients after each step, of the whole or of a part."""
    model = mlp()

    def evaluate(step):
        model.eval()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            output = (model[2:] if how == "part" else model)(batch(step + 100))
        model.train()
        return output

    yield from loop(side, model, cleared=evaluate)


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [mlp, normalized])
@same_as_ddp()
def test_one_rank_alone_evaluates(side, make):
    """Only rank 0 evaluates, and more than once, while the others wait for it."""
    model = make()

    @torch.no_grad()
    def evaluate(step):
        outputs = None
        if dist.get_rank() == 0:
            model.eval()
            outputs = model(batch(step + 100)), model(batch(step + 200))
            model.train()
        dist.barrier()
        return outputs

    yield from loop(side, model, cleared=evaluate)


@same_as_ddp()
def test_all_ranks_evaluate_with_shared_buffers(side):
    """All ranks evaluate on rank 0's buffers: DDP's forward pass shares them, `attach` does where it is asked to."""
    model = normalized()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        if isinstance(side, Attached):
            side.handles[0].share_buffers()
        with torch.no_grad():
            yield net(batch(step + 100))
        net.train()
        yield loss, list(model.buffers())


@same_as_ddp()
def test_moving_averages_and_copies_of_the_weights(side):
    """Averages by torch and by hand after each step, and one made late from the attached model, hooks and all."""
    model = mlp()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    by_hand = copy.deepcopy(model)

    @torch.no_grad()
    def update(step):
        if step == 4:
            averages.append(AveragedModel(model))
        for average in averages:
            average.update_parameters(model)
        for old, new in zip(by_hand.state_dict().values(), model.state_dict().values(), strict=True):
            old.lerp_(new, 0.1)
        return averages[-1](batch(step + 100))

    yield from loop(side, model, cleared=update)
    yield by_hand.state_dict(), [average.state_dict() for average in averages]


@same_as_ddp()
def test_a_copy_may_train_alone(side):
    """A copy trains alone, without any communication, while the model trains on."""
    model = mlp()

    def train_copy(step):
        if step == 4 and dist.get_rank() == 0:
            twin = copy.deepcopy(model)
            train(twin, sgd(twin), 3)
            return twin.state_dict()
        return None

    yield from loop(side, model, cleared=train_copy)


@same_as_ddp()
def test_weights_changed_in_place_after_step_and_an_exception_that_the_script_catches(side):
    """A wrong input raises in a forward pass; in the end a file of one layer holds one layer."""
    model = mlp()

    @torch.no_grad()
    def shrink(step):
        for parameter in model.parameters():
            parameter.mul_(0.99)

    def loss(net, step):
        if step == 4:
            with pytest.raises(RuntimeError, match="shape"):
                net(torch.ones(3, 5))
        return objective(net(batch(step)))

    yield from loop(side, model, loss=loss, cleared=shrink)
    file = io.BytesIO()
    torch.save(model[2].state_dict(), file)
    yield len(file.getvalue()) // 4096


def test_the_comparison_sees_the_last_bit():
    expected = {"weights": [torch.ones(3), torch.tensor(torch.nan)], "step": 1}
    assert not differences(expected, copy.deepcopy(expected), 0.0)
    found = copy.deepcopy(expected)
    found["weights"][0][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert differences(expected, found, 0.0) == [".weights[0]: differs by 1.19e-07 of 1.00e+00"]
    assert not differences(expected, found, 1e-6)
    assert differences(expected, expected | {"step": 2}, 1e-6)
    assert differences(expected, expected | {"weights": [torch.ones(3)]}, 1e-6)
