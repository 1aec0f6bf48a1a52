"""Record a workload from a real PyTorch model: hooks keep a log, from which everything else is read afterwards.

What the hooks see, in `foretrain.workload.step_log`'s words: the call of every module, every accumulation of a
gradient, every optimizer step, and when ``torch.autograd.backward`` begins and returns. A hook takes a mark and appends
it, nothing more: about a microsecond of a CPU step, an event in the stream of a GPU step.

# Note [When backward begins]
No hook of torch fires at that moment. A full backward hook on the model fires only after the backward of the loss,
which is not small where the vocabulary is large, and it wraps the outputs; a hook on the loss needs the loss. So
``torch.autograd.backward``, through which ``Tensor.backward`` goes, is replaced by one that takes two marks, and put
back at the end.

# Note [Clocks]
Moments are taken on the host's clock or, for a GPU, on its own, in the order of its stream.
A GPU runs behind the host, so the host's clock says when a kernel was *asked for*. A CUDA event says when it was
reached, and costs no synchronisation until it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from foretrain.errors import ConfigError, RecordError
from foretrain.torch_version import require_torch
from foretrain.units import MILLISECOND, NANOSECOND, Time
from foretrain.workload.step_log import HookEvent, Kind, StepLog, dissect, observe
from foretrain.workload.summary import summarize

if TYPE_CHECKING:
    import torch

    from foretrain.workload.step import Workload


class Stopwatch(Protocol):
    """Stopwatch that takes marks while a step runs, and turns them into times afterwards."""

    place: str
    """Name of the processor that is timed, for people: ``"CPU (2 threads)"``."""

    def mark(self) -> Any:
        """Take a mark of the present moment, in the cheapest form."""
        ...

    def settle(self, marks: Sequence[Any]) -> list[Time]:
        """Picoseconds from the first mark to each mark, never decreasing. May wait for the device."""
        ...


class HostStopwatch:
    """The host's monotonic clock."""

    def __init__(self, threads: int) -> None:
        self.place = f"CPU ({threads} thread{'s' if threads != 1 else ''})"

    mark = staticmethod(perf_counter_ns)

    def settle(self, marks: Sequence[int]) -> list[Time]:
        """Picoseconds from the first mark to each mark."""
        return [(mark - marks[0]) * NANOSECOND for mark in marks]


class CudaStopwatch:
    """CUDA events on the stream that is current where the mark is taken, which in a gradient hook is the engine's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self.place = torch.cuda.get_device_name(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work queued so far."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def settle(self, marks: Sequence[torch.cuda.Event]) -> list[Time]:
        """Picoseconds from the first mark to each mark; waits for the device once.

        An event on a side stream may be reached before one that was logged earlier on another: the running maximum
        keeps the order of the log, in which nothing ends before it begins.
        """
        self._cuda.synchronize(self._device)
        times = (round(marks[0].elapsed_time(mark) * MILLISECOND) for mark in marks[1:])
        return list(accumulate(times, max, initial=0))


def stopwatch(devices: set[torch.device]) -> Stopwatch:
    """Return the stopwatch for a model whose parameters live on ``devices``."""
    import torch

    if len(devices) != 1:
        shown = ", ".join(sorted(map(str, devices)))
        raise RecordError(
            f"the parameters live on {shown}; a recording is of one worker on one device: move them to one"
        )
    (device,) = devices
    if device.type == "cpu":
        return HostStopwatch(torch.get_num_threads())
    if device.type == "cuda":
        return CudaStopwatch(device)
    raise RecordError(f"the parameters live on {str(device)!r}, which has no stopwatch; move the model to cpu or cuda")


def record(
    step: Callable[[], object],
    model: torch.nn.Module,
    *,
    batch: int,
    name: str | None = None,
    unit: str = "samples",
    iterations: int = 10,
    warmup: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Run ``step`` ``warmup + iterations`` times and return the median of the last ``iterations`` as a workload.

    The training goes on as it would without recording: parameters, gradients and optimizer state are not touched, and
    no hook stays behind. Parameters that never receive a gradient are left out, with a warning.

    Args:
        step: runs forward, ``loss.backward()`` and ``optimizer.step()`` once, on one worker without communication.
            With several backward passes (accumulation) the last counts: see Note [Rounds] in `observation`.
        model: the model that ``step`` trains, on one device.
        batch: samples per step.
        name: of the workload; the model's class when not given.
        unit: what a sample is called.
        iterations: steps that are measured.
        warmup: steps before them that are not.
        optimizer: the only optimizer whose time counts; every one that holds a parameter of ``model`` when not given.
        progress: called after each step with the number of steps done and in all.

    Raises:
        RecordError: the step or the model cannot be recorded; says what was seen and what is needed.
        MissingExtra: torch is not installed.
    """
    require_torch()
    _check_at_least("batch", batch, 1)
    _check_at_least("iterations", iterations, 1)
    _check_at_least("warmup", warmup, 0)
    anatomy = dissect(model)
    watch = stopwatch({parameter.device for parameter in model.parameters()})
    probe = _Probe(watch)
    observations: list[StepLog] = []
    with probe.attached(model, optimizer):
        for index in range(warmup + iterations):
            observations.append(probe.run(step))
            if progress:
                progress(index + 1, warmup + iterations)
    measured = observations[warmup:]
    return summarize(
        measured,
        anatomy,
        probe.sizes,
        name=name or type(model).__name__,
        batch=batch,
        unit=unit,
        source=_source(watch, measured),
    )


