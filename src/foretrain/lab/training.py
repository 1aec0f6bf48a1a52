"""What a host trains: a paced model, or a small real one, with its data and its clock."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foretrain.lab.messages import Experiment
from foretrain.lab.paced import AcceleratorClock, paced
from foretrain.lab.transformer import batches, transformer
from foretrain.trace import Span
from foretrain.units import Time
from foretrain.workload import Workload


class Trainable(Protocol):
    """A model with its data: what one iteration runs forward.

    Attributes:
        clock: notes when backward passes begin.
    """

    clock: AcceleratorClock

    @property
    def model(self) -> nn.Module:
        """Its parameters are exchanged."""
        ...

    def loss(self, module: nn.Module) -> Tensor:
        """The loss of the next batch, through ``module``, which is `model` or what wraps it."""
        ...

    def trace(self) -> list[Span]:
        """From now on, what is computed when, on the lane ``"gpu"``; ps of the performance counter."""
        ...


class PacedTraining:
    """A paced model; see `foretrain.lab.paced`."""

    def __init__(self, experiment: Experiment, workload: Workload, rank: int) -> None:
        last = rank == dist.get_world_size() - 1
        slower = experiment.straggler if last else 0.0
        seed = 1000 * experiment.seed + rank
        self.clock = AcceleratorClock(slower=slower, jitter=experiment.jitter, seed=seed)
        self.model = paced(workload, self.clock)
        self._input = torch.zeros(1)

    def loss(self, module: nn.Module) -> Tensor:
        """One number."""
        return module(self._input).sum()

    def trace(self) -> list[Span]:
        """What the accelerator computes in its own time."""
        self.clock.begins.clear()
        self.clock.spans = []
        return self.clock.spans


class RealTraining:
    """The small transformer on this host's CPU."""

    def __init__(self, experiment: Experiment, batch: int, rank: int) -> None:
        self.clock = AcceleratorClock()
        self.model = transformer(experiment.seed)
        self._batches = batches(batch, rank, experiment.seed)

    def loss(self, module: nn.Module) -> Tensor:
        """Cross-entropy."""
        tokens, targets = next(self._batches)
        loss = module(tokens, targets)
        self.clock.sync()
        self.clock.turn()
        return loss

    def trace(self) -> list[Span]:
        """From a layer's call to the next one's, and from one gradient to the next."""
        spans: list[Span] = []
        self.clock.begins.clear()
        now = _Now(spans, self.clock)
        for name, module in self.model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(now.called, name))
        self.model.register_forward_hook(now.left)
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(now.released, name))
        return spans


class _Now:
    """What a real model computes now: hooks that note it."""

    def __init__(self, spans: list[Span], clock: AcceleratorClock) -> None:
        self._spans = spans
        self._clock = clock
        self._open: tuple[str, Time] | None = None
        self._step = -1
        self._last: Time = 0

    def called(self, name: str, *_: object) -> None:
        """A layer's forward begins, and the one before it is over."""
        now = time.perf_counter_ns() * 1000
        self._close(now)
        self._open = (name, now)

    def left(self, *_: object) -> None:
        """The forward pass is over."""
        self._close(time.perf_counter_ns() * 1000)

    def released(self, name: str, *_: object) -> None:
        """A gradient is complete."""
        now, step = time.perf_counter_ns() * 1000, len(self._clock.begins) - 1
        began = self._last if step == self._step else self._clock.begins[-1]
        self._spans.append(Span("gpu", "backward", name, step, began, now))
        self._last, self._step = now, step

    def _close(self, now: Time) -> None:
        if self._open:
            name, began = self._open
            self._spans.append(Span("gpu", "forward", name, len(self._clock.begins) - 1, began, now))
        self._open = None
