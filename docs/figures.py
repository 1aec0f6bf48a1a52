"""Write every picture, table and command output of the documentation: ``python docs/figures.py``.

All of it is simulated, or drawn from measurements that are kept in ``benchmarks/data``, so that the same source gives
the same bytes on every machine; a test checks that.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import chart  # noqa: E402
import hero  # noqa: E402
import layers  # noqa: E402
import lossy  # noqa: E402

import foretrain as ft  # noqa: E402
from foretrain.cli import main as foretrain  # noqa: E402
from foretrain.experiments import Comparison, compare  # noqa: E402
from foretrain.experiments.result_table import OUTCOMES, PARAMETERS, Column  # noqa: E402
from foretrain.planner import tune  # noqa: E402
from foretrain.report.release_plot import staircase_svg  # noqa: E402
from foretrain.report.timeline_plot import lanes_svg  # noqa: E402
from foretrain.schedule import POLICIES, Knob  # noqa: E402
from foretrain.simulation import Run, simulate  # noqa: E402
from foretrain.workload import Gradient, Layer, Workload  # noqa: E402

FIGURES = HERE / "_figures"
BOUNDED = HERE.parent / "benchmarks" / "data" / "bounded_lab.json"
"""What ``benchmarks/bounded.py --full --json FILE`` measured."""
SERVERS = HERE.parent / "benchmarks" / "data" / "ps.json"
"""What ``benchmarks/ps.py --full --json FILE`` measured."""

EXAMPLE = "4x1xV100@10Gbps,overhead=200us,latency=20us"
"""Slow operations, as with gloo, so that what an operation costs can be seen in the pictures."""
PICTURED = {
    "fifo": "fifo",
    "ddp": "ddp(bucket=8MB)",
    "fusion": "fusion(threshold=16MB)",
    "p3": "p3(slice=1MB)",
    "tictac": "tictac",
    "mgwfbp": "mgwfbp",
    "dear": "dear(group=4MB)",
    "pace": "pace(partition=2MB, credit=4MB)",
    "bytescheduler": "bytescheduler(partition=2MB, credit=4MB)",
    "prophet": "prophet(partition=2MB, credit=4MB)",
    "largest_tail_first": "largest_tail_first(partition=1MB, credit=2MB)",
}
"""Each policy's page and the schedule that its picture shows, with knobs that suit 30 MB of gradients."""
BESIDE = dict.fromkeys(PICTURED, "ddp") | {"ddp": "fifo", "fifo": "bytescheduler"}

CASES = (
    ("resnet50", "4x1xV100@10Gbps"),
    ("resnet50", "4x1xV100@5Gbps"),
    ("resnet50", "4x1xV100@5Gbps,overhead=500us"),
    ("inception_v3", "4x1xV100@5Gbps"),
    ("vgg16", "4x1xV100@50Gbps"),
    ("vgg16", "4x8xV100@100Gbps"),
    ("alexnet", "4x1xV100@25Gbps"),
    ("bert_base", "4x1xV100@25Gbps"),
    ("gpt2", "4x1xV100@10Gbps"),
    ("gpt2", "4x1xV100@10Gbps,latency=500us"),
    ("vgg16", "4x1xV100@25Gbps,ps=4"),
)
"""Where every policy is measured: a network that hides all and one that does not, slow operations, long round trips,
models with even and with very uneven gradients, a parameter server."""

MIDDLE = "<!-- knobs above, cases below -->"
"""Where a page cuts a policy's tables in two."""

RATES = (1, 2, 5, 10, 25, 50, 100)
MODELS = ("resnet50", "inception_v3", "vgg16", "alexnet", "bert_base", "gpt2", "transformer_big")

