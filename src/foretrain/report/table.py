"""Tables for a terminal: the comparison, with a row for every schedule and the optimum below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from foretrain.experiments import Comparison, fastest
from foretrain.schedule import IDEAL, POLICIES, Spec
from foretrain.simulation import Run
from foretrain.units import format_size, format_time, to_seconds
from foretrain.workload.step import Workload

_ROOM_FOR_KNOBS = 96


def ranking(comparison: Comparison) -> list[Run]:
    """Return the runs from the fastest to the slowest, with the baseline where it is none of them."""
    runs = list(comparison.runs)
    if not any(run.schedule == comparison.baseline.schedule for run in runs):
        runs.append(comparison.baseline)
    return sorted(runs, key=lambda run: run.iteration_time)


def labels(runs: Sequence[Run]) -> list[str]:
    """Label each run by its policy; of two, mark the one with knobs "tuned"; number more runs of one policy."""
    names = [run.schedule.name for run in runs]
    plain = [run.schedule.name for run in runs if not _set(run)]
    found = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        if names.count(name) == 1 or (names.count(name) == 2 and plain.count(name) == 1 and not _set(run)):
            found.append(name)
        elif names.count(name) == 2 and plain.count(name) == 1:
            found.append(f"{name}, tuned")
        else:
            found.append(f"{name} {names[: place + 1].count(name)}")
    return found


def _set(run: Run) -> bool:
    """Return whether any knob differs from its default."""
    return isinstance(run.schedule, Spec) and bool(run.schedule.knobs)


def knobs(run: Run) -> tuple[str, ...]:
    """Return ``knob=value`` of every knob that differs from its default, as a schedule's notation takes it."""
    if not isinstance(run.schedule, Spec):
        return ()
    settings = run.schedule.settings
    changed = [knob for knob in POLICIES[run.schedule.name].knobs if settings[knob.name] != knob.default]
    return tuple(f"{knob.name}={knob.write(settings[knob.name])}" for knob in changed)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Line of the table as text, for a terminal and for a page.

    Attributes:
        name: of the schedule.
        marks: some of ``"best"``, ``"as fast"``, ``"keep"``, ``"baseline"`` and ``"ideal"``; none is best, and the
            baseline is kept, where a change is not worth it.
        iteration: time of an iteration.
        rate: samples per second of the whole cluster.
        speedup: over the baseline.
        ratio: T/T*.
        exposed: communication and update that nothing hides.
        idle: share of the iteration in which the GPU computes nothing.
        knobs: that differ from their defaults, see `knobs`.
    """

    name: str
    marks: tuple[str, ...]
    iteration: str
    rate: str
    speedup: str
    ratio: str
    exposed: str
    idle: str
    knobs: tuple[str, ...] = ()


def rows(comparison: Comparison) -> list[ComparisonRow]:
    """A row for every schedule, fastest first."""
    runs = ranking(comparison)
    best = fastest(runs)
    return [
        ComparisonRow(
            name=label,
            marks=("best",) * (run is best and comparison.advice.worth_it)
            + ("as fast",) * (tied(run, best) and run is not best and comparison.advice.worth_it)
            + ("keep",) * (not comparison.advice.worth_it and run.schedule == comparison.baseline.schedule)
            + ("baseline",) * (run.schedule == comparison.baseline.schedule)
            + ("ideal",) * (run.schedule.name == IDEAL),
            iteration=format_time(run.iteration_time),
            rate=format_rate_of_samples(run.throughput),
            speedup=f"{comparison.speedup(run):.2f}×",
            ratio=f"{run.gap + 1:.3f}",
            exposed=format_time(run.exposed),
            idle=f"{run.idle:.0%}",
            knobs=knobs(run),
        )
        for run, label in zip(runs, labels(runs), strict=True)
    ]


def tied(run: Run, best: Run) -> bool:
    """Return whether ``run`` is as fast as ``best``: within 0.5 %, less than forecasts are off."""
    return run.iteration_time <= 1.005 * best.iteration_time


def optimum(comparison: Comparison) -> ComparisonRow:
    """Return the row of T*: what a schedule without cost, at its best, would reach."""
    bound = comparison.bound
    samples = comparison.workload.batch * comparison.cluster.total_gpus
    return ComparisonRow(
        name="optimum T*",
        marks=(),
        iteration=format_time(bound.time),
        rate=format_rate_of_samples(samples / to_seconds(bound.time)),
        speedup=f"{comparison.baseline.iteration_time / bound.time:.2f}×",
        ratio="1.000",
        exposed=format_time(bound.exposed),
        idle=f"{bound.exposed / bound.time:.0%}",
    )


def format_rate_of_samples(rate: float) -> str:
    """Three digits or more, with separators: ``"12,345"``, ``"191.7"``, ``"0.82"``."""
    return f"{rate:,.0f}" if rate >= 999.95 else f"{rate:.1f}" if rate >= 9.995 else f"{rate:.2f}"


def table(comparison: Comparison, width: int = 100) -> Table:
    """Every schedule at its best, fastest first, and the optimum; below 96 columns of ``width`` without knobs.

    No number is cut: in a narrow terminal the schedule's name is broken.
    """
    lines = rows(comparison)
    wide = width >= _ROOM_FOR_KNOBS and any(line.knobs for line in lines)
    result = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", caption_justify="left")
    result.add_column("schedule", overflow="fold")
    for head in ("iteration", f"{comparison.workload.unit}/s", "speed-up", "T/T*", "exposed", "idle"):
        result.add_column(head, justify="right", no_wrap=True)
    if wide:
        result.add_column("knobs", overflow="fold")
    for line in lines:
        chosen = "best" in line.marks or "keep" in line.marks
        style = "bold green" if chosen else "bold" if "baseline" in line.marks else ""
        result.add_row(*_cells(line, wide), style=style, end_section=line is lines[-1])
    result.add_row(*_cells(optimum(comparison), wide), style="cyan")
    result.caption = _caption(comparison, width)
    return result


def _cells(line: ComparisonRow, wide: bool) -> list[str | Text]:
    name = Text(line.name)
    if line.marks:
        name.append(f" ({', '.join(line.marks)})")
    cells = [name, line.iteration, line.rate, line.speedup, line.ratio, line.exposed, line.idle]
    return [*cells, Text(" ".join(line.knobs))] if wide else cells


def _caption(comparison: Comparison, width: int) -> Text:
    text = (
        f"speed-up: over {comparison.baseline.schedule}, DDP at its best; exposed: communication and update that "
        "nothing hides; idle: of the GPU"
    )
    # rich would break it at the table's width, which is smaller
    return Text(text, style="dim", overflow="ignore" if len(text) <= width else None)


def describe(workload: Workload) -> str:
    """Return a line that describes a step and the source of its times."""
    update = f", update {format_time(workload.update)}" if workload.update else ""
    source = f" ({workload.source})" if workload.source else ""
    return (
        f"{workload.name}, {workload.batch} {workload.unit} a GPU: {format_size(workload.size)} of gradients in "
        f"{len(workload.gradients)} tensors of {len(workload.layers)} layers; forward {format_time(workload.forward)}, "
        f"backward {format_time(workload.backward)}{update}{source}"
    )


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """Summary of a comparison in a terminal, as wide as the terminal."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        yield Text.assemble(("workload  ", "dim"), describe(comparison.workload))
        yield Text.assemble(("cluster   ", "dim"), str(comparison.cluster))
        yield Text.assemble(("optimum   ", "dim"), str(comparison.bound))
        yield Text("")
        yield table(comparison, options.max_width)
        yield Text("")
        chosen = [f"{line.name}({', '.join(line.knobs)})" for line in rows(comparison) if line.knobs]
        if options.max_width < _ROOM_FOR_KNOBS and chosen:
            yield Text.assemble(("knobs     ", "dim"), ", ".join(chosen))
            yield Text("")
        yield Text(comparison.advice.text, style="bold green" if comparison.advice.worth_it else "bold yellow")
        if comparison.buckets:
            yield Text(comparison.buckets.line, style="dim")


def summary(comparison: Comparison) -> ComparisonSummary:
    """Return workload, cluster, optimum, table and advice for ``rich.print``."""
    return ComparisonSummary(comparison)


def plain_table() -> Table:
    """Return a table without lines, with dim heads."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def foldable(schedule: str) -> str:
    """Return a schedule's notation with a space before its knobs, at which a narrow column may break it."""
    return schedule.replace("(", " (", 1)
