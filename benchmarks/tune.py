"""The tuner of a running job: how many real samples it needs, against random search and Bayesian optimisation.

Jobs are simulated: what they take is certain, so that "within 2 % of the best" is. The tuner does not see it, but

    a forecast that is wrong: the job's bandwidth, latency and cost per operation are drawn around those forecast
        (standard deviations 10, 50 and 50 %), it computes up to 10 % slower, and along each knob its time departs by up
        to 2 % from anything that simulator knows
    noise: 3 % of each iteration, and of one in fifty the double time

The best is that of an exhaustive grid, or of what was tried where that is better. *reached*: samples after which the
knobs that are taken for the best stay within 2 % of it. A sample is the median of 20 iterations, after 2 that do not
count. Plain Bayesian optimisation is optuna's Gaussian processes, 15 samples, 10 of them at random (as ByteScheduler
does); neither it nor random search knows the simulator. *after a step*: iterations until the knobs that are taken for
the best are within 2 % for good, after the link has lost half of its bandwidth.
*auto*: the planner's choice against the best of all policies, searched one by one (benchmarks/auto.py has more).
*lab*: real jobs on hosts that are network namespaces (needs root): how far above the best of a grid the search ends.
--quick: VGG-16 and GPT-2 at 10 Gb/s, one draw, a coarser grid; one short job in the lab.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import auto
from measure import finish, options
from published_tuners import PUBLISHED, Bayesian, RandomSearch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretrain.network import Cluster, cluster
from foretrain.planner.online import Tuner
from foretrain.planner.search import Proposer, Space
from foretrain.planner.simulator_prior import JobForecaster
from foretrain.schedule import Spec, spec
from foretrain.simulation import simulate
from foretrain.units import to_seconds
from foretrain.workload import Workload, zoo

MODELS = ("resnet50", "vgg16", "bert_base", "gpt2")
RATES = ("1Gbps", "10Gbps")
EXCHANGES = {"all-reduce": "", "ps": ",ps=4"}
SEEDS = (0, 1, 2)
POLICY = "bytescheduler"
ITERATIONS = 300
NOISE, SLOW = 0.03, 0.02
CLOSE = 1.02
SAMPLE = 22
"""Iterations, with those that do not count."""
RANDOM = 40


class Case(NamedTuple):
    """A job; ``points`` of the grid a knob."""

    model: str
    rate: str
    exchange: str
    seed: int
    points: int

    def forecast(self) -> tuple[Workload, Cluster]:
        """As it is forecast."""
        place = cluster(f"8xV100@{self.rate}{EXCHANGES[self.exchange]}")
        assert isinstance(place, Cluster)
        return zoo(self.model, device="V100"), place


class Job:
    """What iterations of ``case`` take, in truth."""

    def __init__(self, case: Case) -> None:
        source = random.Random(f"{case.model} {case.rate} {case.exchange} {case.seed}")
        work, place = case.forecast()
        faster, costlier, longer = (math.exp(source.gauss(0, sigma)) for sigma in (0.1, 0.5, 0.5))
        self._work = work.slowed(1 + 0.1 * source.random())
        self.place = dataclasses.replace(
            place,
            up=place.up * faster,
            down=place.down * faster,
            overhead=round(place.overhead * costlier),
            latency=round(place.latency * longer),
        )
        self._space = Space.of(spec(POLICY), work)
        self._phases = [source.uniform(0, 2 * math.pi) for _ in self._space.free]
        self._known: dict[tuple[Cluster, str], float] = {}

    def time(self, one: Spec) -> float:
        """Seconds of an iteration."""
        key = self.place, str(Spec(one.name, one.settings))
        if key not in self._known:
            crooked = 1.0
            for knob, place, phase in zip(self._space.free, self._space.point(one), self._phases, strict=True):
                crooked *= 1.0 if knob.grid else 1 + 0.01 * math.sin(place / 1.5 + phase)
            run = simulate(self._work, self.place, one, trace=False)
            self._known[key] = crooked * to_seconds(run.iteration_time)
        return self._known[key]


class Told:
    """A proposer, and what it took for the best after each sample."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.bests: list[Spec] = []
        self.ask = proposer.ask

    @property
    def best(self) -> Spec:
        """The proposer's."""
        return self._proposer.best

    def tell(self, one: Spec, sample: Any) -> None:
        """Tells the proposer."""
        self._proposer.tell(one, sample)
        self.bests.append(self._proposer.best)


def trained(job: Job, tuner: Tuner, iterations: int, source: random.Random) -> list[float]:
    """What each of ``iterations`` takes but for noise."""
    path = []
    for _ in range(iterations):
        path.append(job.time(tuner.spec))
        tuner.iterated(path[-1] * (1 + source.gauss(0, NOISE)) * (2 if source.random() < SLOW else 1))
    return path


def reached(times: list[float], best: float) -> int:
    """How many samples it took to be within 2 % for good; one more than there were where it never was."""
    far = [place for place, time in enumerate(times) if time > CLOSE * best]
    return far[-1] + 2 if far else 1


