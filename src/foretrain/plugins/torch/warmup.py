"""Exchange of the observing phase: all gradients are reduced at the end of each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.observation import StepObserver
from foretrain.errors import ConfigError
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.streams import enqueues, finish

_SLICE = 25 << 20
"""Bytes per operation, as in a bucket of DistributedDataParallel."""


class Warmup:
    """Reducer of gradients before there is a schedule, and their `access_guards.GradientOwner` meanwhile.

    Args:
        parameters: indexed by task.
        group: to reduce over.
        observation: records every gradient.
        check: raises the error that has ended the job, if any.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        observation: StepObserver,
        check: Callable[[], None],
    ) -> None:
        self._parameters, self._group, self._observation, self._check = parameters, group, observation, check
        self._task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        self._gradients = GradientBuffer(parameters, range(len(parameters)))
        self._share = 1.0 / dist.get_world_size(group)
        self._fired: set[int] = set()
        self._local: set[int] = set()

    def gradient(self, task: int, synchronizes: bool) -> None:
        """Take a gradient that was accumulated into ``.grad``; it is reduced later unless ``synchronizes``."""
        if synchronizes:
            if not self._fired:
                # All ranks come to the end of the pass, but one rank alone may read gradients before.
                access_guards.pass_ends.append(self.fetch)
            self._fired.add(task)
            access_guards.held[id(self._parameters[task])] = self
            self._observation.gradient(task, access_guards.passes)
        else:
            self._local.add(task)

    def drop(self, key: int, zeros: bool) -> None:
        """Clear one gradient, to zeros or None."""
        access_guards.held.pop(key, None)
        task = self._task_of[key]
        self._fired.discard(task)
        self._local.discard(task)
        parameter = self._parameters[task]
        access_guards.set_raw_grad(parameter, torch.zeros_like(parameter) if zeros else None)

    def fetch(self) -> None:
        """Reduce all gradients accumulated since the last call. Collective."""
        if not self._fired:
            return
        used = {t for t in self._fired | self._local if access_guards.raw_grad(self._parameters[t]) is not None}
        for task in self._fired:
            access_guards.held.pop(id(self._parameters[task]), None)
        self._fired.clear()
        self._local.clear()
        self._observation.reduced()
        with torch.no_grad():
            for task, view in enumerate(self._gradients.views):
                gradient = access_guards.raw_grad(self._parameters[task])
                if gradient is None:
                    view.zero_()
                    continue
                refuse_sparse(gradient)
                if task not in used and gradient.data_ptr() == view.data_ptr():
                    # The old sum stays, unless another rank sends a new gradient: then this rank sends its part.
                    access_guards.set_raw_grad(self._parameters[task], gradient.clone())
                torch.mul(gradient, self._share, out=view)
            mask = torch.zeros(len(self._parameters), dtype=torch.uint8, device=self._parameters[0].device)
            mask[list(used)] = 1
            self._reduce(mask, dist.ReduceOp.MAX)
            for flat in self._gradients.flat:
                step = max(1, _SLICE // flat.element_size())
                for start in range(0, len(flat), step):
                    self._reduce(flat[start : start + step], dist.ReduceOp.SUM)
            for task in mask.nonzero().flatten().tolist():
                access_guards.set_raw_grad(self._parameters[task], self._gradients.views[task])

    def _reduce(self, values: torch.Tensor, kind: dist.ReduceOp.RedOpType) -> None:
        work = dist.all_reduce(values, kind, group=self._group, async_op=True)
        finish(work, self._check, enqueues=enqueues(self._group, values.device))

    def hand_over(self, views: Sequence[torch.Tensor]) -> None:
        """Move sums in ``.grad`` to ``views``, per task, so that this buffer is not needed any more."""
        with torch.no_grad():
            for parameter, own, view in zip(self._parameters, self._gradients.views, views, strict=True):
                gradient = access_guards.raw_grad(parameter)
                if gradient is not None and gradient.data_ptr() == own.data_ptr():
                    access_guards.set_raw_grad(parameter, view.copy_(gradient))


def refuse_sparse(gradient: torch.Tensor) -> None:
    """Raise ConfigError for a sparse gradient, which a flat buffer cannot hold."""
    if gradient.layout != torch.strided:
        raise ConfigError(
            "gradient",
            str(gradient.layout),
            "is not dense (an embedding with sparse=True?)",
            "make the layer dense, or train it outside of the attached model",
        )
