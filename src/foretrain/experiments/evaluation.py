"""Scenarios of a sweep, each with an id from its content, and the evaluator that simulates them in a worker.

Workloads, clusters (with all that their simulations of collectives found) and baselines are kept for the scenarios that
follow; a sweep hands them out in an order in which these change rarely.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from foretrain.device import Precision
from foretrain.errors import ConfigError, ForetrainError
from foretrain.experiments.result_store import ScenarioResult
from foretrain.experiments.sweep_file import Value
from foretrain.network import Cluster, Place, cluster
from foretrain.network.notation import DEFAULT_DEVICE
from foretrain.planner import ScheduleRequest, resolved, tune
from foretrain.schedule import POLICIES, Spec, spec
from foretrain.simulation import Run, simulate
from foretrain.units import Time, to_seconds
from foretrain.workload import Workload, zoo
from foretrain.workload.step import jittered


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a workload: a model of the zoo with its options, or a file.

    Attributes:
        name: the model's name, or that in the file.
        digest: of the file's content; empty for the zoo.
        recorded: what the file holds, so that workers need not have it.
    """

    name: str
    batch: int | None = None
    precision: Precision | None = None
    device: str | None = None
    sequence: int | None = None
    throughput: float | None = None
    digest: str = ""
    recorded: Workload | None = field(default=None, compare=False, repr=False)

    def build(self, device: str) -> Workload:
        """Return the workload; a model of the zoo on ``device`` unless it names its own. Raises ConfigError."""
        if self.recorded is not None:
            return self.recorded
        return zoo(
            self.name,
            batch=self.batch,
            device=self.device or device,
            precision=self.precision,
            throughput=self.throughput,
            sequence=self.sequence,
        )

    def content(self) -> dict[str, Any]:
        """Return what identifies it: the content of a file, not its name."""
        if self.digest:
            return {"digest": self.digest}
        names = ("name", "batch", "precision", "device", "sequence", "throughput")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Where:
    """Cluster by its notation.

    Attributes:
        notation: as `foretrain.network.cluster` takes it.
        digest: of the content of the file that the notation names; empty where it names none.
        axes: what the placeholders of the notation stood for.
    """

    notation: str
    digest: str = ""
    axes: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    def content(self) -> str:
        """Return what identifies it: the content of a file, not its name."""
        _, *options = self.notation.split(",")
        return ",".join([self.digest, *options]) if self.digest else self.notation


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario: one point of a sweep.

    Attributes:
        source: what is trained.
        where: on which cluster.
        schedule: under which policy, in its notation.
        tuned: whether the knobs that ``schedule`` leaves free are searched for their best.
        baseline: what the speed-up is counted from, in its notation; its free knobs are searched.
        jitter: spread of the layer times.
        seed: of the jitter.
    """

    source: Source
    where: Where
    schedule: str
    tuned: bool
    baseline: str
    jitter: float = 0.0
    seed: int = 0

    @property
    def id(self) -> str:
        """Return 20 hexadecimal digits of a hash of what is simulated; order and names of axes do not count."""
        content = {
            "workload": self.source.content(),
            "cluster": self.where.content(),
            "schedule": self.schedule,
            "tuned": self.tuned,
            "baseline": self.baseline,
            "jitter": self.jitter,
            "seed": self.seed,
        }
        return hashlib.blake2b(msgspec.json.encode(content, order="sorted"), digest_size=10).hexdigest()


def best_run(
    workload: Workload,
    place: Place,
    schedule: ScheduleRequest,
    *,
    tuned: bool = True,
    evaluations: int = 60,
    trace: bool = False,
) -> Run:
    """Simulate ``schedule`` on ``place``; if ``tuned``, with the best values of the knobs that a policy leaves free."""
    if tuned and isinstance(schedule, Spec):
        plan = tune(workload, place, schedule, evaluations=evaluations)
    else:
        plan = resolved(schedule, workload, place)
    return simulate(workload, place, plan, trace=trace)


def simulate_all(
    workload: Workload,
    places: Sequence[tuple[str, Place]],
    schedules: Sequence[ScheduleRequest],
    *,
    tuned: bool,
    evaluations: int = 60,
    progress: Callable[[str, int, int], None],
) -> list[tuple[Run, ...]]:
    """Return the runs of every schedule on each of ``places``, which have names for ``progress``."""
    found = []
    for done, (name, place) in enumerate(places):
        progress(name, done, len(places))
        found.append(tuple(best_run(workload, place, one, tuned=tuned, evaluations=evaluations) for one in schedules))
    progress("done", len(places), len(places))
    return found


def digest(path: Path) -> str:
    """Return a hash of the content of the file at ``path``."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Results of a batch of scenarios, in its order, and the seconds that it took."""

    results: tuple[ScenarioResult, ...]
    seconds: float


