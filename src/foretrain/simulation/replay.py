"""Training loop without tensors, in any world.

Layers compute one after the other, as on a GPU. Gradients are released at the workload's times. The forward pass of a
layer waits until its own parameters have landed and been updated; under a policy with a barrier it waits for all.

    step k:   backward (t = 0) ── gradients released ──┐            step k+1: backward …
                                                       └ landed → updated → forward of that layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from foretrain.engine import Decision, Engine, World
from foretrain.errors import StallError
from foretrain.schedule import Job, ScheduledPolicy
from foretrain.tasks import Ready, StepBegin
from foretrain.trace import Kind, Span, Timeline
from foretrain.units import Time
from foretrain.workload.step import Workload


class TrainingLoop:
    """Loop of ``steps`` steps of ``workload`` under ``policy`` in ``world``.

    Args:
        workload: what is computed and released.
        job: the scheduler's view of it.
        policy: decides what is sent.
        world: where it runs.
        steps: how many; ``steps`` + 1 backward passes begin.
        timeline: where to record computation; None records nothing.
        served: whether the carrier of the chunks calls `landed`, as over a parameter server, where a sum comes back
            after its push is done; otherwise a task has landed when all its bytes are done.
    """

    def __init__(
        self,
        workload: Workload,
        job: Job,
        policy: ScheduledPolicy,
        world: World,
        steps: int,
        timeline: Timeline | None = None,
        served: bool = False,
    ) -> None:
        self._workload = workload
        self._job = job
        self._world = world
        self._barrier = policy.barrier
        self._steps = steps
        self._timeline = timeline
        self._engine = Engine(policy, world, job.tasks, None if served else self.landed)
        self._releases = [
            (release, tuple(group)) for release, group in groupby(job.by_release, key=job.releases.__getitem__)
        ]
        self._owned = [0] * len(workload.layers)
        for layer in job.layers:
            self._owned[layer] += 1
        self.begins: list[Time] = []
        self.on_begin: Callable[[], None] | None = None
        self._reset()

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return the policy's decisions."""
        return self._engine.log

    def begin(self) -> None:
        """Begin a backward pass now."""
        now = self._world.now()
        self.begins.append(now)
        if self.on_begin:
            self.on_begin()
        if len(self.begins) > self._steps:
            return
        self._reset()
        self._engine.post(StepBegin(len(self.begins) - 1))
        for release, group in self._releases:
            self._world.call_at(now + release, lambda group=group: self._release(group))
        self._gpu = now + self._workload.backward
        self._world.call_at(self._gpu, self._end_backward)
        if self._timeline is not None:
            self._draw_backward(now)

    def landed(self, task: int) -> None:
        """Record that the sum of ``task`` has arrived."""
        layer = self._job.layers[task]
        self._missing[layer] -= 1
        self._unlanded -= 1
        if not self._missing[layer]:
            now, update = self._world.now(), self._workload.layers[layer].update
            self._open[layer] = now + update
            if update and not self._barrier:
                self._draw("optimizer", "update", self._workload.layers[layer].name, now, now + update)
        self._advance()

    def raise_if_stalled(self, steps: int | None = None) -> None:
        """Raise StallError that lists who waits for what, unless the first ``steps`` steps are complete."""
        steps = self._steps if steps is None else steps
        if len(self.begins) > steps:
            return
        step = len(self.begins) - 1
        waits = [
            f"layer {layer.name!r}: its forward waits for {missing} of its {owned} gradients"
            for layer, missing, owned in zip(self._workload.layers, self._missing, self._owned, strict=True)
            if missing
        ]
        raise StallError(f"step {step} of {steps} cannot go on:", [*waits, *self._engine.waiting()])

    def _reset(self) -> None:
        self._missing = list(self._owned)
        self._open: list[Time] = [0] * len(self._owned)
        self._unlanded = len(self._job.tasks)
        self._next = 0
        self._gpu: Time = 0
        self._computing = True

    def _release(self, group: Sequence[int]) -> None:
        for task in group:
            self._engine.post(Ready(task))

    def _end_backward(self) -> None:
        self._computing = False
        self._advance()

    def _advance(self) -> None:
        """Run the forward pass up to the first layer whose gradients are missing."""
        if self._computing or (self._barrier and self._unlanded):
            return
        layers = self._workload.layers
        if self._barrier and not self._next:
            self._update_all()
        while self._next < len(layers) and not self._missing[self._next]:
            layer = layers[self._next]
            start = self._gpu if self._barrier else max(self._gpu, self._open[self._next])
            if start > self._gpu:
                self._draw("gpu", "wait", layer.name, self._gpu, start)
            self._gpu = start + layer.forward
            self._draw("gpu", "forward", layer.name, start, self._gpu)
            self._next += 1
        if self._next == len(layers):
            self._computing = True
            self._world.call_at(self._gpu, self.begin)

    def _update_all(self) -> None:
        """Update all parameters on the GPU, after the last gradient has landed at the barrier."""
        now = self._world.now()
        if now > self._gpu:
            self._draw("gpu", "wait", "barrier", self._gpu, now)
        self._gpu = max(self._gpu, now) + self._workload.update
        if self._workload.update:
            self._draw("gpu", "update", "all", self._gpu - self._workload.update, self._gpu)

    def _draw(self, lane: str, kind: Kind, name: str, start: Time, end: Time) -> None:
        if self._timeline is not None:
            self._timeline.add(Span(lane, kind, name, len(self.begins) - 1, start, end))

    def _draw_backward(self, now: Time) -> None:
        for layer in reversed(self._workload.layers):
            if layer.backward:
                self._draw("gpu", "backward", layer.name, now, now + layer.backward)
                now += layer.backward
