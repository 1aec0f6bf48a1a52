"""Scripts of the tests of the DDP patch, as users write them; each rank runs them, most under a stand-in for attach."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import distributed

from foretrain.launch import LaunchSettings
from tests.launch.standin import instead

STEPS = 8
"""More than a runtime watches before it schedules."""
STOCK = nn.parallel.DistributedDataParallel


@dataclass
class Told:
    """What one script did in one rank."""

    parameters: list[list[float]] = field(default_factory=list)
    said: str = ""
    attached: list[dict] = field(default_factory=list)
    events: list[list[str]] = field(default_factory=list)


def patched(settings: LaunchSettings) -> contextlib.AbstractContextManager[object]:
    """The patch; it takes seconds to import, which whoever collects tests need not do."""
    from foretrain.launch.ddp_patch import DdpPatch

    return DdpPatch(settings)


def both(script: Callable[[], nn.Module], settings: LaunchSettings, refuse: str | None = None) -> tuple[Told, Told]:
    """The same script under PyTorch alone, and taken over."""
    return alone(script), taken(script, settings, refuse)


def both_really(script: Callable[[], nn.Module], settings: LaunchSettings) -> tuple[Told, Told]:
    """The same without a stand-in."""
    return alone(script), taken(script, settings, standin=contextlib.nullcontext([]))


def alone(script: Callable[[], nn.Module]) -> Told:
    torch.manual_seed(dist.get_rank())
    return Told(_values(script()))


def taken(script: Callable[[], nn.Module], settings: LaunchSettings, refuse: str | None = None, standin=None) -> Told:
    told = Told()
    torch.manual_seed(dist.get_rank())
    standin = standin or instead(refuse)
    with standin as all_made, contextlib.redirect_stderr(io.StringIO()) as said, patched(settings):
        model = script()
        told.parameters = _values(model)
    assert nn.parallel.DistributedDataParallel is distributed.DistributedDataParallel is STOCK
    told.said = said.getvalue()
    for made in all_made:
        told.attached.append({name: made.options[name] for name in ("schedule", "compression", "timeouts")})
        told.attached[-1]["shared"] = made.shared
        told.attached[-1]["optimizers"] = [type(optimizer).__name__ for optimizer in made.optimizers]
        told.events.append(made.events)
    return told


def _values(model: nn.Module | None) -> list[list[float]]:
    return [] if model is None else [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(count: int) -> Iterator[Tensor]:
    return (torch.randn(8, 6) for _ in range(count))


def step(model: nn.Module, batch: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(module: nn.Module | None = None, **options) -> nn.Module:
    return nn.parallel.DistributedDataParallel(network() if module is None else module, **options)


def plain() -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel as Ddp
    from torch.nn.parallel.distributed import DistributedDataParallel as Other

    assert Ddp is Other
    assert Ddp.__module__ == "torch.nn.parallel.distributed"
    model = Ddp(network())
    assert type(model).__name__ == "DistributedDataParallel"
    assert isinstance(model, Ddp)
    assert isinstance(model, STOCK)
    assert next(iter(model.state_dict())) == "module.0.weight"
    optimizer = sgd(model)
    with torch.no_grad():
        model(torch.randn(4, 6))  # a look before training, which moves BatchNorm's statistics
    trained(model, optimizer)
    assert model._get_ddp_logging_data()["world_size"] == 2
    return model


def accumulating() -> nn.Module:
    model = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for batch in batches(2):
                model(batch).square().mean().backward()
        model(torch.randn(8, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


def static() -> nn.Module:
    return trained(wrapped(static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1))


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = STEPS) -> nn.Module:
    optimizers = optimizers or (sgd(model),)
    for batch in batches(count):
        step(model, batch, *optimizers)
    return model


def longer() -> nn.Module:
    """Train for as many steps as an adviser observes, and some."""
    return trained(wrapped(gradient_as_bucket_view=True), count=13)


def bucketed() -> list[str]:
    """The policies that wrappers follow by their arguments."""
    from foretrain.launch.ddp_adviser import buckets_of

    options = (
        {},
        {"bucket_cap_mb": 4, "find_unused_parameters": True},
        {"bucket_cap_mb_list": [1, 8], "find_unused_parameters": True, "static_graph": True},
    )
    return [str(buckets_of(wrapped(**each))) for each in options]


def hooked(hook: str, state: object = None) -> nn.Module:
    model = wrapped()
    model.register_comm_hook(state, getattr(default_hooks, hook))
    return trained(model)


def fp16() -> nn.Module:
    return hooked("fp16_compress_hook")


def summing(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def own_hook() -> nn.Module:
    model = wrapped()
    model.register_comm_hook(None, summing)
    return trained(model)


def evaluating() -> nn.Module:
    """All ranks evaluate through the wrapper, and rank 0 alone the module inside, while the others wait."""
    model = wrapped()
    optimizer = sgd(model)
    seen: list[Tensor] = []
    for batch in batches(STEPS):
        step(model, batch, optimizer)
        with torch.no_grad():
            if dist.get_rank() == 0:
                model.module.eval()
                seen.append(model.module(batch))
                model.module.train()
            dist.barrier()
            seen.append(model(batch))  # in training mode: BatchNorm's statistics move
        with model.no_sync():
            model(batch)
        seen += [buffer.float() for buffer in model.buffers()]
    return nn.ParameterList([nn.Parameter(each.clone()) for each in seen])


def secret_on_one() -> nn.Module:
    """Only one node was given the job's secret."""
    model = wrapped()
    if dist.get_rank() == 0:
        os.environ["FORETRAIN_SECRET"] = "5a" * 32
    try:
        return trained(model)
    finally:
        os.environ.pop("FORETRAIN_SECRET", None)


