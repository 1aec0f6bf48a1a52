"""Energy, money and failures of a recipe: what a million tokens take beside time.

Watts and prices are data with sources, in bill.toml; nothing is known of a GPU that it does not name.

Of failures, two answers check each other: Young's and Daly's closed form, and a simulation, event by event.

Young, "A first order approximation to the optimum checkpoint interval", CACM 1974: τ = √(2 δ M). Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, eq. 20 for the total time: with a checkpoint
of δ every τ of work, restarts of R and failures every M on average (exponential), a run of work T takes
M exp(R/M) (exp((τ + δ)/M) − 1) T/τ. Its best τ is found numerically, from Young's.

# Note [Background]
A script that saves in the background stands still for the copies alone, δ, and a checkpoint counts once it is written,
W after that. A failure meanwhile goes back to the checkpoint before. On average a failure then loses W more of work, so
that Daly's R is the restart and W; checkpoints are no closer than W. The simulation has each checkpoint's own end.

# Note [Spares]
A broken server takes B to repair, and s servers stand by. With all s + 1 broken the job waits until one is repaired,
and nothing fails meanwhile; otherwise a failure comes every M. So the number that are broken is that of the busy lines
of an exchange with s + 1 lines and a load of B/M, and the job waits for the part of the time in which all are busy:
Erlang's formula, which holds for any distribution of B with this mean. Daly's formula is of the rest of the time.

# Note [Stragglers]
GPUs turn slow at random, every E on average in the whole job, each for a time of L on average. At least one is slow for
1 − exp(−L/E) of the time (M/G/∞). A step then takes longer by at most what the GPU's computation takes longer, however
many are slow: where communication overlaps with computation and bounds the step, it loses less, so that goodput is a
lower bound. Slow times are taken to be long beside the interval between checkpoints, so that goodput is the mean, over
time, of Daly's formula with fast steps and with slow ones; where they are short the difference is of second order.

# Note [Energy]
A GPU with its part of the server draws a share of its rated power by what a step's time goes to. Failures take energy
as well: what is lost is computed again, and in restarts, checkpoints and repairs GPUs are idle, as those of spares
always are. Of the time in which spares do not lack, restarts take 1 − exp(−R/M): each failure begins one, and it lasts
for R or until the next failure, M (1 − exp(−R/M)) on average. Checkpoints take δ for each τ of work that is kept.
Switches draw what their ports are rated at all the time: an upper bound.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.recipe_search.evaluation import Account


@dataclass(frozen=True, slots=True)
class Stragglers:
    """GPUs that are slow now and then; see Note [Stragglers].

    Attributes:
        every: mean time between two GPUs of the whole job turning slow, s.
        lasts: mean time for which one stays slow, s.
        speed: of a slow GPU over that of others.
    """

    every: float
    lasts: float
    speed: float

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers that cannot be."""
        for name in ("every", "lasts"):
            _check(f"stragglers.{name}", getattr(self, name), "is not above 0", "write seconds")
        _check("stragglers.speed", self.speed, "is no speed of a slow GPU", "write e.g. 0.7, of 1 at most", most=1.0)

    @property
    def share(self) -> float:
        """Return the part of the time in which a GPU of the job is slow."""
        return -math.expm1(-self.lasts / self.every)


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of a job and what one costs; all in seconds.

    Attributes:
        mtbf: mean time between failures of the whole job.
        checkpoint: for which the job stands still to write one.
        rate: bytes per second at which a GPU writes its part of a checkpoint, for which the job stands still as well.
        restart: from a failure to the first step again, with reading the checkpoint.
        repair: until a broken server is repaired, which the job waits for where no spare is left.
        spares: servers that stand by.
        stragglers: None for none.
        slowdown: of a step while a GPU is slow, as a factor of its time: an upper bound; see Note [Stragglers].
        written: for which a checkpoint is written in the background after that; see Note [Background].
    """

    mtbf: float
    checkpoint: float
    restart: float
    repair: float = 0.0
    spares: int = 0
    rate: float = math.inf
    stragglers: Stragglers | None = None
    slowdown: float = 1.0
    written: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers that cannot be."""
        for name, remedy in (("mtbf", "write seconds"), ("rate", "write bytes per second")):
            _check(name, getattr(self, name), "is not above 0", remedy, most=math.inf)
        for name in ("checkpoint", "restart", "repair", "written"):
            _check(name, getattr(self, name), "is no time", "write seconds, 0 or more", least=0.0)
        _check("slowdown", self.slowdown, "is no factor of a step's time", "write 1 or more", least=1.0)
        if not (isinstance(self.spares, int) and self.spares >= 0):
            raise ConfigError("spares", self.spares, "is no number of servers", "write e.g. 1")
        if self.spares and not self.repair:
            problem = "makes no difference where a broken server is repaired at once"
            raise ConfigError("spares", self.spares, problem, "say how long a repair takes, e.g. --repair 24h")

    def during(self, account: Account) -> Failures:
        """Return these for steps of ``account``: with the time to write its checkpoint, and what a slow GPU does."""
        stands, written = account.checkpoint / self.rate, 0.0
        if account.copies and self.rate < math.inf:
            stands, written = account.copies, stands
        slower = 1 / self.stragglers.speed - 1 if self.stragglers is not None else 0.0
        slowdown = 1 + slower * account.compute / account.time
        stands += self.checkpoint
        return replace(self, checkpoint=stands, rate=math.inf, slowdown=slowdown, written=written)

    @property
    def slow(self) -> float:
        """Return the part of the time in which steps are slow."""
        return 0.0 if self.stragglers is None else self.stragglers.share

    @property
    def waiting(self) -> float:
        """Return the part of the time for which the job waits for a repair; see Note [Spares]."""
        return erlang(self.repair / self.mtbf, self.spares + 1)


