"""Expansion of a sweep file into scenarios: the product of its lists without exclusions, each scenario once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar, cast

from foretrain.device import Precision
from foretrain.errors import ConfigError, unknown
from foretrain.experiments.evaluation import Scenario, Source, Where, digest
from foretrain.experiments.sweep_file import (
    Axis,
    ClusterAxis,
    Condition,
    ScheduleAxis,
    SweepFile,
    Value,
    WorkloadAxis,
    condition,
    values,
)
from foretrain.network import cluster
from foretrain.network.notation import DEFAULT_DEVICE
from foretrain.schedule import POLICIES, Knob, Spec, spec
from foretrain.workload import load
from foretrain.workload.step import check_sigma

_T = TypeVar("_T")
_OWN = ("model", "batch", "precision", "device", "cluster", "schedule", "jitter", "seed")
"""Fields of every scenario that a condition can name, besides axes and knobs."""
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")


@dataclass(frozen=True, slots=True)
class Expansion:
    """Scenarios of a sweep.

    Attributes:
        scenarios: by id, in the order of the file: workloads, then clusters, then seeds, then schedules. So what a
            worker takes together shares its workload, its cluster and its baseline.
        excluded: how many were left out.
        repeated: how many were the same as one before.
    """

    scenarios: Mapping[str, Scenario]
    excluded: int
    repeated: int


def expand(sweep: SweepFile, folder: str | Path = ".") -> Expansion:
    """Return the scenarios of ``sweep``; the files that it names are relative to ``folder``.

    Every workload, cluster and schedule is read once here, so that what is wrong with one is said before anything runs.

    Raises ConfigError that names the field.
    """
    folder = Path(folder).resolve()
    sources = [one for index, given in enumerate(sweep.workloads) for one in _sources(given, index, folder)]
    wheres = [one for index, given in enumerate(sweep.clusters) for one in _wheres(given, index, folder)]
    plans = [one for index, given in enumerate(sweep.schedules) for one in _plans(given, index, sweep.tuned)]
    draws = _draws(sweep)
    baseline = str(_at("baseline", lambda: spec(sweep.baseline)))
    _check(sources, wheres)
    rules = _rules(sweep, [where for where, _ in wheres], [plan for plan, _ in plans])
    found: dict[str, Scenario] = {}
    excluded = repeated = 0
    for source, (where, device), (jitter, seed), (plan, tuned) in product(sources, wheres, draws, plans):
        one = Scenario(source, where, str(plan), tuned, baseline, jitter, seed)
        if rules and any(rule.holds(_about(one, plan, device)) for rule in rules):
            excluded += 1
        elif (known := one.id) in found:
            repeated += 1
        else:
            found[known] = one
    if not found:
        raise ConfigError("exclude", sweep.exclude, f"leaves none of {excluded} scenarios", "exclude less")
    return Expansion(found, excluded, repeated)


# Workloads.


def _sources(given: str | WorkloadAxis, index: int, folder: Path) -> Iterator[Source]:
    field = f"workloads[{index}]"
    one = WorkloadAxis(model=given) if isinstance(given, str) else given
    if (one.model is None) == (one.file is None):
        remedy = "write either model = 'resnet50' or file = 'mine.toml'"
        raise ConfigError(field, one.model, "is not either a model or a file", remedy)
    if one.file is not None:
        for name in ("batch", "precision", "device", "sequence", "throughput"):
            if (value := getattr(one, name)) is not None:
                raise ConfigError(f"{field}.{name}", value, "does not apply to a recorded workload", "leave it out")
        for name in values(cast("Axis", one.file), f"{field}.file"):
            yield _recorded(folder / str(name), f"{field}.file")
        return
    parts = (_optional(getattr(one, name), f"{field}.{name}") for name in ("batch", "precision", "device", "sequence"))
    for name, batch, precision, device, sequence in product(values(cast("Axis", one.model), f"{field}.model"), *parts):
        source = Source(
            str(name),
            cast("int | None", batch),
            cast("Precision | None", precision),
            cast("str | None", device),
            cast("int | None", sequence),
            one.throughput,
        )
        # As the zoo calls it and with its usual batch: however that is written, it is one scenario.
        built = _at(field, lambda source=source: source.build(DEFAULT_DEVICE))
        yield dataclasses.replace(source, name=built.name, batch=built.batch)


def _optional(axis: object, field: str) -> Sequence[Value | None]:
    return (None,) if axis is None else values(cast("Axis", axis), field)


def _recorded(path: Path, field: str) -> Source:
    recorded = _at(field, lambda: load(path))
    return Source(recorded.name, recorded.batch, digest=digest(path), recorded=recorded)


def _check(sources: Sequence[Source], wheres: Sequence[tuple[Where, str]]) -> None:
    """Check that every model is available on every GPU."""
    devices = sorted({device for _, device in wheres})
    for source in (one for one in sources if one.recorded is None):
        for device in [source.device] if source.device else devices:
            _at("workloads", lambda source=source, device=device: source.build(device))


# Clusters.


def _wheres(given: str | ClusterAxis, index: int, folder: Path) -> Iterator[tuple[Where, str]]:
    """Yield each cluster with its GPU."""
    field = f"clusters[{index}]"
    one = ClusterAxis(given) if isinstance(given, str) else given
    for notation in (one.notation,) if isinstance(one.notation, str) else one.notation:
        names = dict.fromkeys(_PLACEHOLDER.findall(notation))
        for name in names:
            _check_name(name, f"{field}.axes")
            if name not in one.axes:
                remedy = f"write e.g. axes = {{ {name} = [...] }}"
                raise ConfigError(f"{field}.axes", name, f"is in {notation!r} but has no values", remedy)
        axes = {name: values(one.axes[name], f"{field}.axes.{name}") for name in names}
        if unused := [name for name in one.axes if name not in names]:
            raise ConfigError(f"{field}.axes", unused[0], f"is nowhere in {notation!r}", f"write {{{unused[0]}}} in it")
        for point in product(*axes.values()):
            yield _where(notation, dict(zip(axes, point, strict=True)), field, folder)


def _check_name(name: str, field: str) -> None:
    knobs = {knob.name for policy in POLICIES.values() for knob in policy.knobs}
    if not _NAME.fullmatch(name):
        raise ConfigError(field, name, "is no name of an axis", "write lower-case letters, digits and underscores")
    if name in _OWN or name in knobs:
        raise ConfigError(field, name, "is taken", f"write e.g. {name}_of_cluster")


def _where(notation: str, point: Mapping[str, Value], field: str, folder: Path) -> tuple[Where, str]:
    text = _PLACEHOLDER.sub(lambda match: str(point[match[1]]), notation).strip()
    head, *options = text.split(",")
    file = ""
    if head.endswith((".toml", ".graphml")):
        text = ",".join([str(folder / head), *options])
        if (folder / head).is_file():
            file = digest(folder / head)
    place = _at(field, lambda: cluster(text))
    return Where(text, file, tuple(point.items())), place.device or DEFAULT_DEVICE


# Schedules and seeds.


def _plans(given: str | ScheduleAxis, index: int, tuned: bool) -> Iterator[tuple[Spec, bool]]:
    """Yield each schedule with its knobs, and whether its free knobs are searched."""
    field = f"schedules[{index}]"
    one = ScheduleAxis(given) if isinstance(given, str) else given
    wanted = tuned if one.tuned is None else one.tuned
    for notation in (one.notation,) if isinstance(one.notation, str) else one.notation:
        plan = _at(field, lambda notation=notation: spec(notation))
        known = {knob.name: knob for knob in POLICIES[plan.name].knobs}
        axes = {name: _knob_values(plan, known, name, axis, f"{field}.knobs") for name, axis in one.knobs.items()}
        for point in product(*axes.values()):
            full = Spec(plan.name, {**plan.knobs, **dict(zip(axes, point, strict=True))})
            yield full, wanted and any(knob.tunable and knob.name not in full.knobs for knob in known.values())


def _knob_values(plan: Spec, known: Mapping[str, Knob], name: str, axis: Axis, field: str) -> tuple[float, ...]:
    if name not in known:
        raise unknown(f"{field} of {plan.name}", name, known)
    if name in plan.knobs:
        raise ConfigError(f"{field}.{name}", str(plan), "sets it already", "give it once")
    knob = known[name]

    def read(value: Value) -> float:
        if isinstance(value, str) or knob.kind in ("size", "time"):
            return knob.parse(cast("str", value))  # which refuses a bare number where a unit belongs
        return knob.check(value)

    found = (_at(field, lambda value=value: read(value)) for value in values(axis, f"{field}.{name}"))
    return tuple(dict.fromkeys(found))


def _draws(sweep: SweepFile) -> list[tuple[float, int]]:
    """Return each jitter with each seed; without jitter the only seed is 0."""
    if isinstance(sweep.seeds, int):
        if sweep.seeds < 1:
            raise ConfigError("seeds", sweep.seeds, "is no number of seeds", "write 1 or more, or a list of seeds")
        seeds: tuple[Value, ...] = tuple(range(sweep.seeds))
    else:
        seeds = values(cast("Axis", sweep.seeds), "seeds")
    if any(cast("int", seed) < 0 for seed in seeds):
        raise ConfigError("seeds", list(seeds), "has one below 0", "write whole numbers from 0")
    spreads = values(cast("Axis", sweep.jitter), "jitter")
    for spread in spreads:
        check_sigma(spread)
    if not any(spreads) and sweep.seeds != 1:
        raise ConfigError("seeds", sweep.seeds, "change nothing without jitter", "write e.g. jitter = 0.03")
    return [(float(jitter), int(seed) if jitter else 0) for jitter in spreads for seed in (seeds if jitter else (0,))]


# What is left out.


def _rules(sweep: SweepFile, wheres: Sequence[Where], plans: Sequence[Spec]) -> list[Condition]:
    axes = {name for where in wheres for name, _ in where.axes}
    knobs = {name for plan in plans for name in plan.settings}
    return [condition(text, {*_OWN, *axes, *knobs}) for text in sweep.exclude]


def _about(one: Scenario, plan: Spec, device: str) -> dict[str, Value]:
    """Return the values that conditions compare; sizes in bytes and times in seconds, as knobs have them."""
    source = one.source
    known = {knob.name: knob for knob in POLICIES[plan.name].knobs}
    about: dict[str, Value | None] = {
        "model": source.name,
        "batch": source.batch,
        "precision": source.precision,
        "device": source.device or device,
        "cluster": one.where.notation,
        "schedule": plan.name,
        "jitter": one.jitter,
        "seed": one.seed,
        **{name: known[name].write(value) for name, value in plan.settings.items() if known[name].kind != "sizes"},
        **dict(one.where.axes),
    }
    return {name: value for name, value in about.items() if value is not None}


def _at(field: str, read: Callable[[], _T]) -> _T:
    """Return the result of ``read``; prefix its error with ``field``."""
    try:
        return read()
    except ConfigError as error:
        raise error.at(field) from None
