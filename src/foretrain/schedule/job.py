"""Static knowledge of a policy: its tasks, their expected release times, and the cost of sending."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.tasks import Task
from foretrain.units import COST_SHIFT, Time, moving
from foretrain.workload.step import Workload


@dataclass(frozen=True, slots=True)
class CostModel:
    """The α–β model of one operation, as MG-WFBP and Prophet use it.

    Attributes:
        overhead: θ, time of an operation whatever its size.
        per_byte: κ in the fixed point of `units.per_byte`.
        latency: time an operation spends on the way without occupying the link.
        elsewhere: what a byte costs on the other pipes of its way together, in the same fixed point.
        floor: least time that an operation occupies the link, hidden behind the bytes of larger ones.
    """

    overhead: Time
    per_byte: int
    latency: Time = 0
    elsewhere: int = 0
    floor: Time = 0

    @property
    def breakeven(self) -> int:
        """Bytes below which an operation costs more than what it carries: α/κ."""
        return (self.startup << COST_SHIFT) // max(1, self.per_byte)

    @property
    def startup(self) -> Time:
        """Return α: the cost of the smallest operation."""
        return max(self.overhead, self.floor)

    def time(self, size: int) -> Time:
        """Return how long ``size`` bytes occupy the link."""
        return max(self.floor, self.overhead + moving(size, self.per_byte))

    def delay(self, size: int) -> Time:
        """Return the delay of ``size`` bytes in addition to the time they occupy the link."""
        return self.latency + moving(size, self.elsewhere)


@dataclass(frozen=True, slots=True)
class Job:
    """Workload as the scheduler sees it.

    Attributes:
        tasks: indexed by `Task.index`, registration order.
        layers: per task, the layer that uses it first.
        releases: per task, r: ps after the start of the backward pass.
        tails: per task, q: ps that must still pass after it lands, its update and the rest of the forward pass.
        forward: per layer.
        backward: Σ of all layers.
        cost: of one exchange.
    """

    tasks: tuple[Task, ...]
    layers: tuple[int, ...]
    releases: tuple[Time, ...]
    tails: tuple[Time, ...]
    forward: tuple[Time, ...]
    backward: Time
    cost: CostModel

    @classmethod
    def of(cls, workload: Workload, cost: CostModel) -> Job:
        """Return the job of ``workload`` on a network of ``cost``."""
        gradients = workload.gradients
        order = sorted(range(len(gradients)), key=lambda i: (gradients[i].layer, i))
        rank = {index: place for place, index in enumerate(order)}
        left, after = workload.forward, []
        for layer in workload.layers:
            after.append(layer.update + left)
            left -= layer.forward
        return cls(
            tasks=tuple(Task(i, g.name, g.size, rank[i]) for i, g in enumerate(gradients)),
            layers=tuple(g.layer for g in gradients),
            releases=tuple(g.release for g in gradients),
            tails=tuple(after[g.layer] for g in gradients),
            forward=tuple(layer.forward for layer in workload.layers),
            backward=workload.backward,
            cost=cost,
        )

    @property
    def by_urgency(self) -> tuple[int, ...]:
        """Task indices, the first used first."""
        return tuple(sorted(range(len(self.tasks)), key=lambda i: self.tasks[i].first_use))

    @property
    def by_release(self) -> tuple[int, ...]:
        """Task indices in the order the backward pass releases them; of one instant the deepest layer first."""
        return tuple(sorted(range(len(self.tasks)), key=lambda i: (self.releases[i], -self.layers[i], i)))