COMMANDS = {
    "tutorial-compare": 'foretrain compare workload.toml --cluster "4 workers @ 1Gbps"',
    "tutorial-bound": 'foretrain bound workload.toml --cluster "4 workers @ 1Gbps"',
    "bound-resnet50": "foretrain bound resnet50 --cluster 4x1xV100@5Gbps",
    "bound-gpt2": "foretrain bound gpt2 --cluster 4x8xV100@100Gbps",
    "select": 'foretrain compare gpt2 --cluster 4x1xV100@10Gbps --schedules ddp "p3(slice=4MB)" prophet',
    "select-untuned": "foretrain compare gpt2 --cluster 4x1xV100@10Gbps --schedules ddp p3 prophet --no-tune",
    "advice-no": "foretrain compare resnet50 --cluster 4x8xV100@100Gbps --schedules ddp bytescheduler prophet",
    "advice-yes": "foretrain compare vgg16 --cluster 4x1xV100@50Gbps --schedules ddp bytescheduler prophet",
    "cluster-file": "foretrain bound vgg16 --cluster cluster.toml",
    "schedule": 'foretrain schedule mine.toml --cluster "4 workers @ 10Gbps" --schedule "bytescheduler(partition=2MB)"',
    "workload-file": 'foretrain bound mine.toml --cluster "4 workers @ 10Gbps"',
    "catalog": "foretrain catalog",
    "network-grid": "foretrain grid resnet50 bigraph:8x4@10Gbps fat_tree:4@10Gbps --collectives ring hdrm auto",
    "network-collective": "foretrain collective bigraph:8x4@100Gbps --size 100MB",
    "network-share": "foretrain share leaf_spine:4x8@10Gbps,oversubscription=4,collective=ring "
    "resnet50@0-3+8-11 vgg16@4-7+12-15:ddp",
    "error-cluster": "foretrain bound vgg16 --cluster 4x1xV100@10",
    "error-policy": "foretrain compare vgg16 --cluster 4x1xV100@10Gbps --schedules bytesheduler",
    "error-knob": 'foretrain compare vgg16 --cluster 4x1xV100@10Gbps --schedules "ddp(bucket=25)"',
}
"""Commands that pages quote, run in ``docs/files``."""


def figures() -> Iterator[tuple[str, str]]:
    """Yield every file of ``docs/_figures`` and its content."""
    yield from pictures()
    yield "layers.svg", layers.svg()
    comparisons = [compare(ft.workload.zoo(model), place, trace=False) for model, place in CASES]
    for name in PICTURED:
        yield f"{name}.md", f"{knobs_of(name)}\n{MIDDLE}\n{cases_of(name, comparisons)}"
    yield "cases.md", overview(comparisons)
    yield from gains()
    yield "sweep-columns.md", columns()
    measured = json.loads(SERVERS.read_text(encoding="utf-8"))
    yield "servers.md", servers(measured)
    yield from busy(measured)
    yield from lossy.tables(json.loads(BOUNDED.read_text(encoding="utf-8")))
    for name, command in COMMANDS.items():
        yield f"{name}.txt", output(command)


def pictures() -> Iterator[tuple[str, str]]:
    workload = ft.workload.load(HERE / "example.toml")
    best = tune(workload, EXAMPLE, "ddp")
    runs = {name: simulate(workload, EXAMPLE, text) for name, text in PICTURED.items()}
    baselines = runs | {"ddp": simulate(workload, EXAMPLE, best)}
    for name, run in runs.items():
        beside = baselines[BESIDE[name]]
        pair = [beside, run] if name != "fifo" else [run, beside]
        yield f"{name}.svg", lanes_svg(pair, width=860, title=f"five layers on 4 workers at 10 Gbps: {run.schedule}")
    yield "staircase.svg", staircase_svg(ft.workload.zoo("resnet50"))
    table = compare(ft.workload.zoo("resnet50"), "4x1xV100@7Gbps", ["ddp", "prophet"])
    yield "readme.svg", hero.svg(*table.runs, title="ResNet-50 on 4 V100 at 7 Gb/s")


def knobs_of(name: str) -> str:
    """Return a table of a policy's knobs, from where they are declared."""
    knobs: tuple[Knob, ...] = POLICIES[name].knobs
    if not knobs:
        return "It has no knobs.\n"
    rows = ["| knob | default | smallest | largest | searched by `compare` |", "|---|--:|--:|--:|---|"]
    rows += [
        f"| `{k.name}` | {k.write(k.default)} | {k.write(k.low)} | {k.write(k.high)} | {'yes' if k.tunable else 'no'} |"
        for k in knobs
    ]
    return "\n".join(rows) + "\n"


def columns() -> str:
    """Return a table of the columns of a sweep's Parquet file, from where they are declared."""
    axes = Column("axis_NAME", "number", "value of an axis of the clusters, in its unit; text where it is none")
    knobs = Column("knob_NAME", "number", "knob of the schedule as it ran, defaults included; null where it has none")
    rows = ["| column | holds | meaning |", "|---|---|---|"]
    rows += [f"| `{one.name}` | {one.kind} | {one.about} |" for one in (*PARAMETERS, axes, *OUTCOMES, knobs)]
    return "\n".join(rows) + "\n"


