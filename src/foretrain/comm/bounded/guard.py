"""Guard of an automatic tolerance: it raises what may be lost, and takes it back where training changes.

# Note [Guard]
``BoundedLoss(tolerance="auto")`` raises the tolerance while training goes on as it does without losses.
A round is sixteen steps. In a round with a tolerance every fourth step is a shadow: it loses nothing. After the round
two things are compared. Norms of summed gradients of the three steps before each shadow, with the shadow's: they may
be neither larger nor smaller. And the model's losses, where they are known: their slow mean, with the lowest
that it has been. A shadow's loss is that of parameters which lossy steps have changed, so that it proves nothing, and
a lowest mean cannot rise with a training that slowly diverges. Where both are alike, the tolerance doubles, up to a
tenth. Where not, it is zero at once, for one round, then for two, four and so on, and begins anew. After a pause of
eight rounds or more the losses of that pause, which lost nothing, are the new reference.

Alike is what differs by no more than a tenth beyond four standard errors, so that noise alone is hardly ever an alarm.
How large noise is, few values say only roughly: it is taken as the largest that they leave likely.

Every rank guards what it receives, on its own: what a sender may lose is up to the receiver. Sums are the same on all
ranks, so that they decide alike, but of an all-reduce that is split each rank sees its part alone.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

from foretrain.errors import ConfigError

ROUND = 16
"""Steps between two decisions."""
SHADOW = 4
"""Of this many steps, the last loses nothing."""
FIRST, MOST = 0.005, 0.1
"""Tolerances, shares of bytes: the first, and the largest."""
_APART = 0.1
"""Difference of mean logarithms that is never an alarm: a tenth."""
_ERRORS = 4.0
"""Standard errors of each mean that are no alarm either."""
_JUMP = math.log(8)
"""Of one value over what it was: an alarm at once."""
_KEPT = 2 * ROUND
_SLOW = 4 * ROUND
"""Values whose mean a trend follows."""
_NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a normal variable, over its standard deviation."""
_FEW = 2.8
"""Two standard errors of a deviation that `_Noise` estimates from n values: this over the root of n, relative."""
_LONG = 8
"""Rounds of a pause whose losses are a reference of their own."""


class _Noise:
    """Standard deviation of values about a mean that may drift or jump, at most.

    It is the median of second differences, by what that is of normal values: a drift leaves no trace in these, and a
    jump one in two of them. That of few values may by chance be small, so that it is enlarged by `_FEW`.
    """

    def __init__(self) -> None:
        self._latest, self._seconds = deque[float](maxlen=3), deque[float](maxlen=_SLOW)
        self._deviation: float | None = 0.0
        """Deviation, None until it is asked for: a median costs more than all else that a guard does in a step."""

    def add(self, value: float) -> None:
        """Take ``value`` into account."""
        self._latest.append(value)
        self._deviation = None
        if len(self._latest) == 3:
            first, second, third = self._latest
            self._seconds.append(abs(first - 2 * second + third))

    @property
    def deviation(self) -> float:
        """Return the standard deviation."""
        if self._deviation is None:
            seconds = self._seconds or (0.0,)
            few = 1 + _FEW / math.sqrt(len(seconds))
            self._deviation = few * median(seconds) / (_NORMAL_MEDIAN * math.sqrt(6))
        return self._deviation


class _Trend:
    """Slow mean of values, about the latest `_SLOW`, and the lowest that it has been."""

    def __init__(self) -> None:
        self.mean, self._count, self._round = 0.0, 0, 0.0
        self._of_values, self._of_rounds = _Noise(), _Noise()
        """Of single values, and of means of rounds: neighbours may have much in common."""
        self._lowest: tuple[float, float] | None = None
        """A mean, and its standard error over the noise."""

    @property
    def _noise(self) -> float:
        """Standard deviation of a value, as it shows in means."""
        return max(self._of_values.deviation, self._of_rounds.deviation * math.sqrt(ROUND))

    def add(self, value: float) -> None:
        """Let the mean follow ``value``."""
        self._count += 1
        self.mean += max(1 / self._count, 1 / _SLOW) * (value - self.mean)
        self._of_values.add(value)
        self._round += value / ROUND
        if self._count % ROUND == 0:
            self._of_rounds.add(self._round)
            self._round = 0.0
        now = self.mean, self._error
        if self._count >= ROUND and (self._lowest is None or self._upper(*now) < self._upper(*self._lowest)):
            self._lowest = now

    def above(self) -> float:
        """Return by how much the mean is surely above the lowest that it has been; negative if it need not be."""
        if self._lowest is None:
            return -math.inf
        return self.mean - _ERRORS * self._noise * self._error - self._upper(*self._lowest)

    def most(self) -> float:
        """Return what hardly any value exceeds while the mean is about the lowest."""
        return self._lowest[0] + _ERRORS * self._of_values.deviation if self._lowest is not None else math.inf

    @property
    def _error(self) -> float:
        """Standard error of the mean, over the noise: a mean that forgets has half the variance of one of `_SLOW`."""
        return math.sqrt(max(1 / self._count, 1 / (2 * _SLOW)))

    def _upper(self, mean: float, error: float) -> float:
        return mean + _ERRORS * self._noise * error


