"""Trainings whose exchange loses packets, evaluated round by round, and their simulated time to accuracy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.loss_tolerance.losses import LossPattern, Random
from foretrain.loss_tolerance.replicas import LossyExchange, Replicas
from foretrain.loss_tolerance.tagging import concentrated
from foretrain.loss_tolerance.trial import Trial, endless, finite, score
from foretrain.units import Time

LossesOf: TypeAlias = Callable[[int], Sequence[LossPattern]]
"""Losses of the network in a round of training, counted from 0: of an all-reduce, or of push and pull."""


@dataclass(frozen=True, slots=True)
class AccuracyCurve:
    """Accuracy over rounds.

    Attributes:
        rounds: after which it was evaluated, increasing.
        accuracies: then; NaN from where training has diverged.
        losses: mean training loss of every round, until it diverged.
        lost: share of all bytes sent that was lost.
        drift: how far ranks were from their mean in the end; see `foretrain.loss_tolerance.replicas.Replicas.drift`.
    """

    rounds: tuple[int, ...]
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    lost: float
    drift: float

    def at(self, rounds: int) -> float:
        """The accuracy after so many rounds, which must have been evaluated."""
        return self.accuracies[self.rounds.index(rounds)]

    def reaches(self, accuracy: float) -> int | None:
        """The first evaluated round with at least ``accuracy``, or None."""
        found = (number for number, one in zip(self.rounds, self.accuracies, strict=True) if one >= accuracy)
        return next(found, None)


class Training:
    """Training of a trial with an exchange; `advance` trains on."""

    def __init__(self, trial: Trial, exchange: LossyExchange, losses: LossesOf | float = 0.0, seed: int = 0) -> None:
        """``losses``: of every round, or the share p that is lost at random, with ``seed``; see `drawn`."""
        trial.model.train()  # before it is copied
        self._trial, self._replicas = trial, exchange.apply(trial)
        self._losses = drawn(losses, exchange, self._replicas, seed) if isinstance(losses, int | float) else losses
        self._batches = endless(trial.batches)
        self._loss: list[float] = []
        self._curve: dict[int, float] = {}
        self.rounds = 0
        """Rounds that have been trained; a training that has diverged goes through the rest without effect."""

    @property
    def diverged(self) -> bool:
        """Return whether loss or accuracy is no longer a finite number."""
        return bool(self._loss and not finite(self._loss[-1])) or any(not finite(a) for a in self._curve.values())

    def advance(self, rounds: int, progress: Callable[[int], None] = lambda done: None) -> float:
        """Train ``rounds`` more and evaluate; return the accuracy, NaN if the training has diverged."""
        self._trial.model.train()
        for batch in itertools.islice(self._batches, rounds):
            if not self.diverged:
                with _may_diverge():
                    self._loss.append(self._replicas.step(batch, self._losses(self.rounds)))
            self.rounds += 1
            progress(1)
        found = float("nan") if self.diverged else score(self._trial, self._replicas.model)
        self._curve[self.rounds] = found
        return found

    def curve(self) -> AccuracyCurve:
        """Return the curve until now."""
        tallies = self._replicas.tallies
        sent, lost = sum(one.sent for one in tallies), sum(one.lost for one in tallies)
        share = lost / sent if sent else 0.0
        rounds, accuracies = tuple(self._curve), tuple(self._curve.values())
        with _may_diverge():
            return AccuracyCurve(rounds, accuracies, tuple(self._loss), share, self._replicas.drift())


def drawn(p: float, exchange: LossyExchange, replicas: Replicas, seed: int) -> LossesOf:
    """Return random losses: sums lose the share ``p`` at most, hops as much of it as `BoundedLoss` lets them.

    What must arrive does, and the rest loses more for that; of this, droppable packets are lost first. Draws are the
    same for every p.
    """

    def losses(number: int) -> list[Random]:
        share = min(exchange.of_hop(p, number) / replicas.lossy, 1.0)
        droppable, important = concentrated(share, replicas.droppable)
        return [Random(droppable, (seed, number, half), important=important) for half in (0, 1)]

    return losses


def _may_diverge() -> np.errstate:
    """Ignore numpy's warnings: divergence is detected by its results."""
    return np.errstate(over="ignore", invalid="ignore")


def elapsed(rounds: int, iterations: Sequence[Time] | NDArray[np.integer]) -> Time:
    """ps until the end of so many rounds; ``iterations``, ps each, begin anew where they are fewer."""
    times = [int(time) for time in iterations]
    if not times or min(times) <= 0:
        raise ConfigError("iterations", times[:4], "are no times of iterations", "give at least one, in ps")
    whole, rest = divmod(rounds, len(times))
    return whole * sum(times) + sum(times[:rest])


def timed(curve: AccuracyCurve, iterations: Sequence[Time] | NDArray[np.integer]) -> list[tuple[Time, float]]:
    """The curve over time: (ps, accuracy)."""
    return [(elapsed(number, iterations), one) for number, one in zip(curve.rounds, curve.accuracies, strict=True)]


def time_to_accuracy(
    curve: AccuracyCurve, iterations: Sequence[Time] | NDArray[np.integer], accuracy: float
) -> Time | None:
    """ps until the first evaluation with at least ``accuracy``; None if there is none."""
    number = curve.reaches(accuracy)
    return None if number is None else elapsed(number, iterations)
