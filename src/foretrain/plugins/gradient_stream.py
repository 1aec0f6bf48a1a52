"""GradientStream: a session for frameworks whose compiled step calls back, from threads of their own.

The step is a graph that was compiled once: it calls `push` with each gradient and `wait` before each use, and nobody is
there to call `foretrain.comm.session.Session.begin_step`. A gradient that comes again begins the next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.ps.placement import Dtype
from foretrain.comm.session import CommTask, Session
from foretrain.errors import ConfigError
from foretrain.units import Time
from foretrain.workload.step import Workload

logger = logging.getLogger("foretrain")
_BUSY = 0.75
"""Share of its own time after which no gradient can have come, unless other work slowed the forward pass down."""
_STEPS = 1 << 24
"""Steps that have numbers of their own: single precision holds all of them."""


class GradientSpec(NamedTuple):
    """Gradient of a parameter: its name, whose text before the last dot is the layer's, its shape and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class GradientStream:
    """Gradients of one model, handed over by any thread. Its parameters are declared by `declare`, once.

    Args:
        session: where they are exchanged; None makes one of what ``foretrain run`` says, which ends with the process.

    Attributes:
        session: it.
    """

    def __init__(self, session: Session | None = None) -> None:
        self.session = session or Session()
        self._parameters: tuple[GradientSpec, ...] = ()
        self._tasks: tuple[CommTask, ...] = ()
        self._lock = threading.Lock()
        self._pushed: set[int] = set()
        self._handed = 0
        """Gradients of the step that the session has; those in ``_pushed`` are at least on their way to it."""
        self._unread: set[int] = set()
        """Gradients that have gone, and whose means nobody has asked for since."""
        self._step_of: dict[int, int] = {}
        """Step of the last gradient of each parameter, as `push` returns it."""

    def declare(self, parameters: Sequence[GradientSpec], *, ordered: bool) -> bool:
        """Declare the parameters unless that has been done. Collective.

        Args:
            parameters: all of the model.
            ordered: whether they are in the order of their first use; else it is observed, by `wait`.

        Returns:
            Whether they were declared now.

        Raises:
            ConfigError: they are others than those of the first call, or of a type that cannot be summed.
            Disagreement: those of another rank differ.
        """
        found = tuple(parameters)
        if self._parameters and found != self._parameters:
            name = next((new.name for new in found if new not in self._parameters), f"{len(found)} parameters")
            remedy = "make another session and another optimizer for another model, or after layers were frozen"
            raise ConfigError("parameters", name, "are not those that this session exchanges", remedy)
        if self._parameters:
            return False
        for each in found:
            if str(each.dtype) not in get_args(Dtype):
                raise ConfigError(each.name, each.dtype, "cannot be summed", "use a floating-point type")
        tensors: list[tuple[str, int, Dtype]] = [
            (each.name, int(np.prod(each.shape)) * each.dtype.itemsize, cast(Dtype, str(each.dtype))) for each in found
        ]
        reliable = {each.name for each in found if len(each.shape) <= 1}  # biases and norms
        self._tasks = self.session.declare(tensors, ordered=ordered, reliable=reliable)
        self._parameters = found
        return True

    def push(self, index: int, gradient: NDArray[Any], landed: Callable[[], None] | None = None) -> int:
        """Hand over the gradient of parameter ``index``; its content is copied before this returns.

        Args:
            index: its number.
            gradient: of the parameter's shape and type.
            landed: as of `foretrain.comm.session.CommTask.ready`.

        Returns:
            The number of the step it belongs to: from 1 to 2²⁴, and over again.

        Raises:
            ConfigError: nobody has asked for the mean of its last one, which this one would overwrite.
            ForetrainError: the job has failed.
        """
        with self._lock:
            if index in self._unread:
                remedy = "compute gradients once per step, and accumulate them in a loop, with JAX in jax.lax.scan"
                raise ConfigError(
                    self._parameters[index].name, "its gradient", "comes before the last was used", remedy
                )
            if index in self._pushed or not self._pushed or len(self._pushed) == len(self._tasks):
                self.session.begin_step()
                self._pushed.clear()
                self._handed = 0
            self._pushed.add(index)
            self._unread.add(index)
            step = self._step_of[index] = (self.session.steps - 1) % _STEPS + 1
        values = gradient.reshape(-1).view()
        values.flags.writeable = False  # the framework's own memory: nothing is written back to it
        self._tasks[index].ready(values, landed)
        with self._lock:
            self._handed += 1
            if self._handed == len(self._tasks):
                self.session.end_step()
        return step

    def wait(self, index: int, step: int = 0) -> NDArray[Any]:
        """Return the mean over all ranks of the last gradient of parameter ``index``, as a new array; zeros before it.

        Args:
            index: its number.
            step: the number of the step whose mean it has to be; 0 for any.

        Raises:
            ConfigError: there was a gradient since.
            ForetrainError: the job has failed; the message says why.
        """
        parameter = self._parameters[index]
        self._check_last(parameter, index, step)
        mean = self._tasks[index].wait().view(parameter.dtype).reshape(parameter.shape).copy()
        with self._lock:
            self._check_last(parameter, index, step)  # programs may run at once: another may have pushed meanwhile
            self._unread.discard(index)
        return mean

    def read(self, index: int) -> NDArray[Any]:
        """Return the mean of the last gradient of parameter ``index``, read-only, and valid until it is pushed again.

        Unlike `wait` it does not say that the model uses the parameter now.

        Raises:
            ForetrainError: the job has failed; the message says why.
        """
        parameter = self._parameters[index]
        mean = self._tasks[index].read().view(parameter.dtype).reshape(parameter.shape)
        with self._lock:
            self._unread.discard(index)
        return mean

    def _check_last(self, parameter: GradientSpec, index: int, step: int) -> None:
        last = self._step_of.get(index, 0)
        if step and 0 < (last - step) % _STEPS < _STEPS // 2:
            remedy = "go on from the state that the last step returned, or from one that was flushed"
            raise ConfigError(parameter.name, f"step {step}", f"is not the last, {last}: its mean is gone", remedy)


