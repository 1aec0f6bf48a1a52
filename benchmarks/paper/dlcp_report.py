"""What `dlcp.py` simulates and prints: completion times, steps of training, rings, and what is changed one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import dlcp_network as network
import numpy as np
from dlcp_network import DCTCP, DLCP, LINUX, PACKET, PATIENT, PFABRIC, SLOW, Way, bounded
from dlcp_plots import Bars, distributions, sensitivity
from dlcp_policies import scheduled
from dlcp_ring import per_hop, reduced
from dlcp_server import Found, exchanged, on_testbed
from eflops_plots import Chart
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from foretrain.workload import Workload, zoo

Part: TypeAlias = tuple[dict[str, float], Any, list[Chart | Bars]]
"""Values of the RESULT line, details, and figures."""

MODELS = ("resnet50", "vgg16", "inception_v3", "transformer_big")
PARTITION = 4_000_000
"""Bytes of a message, as ByteScheduler has them."""
LARGE = 200_000_000
"""Bytes of a model from which on P3's slices are larger than its own: each is simulated as it is decided."""
TOLERANCE = 0.1
CONSOLE = Console(width=140, highlight=False)
WAYS = {"dctcp": DCTCP, "pfabric": PFABRIC, "dlcp": DLCP, "dctcp, RTO 10 ms": PATIENT, "dctcp, RTO 1 s": SLOW}


def work(model: str) -> Workload:
    """One worker's step."""
    return zoo(model, batch=32, device="V100")


def watched(name: str, call: Callable[[Callable[[int, int], None]], Any]) -> Any:
    """What ``call`` finds, with a bar and an ETA while it looks."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=CONSOLE, transient=True) as bar:
        task = bar.add_task(name, total=None)
        return call(lambda came, packets: bar.update(task, completed=came, total=packets))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints one."""
    made = Table(*columns, title=title, title_justify="left")
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*map(str, row))
    CONSOLE.print(made)


def _cells(found: Found) -> list[str]:
    losses = [f"{found.lost:.2%}", f"{found.drops:,}", f"{found.timeouts:,}"]
    return [f"{found.mean:.3f}", f"{found.tail:.2f}", *losses]


COLUMNS = ("mean, ms", "p99, ms", "lost", "drops of all", "timeouts")


def completion_part(quick: bool, copies: int) -> Part:
    """Flow completion times: all jobs at once."""
    models = MODELS[:1] if quick else MODELS
    jobs = models * (1 if quick else copies)
    ways = dict(list(WAYS.items())[:4]) if quick else WAYS
    works = {model: work(model) for model in models}
    found: dict[tuple[str, str], Found] = {}
    for name, way in ways.items():
        each = watched(name, lambda told, way=way: exchanged([works[model] for model in jobs], way, told))
        for model in models:
            found[model, name] = Found.of([one for one, is_of in zip(each, jobs, strict=True) if is_of == model])
        CONSOLE.print(f"{name}: {', '.join(f'{model} {found[model, name].mean:.3f} ms' for model in models)}")
    rows = [(model, name, *_cells(one)) for (model, name), one in found.items()]
    table(f"completion of pushes, {len(jobs)} jobs at once", ("model", "transport", *COLUMNS), sorted(rows))
    gains: dict[str, dict[str, float]] = {}
    for model in models:
        ours = found[model, "dlcp"]
        gains[model] = {}
        for other in ("dctcp", "pfabric"):
            gains[model][f"mean, {other}"] = 1 - ours.mean / found[model, other].mean
            gains[model][f"p99, {other}"] = 1 - ours.tail / found[model, other].tail
    values = {
        f"fct_{short}_vs_{other}": float(np.mean([gains[model][f"{long}, {other}"] for model in models]))
        for other in ("dctcp", "pfabric")
        for short, long in (("avg", "mean"), ("tail", "p99"))
    }
    for name, key in (("dctcp, RTO 10 ms", "rto10ms"), ("dctcp, RTO 1 s", "rto1s")):
        if name in ways:
            tails = [1 - found[model, "dlcp"].tail / found[model, name].tail for model in models]
            values[f"fct_tail_vs_dctcp_{key}"] = float(np.mean(tails))
    drawn = distributions({name: np.concatenate([found[model, name].times for model in models]) for name in ways})
    bars = Bars("dlcp-gain", "Completion times of pushes under bounded loss", gains)
    return values, {f"{model}, {name}": one.row() for (model, name), one in found.items()}, [drawn, bars]


def training_part(quick: bool, _: int) -> Part:
    """Steps of training with a parameter server at one switch."""
    models = MODELS[:1] if quick else MODELS
    rows, details, best, linux = [], {}, [], []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=CONSOLE, transient=True
    ) as bar:
        task = bar.add_task("steps", total=len(models) * (4 if quick else 6))
        for model in models:
            this = work(model)
            cases: dict[str, Callable[[], float]] = {
                "fifo": lambda this=this: min(on_testbed(this, DCTCP), on_testbed(this, DCTCP, PARTITION)),
                "p3": lambda this=this: scheduled(this, "p3" if this.size < LARGE else "p3(slice=1MB)", DCTCP),
                "bytescheduler": lambda this=this: scheduled(this, "bytescheduler", DCTCP),
                "dlcp": lambda this=this: on_testbed(this, DLCP, PARTITION),
            }
            if not quick:
                cases["half of all droppable"] = lambda this=this: on_testbed(this, bounded(back=False), PARTITION)
                cases["bytescheduler, Linux TCP"] = lambda this=this: scheduled(this, "bytescheduler", LINUX)
            found = {}
            for name, case in cases.items():
                bar.update(task, description=f"{model}, {name}")
                found[name] = case()
                bar.advance(task)
            details[model] = found
            best.append(min(found[name] for name in ("fifo", "p3", "bytescheduler")) / found["dlcp"] - 1)
            linux.append(found.get("bytescheduler, Linux TCP", 0.0) / found["dlcp"] - 1)
            compute = (this.forward + this.backward) / 1e9
            rows.append([model, f"{compute:.1f}", *(f"{one:.1f}" for one in found.values()), f"{best[-1]:.1%}"])
    columns = ("ms a step", "computation", *details[models[0]], "faster than the best over DCTCP")
    table("parameter server, 8 workers, one switch of 100 Gb/s", columns, rows)
    return {"speedup_ps": max(best)} | ({} if quick else {"speedup_ps_linux": max(linux)}), details, []


