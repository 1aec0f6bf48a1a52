"""Small models, and training them twice: with stock DistributedDataParallel and attached.

A *recipe* is a generator that trains through a `Side` and yields what is to be compared, usually the loss of each step
(which reads no parameter, and so flushes nothing). `assert_same` runs it on both sides, and also compares all
parameters, buffers, gradients and optimizer states at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foretrain.comm.options import Timeouts
from foretrain.plugins.torch import attach
from tests.plugins.torch.ranks import Ranks

WIDTH = 32
STEPS = 8
WARMUP = 2
SMALL = "bytescheduler(partition=1KiB, credit=2KiB)"
"""Cuts each weight of these models into pieces, so that every step sends dozens of operations across the barrier."""
_LATE = 0.004
"""Seconds by which the ranks, in turn, are late: whoever is on time leaves step() with everything still under way."""


# ---------------------------------------------------------------- models and data


def mlp(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """``depth`` linear layers, the same in every rank and on both sides."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Branches(nn.Module):
    """Runs those of its branches that it is told to; an empty choice leaves only first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList([mlp(2), mlp(2), mlp(2)])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        """``(rows, width)`` through the branches ``chosen``."""
        x = self.first(x).tanh()
        for place in chosen:
            x = self.branches[place](x)
        return self.last(x)


EACH = "another each step on each rank"
CHOICES: dict[str, Callable[[int, int], list[int]]] = {
    "never the last": lambda step, rank: [0, 1],
    "in another order each step": lambda step, rank: [[0, 1, 2], [2, 1, 0], [1, 0, 2]][step % 3],
    "one on rank 1 alone": lambda step, rank: [0, 2] if rank == 1 else [0],
    EACH: lambda step, rank: [(step + rank) % 3],
    "nobody's until late": lambda step, rank: [0, 1] if step < 5 else [0, 1, 2],
    "nobody's from late on": lambda step, rank: [0, 1, 2] if step < 5 else [0, 1],
}
"""The branches that a step takes on a rank."""


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with everything that moves a parameter although its gradient is zero."""
    return torch.optim.SGD(trainable(model), **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options))


def pair() -> tuple[nn.Sequential, torch.optim.SGD]:
    """`mlp`, and `sgd` for it."""
    model = mlp()
    return model, sgd(model)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch(step: int, rows: int = 8, width: int = WIDTH) -> Tensor:
    """What this rank trains on at ``step``, ``(rows, width)``; every rank is late once in a while."""
    rank = dist.get_rank()
    if step % dist.get_world_size() == rank:
        time.sleep(_LATE)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def tokens(step: int, vocabulary: int, length: int = 8) -> Tensor:
    """Token numbers, ``(4, length)``."""
    return batch(step, 4, length).mul(1e4).long().remainder(vocabulary)


def objective(output: Tensor) -> Tensor:
    """A loss whose gradient is nowhere zero for long."""
    return (output - 1).square().mean()


# ---------------------------------------------------------------- sides


class Side:
    """One way to train, with its models and optimizers, to compare them."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []

    def wrap(self, model: nn.Module, *optimizers: Optimizer, **ddp: Any) -> Any:
        """Make ``model`` train on all ranks, and return what to call instead of it; ``ddp`` is for DDP alone."""
        self.models.append(model)
        self.optimizers.extend(optimizers)

    def unfrozen(self, model: nn.Module) -> Any:
        """Tell DDP that more of ``model`` is trainable now, and return what to call instead of it."""
        return model

    def no_sync(self) -> contextlib.ExitStack:
        """Return a context in which backward passes only accumulate."""
        stack = contextlib.ExitStack()
        for handle in self.handles:
            stack.enter_context(handle.no_sync())
        return stack

    def synchronize(self) -> None:
        """Wait until gradients are reduced and parameters updated, as they always are with DDP."""

    def state(self) -> dict[str, Any]:
        """Return everything that training leaves behind."""
        return {
            "models": [model.state_dict() for model in self.models],
            "gradients": [{name: p.grad for name, p in model.named_parameters()} for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }


class Stock(Side):
    """DistributedDataParallel; ``hook`` does its communication if given."""

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._hook = hook
        self.handles: list[DistributedDataParallel] = []

    def wrap(self, model: nn.Module, *optimizers: Optimizer, **ddp: Any) -> DistributedDataParallel:
        super().wrap(model, *optimizers)
        self.handles.append(DistributedDataParallel(model, **ddp))
        if self._hook:
            self.handles[-1].register_comm_hook(None, self._hook)
        return self.handles[-1]

    def unfrozen(self, model: nn.Module) -> DistributedDataParallel:
        self.handles.append(DistributedDataParallel(model))
        return self.handles[-1]


class Attached(Side):
    """`attach`. ``options`` are its keyword arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"schedule": SMALL, "warmup": WARMUP, "timeouts": Timeouts(30.0)} | options
        self.handles: list[Any] = []

    def wrap(self, model: nn.Module, *optimizers: Optimizer, **ddp: Any) -> nn.Module:
        super().wrap(model, *optimizers)
        optimizer = optimizers[0] if len(optimizers) == 1 else list(optimizers)
        self.handles.append(attach(model, optimizer, group=ddp.get("process_group"), **self.options))
        return model

    def synchronize(self) -> None:
        for handle in self.handles:
            handle.synchronize()

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


