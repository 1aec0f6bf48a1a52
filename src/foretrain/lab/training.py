"""Training on a host: a paced model or a small real transformer, with data and clock; the baseline, PyTorch's DDP."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from foretrain.lab.messages import Experiment, LabCase
from foretrain.lab.paced import AcceleratorClock, stretches
from foretrain.trace import Span
from foretrain.units import Time
from foretrain.workload import Layer, Workload

_GRADIENT = 1e-3
"""Value of every element of every gradient."""


class PacedTraining:
    """Paced model with its data and clock; see `foretrain.lab.paced`."""

    def __init__(self, experiment: Experiment, workload: Workload, rank: int) -> None:
        last = rank == dist.get_world_size() - 1
        slower = experiment.straggler if last else 0.0
        seed = 1000 * experiment.seed + rank
        self.clock = AcceleratorClock(slower=slower, jitter=experiment.jitter, seed=seed)
        self.model = PacedModel(workload, self.clock)
        self._input = torch.zeros(1)

    def loss(self, module: nn.Module) -> Tensor:
        """Return the loss of ``module``, which is ``model`` or wraps it: one number."""
        return module(self._input).sum()

    def trace(self) -> list[Span]:
        """Return a list to which the accelerator's computations are added from now on; ps of its clock."""
        self.clock.begins.clear()
        self.clock.spans = []
        return self.clock.spans


