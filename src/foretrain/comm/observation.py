"""Profile of the first steps: the order in which parameters are used, and the times at which gradients are ready.

Registration order is not the order of use, which only a running step shows. Times are those of this hardware, batch and
model: policies that plan ahead (Prophet, MG-WFBP, PACE …) need them, as does a run's distance to its optimum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import msgspec

from foretrain.units import NANOSECOND, Time
from foretrain.workload.recorder import Stopwatch
from foretrain.workload.step import Gradient, Layer, Workload


class StepProfile(msgspec.Struct, frozen=True):
    """Typical step of one rank; times in ps.

    Attributes:
        order: task indices by first use; those never used come last.
        uses: per task in ``order``, time of its first use, from the beginning of the forward pass.
        forward: length of the forward pass; of all passes but the last backward pass where gradients accumulate.
        releases: per task, time at which its gradient was complete, from the beginning of the backward pass; the end
            of the pass for those that had none.
        backward: length of the backward pass.
        update: length of one whole optimizer step.
        fires: per task, most accumulations of its gradient in one backward pass.
        passes: backward passes before gradients were summed.
        crowding: share of an operation's work that delays the computation, in thousandths; see `crowding`.
    """

    order: list[int]
    uses: list[Time]
    forward: Time
    releases: list[Time]
    backward: Time
    update: Time
    fires: list[int]
    passes: int
    crowding: int = 0

    @property
    def compute(self) -> Time:
        """Return forward plus backward time, by which ranks are compared for speed."""
        return self.forward + self.backward


@dataclass
class _Step:
    forward: list[tuple[int, Any]] = field(default_factory=list)
    """(task, mark) of each first use; -1 begins the first forward pass and -2 ends one, of which the last counts."""
    used: set[int] = field(default_factory=set)
    gradients: dict[int, Any] = field(default_factory=dict)
    fires: dict[int, Counter[int]] = field(default_factory=dict)
    """Per backward pass, accumulations of each task's gradient."""
    passes: int = 1
    """Backward passes before gradients were last summed."""
    update: Time = 0


class StepObserver:
    """Recorder of ``count`` tasks in each step, by the clock of the model's device. Belongs to the training thread."""

    def __init__(self, count: int, watch: Stopwatch) -> None:
        self._count, self._watch = count, watch
        self._steps: list[_Step] = []
        self._step = _Step()
        self._began: Ticks | None = None
        self._computed = Ticks(0, 0)
        """CPU time while gradients were computed."""
        self._recent: set[int] = set()
        """Backward passes since gradients were last summed."""
        self._inside = False

    @property
    def steps(self) -> int:
        """Return the number of whole steps seen."""
        return len(self._steps)

    def begin_forward(self) -> None:
        """Note that a forward pass of the whole model begins.

        Earlier passes that accumulated gradients are part of the step: the first needs the parameters, and all
        computation until this one ends counts as the last layer's forward pass.
        """
        if self._began is None or not self._step.forward:
            self._began = ticks()
            self._step.forward = [(-1, self._watch.mark())]
            self._step.used.clear()
        self._inside = True

    def end_forward(self) -> None:
        """Note that the forward pass ends and the backward pass begins."""
        self._step.forward.append((-2, self._watch.mark()))
        self._inside = False

    def use(self, task: int) -> None:
        """Note that ``task`` is used; only the first use in a forward pass counts."""
        if self._inside and task not in self._step.used:
            self._step.used.add(task)
            self._step.forward.append((task, self._watch.mark()))

    def gradient(self, task: int, number: int) -> None:
        """Note that a gradient was accumulated in backward pass ``number``."""
        self._step.gradients.pop(task, None)
        self._step.gradients[task] = self._watch.mark()
        self._step.fires.setdefault(number, Counter())[task] += 1
        self._recent.add(number)

    def reduced(self) -> None:
        """Note that gradients are summed now, and nothing is computed until the next forward pass; further passes
        before step(), as of a closure, are another round.
        """
        if self._began is not None:
            self._computed = self._computed.plus(self._began, ticks())
            self._began = None
        if self._recent:
            self._step.passes = len(self._recent)
            self._recent.clear()

    def updated(self, took: Time) -> None:
        """Note that an optimizer step took ``took``."""
        self._step.update += took

    def end_step(self) -> None:
        """Note that step() was called for the last time before the next backward pass."""
        self._steps.append(self._step)
        self._step = _Step()

    def observed(self) -> StepProfile:
        """Return the median step; the first, which pays for allocations, counts only if it is the only one.

        Of an even number it is the lower median: what disturbs a step makes it longer, and of two steps the mean would
        be disturbed by either.
        """
        steps = [self._settle(step) for step in self._steps[1:] or self._steps]
        uses, order = self._uses(steps)
        releases = [median_low([s.releases.get(task, s.backward) for s in steps] or [0]) for task in range(self._count)]
        return StepProfile(
            order=order,
            uses=uses,
            forward=median_low(s.forward for s in steps),
            releases=releases,
            backward=max([median_low(s.backward for s in steps), *releases]),
            update=median_low(s.update for s in steps),
            fires=[max([p[task] for s in self._steps for p in s.fires.values()] + [1]) for task in range(self._count)],
            passes=self._steps[-1].passes,
            crowding=round(1000 * crowding(self._computed)),
        )

    def backwards(self) -> int:
        """Return the number of backward passes of the last step, summed together or one by one."""
        return max(1, len(self._steps[-1].fires))

    def unseen(self) -> list[int]:
        """Return tasks with a gradient and no observed use, which may be used from the start of the forward pass."""
        used = set().union(*(step.used for step in self._steps))
        return sorted(set().union(*(step.gradients for step in self._steps)) - used)

    def _uses(self, steps: Sequence[_Times]) -> tuple[list[Time], list[int]]:
        found: dict[int, Time] = dict.fromkeys(self.unseen(), 0)
        for task in range(self._count):
            times = [s.uses[task] for s in steps if task in s.uses]
            if times:
                found[task] = median_low(times)
        # Ties and never used: the order of the last step, then registration order.
        rank = {task: place for place, task in enumerate(steps[-1].uses)}
        last = max(found.values(), default=0)
        order = sorted(range(self._count), key=lambda t: (t not in found, found.get(t, last), rank.get(t, t)))
        return [found.get(task, last) for task in order], order

    def _settle(self, step: _Step) -> _Times:
        marks = [mark for _, mark in step.forward] + list(step.gradients.values())
        times = dict(zip(range(len(marks)), self._watch.settle(marks), strict=True)) if marks else {}
        uses: dict[int, Time] = {}
        begin = end = 0
        for place, (task, _) in enumerate(step.forward):
            if task == -2:
                end = times[place]
            elif task >= 0:
                uses[task] = times[place]
        end = max(end, *uses.values(), begin) if uses else end
        after = len(step.forward)
        releases = {task: max(0, times[after + k] - end) for k, task in enumerate(step.gradients)}
        return _Times(uses, end - begin, releases, max(releases.values(), default=0), step.update)


