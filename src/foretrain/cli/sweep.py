"""``foretrain sweep``: thousands of scenarios from one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import check_apart, check_writable, patience
from foretrain.cli.progress import counter
from foretrain.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from foretrain.experiments import Expansion, ResultStore, ScenarioResult
    from foretrain.experiments.execution import Backend
    from foretrain.report.sweep import SweepFindings

_READING = "reading clusters (on first use a topology's simulator is compiled, which takes some 10 s)"


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path | None = None,
    jobs: int | None = None,
    backend: Literal["processes", "dask", "ray"] = "processes",
    address: str | None = None,
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    html: Path | None = None,
    json: Path | None = None,
) -> None:
    """Every combination of workloads, clusters, schedules, knobs and seeds that a file declares.

    Interrupted or killed, it goes on where it was when it is started again; after a change of the file it simulates
    only what is new.

    Args:
        file: a .toml file, see docs/sweep.md.
        out: the Parquet file to write; beside FILE, with its name, if not given. A folder OUT.journal keeps results in
            the meantime and for the next time.
        jobs: workers on this machine; as many as it has cores if not given.
        backend: processes here, or the workers of a Dask or Ray cluster.
        address: of a running cluster, e.g. tcp://10.0.0.5:8786; without it dask and ray start one here.
        dry_run: only say how many scenarios there are and how many are done.
        html: write a page with parallel coordinates and the Pareto front.
        json: write the numbers.
    """
    from foretrain.experiments import ResultStore, expand, read
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
        _say(expansion, {}, 0)
        return
    with ResultStore(folder) as journal:
        _say(expansion, journal.found, journal.stale)
        if dry_run:
            return
        _run(expansion, journal, jobs, backend, address)
        _finish(expansion, journal, declared.objectives, declared.name or file.stem, out, html, json)


def _run(expansion: Expansion, journal: ResultStore, jobs: int | None, backend: Backend, address: str | None) -> None:
    """Simulates what is missing; says what is kept if that ends early."""
    from foretrain.experiments import run

    todo = expansion.scenarios.values()
    try:
        with counter("sweeping", "scenarios") as progress:
            run(todo, journal, jobs=jobs, backend=backend, address=address, progress=progress)
    except (ConfigError, MissingExtra):
        raise  # the same command would end the same way
    except BaseException:
        done = len(expansion.scenarios.keys() & journal.found.keys())
        sys.stderr.write(f"foretrain: {done:,} scenarios are done and kept; the same command goes on\n")
        raise


def _say(expansion: Expansion, found: Mapping[str, ScenarioResult], stale: int) -> None:
    """What there is to do, on stderr."""
    parts = [f"{len(expansion.scenarios):,} scenarios"]
    if expansion.excluded:
        parts.append(f"{expansion.excluded:,} excluded")
    if expansion.repeated:
        parts.append(f"{expansion.repeated:,} the same as others")
    if done := len(expansion.scenarios.keys() & found.keys()):
        parts.append(f"{done:,} done before")
    if stale:
        parts.append(f"{stale:,} of another version of foretrain not used")
    sys.stderr.write(f"foretrain: {', '.join(parts)}\n")


def _finish(
    expansion: Expansion,
    journal: ResultStore,
    objectives: list[str],
    title: str,
    out: Path,
    html: Path | None,
    json: Path | None,
) -> None:
    from rich.console import Console

    from foretrain.experiments.result_table import table
    from foretrain.report.sweep import findings, summary

    made = table(expansion.scenarios, journal.found)
    made.write(out)
    found = findings(made, objectives)
    console = Console(highlight=False)
    console.print(summary(found))
    for path in (out, *_write(found, title, html, json)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _write(found: SweepFindings, title: str, html: Path | None, json: Path | None) -> Iterator[Path]:
    if html:
        from foretrain.report.sweep import page

        page(found, html, title)
        yield html
    if json:
        import msgspec

        from foretrain.files import write_atomically
        from foretrain.report.sweep import to_dict

        write_atomically(json, msgspec.json.format(msgspec.json.encode(to_dict(found)), indent=2))
        yield json