def measured(case: Case) -> dict[str, Any]:
    """All of one case."""
    job, (work, place) = Job(case), case.forecast()
    plan = spec(POLICY)
    space = Space.of(plan, work)
    virtual = JobForecaster(work, place, plan)
    ways: dict[str, Callable[[], Proposer]] = {
        "warm": virtual.informed,
        "bayesian": lambda: Bayesian(space, plan, PUBLISHED, case.seed),
        "random": lambda: RandomSearch(space, plan, RANDOM, case.seed),
    }
    found: dict[str, Any] = {}
    told, paths, tuners = {}, {}, {}
    for name, way in ways.items():
        told[name] = Told(way())
        tuners[name] = tuner = Tuner(told[name], virtual.again if name == "warm" else None)
        iterations = ITERATIONS if name == "warm" else SAMPLE * (RANDOM + 1)
        paths[name] = trained(job, tuner, iterations, random.Random(case.seed))
    tried = [job.time(one) for each in told.values() for one in each.bests]
    best = min([*map(job.time, space.grid(case.points)), *tried])
    for name in ways:
        found[name] = reached([job.time(one) for one in told[name].bests], best)
        found[f"{name} samples"] = len(told[name].bests)
        found[f"{name} end"] = paths[name][-1] / best - 1
    warm = paths["warm"]
    found["lost"] = sum(warm) / (len(warm) * warm[-1]) - 1
    found["defaults"] = job.time(plan) / best - 1
    found["step"] = stepped(job, tuners["warm"], space, case)
    return {**case._asdict(), **found}


def stepped(job: Job, tuner: Tuner, space: Space, case: Case) -> int:
    """Iterations until what it takes for the best is within 2 % for good after the link has lost half its bandwidth."""
    job.place = job.place.scaled(0.5)
    source = random.Random(case.seed + 1)
    path = []
    for _ in range(ITERATIONS):
        trained(job, tuner, 1, source)
        path.append(job.time(tuner.best))
    best = min([*map(job.time, space.grid(case.points)), *path])
    return reached(path, best) - 1


def planned_cell(cell: tuple[str, str, bool]) -> dict[str, Any]:
    """What ``auto`` chooses in a cell of benchmarks/auto.py; the last of ``cell``: against fewer policies."""
    model, where, few = cell
    return auto.planned(model, where, auto.QUICK if few else auto.ALL, 16 if few else 60)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A row for each of the simulated jobs."""
    table = Table("job", "warm", "bayesian", "random", "ends above the best", "defaults", "lost", "after a step")
    for row in rows:
        table.add_row(
            f"{row['model']} {row['rate']} {row['exchange']} {row['seed']}",
            *(f"{row[way]} of {row[f'{way} samples']}" for way in ("warm", "bayesian", "random")),
            " / ".join(f"{row[f'{way} end']:.1%}" for way in ("warm", "bayesian", "random")),
            f"{row['defaults']:.1%}",
            f"{row['lost']:.2%}",
            f"{row['step']} iterations",
        )
    console.print(table)


def in_the_lab(quick: bool, console: Console) -> list[dict[str, Any]]:
    """A row for each of the real jobs; none where there can be no lab."""
    from tune_lab import lab_full, lab_quick, searched_on_line

    from foretrain.errors import ForetrainError

    rows = []
    for job in lab_quick() if quick else lab_full():
        try:
            rows.append(searched_on_line(job))
        except ForetrainError as error:
            console.print(f"no lab here: {error}", markup=False)
            break
        row = rows[-1]
        console.print(
            f"lab, {job.model} {job.rate} {job.engine}: ends {row['end']:.1%} above the best of {row['settings']}; "
            f"lost {row['lost']:.1%} in {job.searched} iterations, {row['samples']} samples; "
            f"within 2 % {row['close_after']} iterations after {'the step' if job.slow else 'the start'}"
        )
    return rows


def main() -> None:
    """Prints a row a case, what the targets are about, and the RESULT line."""
    arguments = options(__doc__ or "")
    console = Console(highlight=False, width=120)
    console.print(__doc__)
    models, rates, seeds, points = MODELS, RATES, SEEDS, 6
    if arguments.quick:
        models, rates, seeds, points = ("vgg16", "gpt2"), ("10Gbps",), (0,), 4
    cases = [Case(m, r, e, s, points) for m in models for r in rates for e in EXCHANGES for s in seeds]
    engines = auto.ENGINES[:1] if arguments.quick else auto.ENGINES
    cells = [(m, f"4x1xV100@{r}{e}", arguments.quick) for m in models for r in rates for e in engines]
    with ProcessPoolExecutor(2) as pool:
        rows = list(track(pool.map(measured, cases), total=len(cases), description="jobs", console=console))
        plans = list(track(pool.map(planned_cell, cells), total=len(cells), description="plans", console=console))
    show(rows, console)
    real = in_the_lab(arguments.quick, console)
    values = {
        "warm_samples_median": median(row["warm"] for row in rows),
        "warm_samples_max": max(row["warm"] for row in rows),
        "bayesian_samples_median": median(row["bayesian"] for row in rows),
        "random_samples_median": median(row["random"] for row in rows),
        "lost_share": max(row["lost"] for row in rows),
        "worse_than_defaults": sum(row["warm end"] > row["defaults"] + 1e-3 for row in rows),
        "step_iterations_median": median(row["step"] for row in rows),
        "step_iterations_max": max(row["step"] for row in rows),
        **auto.judged(plans),
        **({"lab_end_max": max(row["end"] for row in real)} if real else {}),
    }
    finish(arguments, "tune", values, {"simulated": rows, "auto": plans, "lab": real}, seed=0)


if __name__ == "__main__":
    main()
