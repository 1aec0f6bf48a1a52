"""The optimizers of an attached model: their calls pass through here, on the instance, and come back on close."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import nn, optim

from foretrain.errors import ConfigError
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.deferred_optimizer import why_not_separable
from foretrain.plugins.torch.hooks import Handle, Hook, remove_all
from foretrain.units import NANOSECOND, Time

logger = logging.getLogger("foretrain")


class Owner(Protocol):
    """What an attached optimizer reports to."""

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defers a step; False where it must be done now, all gradients being back."""
        ...

    def gather(self) -> None:
        """Brings gradients back and applies everything asked for."""
        ...

    def stepped(self, took: Time) -> None:
        """A whole step was done, in ``took`` ps."""
        ...

    def flush(self) -> None:
        """Applies everything asked for; gradients may stay under way."""
        ...

    def regrouped(self) -> None:
        """A parameter group was added."""
        ...

    def whole(self, why: str) -> None:
        """Brings gradients back for a step that is not to be deferred; ConfigError where only servers have them."""
        ...

    def saves(self, place: int) -> None:
        """The state of an optimizer is to be read: applies everything asked for, and sees to it that it is here."""
        ...

    def saved(self, place: int) -> None:
        """It was read."""
        ...

    def loads(self, place: int) -> None:
        """It is to be replaced."""
        ...


class OptimizerHooks:
    """One optimizer's calls.

    Args:
        place: which of the attached optimizers.
        optimizer: it.
        owner: what it reports to.
    """

    def __init__(self, place: int, optimizer: optim.Optimizer, owner: Owner) -> None:
        self._place, self.optimizer, self._owner = place, optimizer, owner
        self.tasks: dict[int, int] = {}
        self._strangers: list[torch.Tensor] = []
        """Parameters of the optimizer that are none of the model's: stepped together with the others."""
        self._reasons: set[str] = set()
        """Why not to defer, as far as it was said."""
        self._before = {name: vars(optimizer).get(name) for name in ("step", "add_param_group")}
        self._step: Callable[..., Any] = optimizer.step
        self._add: Callable[..., None] = optimizer.add_param_group
        self._closed = False
        reason = why_not_separable(optimizer)
        if reason:
            self._say(reason)
        optimizer.step = types.MethodType(_method(self.step, self._step), optimizer)  # pyright: ignore
        optimizer.add_param_group = types.MethodType(_method(self.add, self._add), optimizer)
        self._handles: list[Handle] = [
            optimizer.register_state_dict_pre_hook(Hook(partial(owner.saves, place))),
            optimizer.register_state_dict_post_hook(Hook(partial(owner.saved, place))),
            optimizer.register_load_state_dict_pre_hook(Hook(partial(owner.loads, place))),
        ]

    def assign(self, task_of: dict[int, int]) -> None:
        """Notes which tasks this optimizer updates; ``task_of`` is by id of the parameter."""
        for group in self.optimizer.param_groups:
            if type(group["params"]) is list:
                group["params"] = access_guards.Members(group["params"])
        self._strangers = [
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
        """The optimizer's step, now or later. Deferred steps return None, as steps without a closure do."""
        if self._closed:
            return self._step(closure, **options) if closure is not None else self._step(**options)
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] what schedulers look for
        if closure is not None or options:
            self._owner.whole("its step() is given a closure, or options")
            return self._whole(closure, options)
        reason = why_not_separable(self.optimizer)
        if reason and reason not in self._reasons:
            self._say(reason)
        if reason or any(parameter.grad is not None for parameter in self._strangers):
            self._owner.whole(reason or "it has parameters that are none of the model's")
        elif self._owner.defer(self._place, self.optimizer, self.tasks):
            return None
        return self._whole(None, {})

    def _whole(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """The optimizer's own step, at once; each evaluation of ``closure`` ends with all gradients summed."""
        began = perf_counter_ns()

        def evaluate() -> Any:
            nonlocal began
            assert closure is not None
            value = closure()
            self._owner.gather()
            began = perf_counter_ns()
            return value

        result = self._step(**options) if closure is None else self._step(evaluate, **options)
        self._owner.stepped((perf_counter_ns() - began) * NANOSECOND)
        return result

    def add(self, group: dict[str, Any]) -> None:
        """Adds a parameter group; its parameters join the schedule after another look at some steps."""
        if self._closed:
            self._add(group)
            return
        self._owner.gather()
        self._add(group)
        self._owner.regrouped()

    def close(self) -> None:
        """Gives the optimizer its own methods back."""
        self._closed = True
        remove_all(self._handles)
        for group in self.optimizer.param_groups:
            if isinstance(group["params"], access_guards.Members):
                group["params"] = list(group["params"].raw())
        for name, before in self._before.items():
            if getattr(vars(self.optimizer).get(name), "__func__", None) is None:
                continue  # a scheduler has wrapped it since, and calls through
            if before is None:
                delattr(self.optimizer, name)
            else:
                setattr(self.optimizer, name, before)

    def _say(self, reason: str) -> None:
        self._reasons.add(reason)
        logger.warning("%s: its steps wait for all gradients (communication still overlaps the backward pass)", reason)


def _method(call: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    # Among what is copied is a scheduler's mark, by which it knows a step that it has seen.
    functools.update_wrapper(method, like)
    return method


def check(optimizers: optim.Optimizer | Sequence[optim.Optimizer], model: nn.Module) -> list[optim.Optimizer]:
    """The optimizers as a list; ConfigError where one is none, or updates nothing of ``model``."""
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