def job_mtbf(where: Deployment, mtbf: Mapping[str, float]) -> float:
    """Return the mean time between failures of a job, s, of those of a ``gpu``, ``server`` and ``link``.

    Rates add up. Links are the cables outside of servers, of the whole cluster; a job in one server uses none.
    """
    nodes, servers = where.topology.nodes, _servers(where)
    ends = zip(where.topology.source, where.topology.target, strict=True)
    cables = sum(-1 in (nodes[one].server, nodes[other].server) for one, other in ends) / 2
    counts = {"gpu": where.total_gpus, "server": servers, "link": cables if uses_cables(where) else 0.0}
    rate = sum(counts[name] / time for name, time in mtbf.items())
    return 1 / rate if rate else math.inf


def uses_cables(where: Deployment) -> bool:
    """Return whether a job uses cables outside of servers: not where all its GPUs are in one."""
    return _servers(where) > 1


def _servers(where: Deployment) -> int:
    """Return how many servers a job has GPUs in."""
    return len({where.topology.nodes[where.topology.ranks[rank]].server for rank in where.members})


def erlang(load: float, lines: int) -> float:
    """Return the part of the time in which all ``lines`` are busy, by Erlang's formula; ``load`` is offered to them."""
    blocked = 1.0
    for number in range(1, lines + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked


def young(failures: Failures) -> float:
    """Return Young's interval of work between checkpoints, s."""
    return math.sqrt(2 * failures.checkpoint * failures.mtbf)


def goodput(failures: Failures, interval: float) -> float:
    """Return training at full speed over time, by Daly's formula, with a checkpoint every ``interval`` s of work.

    Work is counted in the time that it takes without stragglers. See Note [Spares] and Note [Stragglers].
    """
    fast, slow = _daly(failures, interval, 1.0), _daly(failures, interval, failures.slowdown)
    return (1 - failures.waiting) * ((1 - failures.slow) * fast + failures.slow * slow)


def _daly(failures: Failures, interval: float, slowdown: float) -> float:
    """Return the work over time, with work ``slowdown`` times as slow, where spares never lack."""
    mtbf, needed = failures.mtbf, interval * slowdown + failures.checkpoint
    restart = failures.restart + failures.written
    if math.isinf(mtbf):
        return 1 / slowdown if math.isinf(interval) else interval / needed
    if (needed + restart) / mtbf > 500:
        return 0.0
    if needed == 0:  # checkpoints that take no time, all the time
        return math.exp(-restart / mtbf) / slowdown
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(needed / mtbf))


def computing(failures: Failures, interval: float) -> float:
    """Return the part of the time in which the job computes, also what it has computed before; see Note [Energy]."""
    restarting = -math.expm1(-failures.restart / failures.mtbf)
    saving = failures.checkpoint / interval if interval else 0.0
    return max((1 - failures.waiting) * (1 - restarting) - goodput(failures, interval) * saving, 0.0)


