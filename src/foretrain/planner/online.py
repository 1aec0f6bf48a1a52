"""Tuner of a running job: from iteration times it chooses the next knobs.

    begin ──▶ try ──▶ settle, measure a window ──▶ tell ──▶ ask ──▶ try … ──▶ hold the best ──▶ drift: begin again
               └── much worse than the best: back to it at once             link changed ──▶ look: begin again

It has no clock and no threads, so that it is the same over a simulator and over a real job. What it tries is a
`Proposer`'s business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from foretrain.planner.search import IterationTimes, Proposer, robust
from foretrain.schedule import Spec

logger = logging.getLogger("foretrain")


_SOON = 4
"""Iterations in a row that tell a large change before a window is full."""


class What(Enum):
    """Kind of a tuner's event."""

    TRY = "tries"
    BACK = "goes back to"
    HOLD = "keeps"
    LOOK = "measures anew"
    AGAIN = "begins again with"


class TunerEvent(NamedTuple):
    """Decision of the tuner.

    Attributes:
        iteration: when, counted from 0.
        what: it did.
        spec: with which knobs.
        sample: what it knew of those that were in force before; None where they were not measured.
    """

    iteration: int
    what: What
    spec: Spec
    sample: IterationTimes | None


class Tuner:
    """Tuner that searches for knobs while a job runs.

    Args:
        proposer: says what to try.
        known: what the proposer's best took in an earlier run, where nothing is to be tried unless it takes another
            time now.
        again: makes another one when iterations take lastingly longer, or less long, than they did: it is given the
            knobs in force, what they took, and what they take now. None only says so.
        window: iterations of a sample.
        settle: iterations after a change that do not count.
        first: iterations at the beginning that do not count.
        guard: how many times as long as with the best an iteration may take before the job goes back to it.
        drift: by which share it must change to be another one, where noise is not larger.

    Attributes:
        spec: the knobs that are to be in force.
        events: all decisions.
        samples: measured since the search began.
    """

    def __init__(
        self,
        proposer: Proposer,
        again: Callable[[Spec, IterationTimes, IterationTimes], Proposer] | None = None,
        *,
        known: IterationTimes | None = None,
        window: int = 20,
        settle: int = 2,
        first: int = 8,
        guard: float = 1.2,
        drift: float = 0.06,
    ) -> None:
        self._proposer, self._again = proposer, again
        self._window, self._settle, self._guard, self._drift = window, settle, guard, drift
        self._iteration = 0
        self._skip = first
        self._times: deque[float] = deque(maxlen=window)
        self._best = known
        self._state = What.TRY if known is None else What.HOLD
        self.samples = 0
        self.spec = proposer.best if known is not None else proposer.ask() or proposer.best
        self.events = [TunerEvent(0, self._state, self.spec, known)]

    @property
    def searching(self) -> bool:
        """Return whether other knobs may still be tried."""
        return self._state is not What.HOLD

    @property
    def best(self) -> Spec:
        """Return the best knobs known."""
        return self._proposer.best

    @property
    def holds(self) -> IterationTimes | None:
        """Return the iteration time with the kept knobs; None before it was measured."""
        return None if self.searching else self._best

    def iterated(self, time: float) -> Spec | None:
        """Record the time of an iteration; return the knobs to use from now on, or None for the same."""
        self._iteration += 1
        if self._skip:
            self._skip -= 1
            return None
        self._times.append(time)
        before = self.spec
        if self._state is What.TRY:
            self._try()
        elif self._state is What.BACK:
            self._went_back()
        elif self._state is What.LOOK:
            self._look()
        else:
            self._hold()
        return self.spec if self.spec != before else None

    def relinked(self, slower: float) -> Spec | None:
        """Record that the link takes ``slower`` times as long as it did; called instead of `iterated`.

        How long iterations take now decides what becomes of it: a link that is half as fast may be no matter.
        """
        self._iteration += 1
        logger.info("the link takes %.2f times as long as it did", slower)
        before = self.spec
        self._times.clear()
        if self._best is not None:
            self._move(What.LOOK, self._proposer.best)
        return self.spec if self.spec != before else None

    # ── trying ──

    def _try(self) -> None:
        if self._too_slow():
            self._told()
            self._move(What.BACK, self._proposer.best)
        elif len(self._times) == self._window:
            sample = self._told()
            if self._best is None or self._proposer.best == self.spec:
                self._best = sample
            self._next()

    def _too_slow(self) -> bool:
        """Return whether the last two iterations were too slow; one alone does not count."""
        if self._best is None or len(self._times) < 2 or self.spec == self._proposer.best:
            return False
        return min(self._times[-1], self._times[-2]) > self._guard * self._best.time

    def _told(self) -> IterationTimes:
        sample = robust(self._times)
        self._proposer.tell(self.spec, sample)
        self.samples += 1
        return sample

    def _next(self) -> None:
        wanted = self._proposer.ask()
        if wanted is not None:
            self._move(What.TRY, wanted)
            return
        self._move(What.HOLD, self._proposer.best)
        logger.info("tuned after %d samples: %s", self.samples, self.spec)

    def _went_back(self) -> None:
        """After two iterations with the best knobs, decide whether the knobs or the network were slow."""
        if len(self._times) < 2:
            return
        if self._best is not None and min(self._times) > self._guard * self._best.time:
            if len(self._times) < self._window:
                return
            self._restart(self._best)
            return
        self._next()

    # ── holding ──

    def _look(self) -> None:
        if len(self._times) == _SOON and self._best is not None:
            self._restart(self._best)

    def _hold(self) -> None:
        """Compare each window with the first of the kept knobs."""
        if self._best is not None and self._far_off(self._best):
            while len(self._times) > _SOON:
                self._times.popleft()
            self._restart(self._best)
            return
        if len(self._times) < self._window:
            return
        sample = robust(self._times)
        if self._best is None:
            self._best = sample
            self._times.clear()
            return
        off = abs(sample.time - self._best.time)
        if off > max(self._drift * self._best.time, 5 * (sample.error + self._best.error)):
            self._restart(self._best)

    def _far_off(self, usual: IterationTimes) -> bool:
        """Return whether each of the latest iterations takes much longer or shorter than ``usual``."""
        latest = list(self._times)[-_SOON:]
        slow, fast = self._guard * usual.time, usual.time / self._guard
        return len(latest) == _SOON and (min(latest) > slow or max(latest) < fast)

    def _restart(self, known: IterationTimes) -> None:
        now = robust(self._times)
        logger.info(
            "an iteration takes %.3g where it took %.3g%s",
            now.time,
            known.time,
            "" if self._again is None else ": knobs are searched again",
        )
        if self._again is None:
            self._best = now
            self._move(What.HOLD, self.spec)
            return
        self._proposer = self._again(self.spec, known, now)
        self.samples = 0
        self._best = None
        self._move(What.AGAIN, self._proposer.ask() or self._proposer.best, now)

    def _move(self, what: What, spec: Spec, sample: IterationTimes | None = None) -> None:
        if sample is None and self._times:
            sample = robust(self._times)
        self.events.append(TunerEvent(self._iteration, what, spec, sample))
        self._state = What.TRY if what is What.AGAIN else what
        if what is What.HOLD:
            self._best = None
        self._skip = self._settle if spec != self.spec else 0
        self._times.clear()
        self.spec = spec
