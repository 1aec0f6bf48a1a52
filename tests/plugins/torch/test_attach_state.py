"""Whoever looks at the model or the optimizer, at any moment, sees a whole step: never half of one."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from foretrain.comm.options import AllReduce  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    STEPS,
    WIDTH,
    Attached,
    Branches,
    assert_same,
    batch,
    differences,
    mlp,
    objective,
    sgd,
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
    "part of the model": lambda model, optimizer: model[2].state_dict(),
    "optimizer": lambda model, optimizer: optimizer.state_dict(),
    "both": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "optimizer first": lambda model, optimizer: (optimizer.state_dict(), model.state_dict()),
    "copy": lambda model, optimizer: weights(copy.deepcopy(model)),
    "copy of a part": lambda model, optimizer: weights(copy.deepcopy(model[2])),
    "copy of the state": lambda model, optimizer: copy.deepcopy(model.state_dict()),
    "file": lambda model, optimizer: saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
    "file of the model": lambda model, optimizer: weights(saved(model)),
    "parameters": lambda model, optimizer: list(model.parameters()),
    "names": lambda model, optimizer: dict(model.named_parameters()),
    "parameters of a part": lambda model, optimizer: list(model[2].parameters()),
    "get_parameter": lambda model, optimizer: model.get_parameter("2.weight"),
    "momentum": lambda model, optimizer: [optimizer.state[p]["momentum_buffer"] for p in model.parameters()],
    "vector": lambda model, optimizer: torch.nn.utils.parameters_to_vector(model.parameters()),
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


def kept(side, how):
    """Parameters listed before training are read after step()."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 1):
        loss = objective(net(batch(step)))
        made = model.named_parameters()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            # From the last one on: the first is updated first.
            read = KEPT[how](parameters[::-1], made)
        yield [value if isinstance(value, list | torch.Tensor) else value.tolist() for value in read], loss


@pytest.mark.parametrize("how", KEPT)
def test_values_taken_from_parameters_that_were_listed_before(ranks, how):
    assert_same(ranks, kept, how)


def looked_at(side, how, always, make=sgd):
    """Looks right after step(), when everything is under way; ``always``, or in every third step."""
    model = mlp()
    optimizer = make(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 1):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        if always or step % 3 == 2:
            yield LOOKS[how](model, optimizer)
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("always", [True, False], ids=["always", "at times"])
@pytest.mark.parametrize("how", LOOKS)
def test_what_is_read_right_after_step_is_of_that_step(ranks, how, always):
    assert_same(ranks, looked_at, how, always)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("how", ["both", "file"])
def test_a_checkpoint_of_adam_is_whole(ranks, how):
    assert_same(ranks, looked_at, how, True, adam)


def looked_at_elsewhere(side, moment):
    """Looks between zero_grad and the forward pass, between forward and backward, or before step()."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)

    def look(here):
        return (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())) if here == moment else None

    for step in range(STEPS + 1):
        optimizer.zero_grad()
        yield look("cleared")
        loss = objective(net(batch(step)))
        yield look("forward")
        loss.backward()
        yield look("backward")
        optimizer.step()
        yield loss


@pytest.mark.parametrize("moment", ["cleared", "forward", "backward"])
def test_what_is_read_at_any_other_moment(ranks, moment):
    assert_same(ranks, looked_at_elsewhere, moment)


def on_rank_zero(side):
    """The usual way to write a checkpoint: one rank saves, the other goes on."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            yield saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        optimizer.zero_grad()
        yield loss


def test_one_rank_writes_checkpoints(ranks):
    assert_same(ranks, on_rank_zero)


def branches():
    torch.manual_seed(0)
    return Branches()


def on_rank_zero_behind_backward(side, look):
    """Between backward() and step() rank 0 alone looks, and then all meet; each rank uses another branch."""
    model = branches()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer, find_unused_parameters=True)
    for step in range(STEPS):
        loss = objective(net(batch(step), [(step + dist.get_rank()) % 3]))
        loss.backward()
        if dist.get_rank() == 0:
            yield SEEN_EARLY[look](model)
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


SEEN_EARLY = {
    "at the state": lambda model: model.state_dict(),
    "at gradients": lambda model: [p.grad for p in model.parameters()],
}


@pytest.mark.parametrize("look", SEEN_EARLY)
@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_one_rank_looks_while_the_others_wait_for_it(ranks, look, order):
    assert_same(ranks, on_rank_zero_behind_backward, look, transport=AllReduce(order))


def between_passes(side):
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


def test_one_rank_writes_a_checkpoint_between_two_passes(ranks):
    assert_same(ranks, between_passes, tolerance=1e-5)


