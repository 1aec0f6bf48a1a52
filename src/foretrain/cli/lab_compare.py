"""``foretrain lab compare``: real training under every schedule, on hosts of this machine, beside the forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import check_writable, split

if TYPE_CHECKING:
    from foretrain.lab.messages import LabProgress
    from foretrain.lab.result import LabResult


def compare(
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    /,
    *,
    hosts: int = 2,
    rate: str = "1Gbps",
    servers: Annotated[str | None, tyro.conf.arg(metavar="K|colocated")] = None,
    compute: Literal["paced", "real"] | None = None,
    schedules: tuple[str, ...] = (),
    ratio: float | None = None,
    step_time: str | None = None,
    iterations: int = 15,
    rounds: int = 3,
    straggler: str = "0%",
    jitter: str = "0%",
    seed: int = 0,
    name: str = "compare",
    html: Path | None = None,
    trace: Path | None = None,
    json: Path | None = None,
) -> None:
    """Train under every schedule, for real, and compare with DDP at its best, with the optimum and with the forecast.

    With servers gradients go through them, and the comparison is with fifo, which waits for everything.

    Args:
        model: of the zoo (foretrain catalog lists them), or transformer, which computes for real.
        hosts: how many train.
        rate: of every host's link, each way.
        servers: of a parameter server: how many, on hosts of their own, or colocated, one on every host that trains.
        compute: paced (layers sleep as an accelerator would compute) or real; follows from the model.
        schedules: which of the runtime, e.g. "bytescheduler(partition=1MB)" prophet; "+fp16" behind one compresses.
        ratio: communication over computation; sets the time to compute. 1 when neither this nor a step time is given.
        step_time: the time to compute itself, e.g. 300ms.
        iterations: measured in every case, in all rounds together.
        rounds: how often the cases take turns.
        straggler: how much slower the last host computes, e.g. 20%.
        jitter: how much each layer's time varies, e.g. 30%.
        seed: of everything random.
        name: of the lab that is built and removed.
        html: write an interactive page.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
    """
    from rich.console import Console

    from foretrain.lab.compare import SCHEDULES, share
    from foretrain.lab.compare import compare as compare_all
    from foretrain.report.lab import lab_summary
    from foretrain.units import parse_time

    check_writable(html=html, trace=trace, json=json)
    with _bar() as progress:
        result = compare_all(
            model,
            hosts=hosts,
            rate=rate,
            servers=servers,
            name=name,
            progress=progress,
            compute=compute,
            schedules=tuple(part for text in schedules for part in split(text)) or SCHEDULES,
            ratio=ratio,
            step_time=parse_time(step_time, "step-time") if step_time else None,
            iterations=iterations,
            rounds=rounds,
            straggler=share(straggler, "straggler"),
            jitter=share(jitter, "jitter"),
            seed=seed,
            traced=html is not None or trace is not None,
        )
    console = Console(highlight=False)
    console.print(lab_summary(result))
    for path in _write(result, html, trace, json):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _write(result: LabResult, html: Path | None, trace: Path | None, json: Path | None) -> Iterator[Path]:
    import msgspec

    from foretrain.files import write_atomically
    from foretrain.report.lab import lab_page, lab_trace

    if html:
        lab_page(result, html)
        yield html
    if trace:
        lab_trace(result, trace)
        yield trace
    if json:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(result.to_dict()), indent=2))
        yield json


@contextmanager
def _bar() -> Iterator[Callable[[LabProgress], None]]:
    """A bar with an ETA on stderr, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building the lab", total=None)
        yield lambda now: bar.update(task, description=now.what, completed=now.done, total=now.total)
