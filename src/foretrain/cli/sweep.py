"""``foretrain sweep``: thousands of scenarios from one file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from foretrain.cli.arguments import (
    DEFAULT_FIDELITY,
    AddressText,
    AlgorithmText,
    FidelityOptions,
    JsonFile,
    ScheduleText,
    WorkloadName,
    WorkloadOnCluster,
    check_apart,
    check_writable,
    command_line,
    patience,
    split,
    with_fidelity,
    write_outputs,
)
from foretrain.cli.progress import counter, progress_bar
from foretrain.errors import ConfigError, MissingExtra
from foretrain.files import stdout_console, write_json

if TYPE_CHECKING:
    from foretrain.experiments import Expansion, ResultStore, ScenarioResult
    from foretrain.experiments.execution import Backend
    from foretrain.network.deployment import Deployment

_READING = "reading clusters (on first use a topology's simulator is compiled, which takes some 10 s)"


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path | None = None,
    jobs: int | None = None,
    backend: Literal["processes", "dask", "ray"] = "processes",
    address: AddressText | None = None,
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    html: Path | None = None,
    json: JsonFile = None,
) -> None:
    """Simulate every combination of what a file declares.

    The file lists workloads, clusters, schedules, knobs and seeds. An interrupted sweep resumes when it is started
    again; after a change of the file only new scenarios are simulated.

    Args:
        file: a .toml file, see docs/sweep.md.
        out: the Parquet file to write; by default beside FILE, with its name. A folder OUT.journal keeps the results of
            single scenarios, so that later runs reuse them.
        jobs: workers on this machine; by default one per core.
        backend: processes here, or the workers of a Dask or Ray cluster.
        address: of a running cluster, e.g. tcp://10.0.0.5:8786; without it dask and ray start one here.
        dry_run: only say how many scenarios there are and how many are done, also in the numbers of --json.
        html: write a page with parallel coordinates and the Pareto front.
        json: write the numbers.
    """
    from foretrain.experiments import ResultStore, ScenarioResult, expand, read
    from foretrain.experiments.result_table import check_objectives, check_parquet

    out = file.with_suffix(".parquet") if out is None else out
    check_writable(out=out, html=html, json=json)
    check_apart(file, out=out, html=html, json=json)
    declared = read(file)
    check_objectives(declared.objectives)
    with patience(_READING):
        try:
            expansion = expand(declared, file.parent)
        except ConfigError as error:
            raise error.at(str(file)) from None
    check_parquet()
    folder = out.with_name(f"{out.name}.journal")
    if dry_run and not folder.exists():
        _say(expansion, {}, 0, json)
        return
    with ResultStore(folder, ScenarioResult) as journal:
        _say(expansion, journal.found, journal.stale, json if dry_run else None)
        if dry_run:
            return
        _run(expansion, journal, jobs, backend, address)
        _finish(expansion, journal, declared.objectives, declared.name or file.stem, out, html, json)


def _run(
    expansion: Expansion,
    journal: ResultStore[ScenarioResult],
    jobs: int | None,
    backend: Backend,
    address: str | None,
) -> None:
    """Simulate the missing scenarios; when interrupted, report how many results are kept."""
    from foretrain.experiments import run

    todo = expansion.scenarios.values()
    try:
        with counter("sweeping", "scenarios") as progress:
            run(todo, journal, jobs=jobs, backend=backend, address=address, progress=progress)
    except (ConfigError, MissingExtra):
        raise  # a retry would fail in the same way
    except BaseException:
        done = len(expansion.scenarios.keys() & journal.found.keys())
        sys.stderr.write(f"foretrain: {done:,} scenarios are done and kept; the same command goes on\n")
        raise


def _say(expansion: Expansion, found: Mapping[str, ScenarioResult], stale: int, json: Path | None) -> None:
    """Write the number of scenarios to simulate on stderr, and to ``json`` if that is given."""
    done = len(expansion.scenarios.keys() & found.keys())
    parts = [f"{len(expansion.scenarios):,} scenarios"]
    if expansion.excluded:
        parts.append(f"{expansion.excluded:,} excluded")
    if expansion.repeated:
        parts.append(f"{expansion.repeated:,} the same as others")
    if done:
        parts.append(f"{done:,} done before")
    if stale:
        parts.append(f"{stale:,} of another version of foretrain not used")
    sys.stderr.write(f"foretrain: {', '.join(parts)}\n")
    counts = {
        "scenarios": len(expansion.scenarios),
        "excluded": expansion.excluded,
        "repeated": expansion.repeated,
        "done": done,
    }
    write_outputs(stdout_console(), (json, lambda path: write_json(path, counts)))


def _finish(
    expansion: Expansion,
    journal: ResultStore[ScenarioResult],
    objectives: list[str],
    title: str,
    out: Path,
    html: Path | None,
    json: Path | None,
) -> None:

    from foretrain.experiments.result_table import table
    from foretrain.report.sweep import findings, page, summary, to_dict

    made = table(expansion.scenarios, journal.found)
    made.write(out)
    found = findings(made, objectives)
    console = stdout_console()
    console.print(summary(found))
    console.print(f"wrote {out}", markup=False, soft_wrap=True)
    write_outputs(
        console,
        (html, lambda path: page(found, path, title, command_line())),
        (json, lambda path: write_json(path, to_dict(found))),
    )


def grid(
    workload: WorkloadName,
    cluster: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")],
    more: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CLUSTER ...]", help_behavior_hint="(optional)")
    ] = (),
    *,
    collectives: tuple[AlgorithmText, ...] = ("auto",),
    schedules: tuple[ScheduleText, ...] = ("ddp", "bytescheduler"),
    tune: bool = True,
    batch: int | None = None,
    html: Path | None = None,
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Compare schedules × collectives × topologies on one workload.

    Says which combination is fastest, and by how much.

    Args:
        workload: a model of the zoo (foretrain catalog lists them) or a recorded workload's .toml file.
        cluster: a topology, e.g. bigraph:8x4@25Gbps, or a simple cluster; all cells compute on its GPU.
        more: clusters to compare it with, e.g. fat_tree:4@25Gbps,routing=spray.
        collectives: ring, halving_doubling, double_tree, hierarchical, hdrm, in_network, parameter_server, auto, nccl.
        schedules: policies, with or without knobs.
        tune: search the best values of each schedule's free knobs in every cell.
        batch: samples per GPU; models of the zoo only.
        html: write a page with a heat map.
        json: write the numbers.
        fidelity: fidelity of networks; a simple cluster has a formula.
    """
    from foretrain.experiments.grid import grid as grid_of
    from foretrain.report.grid import page, table, verdict

    check_writable(html=html, json=json)
    names = tuple(name for text in schedules for name in split(text))
    # All cells train the same step, on the GPU of the first cluster.
    work, _ = WorkloadOnCluster(workload, cluster, batch=batch).read()
    with progress_bar("simulating") as progress:

        def simulated(place: Deployment) -> Deployment:
            return cast("Deployment", with_fidelity(place, work.size, fidelity, shown=False))

        clusters = (cluster, *more)
        made = grid_of(work, clusters, collectives, names, tuned=tune, progress=progress, simulated=simulated)
    console = stdout_console()
    console.print(table(made))
    console.print(f"{verdict(made)}.", style="bold green", markup=False)
    write_outputs(
        console,
        (html, lambda path: page(made, path, command_line())),
        (json, lambda path: write_json(path, made.to_dict())),
    )
