"""``foretrain compare``: every schedule on one workload; ``explore``: the same in a browser."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    DEFAULT_FIDELITY,
    FidelityOptions,
    JsonFile,
    ScheduleText,
    WorkloadOnCluster,
    check_writable,
    command_line,
    named,
    split,
    with_fidelity,
    write_outputs,
)
from foretrain.cli.progress import progress_bar
from foretrain.errors import ConfigError
from foretrain.files import read_text, stdout_console, write_atomically, write_json


def compare(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    schedules: tuple[ScheduleText, ...] | None = None,
    compression: Literal["fp16", "bf16"] | None = None,
    tune: bool = True,
    sweep: Annotated[str, named("RANGE")] | None = None,
    points: int = 9,
    html: Path | None = None,
    trace: Path | None = None,
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Compare schedules on one workload, and say whether one pays.

    Says of each the time, the speed-up over DDP and the distance to the optimum T*.

    Args:
        scenario: the workload and the cluster.
        schedules: policies, e.g. ddp "bytescheduler(partition=1MB)"; auto, the planner's choice; or a plan file. All
            policies if none is named.
        compression: type as which gradients are sent under every schedule, also DDP's; gradients of four bytes only.
        tune: search the best values of each schedule's free knobs.
        sweep: repeat over a range, e.g. rate=1Gbps:100Gbps; also latency, overhead, workers.
        points: number of points of the sweep.
        html: write an interactive page.
        trace: write a trace for ui.perfetto.dev (.json for Chrome's format).
        json: write the numbers.
        fidelity: fidelity of the network of a topology.
    """
    from foretrain.experiments import compare as compare_all
    from foretrain.experiments import sweep as sweep_all
    from foretrain.experiments.comparison import ALL_SCHEDULES
    from foretrain.planner.candidate_search import compressed, halvable, streaming
    from foretrain.report.page import page
    from foretrain.report.table import summary
    from foretrain.report.trace import write_trace

    check_writable(html=html, trace=trace, json=json)
    workload, place = scenario.read()
    if compression is not None and not halvable(workload):
        raise ConfigError("compression", compression, "halves four bytes, and these gradients have two", "leave it out")
    workload = compressed(workload, compression, streaming(place))
    place = with_fidelity(place, workload.size, fidelity)
    names = tuple(name for text in schedules or () for name in split(text)) or ALL_SCHEDULES
    keep = html is not None or trace is not None
    with progress_bar("comparing") as progress:
        table = compare_all(workload, place, names, tuned=tune, trace=keep, progress=progress)
    if sweep:
        with progress_bar("sweeping") as progress:
            rows = sweep_all(workload, place, names, sweep, points=points, tuned=tune, progress=progress)
        table = table.with_sweep(rows)
    console = stdout_console()
    console.print(summary(table))
    write_outputs(
        console,
        (html, lambda path: page(table, path, command_line())),
        (trace, lambda path: write_trace(table.runs, path)),
        (json, lambda path: write_json(path, table.to_dict())),
    )


def bound(scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster], *, json: JsonFile = None) -> None:
    """Print the optimum T*, which no schedule can beat, and its parts.

    Args:
        scenario: the workload and the cluster.
        json: write the numbers, times in seconds.
    """
    from foretrain.simulation import bound as bound_of
    from foretrain.units import format_time, to_seconds

    check_writable(json=json)
    workload, place = scenario.read()
    found = bound_of(workload, place)
    console = stdout_console(markup=False)
    console.print(f"{workload.name}, batch {workload.batch}, on {place}")
    console.print(str(found))
    console.print(f"computation {format_time(found.compute)}, communication {format_time(found.link)}")
    console.print(f"with a barrier (WFBP, DDP) no less than {format_time(found.wfbp)}")
    console.print(f"with all-reduce split at the barrier (DeAR) no less than {format_time(found.dear)}")
    times = {
        "optimum": found.time,
        "compute": found.compute,
        "link": found.link,
        "wfbp": found.wfbp,
        "dear": found.dear,
    }
    numbers = {name: to_seconds(time) for name, time in times.items()} | {"kind": found.kind, "layer": found.layer}
    write_outputs(console, (json, lambda path: write_json(path, numbers)))


