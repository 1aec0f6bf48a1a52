"""A live simulation for a person at a terminal: progress while it runs, tables that fit 80 columns when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from foretrain.device.model import PROVENANCES
from foretrain.files import stdout_console
from foretrain.live.collectives import who
from foretrain.live.rank_trace import StepBreakdown
from foretrain.live.refold import ProgressCallbacks
from foretrain.live.routed_loads import RoutedLoads
from foretrain.live.scheduled_gradients import ModelSchedule
from foretrain.live.simulate import Simulated
from foretrain.report.findings import SimulationFindings, share, step_time
from foretrain.units import Time, format_size, format_time

BANNER = (
    "Simulated GPUs: times and memory are forecasts, values are not computed. "
    "Any loss, accuracy or gradient norm that the script prints is meaningless."
)
ACCOUNTS = ("compute", "exposed", "waiting", "idle")
"""Times that a step divides into."""
_MOST_RANKS = 16
_MOST_ROWS = 5
_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "workspace": "work",
}
_FIRST_WORD = 10.0
"""Seconds of silence after which a log says who is waited for; four times as many until it says so again."""


class SimulationProgress:
    """Shows on stderr how far a simulation is. A context manager.

    Attributes:
        watch: what to give `foretrain.live.simulate.simulate`.
    """

    def __init__(self, steps: int | None) -> None:
        # A log gets whole lines: rich would cut them at 80.
        self._console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
        self._steps = steps
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._building = self._stepping = self._waiting = None
        self._told = False
        self._done: dict[int, int] = {}
        self._began = time.perf_counter()
        self.watch = ProgressCallbacks(
            self._built, self._repeated, self._folded, self._stepped, self._waits, self._failed, self._tells
        )
        self._next_word = _FIRST_WORD

    def __enter__(self) -> SimulationProgress:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:  # in a log, it would write an empty line
            self._bars.stop()

    def _built(self, done: int, every: int) -> None:
        if self._building is None:
            self._building = self._bars.add_task("compiling the simulated GPU, once (s)", total=every)
            if not self._console.is_terminal:
                self._console.print(f"foretrain: compiling the simulated GPU, once; this takes about {every} s")
        self._bars.update(self._building, completed=done, total=every, visible=done < every)

    def _repeated(self, live: int, why: str) -> None:
        self._console.print(f"foretrain: starting again with {live} live ranks: {why}")

    def _folded(self, lines: tuple[str, ...]) -> None:
        if not self._told:
            self._told = True
            self._console.print(f"foretrain: {BANNER}", style="bold")
        for line in lines:
            self._console.print(f"foretrain: {line}")

    def _tells(self, line: str) -> None:
        self._console.print(f"foretrain: {line}")

    def _waits(self, ranks: tuple[int, ...], seconds: float) -> None:
        text = f"waiting for {who(ranks)} to go on, on the host ({seconds:.0f} s)"
        if self._console.is_terminal:
            self._waiting = self._bars.add_task(text, total=None) if self._waiting is None else self._waiting
            self._bars.update(self._waiting, description=text, visible=True)
        elif seconds >= self._next_word:
            self._next_word *= 4
            self._console.print(f"foretrain: {text}")

    def _stepped(self, rank: int, step: StepBreakdown) -> None:
        if self._waiting is not None:
            self._bars.update(self._waiting, visible=False)
        self._next_word = _FIRST_WORD
        self._done[rank] = step.number
        if self._stepping is None:
            self._stepping = self._bars.add_task("steps", total=self._steps)
        self._bars.update(self._stepping, completed=min(self._done.values()))

    def _failed(self, warnings: dict[str, int]) -> None:
        _show_warnings(self._console, warnings)


def _show_warnings(console: Console, warnings: Mapping[str, int]) -> None:
    for text, count in warnings.items():
        console.print(f"[yellow]warning[/]: {escape(text)}" + (f" ({count:,} times)" if count > 1 else ""))


def show(found: SimulationFindings) -> None:
    """Print the findings of a simulation."""
    console, forecast = stdout_console(), found.forecast
    console.print(_summary(found))
    for title, table in (_ranks(found), _memory(found), *_details(found)):
        console.print(f"\n[bold]{title}[/]")
        console.print(table)
    if len(forecast.ranks) > _MOST_RANKS:
        console.print(f"and {len(forecast.ranks) - _MOST_RANKS} more live ranks, which --json has")
    for schedule in found.done.trace.schedules:
        console.print(_exchange(schedule))
        if not schedule.settled:
            console.print("[yellow]warning[/]: too few steps for a forecast of this schedule; let the script make more")
    _show_warnings(console, forecast.warnings)
    if forecast.unknown:
        names = ", ".join(forecast.unknown)
        # Kernels of Triton and of extensions are called only by what they belong to.
        repeatable = any("::" in name for name in forecast.unknown)
        measure = "measure operators (foretrain calibrate), or " if repeatable else ""
        console.print(
            f"[yellow]warning[/]: charged for their bytes, or the arithmetic they are known to take: {escape(names)}; "
            f"{measure}say what they cost in a file (--costs)"
        )


def interval(found: SimulationFindings) -> str:
    """Return the range in which a measured iteration lies with a probability of 95 %."""
    low, high = map(format_time, found.forecast.interval)
    return f"{low} to {high}"


def shown(time: Time) -> str:
    """Return a duration as text; 0 without a unit."""
    return format_time(time) if time else "0"


def percent(part: float) -> str:
    """Return a share as per cent: ``"12.3 %"``."""
    return f"{100 * part:.1f} %"


def experts(loads: RoutedLoads) -> str:
    """Return which loads routers gave, and how busy the busiest expert and rank were."""
    seed = "" if loads.seed is None else f", seed {loads.seed}"
    rank = "" if loads.busiest_rank is None else f", busiest rank {loads.busiest_rank:.2f}"
    routers = f"{loads.routers} router{'s' if loads.routers > 1 else ''}"
    return f"{loads.given}{seed}: busiest expert {loads.busiest_expert:.2f}{rank} × the mean, {routers}"


def memory_left(found: SimulationFindings) -> str:
    """Return which rank needs the most memory, and how much it has left."""
    rank = found.tightest
    need = f"rank {rank.rank} needs {rank.memory.reserved / 2**30:.2f} of {found.done.usable / 2**30:.2f} GiB"
    retries = f", after giving back its cache {rank.memory.retries} times" if rank.memory.retries else ""
    return f"{need}, {found.left / 2**30:.2f} GiB left{retries}"


def checkpoint(found: SimulationFindings) -> str:
    """Return a sentence on the last checkpoint; empty where the script saved none."""
    if not (checkpoints := found.forecast.checkpoints):
        return ""
    last = checkpoints[-1]
    several = f"{len(checkpoints)}, the last " if len(checkpoints) > 1 else ""
    ranks = "the live ranks" if last.partial else "all ranks"
    stop = f"; the job stands still for {format_time(last.time)} of copies to the host" if last.time else ""
    sizes = f"{format_size(last.size)} by {ranks}, {format_size(last.largest)} a GPU at most"
    return f"{several}after step {last.step}: {sizes}{stop}"


def more_live(found: SimulationFindings) -> str:
    """Return why no fewer ranks are live; empty where one stands for all."""
    return "; ".join(found.done.more_live)


def provenance(found: SimulationFindings) -> str:
    """Return the sources of the kernels' times, with their shares."""
    first = found.forecast.first
    total = sum(first.times) or 1
    parts = (f"{time / total:.0%} {name}" for name, time in zip(PROVENANCES, first.times, strict=True) if time)
    return f"{', '.join(parts)}; {first.kernels:,} a step on rank {first.rank}"