@dataclass(frozen=True)
class _Times:
    uses: dict[int, Time]
    forward: Time
    releases: dict[int, Time]
    backward: Time
    update: Time


def workload_of(seen: StepProfile, names: Sequence[str], sizes: Sequence[int], model: str, place: str) -> Workload:
    """Return the observed step as a `Workload`: a layer is the parameters that one module uses first.

    Args:
        seen: the step.
        names: of the parameters, by task; the text before the last dot is the module, and one without a dot is a module
            itself.
        sizes: bytes on the wire, by task.
        model: its name.
        place: the device it was observed on.

    The backward time of a layer passes between the gradients of the layer behind it and its own.
    """
    modules: dict[str, list[int]] = {}
    for task in seen.order:
        modules.setdefault(names[task].rpartition(".")[0] or names[task], []).append(task)
    use = dict(zip(seen.order, seen.uses, strict=True))
    starts = [use[tasks[0]] for tasks in modules.values()]
    ends = [*starts[1:], max(seen.forward, starts[-1])]
    done = [max(seen.releases[task] for task in tasks) for tasks in modules.values()]
    backward = [0] * len(modules)
    before: Time = 0
    for place_of in sorted(range(len(modules)), key=done.__getitem__):
        backward[place_of], before = done[place_of] - before, done[place_of]
    backward[0] += seen.backward - before
    total = sum(sizes)
    layers, gradients = [], {}
    for place_of, (name, tasks) in enumerate(modules.items()):
        start = 0 if place_of == 0 else starts[place_of]
        update = seen.update * sum(sizes[task] for task in tasks) // total
        layers.append(Layer(name, max(0, ends[place_of] - start), backward[place_of], update))
        for task in tasks:
            gradients[task] = Gradient(names[task], sizes[task], place_of, seen.releases[task])
    if not sum(layer.forward + layer.backward for layer in layers):
        layers[0] = Layer(layers[0].name, NANOSECOND, layers[0].backward, layers[0].update)
    everything = tuple(gradients[task] for task in range(len(names)))
    return Workload(model, 1, tuple(layers), everything, source=f"observed on {place}")


_STAT = Path("/proc/stat")
_FREE = 0.7
"""Share of busy cores up to which a woken thread finds a free one."""


class Ticks(NamedTuple):
    """CPU time.

    Attributes:
        busy, all: of all cores together, in the kernel's unit.
        own, wall: of this process, and what passed meanwhile, ns.
    """

    busy: int
    all: int
    own: int = 0
    wall: int = 0

    def plus(self, began: Ticks, now: Ticks) -> Ticks:
        """Return these ticks plus the time between two readings of `ticks`."""
        return Ticks(*(mine + after - before for mine, before, after in zip(self, began, now, strict=True)))


def ticks() -> Ticks:
    """Return the ticks since boot; of all cores zeros where the kernel does not report them."""
    own = time.process_time_ns(), time.monotonic_ns()
    try:
        first = _STAT.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return Ticks(0, 0, *own)
    # cpu user nice system idle iowait irq softirq steal guest guest_nice; user and nice include the last two.
    times = [int(word) for word in first.split()[1:9]]
    return Ticks(sum(times) - sum(times[3:5]), sum(times), *own)


def crowding(spent: Ticks) -> float:
    """Return 0 if a woken thread finds a free core, up to 1 if each operation takes its time from the computation.

    Of a computation that leaves the cores alone, as an accelerator's does, an operation takes nothing, however busy
    others keep them.
    """
    busy = spent.busy / spent.all if spent.all > 0 else 0.0
    computing = min(1.0, spent.own / spent.wall) if spent.wall > 0 else 0.0
    return computing * min(1.0, max(0.0, (busy - _FREE) / (1 - _FREE)))