def ring_part(quick: bool, copies: int) -> Part:
    """Steps of training with ring all-reduce."""
    models = MODELS[:1] if quick else MODELS
    jobs = models * (1 if quick else copies)
    works = {model: work(model) for model in models}
    each_hop = per_hop(bounded(classes=1), TOLERANCE)
    ways: dict[str, tuple[Way, bool]] = {"dctcp": (DCTCP, False), "dlcp": (each_hop, False)}
    if not quick:
        ways["dlcp, all ways in turn"] = each_hop, True
    steps: dict[tuple[str, str], float] = {}
    lost: dict[str, float] = {}
    for name, (way, spray) in ways.items():
        found = watched(
            f"ring, {name}",
            lambda told, way=way, spray=spray: reduced([works[model] for model in jobs], way, told, spray=spray),
        )
        lost[name] = float(np.mean([one.lost for one in found]))
        for model in models:
            steps[model, name] = float(
                np.mean([one.step for one, is_of in zip(found, jobs, strict=True) if is_of == model])
            )
    rows = [
        [
            model,
            f"{(works[model].forward + works[model].backward) / 1e9:.1f}",
            *(f"{steps[model, name]:.1f}" for name in ways),
            f"{steps[model, 'dctcp'] / steps[model, 'dlcp'] - 1:.1%}",
        ]
        for model in models
    ]
    columns = ("ms a step", "computation", *(f"{name} (a hop loses {lost[name]:.2%})" for name in ways), "faster")
    table(f"ring all-reduce, {len(jobs)} jobs of 8 workers at once", columns, rows)
    gain = {name: max(steps[m, "dctcp"] / steps[m, name] - 1 for m in models) for name in ways}
    values = {"speedup_ring": gain["dlcp"]}
    if not quick:
        values["speedup_ring_sprayed"] = gain["dlcp, all ways in turn"]
    return values, {f"{model}, {name}": one for (model, name), one in steps.items()}, []


def variants_part(quick: bool, _: int) -> Part:
    """What is changed one by one, with ResNet-50."""
    cases: dict[str, tuple[Way, float]] = {
        "classes, half of the front droppable": (DLCP, 0.0),
        "classes, all of the front droppable": (bounded(important=0.0), 0.0),
        "classes, half droppable": (bounded(back=False), 0.0),
        "classes, all droppable": (bounded(important=0.0, back=False), 0.0),
        "classes, all protected": (bounded(important=1.0), 0.0),
        "one class, half of the front droppable": (bounded(classes=1), 0.0),
    }
    tolerances, marks, chances = (0.0, 0.01, 0.05, 0.1, 0.2), (16, 41, 65, 100), (1e-4, 1e-3, 1e-2)
    if quick:
        cases = dict(list(cases.items())[-1:])
    else:
        cases |= {f"p = {p:.0%}": (bounded(tolerance=p), 0.0) for p in tolerances}
        cases |= {f"K = {k} packets": (bounded(mark=k * PACKET), 0.0) for k in marks}
        for chance in chances:
            cases |= {f"grey {chance:.2%}": (DLCP, chance), f"grey {chance:.2%}, dctcp": (DCTCP, chance)}
            cases[f"grey {chance:.2%}, dctcp, RTO 10 ms"] = network.dctcp(least_timeout=10**10), chance
    works = [work(MODELS[0])] * (1 if quick else 2)
    found: dict[str, Found] = {}
    for place, (name, (way, grey)) in enumerate(cases.items()):
        label = f"{name} ({place + 1} of {len(cases)})"
        each = watched(label, lambda told, way=way, grey=grey: exchanged(works, way, told, grey=grey))
        found[name] = Found.of(each)
    rows = [[name, *_cells(one), f"{one.step:.1f}"] for name, one in found.items()]
    table(f"bounded loss, changed one by one: {len(works)} jobs of ResNet-50", ("", *COLUMNS, "step, ms"), rows)
    details = {name: one.row() for name, one in found.items()}
    return {}, details, [] if quick else _sensitivities(found, tolerances, marks, chances)


def _sensitivities(
    found: Mapping[str, Found], tolerances: Sequence[float], marks: Sequence[int], chances: Sequence[float]
) -> list[Chart | Bars]:
    p = {"bounded loss": [(100 * p, found[f"p = {p:.0%}"].mean) for p in tolerances]}
    k = {"bounded loss": [(float(k), found[f"K = {k} packets"].mean) for k in marks]}
    names = {"dlcp": "", "dctcp": ", dctcp", "dctcp, RTO 10 ms": ", dctcp, RTO 10 ms"}
    lossy = {
        name: [(100 * chance, found[f"grey {chance:.2%}{ends}"].mean) for chance in chances]
        for name, ends in names.items()
    }
    return [
        sensitivity("dlcp-p", "Sensitivity to what may be lost", "p, %", p, log=False),
        sensitivity("dlcp-k", "Sensitivity to K", "K, packets", k, log=True),
        sensitivity("dlcp-grey", "One link loses packets", "lost on that link, %", lossy, log=True),
    ]
