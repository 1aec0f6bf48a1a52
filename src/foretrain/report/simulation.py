"""A live simulation for a person: progress while it runs, tables when it is done; and as plain numbers."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
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

from foretrain.live.forecast import Forecast, RankForecast
from foretrain.live.simulate import Simulated, Watch
from foretrain.live.story import Step
from foretrain.units import SECOND, format_size, format_time

BANNER = (
    "Simulated GPUs: times and memory are forecasts, values are not computed. "
    "Any loss, accuracy or gradient norm that the script prints is meaningless."
)
_PROVENANCES = ("measured", "interpolated", "modelled", "unknown")
_MOST_RANKS = 16


class Progress:
    """Shows on stderr how far a simulation is. A context manager.

    Attributes:
        watch: what to give `foretrain.live.simulate.simulate`.
    """

    def __init__(self, steps: int | None) -> None:
        self._console = Console(stderr=True, highlight=False)
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
        self._building = self._stepping = None
        self._done: dict[int, int] = {}
        self._began = time.perf_counter()
        self.watch = Watch(self._built, self._folded, self._stepped)

    def __enter__(self) -> Progress:
        self._console.print(f"foretrain: {BANNER}", style="bold")
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _built(self, done: int, every: int) -> None:
        if self._building is None:
            self._building = self._bars.add_task("compiling the simulated GPU, once", total=every)
            if not self._console.is_terminal:
                self._console.print("foretrain: compiling the simulated GPU, once; this takes about a minute")
        self._bars.update(self._building, completed=done)

    def _folded(self, lines: tuple[str, ...]) -> None:
        for line in lines:
            self._console.print(f"foretrain: {line}")

    def _stepped(self, rank: int, step: Step) -> None:
        self._done[rank] = step.number
        if self._stepping is None:
            self._stepping = self._bars.add_task("steps", total=self._steps)
        self._bars.update(self._stepping, completed=min(self._done.values()))


def show(done: Simulated) -> None:
    """Prints what the simulation found."""
    console, found = Console(highlight=False), done.forecast
    console.print(_summary(found))
    console.print(_ranks(found))
    console.print(_memory(found))
    for text, count in found.warnings.items():
        console.print(f"[yellow]warning[/]: {text}" + (f" ({count:,} times)" if count > 1 else ""))
    if found.unknown:
        console.print(
            f"[yellow]warning[/]: charged for their bytes alone, as nothing else is known: {', '.join(found.unknown)}"
        )


def _summary(found: Forecast) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    mfu = found.mfu
    table.add_row("cluster", f"{found.cluster}")
    table.add_row("iteration", f"{format_time(found.iteration_time)} ± {format_time(2 * found.sigma)} (95 %)")
    achieved = f"{found.flops / 1e12:.1f} TFLOP/s per GPU"
    table.add_row(
        "arithmetic",
        achieved
        if mfu is None
        else f"{achieved}, MFU {mfu:.1%} (FLOPs of matrix products, attention and convolutions, "
        "what is computed twice counted once, over the dense bf16 peak)",
    )
    total = sum(found.first.times) or 1
    parts = (
        f"{share / total:.0%} {name}" for name, share in zip(_PROVENANCES, found.first.times, strict=True) if share
    )
    table.add_row(
        "kernel times", f"{', '.join(parts)}; {found.first.kernels:,} kernels a step on rank {found.first.rank}"
    )
    table.add_row("simulated in", f"{found.wall:.1f} s")
    return table


def _ranks(found: Forecast) -> Table:
    table = Table(title="where a step's time goes", title_justify="left")
    for name in (
        "rank",
        "stands for",
        "step",
        "compute",
        "communication",
        "exposed",
        "waits for others",
        "waits for host",
    ):
        table.add_column(name, justify="right")
    for rank in found.ranks[:_MOST_RANKS]:
        step = sum(one.end - one.begin for one in rank.steady) // len(rank.steady)
        names = ("compute", "communication", "exposed", "waiting", "idle")
        cells = (f"{format_time(rank.mean(name))} {rank.mean(name) / step:4.0%}" for name in names)
        table.add_row(str(rank.rank), f"{rank.members:,}", format_time(step), *cells)
    return table


def _memory(found: Forecast) -> Table:
    table = Table(title=f"memory at its peak, of {format_size(found.device.memory)}", title_justify="left")
    kinds = [
        kind for kind in found.first.memory.breakdown if any(rank.memory.breakdown.get(kind) for rank in found.ranks)
    ]
    for name in ("rank", "reserved", "allocated", *kinds):
        table.add_column(name, justify="right")
    for rank in found.ranks[:_MOST_RANKS]:
        memory = rank.memory
        parts = (_gib(memory.breakdown.get(kind, 0)) for kind in kinds)
        table.add_row(str(rank.rank), _gib(memory.reserved), _gib(memory.allocated), *parts)
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def numbers(done: Simulated) -> dict[str, Any]:
    """What ``--json`` writes; times in seconds, sizes in bytes."""
    found = done.forecast
    return {
        "cluster": found.cluster,
        "device": found.device.name,
        "world": found.world,
        "live": [rank.rank for rank in found.ranks],
        "iteration_time": found.iteration_time / SECOND,
        "iteration_sigma": found.sigma / SECOND,
        "flops_per_gpu": found.flops,
        "mfu": found.mfu,
        "ranks": [_rank_numbers(rank) for rank in found.ranks],
        "warnings": dict(found.warnings),
        "unknown_operators": list(found.unknown),
        "wall": found.wall,
    }


def _rank_numbers(rank: RankForecast) -> dict[str, Any]:
    names = ("compute", "communication", "exposed", "waiting", "idle")
    return {
        "rank": rank.rank,
        "stands_for": rank.members,
        "steps": [(step.end - step.begin) / SECOND for step in rank.steps],
        **{name: rank.mean(name) / SECOND for name in names},
        "kernels": rank.kernels,
        "kernel_seconds": {name: time / SECOND for name, time in zip(_PROVENANCES, rank.times, strict=True)},
        "memory": {
            "allocated": rank.memory.allocated,
            "reserved": rank.memory.reserved,
            "retries": rank.memory.retries,
            "breakdown": dict(rank.memory.breakdown),
        },
    }
