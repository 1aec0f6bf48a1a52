"""Computation that is sleep, paced by the times of a workload; needs no framework.

A host that trains on an accelerator is idle while the accelerator computes, and so is a host that sleeps. That leaves
the CPU to the measured communication, and makes computation exact and adjustable.

# Note [The clock of an accelerator]
An accelerator works off a queue: the host may run late by less than the queued work without slowing it down, but where
the host waits for parameters before it queues the next layer, the accelerator idles. So layers do not sleep *for* their
time but *until* a virtual time, which host overhead below the computation does not move. Waiting moves it:

- the forward pass of a step begins no earlier than the host does (which has waited for the optimizer and a barrier);
- a layer begins no earlier than the host, where a forward pre-hook made the host wait for the layer's parameters, for
  longer than `_HOOK_OVERHEAD`, the most that a hook takes without waiting.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from foretrain.errors import ConfigError
from foretrain.trace import Span
from foretrain.units import MICROSECOND, Time
from foretrain.workload import Layer, Workload

_HOOK_OVERHEAD: Time = 150 * MICROSECOND
_LEAST_SLEEP: Time = 20 * MICROSECOND
"""Shorter waits are skipped: a sleep takes 60 µs more than was asked for."""


class AcceleratorClock:
    """Clock of a virtual accelerator; see Note [The clock of an accelerator]. Belongs to one thread.

    Args:
        slower: share by which this accelerator is slower than the workload says, 0.2 for a straggler of 20 %.
        jitter: each piece of computation takes between 1 − ``jitter`` and 1 + ``jitter`` of its time.
        seed: of the jitter.
        now: a real clock, ps.
        sleep: waits for seconds.

    Attributes:
        time: end of the accelerator's queued work, ps of ``now``.
        busy: total computing time, ps.
        begins: start of each backward pass.
        spans: the computations, on the lane ``"gpu"``; None, the default, records nothing.
    """

    def __init__(
        self,
        *,
        slower: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        now: Callable[[], Time] = lambda: time.perf_counter_ns() * 1000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._factor = 1 + slower
        self._jitter = jitter
        self._random = random.Random(seed)
        self._now, self._sleep = now, sleep
        self._arrived: Time = 0
        self.time: Time = now()
        self.busy: Time = 0
        self.begins: list[Time] = []
        self.spans: list[Span] | None = None

    def sync(self) -> None:
        """Begin no work before now: the host has waited."""
        self.time = max(self.time, self._now())

    def arrive(self) -> None:
        """Note that the host is about to enter a layer."""
        self._arrived = self._now()

    def enter(self) -> None:
        """Note that the host is in the layer; if that took long, it has waited."""
        now = self._now()
        if now - self._arrived > _HOOK_OVERHEAD:
            self.time = max(self.time, now)

    def compute(self, kind: str, name: str, duration: Time) -> None:
        """Compute for ``duration``: sleep until the accelerator has finished."""
        if self._factor != 1 or self._jitter:
            duration = round(duration * self._factor * (1 + self._random.uniform(-self._jitter, self._jitter)))
        began, self.time, self.busy = self.time, self.time + duration, self.busy + duration
        if self.spans is not None and duration:
            assert kind in ("forward", "backward")
            self.spans.append(Span("gpu", kind, name, len(self.begins) - 1, began, self.time))
        if (ahead := self.time - self._now()) > _LEAST_SLEEP:
            self._sleep(ahead / 1e12)

    def turn(self) -> None:
        """Note that a backward pass begins."""
        self.begins.append(self.time)


class BackwardSegment(NamedTuple):
    """Part of one layer's backward pass: ``gradients``, by index, are released at its end."""

    duration: Time
    gradients: tuple[int, ...]


def stretches(workload: Workload) -> tuple[tuple[BackwardSegment, ...], ...]:
    """Return the backward pass of every layer, cut where gradients are released, in the order it runs.

    A gradient may be released in the backward pass of another layer than the one that uses it first.
    """
    released: dict[Time, list[int]] = {}
    for index, gradient in enumerate(workload.gradients):
        released.setdefault(gradient.release, []).append(index)
    found: list[tuple[BackwardSegment, ...]] = []
    begin: Time = 0
    for place, layer in enumerate(reversed(workload.layers)):
        end = begin + layer.backward
        cuts = {release for release in released if begin < release < end} | {end}
        if not place and 0 in released:
            cuts.add(0)  # what is released at the very beginning belongs to the layer that is computed first
        cuts = sorted(cuts)
        found.append(
            tuple(
                BackwardSegment(cut - before, tuple(released.pop(cut, ())))
                for before, cut in zip([begin, *cuts], cuts, strict=False)
            )
        )
        begin = end
    return tuple(reversed(found))


def scaled(workload: Workload, compute: Time, size: float = 1.0) -> Workload:
    """Return ``workload`` with forward and backward passes of ``compute`` in all, in proportion, and no update.

    ``size`` scales the gradients. The update is left out because a paced model really runs its optimizer.
    """
    if compute < len(workload.layers):
        raise ConfigError("compute", compute, "is no time to compute in", "take some milliseconds")
    factor = compute / workload.compute

    def shrunk(time: Time) -> Time:
        return round(time * factor)

    layers = tuple(Layer(layer.name, shrunk(layer.forward), shrunk(layer.backward)) for layer in workload.layers)
    # Rounding layer by layer moves their ends by a few ps; a release that was a layer's end stays one.
    old = list(accumulate(layer.backward for layer in reversed(workload.layers)))
    new = list(accumulate(layer.backward for layer in reversed(layers)))
    ends = dict(zip(old, new, strict=True))
    gradients = tuple(
        dataclasses.replace(
            gradient,
            size=max(4, round(gradient.size * size / 4) * 4),
            release=ends.get(gradient.release, min(new[-1], shrunk(gradient.release))),
        )
        for gradient in workload.gradients
    )
    return dataclasses.replace(workload, layers=layers, gradients=gradients)
