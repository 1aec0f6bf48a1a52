from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from foretrain.errors import ConfigError, RecordError  # noqa: E402
from foretrain.units import MILLISECOND, SECOND  # noqa: E402
from foretrain.workload.recorder import CudaStopwatch, HostStopwatch, record, stopwatch  # noqa: E402

X = torch.ones(2, 4)
CPU = torch.device("cpu")
TORCH = torch.__version__.partition("+")[0]


class Clock:
    """A clock that moves a microsecond with each mark, and by what the models sleep."""

    now = 0

    def mark(self):
        self.now += 1000
        return self.now

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(HostStopwatch, "mark", staticmethod(CLOCK.mark))


def training(model, x=X, loss=lambda out: out.sum(), **options):
    """A plain training step of ``model`` on ``x``."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)

    def step():
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    return step


def recorded(model, step=None, **options):
    options = {"batch": 2, "iterations": 2, "warmup": 1} | options
    return record(step or training(model), model, **options)


def homes(workload):
    """Of each gradient, the name of its layer."""
    return {gradient.name: workload.layers[gradient.layer].name for gradient in workload.gradients}


class Net(nn.Module):
    """A model of ``parts`` whose forward pass is ``run``."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def linear(**options):
    return nn.Linear(4, 4, **options)


def reverse():
    return Net(lambda net, x: net.late(net.early(x)), late=linear(), early=linear())


def tied():
    embed, head = linear(bias=False), linear(bias=False)
    head.weight = embed.weight
    return Net(lambda net, x: net.head(net.middle(net.embed(x))), middle=linear(), embed=embed, head=head)


