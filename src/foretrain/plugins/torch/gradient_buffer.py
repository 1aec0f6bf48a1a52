"""Gradients in flat tensors: compressed to half precision with error feedback, or reduced whole while observed.

`Warmup` reduces all gradients at the end of each backward pass, until there is a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._prims_common import is_non_overlapping_and_dense_or_false

from foretrain.comm.buffers import BufferSlice, FlatLayout
from foretrain.comm.observation import StepObserver
from foretrain.errors import ConfigError, unknown
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.streams import enqueues, finish


class GradientBuffer(FlatLayout):
    """Flat buffers for the gradients of ``parameters``.

    Args:
        parameters: indexed by task.
        order: task indices, first used first; the layout.
        wire: bytes per element on the wire; None sends elements as they are.

    Attributes:
        flat: the buffers, one-dimensional.
        views: per task, its slice, in the shape and memory layout of its parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], order: Sequence[int], wire: int | None = None) -> None:
        super().__init__(
            [parameter.numel() for parameter in parameters],
            [(parameter.device, parameter.dtype) for parameter in parameters],
            [wire or parameter.element_size() for parameter in parameters],
            order,
        )
        self.flat = [
            torch.zeros(length, dtype=dtype, device=device)
            for length, (device, dtype) in zip(self.lengths, self.kinds, strict=True)
        ]
        self.views = [self._view(task, parameter) for task, parameter in enumerate(parameters)]

    def slice(self, run: BufferSlice) -> torch.Tensor:
        """Return the elements of ``run``."""
        return self.flat[run.buffer][run.start : run.end]

    def _view(self, task: int, parameter: torch.Tensor) -> torch.Tensor:
        place = self.slice(self.place(task))
        if parameter.is_contiguous():
            return place.view(parameter.shape)
        dense = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        if is_non_overlapping_and_dense_or_false(dense):
            return place.as_strided(parameter.shape, parameter.stride())
        return place.view(parameter.shape)


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called ``name``; None for None."""
    if name is None:
        return None
    if name not in _DTYPES:
        raise unknown("compression", name, _DTYPES)
    return _DTYPES[name]


class Rounding:
    """Compression of slices of flat buffers, with error feedback.

    Args:
        flat: the buffers; each gets a residual of its own size.
        dtype: to round to.
    """

    def __init__(self, flat: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._residuals = [torch.zeros_like(buffer) for buffer in flat]

    def round(self, run: BufferSlice, values: torch.Tensor) -> torch.Tensor:
        """Return rounded ``values``, the elements of ``run``, with the error of the last rounding added."""
        residual = self._residuals[run.buffer][run.start : run.end]
        residual.add_(values)
        sent = residual.to(self._dtype)
        residual.sub_(sent)
        # The receiver must see an overflow (GradScaler checks for it), but it must not be fed back.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return sent


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