def _summary(found: SimulationFindings) -> Table:
    forecast, first = found.forecast, found.forecast.first
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("cluster", escape(forecast.cluster))
    table.add_row("iteration", f"{format_time(forecast.iteration_time)} (95 %: {interval(found)})")
    if (rate := found.tokens_rate) is not None:
        table.add_row("throughput", f"{rate:,.0f} tokens/s, {rate / forecast.world:,.0f} tokens/s/GPU")
    achieved = f"{forecast.flops / 1e12:.1f} TFLOP/s per GPU"
    mfu = "" if forecast.mfu is None else f", MFU {percent(forecast.mfu)} of the dense bf16 peak"
    table.add_row("arithmetic", achieved + mfu)
    table.add_row("memory", memory_left(found))
    exposed = f"{percent(share(first, 'exposed'))} of rank {first.rank}'s step exposed"
    table.add_row("communication", f"{exposed}, bubble {percent(found.bubble)} of all ranks' steps")
    if found.loads and found.loads[0].busiest:
        load = found.loads[0]
        table.add_row("busiest link", f"{percent(load.busiest)} used: {load.name}")
    if (loads := found.done.loads) is not None:
        table.add_row("experts", escape(experts(loads)))
    if saved := checkpoint(found):
        table.add_row("checkpoint", saved)
    if found.done.more_live:
        table.add_row("live ranks", escape(f"{len(forecast.ranks)} of {forecast.world:,}: {more_live(found)}"))
    table.add_row("kernel times", provenance(found))
    if forecast.stand_ins:
        table.add_row("stand-ins", f"for {', '.join(forecast.stand_ins)}, not installed here")
    table.add_row("simulated in", f"{forecast.wall:.1f} s")
    return table