class Guard:
    """Guard of one job on one rank; see Note [Guard].

    Args:
        reliable_steps: of the first so many steps nothing is lost; they are compared with, too.

    Attributes:
        tolerance: of steps that are no shadows.
        alarms: reasons for which the tolerance went back to zero, with the step.
    """

    def __init__(self, reliable_steps: int) -> None:
        self.tolerance = 0.0
        self.alarms: list[str] = []
        self._begin = max(reliable_steps, ROUND)
        """Step with which the next round with a tolerance begins."""
        self._pause = 1
        self._losses = _Trend()
        self._norms, self._reliable = _Noise(), deque[float](maxlen=_KEPT)
        """Of steps without losses."""
        self._lossy: list[float] = []
        """Norms since the last step without losses."""
        self._apart: deque[float] = deque(maxlen=_KEPT)
        """Norms before each shadow less the shadow's, under the present tolerance."""

    def of_step(self, step: int) -> float:
        """Return the tolerance of ``step``."""
        if step < self._begin or self.tolerance == 0.0 or self.is_shadow(step):
            return 0.0
        return self.tolerance

    def is_shadow(self, step: int) -> bool:
        """Return whether ``step`` loses nothing in any case."""
        return step % SHADOW == SHADOW - 1

    def begin_anew(self, step: int) -> None:
        """Compare norms with later ones only, as the gradients from ``step`` on are others; lose nothing for a round.

        The tolerance and the reference of losses stay.
        """
        self._begin = max(self._begin, step + ROUND)
        self._norms = _Noise()
        self._reliable.clear()
        self._clear()

    def forget_losses(self) -> None:
        """Compare losses with later ones only, as those to come are of another kind."""
        self._losses = _Trend()

    def observe(self, step: int, name: str, value: float) -> None:
        """Note what ``step`` has led to.

        Args:
            step: from 0, ascending.
            name: "norm": of the summed gradient, or "loss": of the model after the update before.
            value: the number.

        Raises:
            ConfigError: the name is neither.
        """
        if name not in ("norm", "loss"):
            raise ConfigError("name", name, "is nothing that a guard compares", "write norm or loss")
        if not math.isfinite(value):
            if self.tolerance:
                self._alarm(step, f"the {name} is {value}")
            return
        logarithm = math.log(max(abs(value), 1e-30))
        lossy = self.of_step(step) > 0.0
        if (lossy or (self.tolerance and name == "loss")) and logarithm > self._most(name) + _JUMP:
            self._alarm(step, f"the {name} {value:.3g} is far above what it was")
            return
        if name == "loss":
            self._losses.add(logarithm)
            return
        self._note_norm(logarithm, lossy=lossy)
        if step >= self._begin - 1 and (step + 1 - self._begin) % ROUND == 0:
            self._decide(step)

    def _most(self, name: str) -> float:
        """Return the logarithm beyond which a value is no noise."""
        return max(self._reliable, default=math.inf) if name == "norm" else self._losses.most()

    def _note_norm(self, logarithm: float, *, lossy: bool) -> None:
        if lossy:
            self._lossy.append(logarithm)
            return
        if self._lossy:
            self._apart.append(fmean(self._lossy) - logarithm)
            self._lossy.clear()
        self._norms.add(logarithm)
        self._reliable.append(logarithm)

    def _decide(self, step: int) -> None:
        if (above := self._losses.above()) > _APART:
            reason = f"the loss is at least {math.expm1(above):.0%} above the lowest that it was"
        elif (apart := self._norms_apart()) is not None:
            reason = f"the norm is {abs(math.expm1(apart)):.0%} {'above' if apart > 0 else 'below'} that of steps "
            reason += "without losses"
        elif self.tolerance == 0.0 or self._apart:
            self._raise()
            return
        else:
            return
        self._alarm(step, reason)

    def _norms_apart(self) -> float | None:
        """Return how far norms with losses are from those without; None where that may be noise."""
        if len(self._apart) < 2:
            return None
        apart = fmean(self._apart)
        error = self._norms.deviation * math.sqrt((1 + 1 / (SHADOW - 1)) / len(self._apart))
        return apart if abs(apart) - _ERRORS * error > _APART else None

    def _raise(self) -> None:
        before, self.tolerance = self.tolerance, min(2 * self.tolerance or FIRST, MOST)
        if self.tolerance != before:
            self._clear()

    def _alarm(self, step: int, reason: str) -> None:
        """Go back to zero, or stay there, for a pause twice as long as the last."""
        if self.tolerance:
            self.alarms.append(f"step {step}, tolerance {self.tolerance:.2%}: {reason}")
        self.tolerance = 0.0
        self._begin = step + 1 + self._pause * ROUND
        if self._pause >= _LONG:
            self.forget_losses()
        self._pause *= 2
        self._clear()

    def _clear(self) -> None:
        self._lossy.clear()
        self._apart.clear()