def no_optimizer() -> nn.Module:
    model = wrapped()
    for batch in batches(STEPS):
        model.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model


def late_optimizer() -> nn.Module:
    """A second optimizer between a backward pass and its step."""
    model = wrapped()
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    trained(model, first, count=5)
    model.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    second = torch.optim.SGD(model.module[3].parameters(), lr=0.1)
    first.step()
    second.step()
    return trained(model, first, second, count=2)


def given_later() -> nn.Module:
    """An optimizer of something else is given the model's parameters in the middle of training."""
    model = wrapped()
    scale = nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([scale], lr=0.1)
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    trained(model, first, other, count=5)
    other.add_param_group({"params": list(model.module[3].parameters())})
    return trained(model, first, other, count=3)


def uneven() -> nn.Module:
    model = wrapped(nn.Linear(6, 3))
    optimizer = sgd(model)
    with model.join():
        return trained(model, optimizer, count=3 * dist.get_rank())  # rank 0 has no inputs


def uneven_later() -> nn.Module:
    model = wrapped(nn.Linear(6, 3))
    optimizer = sgd(model)
    trained(model, optimizer)
    with model.join():
        return trained(model, optimizer, count=2 + dist.get_rank())


def one_rank_objects() -> nn.Module:
    """Rank 1 alone makes its optimizer too late."""
    model = wrapped()
    optimizer = sgd(model) if dist.get_rank() == 0 else None
    for batch in batches(STEPS):
        model.zero_grad()
        model(batch).square().mean().backward()
        optimizer = optimizer or sgd(model)
        optimizer.step()
    return model


def reducer_used() -> nn.Module:
    model = wrapped()
    model._set_ddp_runtime_logging_sample_rate(10)
    return trained(model)


def replaced_optimizer() -> nn.Module:
    """The first one is gone, but for a cycle."""
    model = wrapped()
    gc.collect()
    gc.disable()
    first = sgd(model)
    first.scheduled_by = torch.optim.lr_scheduler.StepLR(first, 1)
    del first
    try:
        return trained(model)
    finally:
        gc.enable()


def zero() -> nn.Module:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped()
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


def sparse() -> nn.Module:
    model = wrapped(nn.Embedding(10, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(10, (4,))).square().mean().backward()
        optimizer.step()
    return model


def adversaries() -> nn.Module:
    """Two models, an optimizer each."""
    both = nn.Sequential(wrapped(nn.Linear(6, 6)), wrapped(nn.Linear(6, 3)))
    return trained(both, *map(sgd, both))


def one_for_two() -> nn.Module:
    """Two models, one optimizer."""
    return trained(nn.Sequential(wrapped(nn.Linear(6, 6)), wrapped(nn.Linear(6, 3))))


def copies() -> nn.Module:
    """A copy trains on its own, and what is pickled belongs to PyTorch."""
    model = wrapped()
    twin = copy.deepcopy(model)
    trained(model)
    trained(twin)
    assert b"foretrain" not in pickle.dumps(wrapped())
    return nn.ModuleList([model, twin])


def many() -> nn.Module:
    """Models that are gone again."""
    for _ in range(4):
        trained(wrapped(nn.Linear(6, 3)))
    return nn.ModuleList()


def partly() -> nn.Module:
    """Parameters that no optimizer holds, whose gradients count when the others' are clipped."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.module[3].parameters(), lr=0.1)
    for batch in batches(STEPS):
        model.zero_grad()
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


def copied_later() -> nn.Module:
    model = trained(wrapped())
    average = copy.deepcopy(model)
    return nn.ModuleList([trained(model), average])


def without() -> nn.Module:
    return trained(network())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    trained(fully_shard(nn.Linear(6, 4)))
    return nn.ModuleList()


def untrained() -> nn.Module:
    return wrapped()


def dropped() -> tuple[str, list[str]]:
    """A script that raises after it was taken over."""
    said, raises = io.StringIO(), contextlib.suppress(ZeroDivisionError)
    with instead() as made, contextlib.redirect_stderr(said), raises, patched(LaunchSettings()):
        trained(wrapped())
        print(1 // 0)
    return said.getvalue(), made[0].events


def collected() -> list[int]:
    """How many models had ended when the next one was made; on rank 1 each is held by a cycle."""
    ended = []
    with instead() as made, contextlib.redirect_stderr(io.StringIO()), patched(LaunchSettings()):
        gc.disable()
        try:
            for _ in range(3):
                model = wrapped(nn.Linear(6, 3))
                ended.append(sum(each.events == ["close"] for each in made))
                trained(model)
                if dist.get_rank() == 1:
                    model.itself = [model]
                del model
        finally:
            gc.enable()
    return ended


def destroying() -> tuple[list[str], list[list[str]]]:
    """What had happened to the model before its script destroys the process group, and when that is done."""
    calls, original = [], dist.destroy_process_group
    with instead() as made, contextlib.redirect_stderr(io.StringIO()):
        dist.destroy_process_group = lambda group=None: calls.append(list(made[0].events))
        try:
            with patched(LaunchSettings()):
                trained(wrapped())
                before = list(made[0].events)
                dist.destroy_process_group()
        finally:
            dist.destroy_process_group = original
    return before, calls