def evaluate(scenarios: Sequence[Scenario]) -> Evaluated:
    """Simulate each of ``scenarios``; a result holds the error of a scenario that fails. Only bugs raise."""
    began = time.perf_counter()
    results = tuple(result_of(one) for one in scenarios)
    return Evaluated(results, time.perf_counter() - began)


def result_of(scenario: Scenario) -> ScenarioResult:
    """Simulate ``scenario``."""
    try:
        return _result(scenario)
    except ForetrainError as error:
        return ScenarioResult(scenario.id, error=str(error))


def _result(scenario: Scenario) -> ScenarioResult:
    where = scenario.where
    place = _place(where)
    device = "" if scenario.source.recorded else scenario.source.device or place.device or DEFAULT_DEVICE
    work = _work(scenario.source, device, scenario.jitter, scenario.seed)
    run = best_run(work, place, spec(scenario.schedule), tuned=scenario.tuned)
    assert isinstance(run.schedule, Spec)
    name, baseline_time = _baseline(scenario.source, device, scenario.jitter, scenario.seed, where, scenario.baseline)
    bound = run.bound
    return ScenarioResult(
        id=scenario.id,
        gpus=place.total_gpus,
        device=device,
        exchange=place.exchange if isinstance(place, Cluster) else place.collective_at(work.size),
        bandwidth=place.workers * place.up if isinstance(place, Cluster) else 0.0,
        schedule=str(run.schedule),
        knobs=_knobs(run.schedule),
        iteration_time=to_seconds(run.iteration_time),
        samples_per_second=run.throughput,
        optimum=to_seconds(bound.time),
        gap=run.gap,
        kind=bound.kind,
        layer=bound.layer,
        compute=to_seconds(bound.compute),
        communication=to_seconds(bound.link),
        exposed=to_seconds(run.exposed),
        idle=run.idle,
        operations=len(run.log) / (len(run.begins) - 1),
        baseline=name,
        baseline_time=to_seconds(baseline_time),
        speedup=baseline_time / run.iteration_time,
    )


def _knobs(plan: Spec) -> dict[str, float]:
    """Return the knobs that are numbers; a list of sizes is in the schedule's notation alone."""
    kinds = {knob.name: knob.kind for knob in POLICIES[plan.name].knobs}
    return {
        name: to_seconds(int(value)) if kinds[name] == "time" else float(value)
        for name, value in plan.settings.items()
        if kinds[name] != "sizes"
    }


@lru_cache(maxsize=32)
def _place(where: Where) -> Place:
    if where.digest and digest(Path(where.notation.partition(",")[0])) != where.digest:
        problem = "is not the file that the sweep began with"
        raise ConfigError("cluster", where.notation, problem, "give every worker the same file, and start again")
    return cluster(where.notation)


@lru_cache(maxsize=64)
def _work(source: Source, device: str, jitter: float, seed: int) -> Workload:
    return jittered(source.build(device), jitter, seed)


@lru_cache(maxsize=256)
def _baseline(source: Source, device: str, jitter: float, seed: int, where: Where, baseline: str) -> tuple[str, Time]:
    """Return the baseline with its best knobs, in its notation, and its iteration time."""
    run = best_run(_work(source, device, jitter, seed), _place(where), spec(baseline))
    return str(run.schedule), run.iteration_time