def best_interval(failures: Failures) -> float:
    """Return the interval with the best `goodput`, s, by golden section around Young's."""
    if math.isinf(failures.mtbf):
        return math.inf
    if failures.checkpoint == 0:
        return failures.written
    low, high = (max(factor * young(failures), failures.written) for factor in (0.1, 10))
    part = (math.sqrt(5) - 1) / 2
    while high - low > 1e-6 * high:
        first, second = high - part * (high - low), low + part * (high - low)
        if goodput(failures, first) >= goodput(failures, second):
            high = second
        else:
            low = first
    return (low + high) / 2


def simulated_goodput(
    failures: Failures, interval: float, work: float, seed: int = 0, events: int = 1_000_000
) -> float:
    """Return `goodput` in a run of ``work`` s of training, failure by failure and slow GPU by slow GPU.

    Failures come at any time, during checkpoints and restarts as well, but not while the job waits for a repair; what
    was done since the last checkpoint that was written is lost. The run ends early after this many ``events``:
    checkpoints, failures and GPUs that turn slow. The result is nan where it then has seen too few failures to tell.
    """
    if math.isinf(failures.mtbf) or not 0 < interval < math.inf:
        return math.nan
    draw, speeds = random.Random(seed), _Speeds(failures, seed, events)
    if speeds.rate * min(work, _FEWEST_FAILURES * failures.mtbf) > 2 * events:
        return math.nan  # far more GPUs turn slow until there are enough failures
    now, saved, happened, failed = 0.0, 0.0, 0, 0
    before, written = 0.0, 0.0  # work of the checkpoint before the last, and when the last is written
    fails = draw.expovariate(1 / failures.mtbf)
    broken: list[float] = []  # when servers that failed are repaired, in order
    while saved < work and happened + speeds.drawn < events:
        happened += 1
        # Checkpoints before the next failure and the next change of speed are alike: all but the last count at once.
        until, speed = speeds.at(now)
        whole = interval / speed + failures.checkpoint
        alike = int(min((min(fails, until) - now) / whole, (work - saved) / interval)) - 1
        if alike > 1:
            now, saved = now + alike * whole, saved + alike * interval
            before, written = saved - interval, now + failures.written
        piece = min(interval, work - saved)
        end = speeds.end_of(now, piece) + (failures.checkpoint if saved + piece < work else 0.0)
        if end <= fails:
            now, before, saved, written = end, saved, saved + piece, end + failures.written
            continue
        now, saved = fails, saved if written <= fails else before
        while happened < events:  # until a restart is not interrupted by another failure
            happened, failed = happened + 1, failed + 1
            broken = [*(time for time in broken if time > now), now + failures.repair]
            now = now if len(broken) <= failures.spares else broken[0]
            fails = now + draw.expovariate(1 / failures.mtbf)
            end = now + failures.restart
            if end <= fails:
                now = end
                break
            now = fails
    enough = saved >= work or (failed >= _FEWEST_FAILURES and saved > 0)
    return saved / now if enough else math.nan


_FEWEST_FAILURES = 100
"""Failures that a simulation that ends early must have seen."""


class _Speeds:
    """Speed of steps over time: 1, and less while a GPU is slow; drawn as far as it is asked for.

    Attributes:
        rate: at which GPUs turn slow that must be drawn, per second.
        drawn: how many GPUs turned slow; no more than ``most`` do.
    """

    _ALWAYS = 12.0
    """Ratio of the time that a GPU stays slow to the time between two that turn slow, from which on one always is: but
    for e⁻¹² of the time, which no simulation meets."""

    def __init__(self, failures: Failures, seed: int, most: int) -> None:
        self._draw, self._most, self.drawn = random.Random(f"{seed}/stragglers"), most, 0
        self._stragglers, self._slow = failures.stragglers, 1 / failures.slowdown
        self._pieces = deque([(0.0, 1.0)])  # until when, and the speed; those that no call has passed
        self.rate = self._next = 0.0
        if self._stragglers is None:
            self._pieces.append((math.inf, 1.0))
        elif self._stragglers.lasts > self._ALWAYS * self._stragglers.every:
            self._pieces.append((math.inf, self._slow))
        else:
            self.rate = 1 / self._stragglers.every
            self._next = self._draw.expovariate(self.rate)

    def at(self, time: float) -> tuple[float, float]:
        """Return until when the speed at ``time`` lasts, and that speed; ``time`` is never before that of another call.

        It ends at once where too many GPUs turn slow.
        """
        return self._piece(time)

    def _piece(self, time: float) -> tuple[float, float]:
        while self._pieces[0][0] <= time:
            if len(self._pieces) == 1 and not self._append():
                return time, 1.0
            self._pieces.popleft()
        return self._pieces[0]

    def end_of(self, begin: float, work: float) -> float:
        """Return when ``work`` is done that begins at ``begin``, which is never before that of another call.

        It is never done where too many GPUs turn slow.
        """
        until, speed = self._piece(begin)
        index = 0
        while (until - begin) * speed < work:
            index += 1
            if index == len(self._pieces) and not self._append():
                return math.inf
            work, begin = work - (until - begin) * speed, until
            until, speed = self._pieces[index]
        return begin + work / speed

    def _append(self) -> bool:
        """Draw the time until a GPU turns slow, and that until none is; return False where enough were drawn."""
        if self.drawn >= self._most or self._stragglers is None:
            return False
        self._pieces.append((self._next, 1.0))
        end = self._next
        while self._next <= end and self.drawn < self._most:
            end = max(end, self._next + self._draw.expovariate(1 / self._stragglers.lasts))
            self._next += self._draw.expovariate(self.rate)
            self.drawn += 1
        self._pieces.append((end, self._slow))
        return True