def cases_of(name: str, comparisons: list[Comparison]) -> str:
    """Return a table of one policy in every case, and a sentence on its best and worst."""
    found = [(table, next(run for run in table.runs if run.schedule.name == name)) for table in comparisons]
    rows = [
        "",
        "| workload | cluster | communication / computation | defaults T/T* | tuned T/T* | over DDP | knobs found |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for (model, place), (table, run) in zip(CASES, found, strict=True):
        plain = simulate(table.workload, place, name, steps=1, trace=False)
        ratio = table.bound.link / table.bound.compute
        knobs = " ".join(f"{knob}={text}" for knob, text in written(run)) or "–"
        rows.append(
            f"| {model} | `{place}` | {ratio:.2f} | {plain.gap + 1:.3f} | {run.gap + 1:.3f} "
            f"| {table.speedup(run):.2f}× | {knobs} |"
        )
    if name != "ddp":
        ranked = sorted(zip(found, CASES, strict=True), key=lambda item: item[0][0].speedup(item[0][1]))
        best, worst = (_case(ranked[place], "× the speed of DDP at its best") for place in (-1, 0))
    else:
        ranked = sorted(zip(found, CASES, strict=True), key=lambda item: item[0][1].gap)
        best, worst = (_case(ranked[place]) for place in (0, -1))
    return "\n".join([*rows, "", f"Best here: {best}. Worst here: {worst}.", ""])


def _case(item: tuple[tuple[Comparison, Run], tuple[str, str]], unit: str = "") -> str:
    (table, run), (model, place) = item
    number = f"{table.speedup(run):.2f}{unit}" if unit else f"T/T* {run.gap + 1:.3f}"
    return f"{model} on `{place}`, {number}"


def written(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the knobs that a search moved away from their defaults."""
    for knob in POLICIES[run.schedule.name].knobs:
        if run.schedule.settings[knob.name] != knob.default:
            yield knob.name, knob.write(run.schedule.settings[knob.name])


def overview(comparisons: list[Comparison]) -> str:
    """Return speeds over DDP at its best: a row for each policy, a numbered column for each case, then the cases."""
    numbers = range(1, len(comparisons) + 1)
    rows = [f"| policy | {' | '.join(map(str, numbers))} |", f"|---|{'--:|' * len(comparisons)}"]
    for runs in zip(*(table.runs for table in comparisons), strict=True):
        cells = [_cell(table, run) for table, run in zip(comparisons, runs, strict=True)]
        rows.append(f"| {runs[0].schedule.name} | {' | '.join(cells)} |")
    limits = [f"{table.baseline.iteration_time / table.bound.time:.2f}" for table in comparisons]
    rows.append(f"| *optimum* | {' | '.join(limits)} |")
    cases = [f"{number}. {model} on `{place}`" for number, (model, place) in zip(numbers, CASES, strict=True)]
    return "\n".join([*rows, "", *cases, ""])


def _cell(table: Comparison, run: Run) -> str:
    speed = f"{table.speedup(run):.2f}"
    return f"**{speed}**" if run is table.best else speed


def even(ratio: float, layers: int = 50) -> Workload:
    """Return equal layers, backward twice the forward, whose gradients take ``ratio`` of the computation to send.

    A host of the `gains` cluster moves a byte in 1.2 ns.
    """
    forward, backward = 10**9, 2 * 10**9
    size = max(1, round(ratio * (forward + backward) / 1200))
    return Workload(
        "even",
        1,
        tuple(Layer(f"layer{i}", forward, backward) for i in range(layers)),
        tuple(Gradient(f"layer{i}", size, i, (layers - i) * backward) for i in range(layers)),
    )


def gains() -> Iterator[tuple[str, str]]:
    """Yield how much a schedule can gain over a barrier, T_WFBP/T*, over communication/computation."""
    lines: dict[str, list[tuple[float, float]]] = {"even layers": []}
    for step in range(61):
        bound = ft.bound(even(10 ** (-1 + step / 30)), "4x1xV100@10Gbps")
        lines["even layers"].append((bound.link / bound.compute, bound.wfbp / bound.time))
    header = f"| model | {' | '.join(f'{rate} Gbps' for rate in RATES)} |"
    rows = [header, f"|---|{'--:|' * len(RATES)}"]
    for model in MODELS:
        workload = ft.workload.zoo(model)
        bounds = [ft.bound(workload, f"4x1xV100@{rate}Gbps") for rate in RATES]
        cells = [f"{b.wfbp / b.time:.2f} ({_two_digits(b.link / b.compute)})" for b in bounds]
        rows.append(f"| {model} | {' | '.join(cells)} |")
        if model in ("resnet50", "vgg16", "gpt2"):
            fine = [ft.bound(workload, f"4x1xV100@{10 ** (step / 20):.3f}Gbps") for step in range(0, 45)]
            lines[model] = [(b.link / b.compute, b.wfbp / b.time) for b in fine]
    yield "gain.md", "\n".join(rows) + "\n"
    yield (
        "gain.svg",
        chart.svg(lines, x="communication / computation", y="T_WFBP / T*", xs=(0.1, 10), ys=(1, 1.5), rule=2 / 3),
    )


def servers(measured: Mapping[str, Any]) -> str:
    """Return what each schedule gains over fifo on real links, and when and where that was measured, a table for each
    set-up."""
    cells = sorted(measured["details"]["cells"], key=lambda one: (one["setup"], one["cell"]["ratio"]))
    tables = []
    for setup, group in groupby(cells, key=lambda one: one["setup"]):
        rows = [f"**{setup}**", ""]
        for one in group:
            cases = {case["case"]: case for case in one["cases"] if "median" in case}
            if len(rows) == 2:
                names = [name for name in cases if name != "fifo"]
                heads = ["model", "MB", "R", "fifo", *(f"`{name}`" for name in names), "T/T*", "idle", "error"]
                heads.append("measured")
                rows += [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
            fifo, prophet = cases["fifo"], cases["prophet"]
            gains = [f"{cases[name]['vs_fifo']:.2f}" if name in cases else "–" for name in names]
            size = f"{one['workload']['bytes'] / 1e6:.0f}"
            idle = f"{fifo['idle']:.0%} → {prophet['idle']:.0%}".replace("%", " %")
            optimum = f"{1 + prophet['gap']:.2f}"
            error = f"{100 * prophet['forecast_error']:+.0f} %".replace("-", "−")
            what = [one["model"], size, f"{one['cell']['ratio']:g}", f"{fifo['median']:.2f} s"]
            measured_on = ", ".join(one[key] for key in ("date", "machine") if key in one) or "–"
            rows.append(f"| {' | '.join([*what, *gains, optimum, idle, error, measured_on])} |")
        tables.append("\n".join(rows))
    if any("busy" in one for one in cells):
        how = "one worker's GPU, share of time in which it computes, in the first cell"
        tables.append(f"```{{figure}} _figures/busy.svg\n:alt: {how}\n\n{how[0].upper()}{how[1:]}.\n```")
    return "\n\n".join(tables) + "\n"


def busy(measured: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how busy an accelerator was over time on real links, in the cell of which that was recorded, if any was."""
    for cell in measured["details"]["cells"]:
        if "busy" not in cell:
            continue
        window, shares = cell["busy"]["window"], cell["busy"]["shares"]
        lines = {
            name: [((place + 0.5) * window, share) for place, share in enumerate(each)] for name, each in shares.items()
        }
        end = window * max(map(len, shares.values()))
        yield "busy.svg", chart.svg(lines, x="time (s)", y="GPU busy", xs=(0, end), ys=(0, 1))
        return


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def output(command: str) -> str:
    """Return the command and its output, 90 columns wide."""
    text = io.StringIO()
    before = Path.cwd(), dict(os.environ)
    os.environ |= {"COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}
    os.chdir(HERE / "files")
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
            foretrain(shlex.split(command)[1:])
    finally:
        os.chdir(before[0])
        os.environ.clear()
        os.environ.update(before[1])
    # A notice that appears only where preparation takes long is no part of the command's output.
    lines = [line.rstrip() for line in text.getvalue().splitlines() if not line.startswith("foretrain: preparing")]
    return f"$ {command}\n" + "\n".join(lines).strip("\n") + "\n"


def write(found: Mapping[str, str]) -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, content in found.items():
        (FIGURES / name).write_text(content, encoding="utf-8")
    for path in FIGURES.iterdir():
        if path.name not in found:
            path.unlink()


if __name__ == "__main__":
    write(dict(figures()))