class _Probe:
    """Hooks that keep the log of one step at a time.

    Attributes:
        sizes: bytes of each parameter's gradient as it was accumulated; 0 for one that is not a dense tensor.
    """

    def __init__(self, watch: Stopwatch) -> None:
        import torch

        self._grad_enabled = torch.is_grad_enabled
        self.sizes: dict[int, int] = {}
        self._watch = watch
        self._log: list[tuple[Kind, int, Any]] = []
        self._inside = self._evaluating = False  # of a call of the model itself

    def run(self, step: Callable[[], object]) -> StepLog:
        """Run ``step`` and read its log, while no clock runs."""
        self._log.clear()
        self._note("begin")
        step()
        times = self._watch.settle([mark for _, _, mark in self._log])
        return observe(
            HookEvent(kind, subject, time) for (kind, subject, _), time in zip(self._log, times, strict=True)
        )

    @contextmanager
    def attached(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Attach all hooks inside the block, and none afterwards."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        with ExitStack() as stack:
            ours = _holds_any(model, optimizer)
            before = register_optimizer_step_pre_hook(lambda one, *_: self._note("update") if ours(one) else None)
            stack.callback(before.remove)
            after = register_optimizer_step_post_hook(lambda one, *_: self._note("updated") if ours(one) else None)
            stack.callback(after.remove)
            for index, parameter in enumerate(model.parameters()):
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(partial(self._released, index))
                    stack.callback(hook.remove)
            stack.callback(model.register_forward_hook(self._left, always_call=True).remove)
            stack.callback(model.register_forward_pre_hook(self._entered).remove)
            for index, module in list(enumerate(model.modules()))[1:]:
                stack.callback(module.register_forward_pre_hook(partial(self._called, index)).remove)
            stack.enter_context(self._backward_marked())
            yield

    @contextmanager
    def _backward_marked(self) -> Iterator[None]:
        """See Note [When backward begins]."""
        import torch

        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self._note("backward")
            try:
                original(*args, **kwargs)
            finally:
                self._note("returned")

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _note(self, kind: Kind, subject: int = 0) -> None:
        self._log.append((kind, subject, self._watch.mark()))

    def _entered(self, *_: object) -> None:
        self._inside, self._evaluating = True, not self._grad_enabled()
        self._note("pause" if self._evaluating else "call")

    def _left(self, *_: object) -> None:
        if self._evaluating:
            self._note("resume")
        self._inside = self._evaluating = False

    def _called(self, module: int, *_: object) -> None:
        # Without gradients a call inside the model is a checkpoint or a frozen part, outside it is evaluation.
        if not self._evaluating and (self._inside or self._grad_enabled()):
            self._note("call", module)

    def _released(self, index: int, parameter: torch.Tensor) -> None:
        self._note("release", index)
        if index not in self.sizes:
            self.sizes[index] = _dense_size(parameter.grad)


def _dense_size(gradient: torch.Tensor | None) -> int:
    import torch

    return gradient.nbytes if gradient is not None and gradient.layout == torch.strided else 0


def _holds_any(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[torch.optim.Optimizer], bool]:
    """Return whether an optimizer is the given one, or without one given, holds any parameter of ``model``."""
    if optimizer is not None:
        return lambda one: one is optimizer
    known = {id(parameter) for parameter in model.parameters()}
    return lambda one: any(id(parameter) in known for group in one.param_groups for parameter in group["params"])


def _check_at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(field, value, "is too few", f"use at least {least}")


def _source(watch: Stopwatch, steps: list[StepLog]) -> str:
    import torch

    release = torch.__version__.partition("+")[0]
    parts = [f"recorded on {watch.place}, torch {release}, median of {len(steps)} step{'s' if len(steps) > 1 else ''}"]
    if all(step.update is None for step in steps):
        parts.append("no optimizer step was seen: update = 0")
    rounds = max(step.rounds for step in steps)
    if rounds > 1:
        parts.append(f"the last of {rounds} backward passes per step")
    return "; ".join(parts)