_SIMULATED_FAILURES = 10_000
"""Mean times between failures for which the simulation that stands beside the closed form works."""
_NO_GOODPUT = 1e-9
"""Goodput of a recipe that never ends."""
_LEAST_GOODPUT = 0.01
"""Goodput below which a job is refused: it fails more often than it goes on."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Prices and failures of a job.

    Attributes:
        device: the GPU's name.
        world: GPUs.
        price: of a GPU's hour; None where no list is known.
        currency: of the price; empty for a price of the user's own.
        priced: where the price is from, and of which day.
        failures: of the whole job; None where nobody said.
        interval: of work between checkpoints, s; None for the best.
        run: tokens of the whole run; None where nobody said.
        gpus_per_server: which spare servers have as well.
        switches: power that switches outside of servers draw, W.
    """

    device: str
    world: int
    price: float | None
    currency: str
    priced: str
    failures: Failures | None = None
    interval: float | None = None
    run: float | None = None
    gpus_per_server: int = 1
    switches: float = 0.0

    @property
    def watts(self) -> float | None:
        """Return the rated power of a GPU with its part of the server, W; None where it is not known."""
        return _known()["gpus"].get(self.device, {}).get("rated")

    def useful(self, account: Account) -> float:
        """Return the goodput: of the time the part that trains, at full speed; 1 where nobody said what fails.

        It is never 0, so that a recipe whose checkpoint never ends before a failure ranks last.
        """
        if self.failures is None:
            return 1.0
        failures = self.failures.during(account)
        return max(goodput(failures, self.checkpointed(failures)), _NO_GOODPUT)

    def checkpointed(self, failures: Failures) -> float:
        """Return the interval of work between checkpoints, s: no less than writing one in the background takes."""
        return best_interval(failures) if self.interval is None else max(self.interval, failures.written)

    def joules(self, account: Account) -> float | None:
        """Return the energy of a step over all GPUs and switches, J, spares and failures included; see Note [Energy].

        None where it is not known.
        """
        if self.watts is None:
            return None
        shares, busy = _known()["activity"], 1.0
        if self.failures is not None:
            failures = self.failures.during(account)
            busy = computing(failures, self.checkpointed(failures))
        step = sum(share * getattr(account, name) for name, share in shares.items()) / account.time
        idle = shares["idle"]
        gpus = self.world * (busy * step + (1 - busy) * idle) + self.spare_gpus * idle
        return (self.watts * gpus + self.switches) * account.time / self.useful(account)

    @property
    def spare_gpus(self) -> int:
        """Return the GPUs of servers that stand by."""
        return self.failures.spares * self.gpus_per_server if self.failures is not None else 0

    def money(self, account: Account) -> float | None:
        """Return the price of a step over all GPUs, spares and failures included; None where no price is known."""
        if self.price is None:
            return None
        return (self.world + self.spare_gpus) * self.price * account.time / 3600 / self.useful(account)

    def amount(self, money: float, form: str = ".4g") -> str:
        """Return an amount of money as text, with its currency where that is known."""
        return f"{money:{form}} {self.currency}".strip()

    def failure_numbers(self, account: Account) -> dict[str, float | None] | None:
        """Return the numbers of a recipe's failures, s, for JSON; None where nobody said what fails."""
        if self.failures is None:
            return None
        failures = self.failures.during(account)
        every = self.checkpointed(failures)
        return {
            "mtbf": failures.mtbf,
            "checkpoint": failures.checkpoint,
            "written_behind": failures.written,
            "interval": every,
            "best_interval_daly": best_interval(failures),
            "best_interval_young": young(failures),
            "goodput": goodput(failures, every),
            "simulated_goodput": _simulated(failures, every),
            "waiting": failures.waiting,
            "slow": failures.slow,
            "slowdown": failures.slowdown,
        }

    def lines(self, account: Account, tokens: float | None) -> Iterator[str]:
        """Yield sentences about a step of a recipe: money, energy, failures."""
        what, many = ("a million tokens", 1e6 / tokens) if tokens else ("a step", 1.0)
        if (money := self.money(account)) is not None:
            paid, rate = self.amount(money * many), self.amount(self.price or 0.0)
            spares = f", with {self.spare_gpus} GPUs that stand by" if self.spare_gpus else ""
            yield f"{what}: {paid} at {rate} for a GPU's hour ({self.priced}){spares}"
        if (joules := self.joules(account)) is not None:
            mean = joules / account.time * self.useful(account) / 1000
            parts = [f"switches' {self.switches / 1000:.1f}"] if self.switches else []
            parts += ["spares and failures included"] if self.failures is not None else []
            counted = f" ({', '.join(parts)})" if parts else ""
            yield (
                f"{what}: {joules * many / 3.6e6:.4g} kWh at {mean:.1f} kW in the mean{counted}; only computation's "
                "part of the power is calibrated"
            )
        if self.run is not None and tokens:
            steps = self.run / tokens
            totals = [f"{steps * account.time / self.useful(account) / 86400:.3g} days"]
            totals += [] if money is None else [f"{self.amount(steps * money, ',.0f')} for the GPUs"]
            totals += [] if joules is None else [f"{steps * joules / 3.6e9:,.1f} MWh"]
            yield f"the run of {self.run:.3g} tokens: {', '.join(totals)}"
        if self.price is None:
            yield f"no list price of {self.device} is known: give what a GPU costs an hour, e.g. --price 2.5"
        if self.watts is None:
            yield f"the power of {self.device} is not known, so neither is energy"
        if self.failures is not None:
            yield from self._failure_lines(account)

    def _failure_lines(self, account: Account) -> Iterator[str]:
        """Yield sentences about goodput, the checkpoints, and stragglers."""
        assert self.failures is not None
        failures = self.failures.during(account)
        every, simulated = self.checkpointed(failures), _simulated(failures, self.checkpointed(failures))
        steps = max(round(every / account.time), 1) if math.isfinite(every) else 0
        after = f"{steps:,} steps" if steps > 1 else "step"
        saves = f"a checkpoint every {after} ({_duration(every)})" if steps else "no checkpoint is needed"
        fails = "nothing fails" if math.isinf(failures.mtbf) else f"a failure every {_duration(failures.mtbf)}"
        yield f"goodput {goodput(failures, every):.2%}: {fails}, {saves}"
        kind = "as the script saves" if account.saved else "parameters and optimizer"
        best = f"{_duration(best_interval(failures))} by Daly's formula, {_duration(young(failures))} by Young's"
        takes = _duration(failures.checkpoint)
        takes += f" and {_duration(failures.written)} in the background" if failures.written else ""
        yield (
            f"a checkpoint takes {takes} ({account.checkpoint / 2**30:.3g} GiB a GPU, {kind})"
            f"{'' if math.isinf(failures.mtbf) else f'; the best interval is {best}'}"
        )
        if failures.repair:
            more = erlang(failures.repair / failures.mtbf, failures.spares + 2)
            yield f"the job waits for repairs for {failures.waiting:.2%} of the time; with one more spare, {more:.2%}"
        if simulated is not None:
            yield f"in a simulation of failures, one by one, goodput is {simulated:.2%}"
        elif not math.isinf(failures.mtbf):
            yield "failures are too rare to be simulated one by one, with the checkpoints and slow GPUs between them"
        if failures.stragglers is not None:
            without = goodput(replace(failures, stragglers=None), every)
            yield (
                f"a GPU is slow in {failures.slow:.1%} of the time, in which a step takes at most "
                f"{failures.slowdown:.2f} times as long; without stragglers, goodput would be {without:.2%}"
            )