def broadcast(session: Session, arrays: Sequence[tuple[str, NDArray[Any]]]) -> list[NDArray[Any]]:
    """Return rank 0's ``arrays`` on all ranks; each has a name. Collective.

    Raises:
        Disagreement: those of another rank have other names, shapes or types.
    """
    session.must_agree("array", [f"{name} {values.shape} {values.dtype}" for name, values in arrays])
    return [
        np.frombuffer(session.broadcast(values.tobytes()), values.dtype).reshape(values.shape) for _, values in arrays
    ]


def recording(iterations: int, warmup: int) -> Session:
    """Return a session of this process alone, which observes as many steps; it is in nobody's way.

    Raises:
        ConfigError: ``iterations`` or ``warmup`` is too small.
    """
    for field, value, least in (("iterations", iterations, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ConfigError(field, value, "is too few", f"use at least {least}")
    return Session("fifo", "all_reduce", rank=0, ranks=1, warmup=warmup + iterations)


def recorded(session: Session, name: str, batch: int, source: str, forward: Time | None = None) -> Workload:
    """Return the step that `recording` has observed.

    Args:
        session: of `recording`, past its first scheduled step.
        name: of the workload.
        batch: samples per step.
        source: says how it was recorded.
        forward: length of the forward pass, ps, where no layer's entry was seen, and which was computed alone once more
            before each step; it is divided among the layers as the backward pass is, which began that long after the
            forward pass did.
    """
    seen = session.workload
    assert seen is not None
    layers, gradients = list(seen.layers), list(seen.gradients)
    if forward is not None:
        until_first = max(0, seen.forward - forward)
        late, total = max(0, until_first - forward), min(forward, until_first)
        if until_first < _BUSY * forward:
            text = "%s: the forward pass took longer alone than in a step; record again when the machine is idle"
            logger.warning(text, name)
        gradients = [replace(each, release=each.release + late) for each in gradients]
        first = min(gradients, key=lambda each: each.release).layer
        layers[first] = replace(layers[first], backward=layers[first].backward + late)
        backward = sum(layer.backward for layer in layers)
        layers = [replace(layer, forward=total * layer.backward // max(1, backward)) for layer in layers]
    return Workload(name, batch, tuple(layers), tuple(gradients), source=source)


@cache
def warn_if_untested(rank: int, framework: str, version: str, tested: str) -> None:
    """Log a warning, once and on rank 0, if ``version`` of ``framework`` is not the ``tested`` major and minor one."""
    if rank == 0 and version.split(".")[:2] != tested.split("."):
        logger.warning("%s %s: foretrain is tested with %s.x; please report what fails", framework, version, tested)
