"""A paced model computes in virtual time exactly as its workload says, whatever the host does beside it."""

import dataclasses
import random

import pytest
import torch

from foretrain.errors import ConfigError
from foretrain.lab.paced import AcceleratorClock, scaled, stretches
from foretrain.lab.training import PacedModel
from foretrain.units import MICROSECOND, MILLISECOND
from foretrain.workload import Gradient, Layer, Workload, zoo
from tests.scenario import layered, random_workload


class Host:
    """A host whose time passes only when it sleeps or is busy."""

    def __init__(self) -> None:
        self.time = 5_000_000

    def now(self) -> int:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.busy(round(seconds * 1e12))

    def busy(self, duration: int) -> None:
        self.time += duration

    def clock(self, **options) -> AcceleratorClock:
        return AcceleratorClock(now=self.now, sleep=self.sleep, **options)


def run(model: torch.nn.Module, clock: AcceleratorClock) -> tuple[int, int, dict[str, int]]:
    """When the forward pass began and the backward pass began, and when each parameter's gradient came."""
    released: dict[str, int] = {}

    def note(name: str) -> None:
        released[name] = clock.time

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in model.named_parameters()
    ]
    began = clock.time
    loss = model(torch.zeros(1)).sum()
    turned = clock.time
    loss.backward()
    for hook in hooks:
        hook.remove()
    return began, turned, released


def slowed(workload: Workload, factor: int) -> Workload:
    layers = tuple(Layer(x.name, x.forward * factor, x.backward * factor) for x in workload.layers)
    gradients = tuple(dataclasses.replace(x, release=x.release * factor) for x in workload.gradients)
    return dataclasses.replace(workload, layers=layers, gradients=gradients)


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_comes_when_its_workload_says(seed: int):
    workload = slowed(random_workload(random.Random(seed)), MICROSECOND)  # up to 20 ms a layer
    host = Host()
    clock = host.clock()
    model = PacedModel(workload, clock)
    began, turned, released = run(model, clock)
    assert turned - began == workload.forward
    assert clock.time - turned == workload.backward
    assert clock.begins == [turned]
    found = sorted((moment - turned) for moment in released.values())
    assert found == sorted(gradient.release for gradient in workload.gradients)
    assert abs(host.time - clock.time) <= 20 * MICROSECOND  # what is not worth a sleep


def test_parameters_are_real_and_belong_to_their_layer():
    workload = zoo("resnet50", batch=1)
    model = PacedModel(workload, Host().clock())
    assert sum(parameter.nbytes for parameter in model.parameters()) == workload.size
    assert dict(model.named_parameters())["layer1/0/conv1.weight"].nbytes == 64 * 64 * 4
    run(model, model.clock)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert all(torch.all(old > new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_tied_weight_comes_last_and_is_needed_first():
    workload = scaled(zoo("gpt2", batch=1), 100 * MILLISECOND)
    clock = Host().clock()
    model = PacedModel(workload, clock)
    _, turned, released = run(model, clock)
    assert next(iter(model.state_dict())) == "transformer/wte.weight"
    assert released["transformer/wte.weight"] - turned == workload.backward


def test_equal_names_get_numbers():
    layers = (Layer("forward", 1, 1), Layer("a", 1, 1), Layer("a", 1, 1))
    gradients = (Gradient("x.weight", 4, 1, 3), Gradient("y.weight", 4, 1, 3), Gradient("weight", 4, 2, 1))
    model = PacedModel(Workload("odd", 1, layers, gradients), Host().clock())
    assert list(model.state_dict()) == ["a.weight", "a.weight-2", "a-2.weight"]


UNIFORM = layered([10 * MILLISECOND] * 4, [20 * MILLISECOND] * 4, [400] * 4)


def test_a_host_that_is_busy_below_the_computation_slows_nothing():
    host = Host()
    clock = host.clock()
    model = PacedModel(UNIFORM, clock)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: host.busy(5 * MILLISECOND))
    for layer in model.children():
        layer.register_forward_hook(lambda *_: host.busy(2 * MILLISECOND))
    began, _, _ = run(model, clock)
    assert clock.time - began == UNIFORM.compute


def test_waiting_for_parameters_delays_the_layers_that_follow():
    host = Host()
    clock = host.clock()
    model = PacedModel(UNIFORM, clock)
    third = list(model.children())[2]
    third.register_forward_pre_hook(lambda *_: host.busy(7 * MILLISECOND))
    began, turned, _ = run(model, clock)
    assert turned - began == UNIFORM.forward + 7 * MILLISECOND
    host.busy(30 * MILLISECOND)  # the optimizer
    began = clock.time
    model(torch.zeros(1))
    assert clock.time - began == 30 * MILLISECOND + UNIFORM.forward + 7 * MILLISECOND


def test_stragglers_are_slower_and_jitter_repeats():
    def times(**options) -> list[int]:
        clock = Host().clock(**options)
        model = PacedModel(UNIFORM, clock)
        return [run(model, clock)[1] for _ in range(3)]

    plain = times()
    assert times(slower=0.2)[0] - 5_000_000 == 1.2 * (plain[0] - 5_000_000)
    assert times(jitter=0.3, seed=1) == times(jitter=0.3, seed=1) != times(jitter=0.3, seed=2)


def test_spans_are_what_was_computed():
    workload = layered([10 * MILLISECOND] * 2, [20 * MILLISECOND] * 2, [400] * 2)
    clock = Host().clock()
    clock.spans = []
    run(PacedModel(workload, clock), clock)
    assert [(span.kind, span.name, span.end - span.start) for span in clock.spans] == [
        ("forward", "l0", 10 * MILLISECOND),
        ("forward", "l1", 10 * MILLISECOND),
        ("backward", "l1", 20 * MILLISECOND),
        ("backward", "l0", 20 * MILLISECOND),
    ]


@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
def test_scaling_keeps_proportions(model: str):
    plain = zoo(model)
    workload = scaled(plain, 300 * MILLISECOND, 0.5)
    assert workload.compute == pytest.approx(300 * MILLISECOND)
    assert workload.size == pytest.approx(plain.size / 2, rel=1e-4)
    assert workload.update == 0
    assert workload.forward / workload.compute == pytest.approx(plain.forward / plain.compute)
    # Gradients still come at the end of their layer, so that no layer's backward pass is cut in two.
    assert all(len(parts) == 1 for parts in stretches(workload))
    with pytest.raises(ConfigError, match="no time to compute in"):
        scaled(plain, 3)