Recipe = Callable[..., Iterator[Any]]


def steps(model: nn.Module, optimizer: Optimizer, count: int = STEPS, first: int = 0) -> Iterator[int]:
    """The training loop of every tutorial, on `batch`; yields the number of each step before it is done."""
    for step in range(first, first + count):
        yield step
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(*args: Any, **options: Any) -> None:
    """All of `steps`."""
    for _ in steps(*args, **options):
        pass


def loop(
    side: Side,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    steps: int = STEPS,
    loss: Callable[[Any, int], Tensor] = lambda net, step: objective(net(batch(step))),
    ready: Callable[[int], Any] = lambda step: None,
    stepped: Callable[[int], Any] = lambda step: None,
    cleared: Callable[[int], Any] = lambda step: None,
    **ddp: Any,
) -> Iterator[Any]:
    """The same loop through ``side``; yields what ``ready`` returns after backward(), ``stepped`` after step(),
    ``cleared`` after zero_grad(), and the loss."""
    model = mlp() if model is None else model
    optimizer = optimizer or sgd(model)
    net = side.wrap(model, optimizer, **ddp)
    for step in range(steps):
        value = loss(net, step)
        value.backward()
        yield ready(step)
        optimizer.step()
        yield stepped(step)
        optimizer.zero_grad()
        yield cleared(step), value


def plain(side: Side, make: Callable[[], nn.Module] = mlp, **options: Any) -> Iterator[Any]:
    """`loop` with the model that ``make`` returns."""
    yield from loop(side, make(), **options)


def branching(side: Side, how: str, reads: bool = False, to_none: bool = True) -> Iterator[Any]:
    """Trains `Branches` by ``CHOICES[how]``; ``reads`` looks after each step at which gradients there are."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer, find_unused_parameters=True)
    for step in range(STEPS + 1):
        loss = objective(net(batch(step), CHOICES[how](step, dist.get_rank())))
        loss.backward()
        optimizer.step()
        yield loss, [p.grad is None for p in model.parameters()] if reads else None
        optimizer.zero_grad(set_to_none=to_none)


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one rank saw.

    Attributes:
        differences: one line per value that is not the same on both sides, earliest first.
        said: warnings and log records of the attached side that stock DDP did not give.
        schedules: of each attached model, the schedule in force at the end.
        sizes: of each attached model, the bytes of every chunk that the schedule started; only the leader knows.
        threads: those that outlived close().
        weights: a hash of all parameters at the end.
    """

    differences: tuple[str, ...]
    said: tuple[str, ...]
    schedules: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    threads: tuple[str, ...]
    weights: str


def compare(recipe: Recipe, args: tuple[Any, ...], options: dict[str, Any], tolerance: float) -> Comparison:
    """Runs in every rank: ``recipe``, or that of a test, on both sides, the attached one with ``options``."""
    recipe = getattr(recipe, "recipe", recipe)
    with _listening() as expected_words:
        stock = _train(side := Stock(), recipe, args)
        expected = [*stock, copied(side.state())]
    before = set(threading.enumerate())
    with _listening() as words:
        attached = Attached(**options)
        found = _train(attached, recipe, args)
        found.append(copied(attached.state()))
        schedules = tuple(str(handle.schedule) for handle in attached.handles)
        sizes = tuple(tuple(decision.chunk.size for decision in handle.log) for handle in attached.handles)
        attached.close()
        closed = copied(attached.state())
    return Comparison(
        differences=(*differences(expected, found, tolerance), *differences(found[-1], closed, 0.0, "after close ")),
        said=tuple(word for word in words if word not in expected_words),
        schedules=schedules,
        sizes=sizes,
        threads=tuple(sorted(thread.name for thread in set(threading.enumerate()) - before)),
        weights=_hash(parameter for model in attached.models for parameter in model.parameters()),
    )