class Sleep(torch.autograd.Function):
    """The identity, which takes ``forward`` seconds one way and ``backward`` seconds the other."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.pause = backward
        CLOCK.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CLOCK.sleep(ctx.pause)
        return grad, None, None


class Slow(nn.Module):
    """A linear layer that sleeps before its product in forward, and before its gradients in backward."""

    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.pauses = (forward, backward)

    def forward(self, x):
        CLOCK.sleep(self.pauses[0])
        return Sleep.apply(x @ self.weight, 0.0, self.pauses[1])


def test_a_workload_of_a_small_network():
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), []
    workload = recorded(model, name="tiny", unit="rows", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (workload.name, workload.batch, workload.unit) == ("tiny", 2, "rows")
    assert [layer.name for layer in workload.layers] == ["0", "2"]
    assert [(g.name, g.size, g.layer) for g in workload.gradients] == [
        ("0.weight", 4 * 8 * 4, 0),
        ("0.bias", 8 * 4, 0),
        ("2.weight", 8 * 3 * 4, 1),
        ("2.bias", 3 * 4, 1),
    ]
    assert workload.source == f"recorded on {stopwatch({CPU}).place}, torch {TORCH}, median of 2 steps"
    assert [HostStopwatch(threads).place for threads in (1, 2)] == ["CPU (1 thread)", "CPU (2 threads)"]
    model = linear().to(torch.bfloat16)
    assert [g.size for g in recorded(model, training(model, X.to(torch.bfloat16))).gradients] == [32, 8]


def test_backward_releases_from_the_last_layer_to_the_first_and_update_follows_the_bytes():
    model = nn.Sequential(*(linear(bias=False) for _ in range(4)))
    workload = recorded(model)
    releases = [gradient.release for gradient in workload.gradients]
    assert releases == sorted(releases, reverse=True)
    assert workload.backward >= max(releases)
    assert [layer.backward for layer in workload.layers][1:] == [
        a - b for a, b in zip(releases[1:], [*releases[2:], 0], strict=True)
    ]
    updates = [layer.update for layer in workload.layers]
    assert max(updates) - min(updates) <= 1
    assert all(layer.forward > 0 and layer.update > 0 for layer in workload.layers)


def test_time_goes_to_the_layer_that_took_it():
    model = nn.Sequential(Slow(), Slow(forward=0.02), Slow(backward=0.03), Slow())
    workload = recorded(model, iterations=1, warmup=0)
    forward = [layer.forward for layer in workload.layers]
    backward = [layer.backward for layer in workload.layers]
    assert 15 * MILLISECOND <= forward[1] < SECOND
    assert 25 * MILLISECOND <= backward[2] < SECOND
    assert max(forward[0], forward[2], forward[3]) < forward[1]
    assert max(backward[0], backward[1], backward[3]) < backward[2]


def test_the_loss_is_part_of_both_passes_and_data_loading_of_none():
    model = linear()
    inner = training(model, loss=lambda out: Sleep.apply(out, 0.02, 0.03).sum())

    def step():
        CLOCK.sleep(0.2)
        inner()

    workload = recorded(model, step, iterations=1, warmup=0)
    assert 15 * MILLISECOND <= workload.forward < 150 * MILLISECOND
    assert min(gradient.release for gradient in workload.gradients) >= 25 * MILLISECOND


def test_update_is_the_step_of_the_models_own_optimizer_alone():
    class Lazy(torch.optim.SGD):
        def step(self, closure=None):
            CLOCK.sleep(0.1)
            return super().step(closure)

    model = linear()
    optimizer = Lazy(model.parameters(), lr=0.1)

    def step():
        model(X).sum().backward()
        optimizer.step()

    workload = recorded(model, step, iterations=1)
    assert workload.update >= 90 * MILLISECOND > workload.backward

    other = linear()
    foreign = training(other)
    assert recorded(model, lambda: (training(model)(), foreign())).update > 0
    extra = torch.optim.SGD(other.parameters(), lr=0.1)
    for seen in (recorded(model, optimizer=extra), recorded(model, lambda: model(X).sum().backward())):
        assert seen.update == 0
        assert seen.source.endswith("; no optimizer step was seen: update = 0")


def test_layers_are_in_the_order_of_execution_and_gradients_in_that_of_registration():
    workload = recorded(reverse())
    assert [layer.name for layer in workload.layers] == ["early", "late"]
    assert [g.name for g in workload.gradients] == ["late.weight", "late.bias", "early.weight", "early.bias"]
    assert [g.layer for g in workload.gradients] == [1, 1, 0, 0]


def test_a_tied_weight_is_one_gradient_of_its_first_use_and_its_last_accumulation():
    workload = recorded(tied())
    assert [layer.name for layer in workload.layers] == ["embed", "middle", "head"]
    assert homes(workload)["embed.weight"] == "embed"
    assert len(workload.gradients) == 3
    by_name = {gradient.name: gradient.release for gradient in workload.gradients}
    assert max(by_name, key=by_name.__getitem__) == "embed.weight"


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_backward_time(reentrant):
    def run(net, x):
        return net.third(checkpoint(lambda y: net.second(net.first(y)), x, use_reentrant=reentrant))

    model = Net(run, **{name: Slow(forward=0.01) for name in ("first", "second", "third")})
    workload = recorded(model, training(model, X.clone().requires_grad_()), iterations=1)
    assert [layer.name for layer in workload.layers] == ["first", "second", "third"]
    assert all(8 * MILLISECOND <= layer.forward < SECOND for layer in workload.layers)
    assert workload.backward >= 15 * MILLISECOND
    assert workload.gradients[1].release >= 15 * MILLISECOND


def test_a_weight_belongs_to_the_module_around_the_call_that_reads_it():
    def attend(net, x):
        x = net.embed(x)
        return net.head(net.attention(x, x, x)[0])

    workload = recorded(Net(attend, embed=linear(), attention=nn.MultiheadAttention(4, 2), head=linear()))
    assert [layer.name for layer in workload.layers] == ["embed", "attention", "head"]
    assert homes(workload)["attention.out_proj.weight"] == "attention"
    assert homes(workload)["attention.in_proj_weight"] == "attention"

    def functional(net, x):
        return nn.functional.linear(net.linear(x), net.inner.weight, net.inner.bias)

    workload = recorded(Net(functional, inner=linear(), linear=linear()))
    assert [layer.name for layer in workload.layers] == ["Net", "linear"]
    assert homes(workload)["inner.weight"] == "Net"


def test_containers_with_parameters_of_their_own_are_layers():
    def scaled(*inside):
        scale = nn.Parameter(torch.ones(4))
        return Net(lambda net, x: net.inside(x * net.scale), scale=scale, inside=nn.Sequential(*inside))

    workload = recorded(nn.Sequential(linear(), scaled(linear(), scaled(linear()))))
    assert [layer.name for layer in workload.layers] == ["0", "1", "1.inside.0", "1.inside.1", "1.inside.1.inside.0"]
    assert homes(workload)["1.inside.1.scale"] == "1.inside.1"


def test_a_frozen_backbone_run_without_gradients_is_forward_time():
    def run(net, x):
        with torch.no_grad():
            x = net.backbone(x)
        return net.head(x)

    backbone = Slow(forward=0.02).requires_grad_(False)
    workload = recorded(Net(run, backbone=backbone, head=linear()), iterations=1)
    assert [layer.name for layer in workload.layers] == ["backbone", "head"]
    assert workload.layers[0].forward >= 15 * MILLISECOND


def test_unused_parameters_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"no gradient in any step.*unused\.weight, unused\.bias") as caught:
        workload = recorded(Net(lambda net, x: net.used(x), used=linear(), unused=linear()))
    assert [layer.name for layer in workload.layers] == ["used"]
    assert len(workload.gradients) == 2
    assert caught[0].filename == __file__


def test_with_accumulation_the_last_backward_counts():
    model = nn.Sequential(Slow(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for pauses in ((0.2, 0.2), (0.0, 0.2), (0.02, 0.02)):
            model[0].pauses = pauses
            model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    workload = recorded(model, step, iterations=1, warmup=0)
    assert "the last of 3 backward passes per step" in workload.source
    assert 15 * MILLISECOND <= workload.layers[0].forward < 150 * MILLISECOND
    assert 15 * MILLISECOND <= workload.gradients[0].release < 150 * MILLISECOND


def test_two_losses_after_one_forward_are_one_backward_pass():
    model = reverse()

    def step():
        model.zero_grad()
        out = model(X)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()

    workload = recorded(model, step)
    assert "passes per step" not in workload.source
    assert len(workload.gradients) == 4


def test_evaluation_takes_no_part():
    model = nn.Sequential(Slow(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate():
        model[0].pauses = (0.1, 0.0)
        with torch.no_grad():
            model(X)
        model[0].pauses = (0.02, 0.0)

    def step():
        evaluate()
        out = model(X)
        evaluate()
        out.sum().backward()
        evaluate()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0](X)

    workload = recorded(model, step, iterations=1, warmup=0)
    assert [layer.name for layer in workload.layers] == ["0", "1"]
    assert 15 * MILLISECOND <= workload.forward < 90 * MILLISECOND
    assert workload.backward < 90 * MILLISECOND
    assert workload.update < 90 * MILLISECOND


def test_training_is_the_same_with_and_without_recording():
    def parameters_after(steps_of):
        torch.manual_seed(0)
        model = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5), tied())
        step = training(model, torch.randn(8, 4), momentum=0.9)
        steps_of(step, model)
        return [*model.state_dict().values(), *(p.grad for p in model.parameters())]

    plain = parameters_after(lambda step, model: [step() for _ in range(5)])
    seen = parameters_after(lambda step, model: record(step, model, batch=8, iterations=4, warmup=1))
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def hooks_of(model):
    """Everything that a recorder could leave behind."""
    from torch.optim import optimizer

    modules = [
        (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._forward_hooks_always_called)) for m in model.modules()
    ]
    tensors = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    everywhere = (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
    return modules, tensors, everywhere, torch.autograd.backward


@pytest.mark.parametrize("failure", [None, ValueError("theirs"), KeyboardInterrupt()])
def test_no_hook_stays_behind_also_when_the_step_fails(failure):
    model, calls = tied(), []
    before = hooks_of(model)

    def step():
        training(model)()
        calls.append(1)
        if failure and len(calls) == 2:
            raise failure

    with pytest.raises(type(failure)) if failure else nullcontext():
        recorded(model, step)
    assert hooks_of(model) == before


def test_an_error_inside_the_backward_pass_is_the_users_own():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("theirs")

    model = linear()
    before = hooks_of(model)
    with pytest.raises(ArithmeticError, match="theirs"):
        recorded(model, training(model, loss=lambda out: Broken.apply(out).sum()))
    assert hooks_of(model) == before


def refused(model, step, match, **options):
    before = hooks_of(model)
    with pytest.raises(RecordError, match=match):
        recorded(model, step, **options)
    assert hooks_of(model) == before


def test_steps_that_do_not_train_the_model_are_refused():
    model, backward = linear(), torch.autograd.backward
    refused(model, lambda: model(X), r"no backward pass was seen.*loss\.backward\(\)")
    refused(model, training(copy.deepcopy(model)), "none of the model's parameters a gradient")
    refused(model, lambda: (X @ model.weight).sum().backward(), "no module was called before it")
    refused(model, lambda: backward(model(X).sum()), r"no call of torch\.autograd\.backward was seen")

    model = reverse()
    model.early.bias.requires_grad_(False)

    def step():
        (model.late(X) @ model.early.weight).sum().backward()

    refused(model, step, "early has gradients, but neither it nor a module around it was called")


def test_an_optimizer_that_runs_backward_or_runs_inside_of_it_is_refused():
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    refused(model, lambda: optimizer.step(closure), "inside optimizer.step")

    model = linear(bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    refused(model, lambda: model(X).sum().backward(), "optimizer.step ran inside the backward pass")
    handle.remove()


def test_sparse_gradients_and_those_that_another_hook_removes_are_refused():
    sparse, model = nn.Embedding(10, 4, sparse=True), linear()
    refused(sparse, lambda: sparse(torch.tensor([1, 2])).sum().backward(), "weight: the gradient is sparse")
    handle = model.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    refused(model, training(model), "bias: the gradient is sparse, or another hook removed it")
    handle.remove()


def test_models_that_cannot_be_recorded_and_numbers_out_of_range_are_refused():
    frozen = linear().requires_grad_(False)
    refused(frozen, lambda: None, "no parameter of the model requires a gradient")
    refused(nn.ReLU(), lambda: None, "no parameter of the model requires a gradient")
    refused(nn.LazyLinear(4), lambda: None, "run one batch through it first")
    refused(linear(device="meta"), lambda: None, "'meta', which has no stopwatch")
    mixed = nn.Sequential(linear(), linear(device="meta"))
    refused(mixed, lambda: None, "live on cpu, meta")
    for field, number in {"iterations": 0, "warmup": -1, "batch": 0}.items():
        with pytest.raises(ConfigError, match=field):
            recorded(linear(), **{field: number})


def test_a_model_that_is_wrapped_for_communication():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(linear())
        refused(model, training(model), "is a DistributedDataParallel; record the module inside it")
    finally:
        dist.destroy_process_group()

    class FSDPModule:
        """As `fully_shard` mixes it in."""

    sharded = nn.Sequential(type("FSDPLinear", (FSDPModule, nn.Linear), {})(4, 4))
    refused(sharded, training(sharded), "0 is a FSDPModule; record the model before it is sharded")


def test_a_compiled_part():
    whole = torch.compile(linear(), backend="eager")
    refused(whole, training(whole), "the model is a OptimizedModule; record the model before torch.compile")
    part = nn.Sequential(linear())
    part[0].compile(backend="eager")
    refused(part, training(part), "0 is compiled")


class FakeEvent:
    """An event that is reached when ``reached`` says; recorded on a stream, as the real one."""

    reached = iter((5.0, 7.5, 7.0, 9.0))

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "stream"
        self.at = next(self.reached)

    def elapsed_time(self, later):
        return later.at - self.at


def test_cuda_times_come_from_events_in_the_order_of_the_log(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda", 0)
    watch = stopwatch({device})
    assert isinstance(watch, CudaStopwatch)
    assert watch.place == "NVIDIA H200"
    marks = [watch.mark() for _ in range(4)]
    assert watch.settle(marks) == [0, 2_500_000_000, 2_500_000_000, 4 * MILLISECOND]
    assert waited == [device]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_on_a_gpu():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
    workload = recorded(model, training(model, X.cuda()))
    assert torch.cuda.get_device_name() in workload.source
    assert [gradient.layer for gradient in workload.gradients] == [0, 0, 1, 1]
    assert workload.forward > 0
    assert workload.update > 0
