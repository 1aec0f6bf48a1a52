"""Failures: how much of a run's time trains, and the best interval between checkpoints.

Two answers that check each other: Young's and Daly's closed form, and a simulation of failures, event by event.

Young, "A first order approximation to the optimum checkpoint interval", CACM 1974: τ = √(2 δ M). Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, eq. 20 for the total time: with a checkpoint
of δ every τ of work, restarts of R and failures every M on average (exponential), a run of work T takes
M exp(R/M) (exp((τ + δ)/M) − 1) T/τ. Its best τ is found numerically, from Young's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failures:
    """What fails, and what a failure costs; all in seconds.

    Attributes:
        mtbf: mean time between failures of the whole job.
        checkpoint: for which the job stands still to write one.
        restart: from a failure to the first step again, with reading the checkpoint.
        repair: until a broken node is replaced, which comes on top where no spare is left.
        spares: nodes that stand by.
    """

    mtbf: float
    checkpoint: float
    restart: float
    repair: float = 0.0
    spares: int = 0

    @property
    def recovery(self) -> float:
        """Return the mean time from a failure to the first step again: waiting for a repair where no spare is free."""
        return self.restart + self.repair * lacking(self.repair / self.mtbf, self.spares)


def job_mtbf(gpus: int, per_gpu: float, nodes: int = 0, per_node: float = math.inf) -> float:
    """Return the mean time between failures of a job, s, of those of its GPUs and nodes: their rates add up."""
    rate = gpus / per_gpu + nodes / per_node
    return 1 / rate if rate else math.inf


def lacking(load: float, spares: int) -> float:
    """Return the probability that a failure finds no spare: Erlang's formula, ``load`` broken nodes in the mean."""
    if spares == 0:
        return 1.0
    blocked = 1.0
    for number in range(1, spares + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked


def young(failures: Failures) -> float:
    """Return Young's interval of work between checkpoints, s."""
    return math.sqrt(2 * failures.checkpoint * failures.mtbf)


def goodput(failures: Failures, interval: float) -> float:
    """Return the part of the time that trains, by Daly's formula, with a checkpoint every ``interval`` s of work."""
    mtbf = failures.mtbf
    if math.isinf(mtbf):
        return interval / (interval + failures.checkpoint)
    exponent = (interval + failures.checkpoint) / mtbf
    if exponent + failures.recovery / mtbf > 500:
        return 0.0
    return interval / (mtbf * math.exp(failures.recovery / mtbf) * math.expm1(exponent))


def best_interval(failures: Failures) -> float:
    """Return the interval with the best `goodput`, s, by golden section around Young's."""
    if math.isinf(failures.mtbf):
        return math.inf
    if failures.checkpoint == 0:
        return 0.0
    low, high = young(failures) / 10, young(failures) * 10
    part = (math.sqrt(5) - 1) / 2
    while high - low > 1e-6 * high:
        first, second = high - part * (high - low), low + part * (high - low)
        if goodput(failures, first) > goodput(failures, second):
            high = second
        else:
            low = first
    return (low + high) / 2


def simulated_goodput(failures: Failures, interval: float, work: float, seed: int = 0) -> float:
    """Return the part of the time that trains in a run of ``work`` s of training, failure by failure.

    Failures come at any time, during checkpoints and restarts as well; what was done since the last checkpoint is lost.
    """
    draw = random.Random(seed)
    now, saved = 0.0, 0.0
    fails = draw.expovariate(1 / failures.mtbf)
    broken: list[float] = []  # when nodes that failed are repaired
    while saved < work:
        piece = min(interval, work - saved)
        end = now + piece + (failures.checkpoint if saved + piece < work else 0.0)
        if end <= fails:
            now, saved = end, saved + piece
            continue
        now = fails
        while True:  # until a restart is not interrupted by another failure
            broken = [time for time in broken if time > now]
            wait = 0.0 if len(broken) < failures.spares else failures.repair
            broken.append(now + failures.repair)
            fails = now + draw.expovariate(1 / failures.mtbf)
            end = now + failures.restart + wait
            if end <= fails:
                now = end
                break
            now = fails
    return work / now