def bill_of(
    device: str,
    world: int,
    price: float | None,
    failures: Failures | None = None,
    interval: float | None = None,
    run: float | None = None,
    gpus_per_server: int = 1,
    switches: float = 0.0,
) -> Bill:
    """Return the bill of a job; ``price`` of a GPU's hour overrides the list. Raises ConfigError."""
    if price is not None:
        _check("price", price, "is no price", "write what a GPU costs an hour, e.g. 2.5")
    if interval is not None:
        _check("checkpoint_every", interval, "is no time", "write auto, or e.g. 30min; in Python, seconds")
    if run is not None:
        _check("run_tokens", run, "is no number of tokens", "write e.g. 2e12")
    known = _known()["gpus"].get(device, {})
    listed = known.get("price") if price is None else price
    currency, priced = "", "as you said"
    if price is None and listed is not None:
        currency, priced = "USD", f"{known['date']}: {known['source']}"
    if failures is not None:
        _check_goodput(failures, interval, world)
    return Bill(device, world, listed, currency, priced, failures, interval, run, gpus_per_server, switches)


def switch_power(where: Deployment) -> float:
    """Return the job's share of the power of switches outside of servers, W; see Note [Energy].

    It is that of the cluster's GPUs that the job has; none where all are in one server.
    """
    topology, nodes = where.topology, where.topology.nodes
    if not uses_cables(where):
        return 0.0
    ports = [nodes[node].server < 0 and nodes[node].kind == "switch" for node in topology.source]
    gbps = float(topology.rate[ports].sum()) * 8e-9
    return gbps * _known()["switch"]["watts_per_gbps"] * where.total_gpus / len(topology.ranks)


