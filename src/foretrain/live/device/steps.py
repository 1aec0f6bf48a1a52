"""Steps of a rank's script: noted in its log when optimizers have made them."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foretrain.live.device import operator_cost, put, script, streams
from foretrain.live.device.expert_loads import Routers
from foretrain.live.device.operator_cost import HostOptimizerStep, local_part

_NONE = 0
"""In the place of the id of an optimizer, where a script has none, or of a parameter."""
_TRIALS = 2
"""Backward passes that a script may make before its first optimizer, and that are no steps."""


class Steps:
    """Notes every step of the optimizer, and ends the script after the last wanted.

    Where a script has several optimizers, the first that makes its n-th step makes the script's. An optimizer makes its
    n-th when it updates a parameter for the n-th time: DeepSpeed's ZeRO calls it for each group of parameters. While a
    script has made none, it updates parameters by hand, and each backward pass counts as a step. What is launched from
    one step to the next, and which memory is for what, is known here as well.
    """

    expects_whole_steps = False
    """False: updates may be applied parameter by parameter; see
    `foretrain.plugins.torch.deferred_optimizer.why_not_separable`."""

    def __init__(
        self,
        device: ModuleType,
        prices: operator_cost.Prices,
        wanted: int | None,
        stepped: Callable[[], None],
        host: HostOptimizerStep | None,
        routers: Routers | None,
    ) -> None:
        self._device, self._prices, self._wanted, self._tell = device, prices, wanted, stepped
        self._host, self._routers = host, routers
        self._updated: dict[int, Counter[int]] = {}
        self._updating: tuple[int, ...] = ()
        # By identity: a reference would keep a state that the script has dropped in memory.
        self._states: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._before: dict[str, Any] = device.counts()
        self._before_update: Sequence[int] = ()
        self._updates: Counter[int] = Counter()
        self._by_hand, self._passes, self._passes_by_hand = True, 0, 0
        self.done = 0
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(self._stepped)
        self._watch_backward()

    def _watch_backward(self) -> None:
        make, backward = Optimizer.__init__, torch.autograd.backward

        @wraps(make)
        def made(*arguments: Any, **named: Any) -> None:
            self._by_hand = False
            make(*arguments, **named)

        @wraps(backward)
        def passed(*arguments: Any, **named: Any) -> None:
            self._passes += 1
            try:
                backward(*arguments, **named)
            finally:
                self._passes -= 1
            if self._by_hand and not self._passes:  # reentrant checkpoints have passes within passes
                self._passed()

        put(Optimizer, __init__=made)
        put(torch.autograd, backward=passed)

    def _passed(self) -> None:
        """Count a backward pass as a step, but for the first: they may only try the model."""
        device = self._device
        self._passes_by_hand += 1
        if self._passes_by_hand <= _TRIALS:
            return
        if not self.done:
            text = "the script has no optimizer of torch.optim: each backward pass is taken for a step"
            device.note(device.WARNING, 0, 0, text.encode())
        if not device.capturing():
            self._made_one(_NONE, (_NONE,))

    def _steps(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Begin a step; a closure that it is given, e.g. by Lightning, makes passes, which are none of the update."""
        if self.done == self._wanted:  # a bare except of the script has kept it from ending
            raise script.Enough
        self._begin_update(optimizer)
        closure = named.get("closure", next(iter(arguments[1:]), None))
        if not callable(closure):
            return None

        @wraps(closure)
        def passes() -> Any:
            self._end_update()
            loss = closure()
            self._begin_update(optimizer)
            return loss

        if "closure" in named:
            return arguments, named | {"closure": passes}
        return (arguments[0], passes, *arguments[2:]), named

    def _begin_update(self, optimizer: Optimizer) -> None:
        device = self._device
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        self._updating = tuple(id(one) for one in parameters if one.grad is not None or not gradients) or (_NONE,)
        device.retag([local_part(tensor) for tensor in parameters], device.PARAMETER)
        device.retag([local_part(tensor) for tensor in gradients], device.GRADIENT)
        if self._states.get(optimizer) != id(optimizer.state):  # made by load_state_dict; others in step() itself
            self._states[optimizer] = id(optimizer.state)
            device.retag(list(_tensors(optimizer.state)), device.OPTIMIZER)
        device.set_tag(device.OPTIMIZER)
        self._before_update = device.counts()["by_name"]
        if self._host is not None:
            self._host.begin([local_part(tensor) for tensor in parameters if tensor.grad is not None])

    def _end_update(self) -> None:
        device = self._device
        device.set_tag(device.ACTIVATION)
        self._updates.update(dict(enumerate(_more(device.counts()["by_name"], self._before_update))))
        if self._host is not None:
            self._host.end()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._end_update()
        device = self._device
        if not device.capturing():
            self._made_one(id(optimizer), self._updating)
        elif not streams.after_replays(optimizer, partial(self._made_one, id(optimizer), self._updating)):
            text = "a CUDA graph in which an optimizer makes several steps is taken for one step"
            device.note(device.WARNING, 0, 0, text.encode())

    def _made_one(self, optimizer: int, parameters: Sequence[int]) -> None:
        """Count an update of these parameters, by their ids, by an optimizer, by its, which has been launched."""
        device = self._device
        updated = self._updated.setdefault(optimizer, Counter())
        updated.update(parameters)
        made = max(map(updated.__getitem__, parameters))
        if made <= self.done:
            return
        self.done = made
        if self._routers is not None:
            self._routers.step = made
        self._tell()
        device.note(device.STEP, made, device.record(), b"")
        device.end_memory_step()
        now = device.counts()
        device.note(device.COST, made, 0, json.dumps(self._cost(now)).encode())
        self._before = now
        self._updates.clear()
        if made == self._wanted:
            raise script.Enough

    def _cost(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return the work that was launched since the step before."""
        before = self._before
        spreads = itertools.zip_longest(now["spreads"], before["spreads"], fillvalue=0.0)
        names = self._device.kernel_names()
        by_name = zip(names, _more(now["by_name"], before["by_name"]), strict=False)  # the last have no launch yet
        return {
            "kernels": now["kernels"] - before["kernels"],
            "flops": now["flops"] - before["flops"],
            "recomputed": now["recomputed"] - before["recomputed"],
            "times": [one - other for one, other in zip(now["times"], before["times"], strict=True)],
            "spread": round(math.hypot(*(one - other for one, other in spreads))),
            "by_name": {name: time for name, time in by_name if time},
            "updates": {names[number]: time for number, time in self._updates.items() if time},
            "unknown": self._prices.unknown,
            "unused": self._prices.unused,
        }


def _more(now: Sequence[int], before: Sequence[int]) -> Iterator[int]:
    """Yield by how much times by kernel's number have grown; new kernels have new numbers."""
    return (one - other for one, other in itertools.zip_longest(now, before, fillvalue=0))


def _tensors(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield this rank's part of an optimizer's state."""
    for values in state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                yield local_part(value)
