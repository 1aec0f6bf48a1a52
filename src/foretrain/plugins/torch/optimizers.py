"""Hooks of an attached model's optimizers: ``step`` and ``add_param_group`` of each instance, replaced until close."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import nn, optim

from foretrain.errors import ConfigError
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.deferred_optimizer import why_not_separable
from foretrain.units import NANOSECOND, Time

logger = logging.getLogger("foretrain")


class StepHandler(Protocol):
    """Receiver of optimizers' calls: `foretrain.plugins.torch.attached_model.AttachedModel`."""

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defer a step; if it must be done now, fetch gradients and return False."""
        ...

    def gather(self) -> None:
        """Fetch all sums into ``.grad`` and apply every wanted update."""
        ...

    def gather_for_step(self, why: str) -> None:
        """Fetch all sums for a step that cannot be deferred; ConfigError if servers have applied them already."""
        ...

    def stepped(self, took: Time) -> None:
        """Record that a whole step was done in ``took`` ps."""
        ...

    def regrouped(self) -> None:
        """Adapt to an added parameter group."""
        ...


class OptimizerHooks:
    """Replacements of one optimizer's ``step`` and ``add_param_group``.

    Args:
        place: index among the attached optimizers.
        optimizer: whose calls are replaced.
        handler: receives the calls.

    Attributes:
        tasks: of the optimizer, each with the index of its parameter group.
    """

    def __init__(self, place: int, optimizer: optim.Optimizer, handler: StepHandler) -> None:
        self._place, self.optimizer, self._handler = place, optimizer, handler
        self.tasks: dict[int, int] = {}
        self._foreign: list[torch.Tensor] = []
        """Parameters of the optimizer outside of the model: stepped together with the others."""
        self._warned: set[str] = set()
        """Reasons against deferring that were logged."""
        self._originals = {name: vars(optimizer).get(name) for name in ("step", "add_param_group")}
        self._step: Callable[..., Any] = optimizer.step
        self._add: Callable[..., None] = optimizer.add_param_group
        self._closed = False
        reason = why_not_separable(optimizer)
        if reason:
            self._warn(reason)
        optimizer.step = types.MethodType(_method(self.step, self._step), optimizer)  # pyright: ignore
        optimizer.add_param_group = types.MethodType(_method(self.add, self._add), optimizer)

    def assign(self, task_of: dict[int, int]) -> None:
        """Set the tasks that this optimizer updates; ``task_of`` is by id of the parameter."""
        for group in self.optimizer.param_groups:
            if type(group["params"]) is list:
                group["params"] = access_guards.Members(group["params"])
        self._foreign = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in task_of and parameter.numel()
        ]
        self.tasks = {
            task_of[id(parameter)]: place
            for place, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in task_of
        }

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run the optimizer's step now, or defer it. Deferred steps return None, as steps without a closure do."""
        if self._closed:
            return self._step(closure, **options) if closure is not None else self._step(**options)
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] learning rate schedulers read it
        if closure is not None or options:
            self._handler.gather_for_step("its step() is given a closure, or options")
            return self._step_now(closure, options)
        reason = why_not_separable(self.optimizer)
        if reason and reason not in self._warned:
            self._warn(reason)
        if reason or any(parameter.grad is not None for parameter in self._foreign):
            self._handler.gather_for_step(reason or "it has parameters that are none of the model's")
        elif self._handler.defer(self._place, self.optimizer, self.tasks):
            return None
        return self._step_now(None, {})

    def _step_now(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Run the optimizer's own step; each evaluation of ``closure`` ends with all gradients summed."""
        began = perf_counter_ns()

        def evaluate() -> Any:
            nonlocal began
            assert closure is not None
            value = closure()
            self._handler.gather()
            began = perf_counter_ns()
            return value

        result = self._step(**options) if closure is None else self._step(evaluate, **options)
        self._handler.stepped((perf_counter_ns() - began) * NANOSECOND)
        return result

    def add(self, group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters join the schedule after some more observed steps."""
        if self._closed:
            self._add(group)
            return
        self._handler.gather()
        self._add(group)
        self._handler.regrouped()

    def close(self) -> None:
        """Restore the optimizer's own methods."""
        self._closed = True
        for group in self.optimizer.param_groups:
            if isinstance(group["params"], access_guards.Members):
                group["params"] = list(group["params"].raw())
        for name, original in self._originals.items():
            if getattr(vars(self.optimizer).get(name), "__func__", None) is None:
                continue  # a scheduler has wrapped our replacement since, and calls it
            if original is None:
                delattr(self.optimizer, name)
            else:
                setattr(self.optimizer, name, original)

    def _warn(self, reason: str) -> None:
        self._warned.add(reason)
        logger.warning("%s: its steps wait for all gradients (communication still overlaps the backward pass)", reason)


def _method(call: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    # Copies the attribute by which a learning rate scheduler recognizes a step that it has wrapped.
    @functools.wraps(like)
    def method(self: optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    return method


def check(optimizers: optim.Optimizer | Sequence[optim.Optimizer], model: nn.Module) -> list[optim.Optimizer]:
    """Return the optimizers as a list; ConfigError if one is no optimizer, or updates no parameter of ``model``."""
    several = [optimizers] if isinstance(optimizers, optim.Optimizer) else list(optimizers)
    if not several:
        raise ConfigError("optimizer", [], "is empty", "hand in the optimizer that updates the model")
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in several:
        if not isinstance(optimizer, optim.Optimizer):
            raise ConfigError("optimizer", type(optimizer).__name__, "is no torch.optim.Optimizer", "hand in that")
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            remedy = "make it from model.parameters(), of the same model and after it was moved to its device"
            raise ConfigError("optimizer", type(optimizer).__name__, "updates no parameter of the model", remedy)
    return several