def _check_goodput(failures: Failures, interval: float | None, world: int) -> None:
    """Raise ConfigError where a job hardly ever trains, whatever its recipe."""
    if math.isinf(failures.mtbf):
        return
    fails = f"a job of {world:,} GPUs then fails every {_duration(failures.mtbf)}"
    if math.exp(-failures.restart / failures.mtbf) < _LEAST_GOODPUT:
        problem = f"is too short: {fails}, more often than it restarts"
        remedy = f"a restart takes {_duration(failures.restart)}: shorten it, or fail less often"
        raise ConfigError("mtbf", failures.mtbf, problem, remedy)
    if 1 - failures.waiting < _LEAST_GOODPUT:
        problem = f"is too long: {fails}, so that it waits for repairs {failures.waiting:.1%} of the time"
        raise ConfigError("repair", failures.repair, problem, "shorten it, or have more spares")
    if interval is not None and goodput(failures, interval) < _LEAST_GOODPUT:
        problem = f"is too long: {fails}, and hardly ever writes a checkpoint"
        if interval < best_interval(failures):
            problem = f"is too short: a job of {world:,} GPUs then does little but write checkpoints"
        remedy = f"take auto, or e.g. {_duration(young(failures) or failures.mtbf / 10)}"
        raise ConfigError("checkpoint_every", interval, problem, remedy)
    if goodput(failures, best_interval(failures)) < _LEAST_GOODPUT:
        problem = f"is too long: {fails}, and hardly ever writes one"
        raise ConfigError("checkpoint", failures.checkpoint, problem, "write it faster, or fail less often")


@lru_cache(maxsize=64)
def _simulated(failures: Failures, interval: float) -> float | None:
    """Return `goodput` by the simulation; None where it cannot tell."""
    found = simulated_goodput(failures, interval, _SIMULATED_FAILURES * failures.mtbf)
    return None if math.isnan(found) else found


def _duration(seconds: float) -> str:
    """Return a time for people, in three digits: ``"21.1 s"``, ``"43.2 min"``, ``"2.40 h"``, ``"32.5 days"``."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.3g} s"


def _check(
    field: str,
    value: object,
    problem: str,
    remedy: str,
    least: float = math.ulp(0.0),
    most: float = math.nextafter(math.inf, 0.0),
) -> None:
    """Raise ConfigError unless ``value`` is a number of ``least`` to ``most``: by default finite, and more than 0."""
    if not (isinstance(value, int | float) and least <= value <= most):
        raise ConfigError(field, value, problem, remedy)


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("bill.toml").read_text(encoding="utf-8"))