def rewound(side, moment, what):
    """In steps 4 and 6 goes back to the state of step 3, with everything under way or not."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    kept = None

    def back():
        if "model" in what:
            model.load_state_dict(kept[0])
        if "optimizer" in what:
            optimizer.load_state_dict(kept[1])

    for step in range(STEPS + 1):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        if step in (4, 6) and moment == "after step":
            back()
        optimizer.zero_grad()
        if step in (4, 6) and moment == "after zero_grad":
            back()
        if step == 3:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        yield loss


@pytest.mark.parametrize("what", ["model", "optimizer", "model and optimizer"])
@pytest.mark.parametrize("moment", ["after step", "after zero_grad"])
def test_loading_a_state_under_way(ranks, moment, what):
    assert_same(ranks, rewound, moment, what)


def resumed(side):
    """A checkpoint taken under way continues in a new model and optimizer, wrapped anew beside the old one."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(5):
        objective(net(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
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


@pytest.mark.smoke
def test_a_checkpoint_resumes_in_a_new_model(ranks):
    assert_same(ranks, resumed)


def evaluated(side, how):
    """A forward pass without gradients after each step, of the whole or of a part."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            yield (model[2:] if how == "part" else model)(batch(step + 100))
        model.train()
        yield loss


@pytest.mark.parametrize("how", ["no_grad", "inference", "part"])
def test_evaluation_between_steps(ranks, how):
    assert_same(ranks, evaluated, how)


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def evaluated_alone(side, make):
    """Only rank 0 evaluates, and more than once, while the others wait for it."""
    model = make()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                yield model(batch(step + 100)), model(batch(step + 200))
            model.train()
        torch.distributed.barrier()
        yield loss


@pytest.mark.parametrize("make", [mlp, normalized])
def test_one_rank_alone_evaluates(ranks, make):
    assert_same(ranks, evaluated_alone, make)


def evaluated_by_all(side):
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


def test_all_ranks_evaluate_with_shared_buffers(ranks):
    assert_same(ranks, evaluated_by_all)


def averaged(side, how):
    """A moving average of the weights after each step; in the end it is compared too."""
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if how == "torch" else copy.deepcopy(model)
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "torch":
            average.update_parameters(model)
        else:
            with torch.no_grad():
                for old, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    old.lerp_(new, 0.1)
        yield loss
    yield average.state_dict()


@pytest.mark.parametrize("how", ["torch", "by hand"])
def test_a_moving_average_of_the_weights(ranks, how):
    assert_same(ranks, averaged, how)


def average_made_late(side):
    """The average is made from the attached model, as a copy of it, hooks and all."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    average = None
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            average = AveragedModel(model)
        if average:
            average.update_parameters(model)
            yield average(batch(step + 100))
        yield loss


def test_a_copy_of_an_attached_model_lives_on_its_own(ranks):
    assert_same(ranks, average_made_late)


def trained_copy(side):
    """A copy trains alone, without any communication, while the model trains on."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4 and torch.distributed.get_rank() == 0:
            twin = copy.deepcopy(model)
            own = sgd(twin)
            for _ in range(3):
                objective(twin(batch(step))).backward()
                own.step()
                own.zero_grad()
            yield twin.state_dict()
        yield loss


def test_a_copy_may_train_alone(ranks):
    assert_same(ranks, trained_copy)


def edited(side):
    """Weights changed by hand after step(), in place."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        yield loss


def test_weights_changed_in_place_after_step(ranks):
    assert_same(ranks, edited)


def sized(side):
    """How large a file of one layer is: the layer, not what it may share its storage with."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        objective(net(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(model[2].state_dict(), file)
    yield len(file.getvalue()) // 4096


def test_a_file_of_one_layer_holds_one_layer(ranks):
    assert_same(ranks, sized)


def failing(side):
    """The gradient of a wrong input raises; the script catches it, and goes on training."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        if step == 4:
            with pytest.raises(RuntimeError, match="shape"):
                net(torch.ones(3, 5))
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_an_exception_that_the_script_catches(ranks):
    assert_same(ranks, failing)


def test_the_comparison_sees_the_last_bit():
    expected = {"weights": [torch.ones(3), torch.tensor(torch.nan)], "step": 1}
    assert not differences(expected, copy.deepcopy(expected), 0.0)
    found = copy.deepcopy(expected)
    found["weights"][0][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert differences(expected, found, 0.0) == [".weights[0]: differs by 1.19e-07 of 1.00e+00"]
    assert not differences(expected, found, 1e-6)
    assert differences(expected, expected | {"step": 2}, 1e-6)
    assert differences(expected, expected | {"weights": [torch.ones(3)]}, 1e-6)