def schedule(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    schedule: Annotated[ScheduleText, tyro.conf.arg(aliases=["-s"])] = "bytescheduler",
    out: Path | None = None,
    run: Path | None = None,
    barrier: bool = False,
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Print a step of a schedule chunk by chunk, or run an edited one.

    Args:
        scenario: the workload and the cluster.
        schedule: a policy with its knobs, e.g. "bytescheduler(partition=1MB, credit=4MB)"; auto; or a plan file.
        out: a file to write instead of standard output.
        run: validate and simulate the schedule in this file instead.
        barrier: with --run, let the next iteration wait for the last gradient.
        json: write the numbers and the schedule's text, times in seconds.
        fidelity: fidelity of the network of a topology.
    """
    from foretrain.planner import requested_schedule, resolved
    from foretrain.schedule.script import Written
    from foretrain.simulation import simulate
    from foretrain.units import format_time

    check_writable(out=out, json=json)
    workload, place = scenario.read()
    place = with_fidelity(place, workload.size, fidelity)
    if run:
        text = read_text(run, "run", "give the path of a schedule")
        found = simulate(workload, place, Written(text, barrier, name=run.name), trace=False)
        time = format_time(found.iteration_time)
        sys.stdout.write(f"{run}: {time} an iteration, {found.gap:.1%} above the optimum\n")
        if json:
            write_json(json, found.to_dict() | {"script": text})
        return
    found = simulate(workload, place, resolved(requested_schedule(schedule), workload, place), trace=False)
    text = f"# {found.schedule} for {workload.name} on {place}\n{found.script()}"
    if out:
        write_atomically(out, text)
    else:
        sys.stdout.write(text)
    if json:
        write_json(json, found.to_dict() | {"script": text})


def catalog(*, json: JsonFile = None) -> None:
    """List the models, GPUs, clusters and schedules known by name.

    Args:
        json: write the names.
    """
    from rich.table import Table

    from foretrain.device import preset_names
    from foretrain.network.notation import PRESETS
    from foretrain.schedule import POLICIES
    from foretrain.units import format_size
    from foretrain.workload import zoo, zoo_models

    check_writable(json=json)
    models = ", ".join(f"{name} ({format_size(zoo(name).size)})" for name in zoo_models())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("models", models)
    table.add_row("GPUs", ", ".join(preset_names()))
    table.add_row("clusters", ", ".join(f"{name}:N" for name in PRESETS) + ", or WORKERSxGPUSxDEVICE@RATE[,OPTION...]")
    for name, policy in POLICIES.items():
        knobs = ", ".join(f"{knob.name}={knob.write(knob.default)}" for knob in policy.knobs)
        table.add_row("schedules" if name == next(iter(POLICIES)) else "", f"{name}({knobs})" if knobs else name)
    console = stdout_console()
    console.print(table)
    names = {
        "models": list(zoo_models()),
        "gpus": list(preset_names()),
        "clusters": list(PRESETS),
        "schedules": list(POLICIES),
    }
    write_outputs(console, (json, lambda path: write_json(path, names)))


def explore(
    workload: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[WORKLOAD|RESULT.json]")] = "resnet50",
    *,
    port: int = 0,
    browser: bool = True,
) -> None:
    """Explore scenarios in a browser, with the verdict at once.

    The page asks for GPU, link, hosts, batch and schedule. Serves it on this machine alone (127.0.0.1) until Ctrl-C.

    Args:
        workload: a model of the zoo, a recorded workload's .toml file, or a result's .json of simulate or search.
        port: port of the page; 0 takes a free one.
        browser: open the page in a browser, if there is a display.
    """
    from foretrain.explore import Explorer, Question, opened

    if not 0 <= port <= 65535:
        raise ConfigError("port", port, "is no port", "write e.g. --port 8080, or leave it out")
    source, model = opened(workload)
    try:
        explorer = Explorer(source, Question(model=model), port=port)
    except OSError as error:
        raise ConfigError("port", port, f"cannot be used ({error.strerror})", "leave it out") from None
    with explorer:
        sys.stdout.write(f"{explorer.url}\n")
        sys.stdout.flush()
        sys.stderr.write("foretrain: Ctrl-C ends it\n")
        # Without a display a browser for the terminal would start, and cannot show the page.
        if browser and any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
            import webbrowser

            webbrowser.open(explorer.url)
        threading.Event().wait()