class PacedModel(nn.Module):
    """Model with the times and gradients of ``workload``, whose computation is sleep; see `foretrain.lab.paced`.

    It has one child per layer, named after it with ``/`` for ``.``. Each gradient is one flat fp32 parameter. Input and
    output are one number: ``model(torch.zeros(1)).sum()``. Gradients are views of one constant buffer, so that making
    them costs nothing; do not change ``p.grad`` in place.
    """

    def __init__(self, workload: Workload, clock: AcceleratorClock) -> None:
        super().__init__()
        self.clock = clock
        self.workload = workload
        parameters = [nn.Parameter(torch.zeros(-(-gradient.size // 4))) for gradient in workload.gradients]
        constant = torch.full((max(parameter.numel() for parameter in parameters),), _GRADIENT)
        owned: list[list[int]] = [[] for _ in workload.layers]
        for index, gradient in enumerate(workload.gradients):
            owned[gradient.layer].append(index)
        for layer, parts, own in zip(workload.layers, stretches(workload), owned, strict=True):
            child = _PacedLayer(layer, clock, constant)
            for index in own:
                name = workload.gradients[index].name.rpartition(".")[2]
                child.register_parameter(_free(child, name), parameters[index])
            child.parts = [(duration, [parameters[i] for i in released]) for duration, released in reversed(parts)]
            self.add_module(_free(self, layer.name.replace(".", "/") or "layer"), child)

    def forward(self, x: Tensor) -> Tensor:
        """Compute for the time of the forward pass."""
        clock = self.clock
        # Autograd forgets what computes on nothing that needs a gradient: the backward pass of layers without any.
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        clock.sync()
        for layer in self.children():
            clock.arrive()
            x = layer(x)
        clock.turn()
        return x


class _PacedLayer(nn.Module):
    """Layer that sleeps for its forward and, through `_Backward`, backward time."""

    parts: list[tuple[Time, list[nn.Parameter]]]
    """Segments of the backward pass, in forward order, with the parameters whose gradients each releases."""

    def __init__(self, layer: Layer, clock: AcceleratorClock, constant: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self._clock = clock
        self._constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and give autograd the durations of the backward pass."""
        self._clock.enter()
        self._clock.compute("forward", self.layer.name, self.layer.forward)
        for duration, parameters in self.parts:
            x = _Backward.apply(x, (self._clock, self.layer.name, duration, self._constant), *parameters)
        return x


class _Backward(torch.autograd.Function):
    """Identity whose backward pass sleeps and then releases the gradients of the given parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: tuple[AcceleratorClock, str, Time, Tensor], *parameters: Tensor) -> Tensor:
        """Keep ``work`` for the backward pass."""
        ctx.work = work
        ctx.sizes = [parameter.shape[0] for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute, then release."""
        clock, name, duration, constant = ctx.work
        clock.compute("backward", name, duration)
        return gradients[0], None, *(constant[:size] for size in ctx.sizes)


def _free(module: nn.Module, name: str) -> str:
    """Return ``name``, with a number appended where ``module`` has such an attribute already."""
    found, number = name, 1
    while hasattr(module, found):
        number += 1
        found = f"{name}-{number}"
    return found


class RealTraining:
    """Small transformer on this host's CPU, with its data and a clock of backward passes."""

    def __init__(self, experiment: Experiment, batch: int, rank: int) -> None:
        self.clock = AcceleratorClock()
        self.model = transformer(experiment.seed)
        self._batches = batches(batch, rank, experiment.seed)

    def loss(self, module: nn.Module) -> Tensor:
        """Return the loss of the next batch through ``module``, which is ``model`` or wraps it."""
        tokens, targets = next(self._batches)
        loss = module(tokens, targets)
        self.clock.sync()
        self.clock.turn()
        return loss

    def trace(self) -> list[Span]:
        """Return a list to which spans are added from now on: between calls of layers, and between gradients."""
        spans: list[Span] = []
        self.clock.begins.clear()
        hooks = _TracingHooks(spans, self.clock)
        for name, module in self.model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(hooks.called, name))
        self.model.register_forward_hook(hooks.left)
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(hooks.released, name))
        return spans


Trainable: TypeAlias = PacedTraining | RealTraining


class _TracingHooks:
    """Hooks that record the computation of a real model."""

    def __init__(self, spans: list[Span], clock: AcceleratorClock) -> None:
        self._spans = spans
        self._clock = clock
        self._open: tuple[str, Time] | None = None
        self._step = -1
        self._last: Time = 0

    def called(self, name: str, *_: object) -> None:
        """Note that a layer's forward pass begins, and the one before it ends."""
        now = time.perf_counter_ns() * 1000
        self._close(now)
        self._open = (name, now)

    def left(self, *_: object) -> None:
        """Note that the forward pass ends."""
        self._close(time.perf_counter_ns() * 1000)

    def released(self, name: str, *_: object) -> None:
        """Note that a gradient is complete."""
        now, step = time.perf_counter_ns() * 1000, len(self._clock.begins) - 1
        began = self._last if step == self._step else self._clock.begins[-1]
        self._spans.append(Span("gpu", "backward", name, step, began, now))
        self._last, self._step = now, step

    def _close(self, now: Time) -> None:
        if self._open:
            name, began = self._open
            self._spans.append(Span("gpu", "forward", name, len(self._clock.begins) - 1, began, now))
        self._open = None


def ddp(model: nn.Module, case: LabCase, traced: bool) -> nn.Module:
    """Return ``model`` in DDP with the options of ``case``; with ``traced`` in a `TracedDdp`."""
    # Gradients as views of buckets spare DDP a copy; the baseline is meant to be strong.
    kind = TracedDdp if traced else DistributedDataParallel
    buckets: dict[str, Any] = {}
    if isinstance(case.bucket, tuple):
        buckets = {"bucket_cap_mb_list": [size / (1 << 20) for size in case.bucket]}
    elif case.bucket:
        buckets = {"bucket_cap_mb": case.bucket / (1 << 20)}
    wrapped = kind(model, gradient_as_bucket_view=True, broadcast_buffers=False, **buckets)
    if isinstance(wrapped, TracedDdp):
        wrapped.trace(case.kind == "ddp_fp16")
    elif case.kind == "ddp_fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


class TracedDdp(DistributedDataParallel):
    """DDP that records the all-reduce of each bucket and each optimizer step.

    Attributes:
        spans: on the lanes ``"wire"`` and ``"gpu"``; ps of the performance counter.
    """

    def trace(self, half: bool) -> None:
        """Begin to record, around DDP's own hooks."""
        self.spans: list[Span] = []
        hook = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
        names = {parameter: name for name, parameter in self.module.named_parameters()}

        # Not annotated: DDP compares annotations with the types themselves, and here they are text.
        def traced(state, bucket):
            began = time.perf_counter_ns() * 1000
            first, *more = [names[parameter] for parameter in bucket.parameters()]
            name = f"{first} +{len(more)}" if more else first
            size = bucket.buffer().nbytes // (2 if half else 1)

            def done(future: torch.futures.Future[Tensor]) -> Tensor:
                self.spans.append(Span("wire", "communication", name, 0, began, time.perf_counter_ns() * 1000, size))
                return future.value()

            return hook(state, bucket).then(done)

        self.register_comm_hook(None, traced)

    def noted(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return ``step`` with a record of its time."""

        def both() -> None:
            began = time.perf_counter_ns() * 1000
            step()
            self.spans.append(Span("gpu", "update", "all", 0, began, time.perf_counter_ns() * 1000))

        return both


def complete(noted: Sequence[Span], computed: Sequence[Span], begins: Sequence[Time]) -> list[Span]:
    """Return ``noted`` with steps and with waits at the barrier, from the last computation to the optimizer.

    A bucket's span begins when the one before it has ended: the link carries one after the other.
    """
    spans = []
    free: Time = 0
    for span in sorted(noted, key=lambda span: span.end):
        step = bisect_right(begins, span.start) - 1
        if span.kind == "communication":
            spans.append(span._replace(step=step, start=max(free, span.start)))
            free = span.end
        else:
            spans.append(span._replace(step=step))
            ended = max((one.end for one in computed if one.end <= span.start), default=span.start)
            spans.append(Span("gpu", "wait", "barrier", step, ended, span.start))
    return spans


VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 1000, 512, 8, 8, 64
_CERTAIN = 0.9


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a norm, beside a residual; (batch, length, width) both ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(functional.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """Transformer that predicts the successor, in ``targets``, of each token; both are (batch, length)."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, HEADS) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def transformer(seed: int = 0, width: int = WIDTH, depth: int = DEPTH) -> Transformer:
    """Return the model, with the same parameters for the same ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(width, depth)


def batches(size: int, rank: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of ``size`` sequences and their targets, different on every ``rank``."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    while True:
        jumps = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        certain = torch.rand((size, LENGTH + 1), generator=generator) < _CERTAIN
        walk = [jumps[:, 0]]
        for place in range(1, LENGTH + 1):
            walk.append(torch.where(certain[:, place], successor[walk[-1]], jumps[:, place]))
        tokens = torch.stack(walk, dim=1)
        yield tokens[:, :-1], tokens[:, 1:]