def assert_same(
    ranks: Ranks,
    recipe: Recipe,
    *args: Any,
    tolerance: float = 0.0,
    said: str | None = None,
    barrier: bool = False,
    timeout: float = 300,
    **options: Any,
) -> list[Comparison]:
    """Trains by ``recipe(side, *args)`` with DDP and with ``attach(..., **options)``; both must give the same.

    Args:
        ranks: where.
        recipe: how.
        args: its arguments.
        tolerance: 0 compares bits; else the largest difference relative to the largest value of a tensor.
        said: a pattern that one warning or log record of the attached side must match; None if there must be none,
            empty if there may be any.
        barrier: whether the attached side trains on under the barrier, and so sends nothing by a schedule.
        timeout: seconds.
        options: for attach.
    """
    comparisons = ranks(compare, recipe, args, options, tolerance, timeout=timeout)
    for rank, seen in enumerate(comparisons):
        assert not seen.differences, f"rank {rank}: " + "\n".join(seen.differences)
        assert not seen.threads, f"rank {rank}: threads outlive close(): {seen.threads}"
        if said is None:
            assert not seen.said, f"rank {rank} said: {seen.said}"
        elif said:
            assert any(re.search(said, word) for word in seen.said), f"rank {rank} said only: {seen.said}"
    assert len({seen.weights for seen in comparisons if seen.schedules}) == 1, "the ranks ended with different weights"
    if not barrier:
        assert all(schedule != "None" for seen in comparisons for schedule in seen.schedules), comparisons[0].schedules
    if not barrier and getattr(options.get("transport"), "order", None) != "replay":
        assert all(comparisons[0].sizes), "the schedule has sent nothing"
    return comparisons


def same_as_ddp(on: str = "ranks", **options: Any) -> Callable[[Recipe], Callable[..., None]]:
    """Make a test of a recipe: on the ranks of the fixture ``on``, with ``options`` of `assert_same`."""

    def decorate(recipe: Recipe) -> Callable[..., None]:
        names = list(inspect.signature(recipe).parameters)[1:]

        def test(**given: Any) -> None:
            assert_same(given[on], test, *(given[name] for name in names), **options)

        functools.update_wrapper(test, recipe)
        del test.__wrapped__
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (on, *names)]
        test.__dict__.update(recipe=recipe, __signature__=inspect.Signature(parameters))
        return test

    return decorate


def copied(value: Any) -> Any:
    """``value`` as it is now: nested containers with every tensor copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def differences(expected: Any, found: Any, tolerance: float, path: str = "") -> list[str]:
    """One line for each place where two nested values are not the same."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [d for key in expected for d in differences(expected[key], found[key], tolerance, f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [d for place, (a, b) in pairs for d in differences(a, b, tolerance, f"{path}[{place}]")]
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensor_differences(expected, found, tolerance, path)
    same = expected == found or (expected != expected and found != found)
    return [] if same else [f"{path}: DDP {str(expected)[:200]}, attached {str(found)[:200]}"]


def _tensor_differences(expected: Tensor, found: Tensor, tolerance: float, path: str) -> list[str]:
    kinds = [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in (expected, found)]
    if kinds[0] != kinds[1]:
        return [f"{path}: DDP {kinds[0]}, attached {kinds[1]}"]
    if torch.allclose(expected, found, rtol=0, atol=0, equal_nan=True):
        return []
    worst = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    return [] if worst <= tolerance * largest else [f"{path}: differs by {worst:.2e} of {largest:.2e}"]


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _train(side: Side, recipe: Recipe, args: tuple[Any, ...]) -> list[Any]:
    torch.manual_seed(7)
    return [copied(value) for value in recipe(side, *args)]


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Collects warnings, and what foretrain logs as a warning or worse."""
    words: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logger = logging.getLogger("foretrain")
    logger.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield words
        words.extend(str(warning.message) for warning in caught)
    finally:
        logger.removeHandler(ear)
