"""Adviser of a script's own DistributedDataParallel: observes some steps, then forecasts its best arguments.

``foretrain run --advise`` leaves training as it is. Hooks take times, and once, between two steps, the ranks measure
what an all-reduce costs them. Then rank 0 says which bucket sizes would make an iteration shorter, and on CPUs whether
the network loses so many packets that bounded loss may.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foretrain.comm.observation import StepObserver, workload_of
from foretrain.comm.runtime_plan import slowest
from foretrain.launch.tcp_losses import loss_advice, sent_again
from foretrain.planner.bucket_advice import BucketAdvice, advise_buckets
from foretrain.planner.candidate_search import cluster_of
from foretrain.planner.choice import usual
from foretrain.plugins.torch.hooks import after_forward, before_forward, parameter_modules
from foretrain.plugins.torch.process_groups import ControlGroup
from foretrain.schedule import Spec
from foretrain.units import NANOSECOND
from foretrain.workload.recorder import stopwatch

STEPS = 10
"""Steps that are observed; the first does not count."""


_SMALLEST, _LARGEST = 1 << 10, 1 << 34


def buckets_of(wrapper: DistributedDataParallel) -> Spec:
    """Return the policy that ``wrapper`` follows by its arguments."""
    knobs: dict[str, Any] = {}
    if caps := wrapper.bucket_bytes_cap_list:
        knobs["buckets"] = tuple(min(max(1, cap), _LARGEST) for cap in caps)
    elif not wrapper.bucket_bytes_cap_default:
        knobs["bucket"] = knobs["first"] = min(max(_SMALLEST, wrapper.bucket_bytes_cap), _LARGEST)
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        knobs["find_unused"] = 1
    return Spec("ddp", knobs)


class DdpAdviser:
    """Adviser of one model: observes `STEPS` training steps of ``wrapper``, then forecasts. All ranks make one.

    Attributes:
        advice: what it found, on every rank; None before, and where one rank trains alone.
        closed: whether it observes no more.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.advice: BucketAdvice | None = None
        self.sent_again: float | None = None
        """Share of all ranks' TCP packets; None where bounded loss is no choice."""
        self.closed = False
        self._model: nn.Module = wrapper.module
        assert wrapper.process_group is not None
        self._group = wrapper.process_group
        self._present, self._copies = buckets_of(wrapper), not wrapper.gradient_as_bucket_view
        self._named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad and p.numel()]
        self._own = {parameter for _, parameter in self._named}
        self._device = self._named[0][1].device
        self._observer = StepObserver(len(self._named), stopwatch({self._device}))
        self._passes, self._began, self._step_over = 0, 0, False
        task_of = {id(parameter): task for task, (_, parameter) in enumerate(self._named)}
        self._hooks = ExitStack()
        self._hooks.callback(before_forward(self._model, self._begin_forward))
        for module, parameters in parameter_modules(self._model):
            tasks = [task_of[id(parameter)] for parameter in parameters if id(parameter) in task_of]
            self._hooks.callback(before_forward(module, partial(self._use, tasks)))
        self._hooks.callback(after_forward(self._model, self._end_forward))
        for task, (_, parameter) in enumerate(self._named):
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(partial(self._gradient, task)).remove)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)

    @property
    def steps(self) -> int:
        """Return the number of whole steps observed."""
        return self._observer.steps

    def close(self) -> None:
        """Stop observing. Idempotent."""
        self.closed = True
        self._hooks.close()

    def ready(self) -> bool:
        """Return whether enough was seen, at the beginning of a training forward; the same on all ranks."""
        if self._step_over:
            self._step_over = False
            self._observer.end_step()
        return not self.closed and self.steps >= STEPS

    def advise(self) -> list[str]:
        """Measure the network, forecast, and stop observing; return lines for people. Collective."""
        self.close()
        control = ControlGroup(self._group, self._device)
        if control.ranks == 1:
            return ["one rank alone exchanges nothing: start more to be advised"]
        seen = slowest(control, self._observer.observed())
        names = [name for name, _ in self._named]
        sizes = [parameter.nbytes for _, parameter in self._named]
        where = f"{control.ranks} ranks of {self._device.type}"
        workload = workload_of(seen, names, sizes, type(self._model).__name__, where)
        crowding = seen.crowding / 1000
        place = cluster_of(control.cost(crowding), control.ranks)
        self.advice = advise_buckets(
            workload, place, present=self._present, copies=self._copies, doubt=usual(place, crowding)
        )
        lines = [f"{self.steps} steps of {type(self._model).__name__} observed on {place}", *self.advice.lines]
        if self._device.type == "cpu":  # bounded loss sums on no other, and NCCL's packets are not the kernel's
            again, sent = (sum(counts) for counts in zip(*control.gather(sent_again()), strict=True))
            self.sent_again = again / max(sent, 1)
            lines.append(loss_advice(again, sent))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON; no advice where too few steps were seen, or one rank alone."""
        advice = None if self.advice is None else self.advice.to_dict()
        return {
            "model": type(self._model).__name__,
            "steps": self.steps,
            "advice": advice,
            "packets_sent_again": self.sent_again,
        }

    # ── from the hooks ──

    def _begin_forward(self) -> None:
        if self._model.training:
            self._passes += 1
            self._observer.begin_forward()

    def _use(self, tasks: list[int]) -> None:
        for task in tasks:
            self._observer.use(task)

    def _end_forward(self) -> None:
        if self._model.training:
            self._observer.end_forward()

    def _gradient(self, task: int, _: Tensor) -> None:
        self._observer.gradient(task, self._passes)

    def _trains(self, optimizer: Optimizer) -> bool:
        return any(parameter in self._own for group in optimizer.param_groups for parameter in group["params"])

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._trains(optimizer):
            self._observer.reduced()
            self._began = time.perf_counter_ns()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._trains(optimizer):
            self._observer.updated((time.perf_counter_ns() - self._began) * NANOSECOND)
            self._step_over = True