def _plain(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ranks(found: SimulationFindings) -> tuple[str, Table]:
    table = _plain("rank", "ranks", "mean step", "compute", "exposed", "waiting", "host", "communication")
    for rank in found.forecast.ranks[:_MOST_RANKS]:
        parts = (percent(share(rank, name)) for name in (*ACCOUNTS, "communication"))
        table.add_row(str(rank.rank), f"{rank.members:,}", shown(step_time(rank)), *parts)
    return "where a step's time goes", table


def _memory(found: SimulationFindings) -> tuple[str, Table]:
    ranks = found.forecast.ranks[:_MOST_RANKS]
    kinds = [kind for kind in ranks[0].memory.breakdown if any(rank.memory.breakdown.get(kind) for rank in ranks)]
    names = ("reserved", "allocated", *(_SHORT.get(kind, kind) for kind in kinds))
    table = _plain("rank", *names)
    for rank in ranks:
        memory = rank.memory
        sizes = (memory.reserved, memory.allocated, *(memory.breakdown.get(kind, 0) for kind in kinds))
        table.add_row(str(rank.rank), *(f"{size / 2**30:.2f}" for size in sizes))
    return "memory at its peak, GiB", table


def _exchange(schedule: ModelSchedule) -> str:
    """Describe a policy's exchange in one line."""
    if schedule.plan is None:
        return f"schedule: {schedule.group} did not get to it"
    plan, rounds = schedule.plan, len(schedule.begins)
    return (
        f"schedule: {plan.workload.name} under {plan.schedule}, {rounds} rounds, "
        f"{len(schedule.log) / max(rounds, 1):.1f} operations each; {plan.bound}"
    )


def show_comparison(stock: Simulated, done: Simulated) -> None:
    """Print the distance of a policy from PyTorch's own DistributedDataParallel, and from the optimum."""
    table = Table(title="DistributedDataParallel and the policy", title_justify="left")
    for name in ("exchange", "iteration", "95 %", "speed-up", "exposed"):
        table.add_column(name, justify="left" if name == "exchange" else "right")
    before, after = stock.forecast, done.forecast
    names = ", ".join(str(schedule.plan.schedule) for schedule in done.trace.schedules if schedule.plan) or "as before"
    for name, found in (("PyTorch's own", before), (names, after)):
        gain = before.iteration_time / found.iteration_time
        between = " to ".join(map(format_time, found.interval))
        exposed = shown(found.first.mean("exposed"))
        table.add_row(name, format_time(found.iteration_time), between, f"{gain:.2f}×", exposed)
    for schedule in done.trace.schedules:
        if schedule.plan:
            best = schedule.plan.bound.time
            table.add_row("T*, what no order beats", format_time(best), "", f"{before.iteration_time / best:.2f}×", "")
    stdout_console().print(table)


def _details(found: SimulationFindings) -> Iterator[tuple[str, Table]]:
    """Yield the tables of operators, critical path and links, as far as they were recorded."""
    if found.operators:
        table = _plain("name", "a step", "share")
        for operator in found.operators[:_MOST_ROWS]:
            table.add_row(escape(operator.name), shown(operator.time), percent(operator.share))
        yield "kernels by time, mean of all GPUs", table
    if found.path is not None:
        table = _plain("what", "share")
        for name, part in list(found.path.shares().items())[:_MOST_ROWS]:
            table.add_row(escape(name), percent(part))
        yield f"critical path of the last step, which ends on rank {found.path.rank}", table
    if any(load.carried for load in found.loads):
        table = _plain("between", "links", "carried", "mean used", "busiest")
        for load in found.loads:
            if load.carried:
                used = (percent(load.mean), percent(load.busiest))
                table.add_row(load.kind.label, f"{len(load.kind.links):,}", format_size(load.carried), *used)
        yield "links in a step", table
