"""Energy, money and failures of a recipe: what a million tokens take beside time.

Watts and prices are data with sources, in bill.toml; nothing is known of a GPU that it does not name.

Of failures, two answers check each other: Young's and Daly's closed form, and a simulation, event by event.

Young, "A first order approximation to the optimum checkpoint interval", CACM 1974: τ = √(2 δ M). Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, eq. 20 for the total time: with a checkpoint
of δ every τ of work, restarts of R and failures every M on average (exponential), a run of work T takes
M exp(R/M) (exp((τ + δ)/M) − 1) T/τ. Its best τ is found numerically, from Young's.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.recipe_search.evaluation import Account


@dataclass(frozen=True, slots=True)
class Failures:
    """What fails, and what a failure costs; all in seconds.

    Attributes:
        mtbf: mean time between failures of the whole job.
        checkpoint: for which the job stands still to write one.
        rate: bytes per second at which a GPU writes its part of a checkpoint, for which the job stands still as well.
        restart: from a failure to the first step again, with reading the checkpoint.
        repair: until a broken node is replaced, which comes on top where no spare is left.
        spares: nodes that stand by.
    """

    mtbf: float
    checkpoint: float
    restart: float
    repair: float = 0.0
    spares: int = 0
    rate: float = math.inf

    def writing(self, state: float) -> Failures:
        """Return these where a GPU writes ``state`` bytes for a checkpoint: with the time of that in `checkpoint`."""
        return replace(self, checkpoint=self.checkpoint + state / self.rate, rate=math.inf)

    @property
    def recovery(self) -> float:
        """Return the mean time from a failure to the first step again: waiting for a repair where no spare is free."""
        return self.restart + self.repair * lacking(self.repair / self.mtbf, self.spares)


def job_mtbf(where: Deployment, mtbf: Mapping[str, float]) -> float:
    """Return the mean time between failures of a job, s, of those of a ``gpu``, ``server`` and ``link``.

    Rates add up. Links are the cables outside of servers, of the whole cluster.
    """
    nodes = where.topology.nodes
    ends = zip(where.topology.source, where.topology.target, strict=True)
    counts = {
        "gpu": where.total_gpus,
        "server": len({nodes[where.topology.ranks[rank]].server for rank in where.members}),
        "link": sum(-1 in (nodes[one].server, nodes[other].server) for one, other in ends) / 2,
    }
    rate = sum(counts[name] / time for name, time in mtbf.items())
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


_SIMULATED_INTERVALS = 20_000
"""Checkpoints of the simulation that stands beside the closed form."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job costs, and how it fails.

    Attributes:
        device: the GPU's name.
        world: GPUs.
        price: of a GPU's hour; None where no list is known.
        currency: of the price; empty for a price of the user's own.
        priced: where the price is from, and of which day.
        failures: of the whole job; None where nobody said.
        interval: of work between checkpoints, s; None for the best.
        run: tokens of the whole run; None where nobody said.
    """

    device: str
    world: int
    price: float | None
    currency: str
    priced: str
    failures: Failures | None = None
    interval: float | None = None
    run: float | None = None

    @property
    def watts(self) -> float | None:
        """Return the rated power of a GPU with its part of the server, W; None where it is not known."""
        return _known()["gpus"].get(self.device, {}).get("rated")

    def useful(self, account: Account) -> float:
        """Return the part of the time that trains: between failures and checkpoints; 1 where nobody said."""
        if self.failures is None:
            return 1.0
        failures = self.failures.writing(account.checkpoint)
        return goodput(failures, self.checkpointed(failures))

    def checkpointed(self, failures: Failures) -> float:
        """Return the interval of work between checkpoints, s."""
        return best_interval(failures) if self.interval is None else self.interval

    def joules(self, account: Account) -> float | None:
        """Return the energy of a step over all GPUs, J, by what their time goes to; None where it is not known."""
        if self.watts is None:
            return None
        shares = _known()["activity"]
        return self.world * self.watts * sum(share * getattr(account, name) for name, share in shares.items())

    def money(self, account: Account) -> float | None:
        """Return the price of a step over all GPUs, failures included; None where no price is known."""
        return None if self.price is None else self.world * self.price * account.time / 3600 / self.useful(account)

    def amount(self, money: float, form: str = ".4g") -> str:
        """Return an amount of money as text, with its currency where that is known."""
        return f"{money:{form}} {self.currency}".strip()

    def lines(self, account: Account, tokens: float | None) -> Iterator[str]:
        """Yield sentences about a step of a recipe: money, energy, failures."""
        what, many = ("a million tokens", 1e6 / tokens) if tokens else ("a step", 1.0)
        if (money := self.money(account)) is not None:
            paid, rate = self.amount(money * many), self.amount(self.price or 0.0)
            yield f"{what}: {paid} at {rate} for a GPU's hour ({self.priced})"
        if (joules := self.joules(account)) is not None:
            mean = joules / account.time / 1000
            yield (
                f"{what}: {joules * many / 3.6e6:.4g} kWh at {mean:.1f} kW in the mean; only computation's part of the "
                "power is calibrated"
            )
        if self.run is not None and tokens:
            steps = self.run / tokens
            totals = [f"{steps * account.time / self.useful(account) / 86400:.3g} days"]
            totals += [] if money is None else [f"{self.amount(steps * money, ',.0f')} for the GPUs"]
            totals += [] if joules is None else [f"{steps * joules / 3.6e9:,.1f} MWh without what failures take"]
            yield f"the run of {self.run:.3g} tokens: {', '.join(totals)}"
        if self.failures is not None:
            failures = self.failures.writing(account.checkpoint)
            every = self.checkpointed(failures)
            kind = "as the script saves" if account.saved else "parameters and optimizer"
            simulated = simulated_goodput(failures, every, _SIMULATED_INTERVALS * every)
            yield (
                f"goodput {goodput(failures, every):.2%} with a checkpoint of {failures.checkpoint:.1f} s "
                f"({account.checkpoint / 2**30:.1f} GiB a GPU, {kind}) every {every / 60:.1f} min of work "
                f"(closed form; {simulated:.2%} in a simulation of failures; Young: every "
                f"{young(failures) / 60:.1f} min), a failure every {failures.mtbf / 3600:.1f} h"
            )


def bill_of(
    device: str,
    world: int,
    price: float | None,
    failures: Failures | None = None,
    interval: float | None = None,
    run: float | None = None,
) -> Bill:
    """Return the bill of a job; ``price`` of a GPU's hour overrides the list. Raises ConfigError."""
    _check("price", price, "is no price", "write what a GPU costs an hour, e.g. 2.5", least=0.0)
    _check("checkpoint_every", interval, "is no time", "write auto, or e.g. 30min")
    _check("run_tokens", run, "is no number of tokens", "write e.g. 2e12")
    known = _known()["gpus"].get(device, {})
    listed = known.get("price") if price is None else price
    currency, priced = "", "as you said"
    if price is None and listed is not None:
        currency, priced = "USD", f"{known['date']}: {known['source']}"
    return Bill(device, world, listed, currency, priced, failures, interval, run)


def _check(field: str, value: object, problem: str, remedy: str, least: float = math.ulp(0.0)) -> None:
    """Raise ConfigError unless ``value`` is None or a finite number, ``least`` at least; by default more than 0."""
    if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
        raise ConfigError(field, value, problem, remedy)


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("bill.toml").read_text(encoding="utf-8"))
