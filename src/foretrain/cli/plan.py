"""``foretrain plan``: the best schedule, as a file; ``foretrain what-if``: what would help more than a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    DEFAULT_FIDELITY,
    FidelityOptions,
    JsonFile,
    WorkloadOnCluster,
    check_apart,
    check_writable,
    command_line,
    named,
    with_fidelity,
    write_outputs,
)
from foretrain.cli.progress import progress_bar
from foretrain.errors import ConfigError
from foretrain.files import stdout_console, write_json


def what_if(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    changes: tuple[Annotated[str, named("CHANGE")], ...] | None = None,
    html: Path | None = None,
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Say which single change helps most, each with its best schedule.

    Args:
        scenario: the workload and the cluster.
        changes: one at a time: rate=25Gbps, hosts=8, batch=128, topology=bigraph:8x4@25Gbps, servers=2,
            compression=fp16; by default twice the rate, the hosts and the batch, and half the bytes.
        html: write an interactive page.
        json: write the numbers.
        fidelity: fidelity of the network of a topology.
    """
    import dataclasses

    from foretrain.planner.what_if import scaled, usual
    from foretrain.planner.what_if import what_if as compare_all
    from foretrain.report.planning import page, precision, what_ifs
    from foretrain.workload import Workload

    check_writable(html=html, json=json)
    check_apart(scenario.workload, html=html, json=json)
    workload, place = scenario.read()
    place = with_fidelity(place, workload.size, fidelity)

    def rebatched(batch: int) -> Workload:
        if place.device is None:  # recorded: how its operators scale is unknown
            return scaled(workload, batch)
        return dataclasses.replace(scenario, batch=batch).read()[0]

    with progress_bar("planning") as progress:
        wanted = changes or usual(workload, place)
        found = compare_all(workload, place, wanted, rebatched=rebatched, progress=progress)
    console = stdout_console()
    console.print(what_ifs(found))
    console.print()
    console.print(found.advice, markup=False)
    console.print(precision([case.choice for case in found.cases]), markup=False, style="dim")
    write_outputs(
        console,
        (html, lambda path: page(found, path, command_line())),
        (json, lambda path: write_json(path, found.to_dict())),
    )


def plan(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    allow: tuple[Literal["fp16", "bf16"], ...] | None = None,
    engines: tuple[Literal["all_reduce", "ps", "ps_colocated"], ...] | None = None,
    out: Path = Path("plan.toml"),
    json: JsonFile = None,
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = DEFAULT_FIDELITY,
) -> None:
    """Find the best policy, or plain DDP, and write a plan file.

    Searches knobs, engines and, where allowed, compression.

    Args:
        scenario: the workload and the cluster.
        allow: compression of gradients to consider; it changes the computed values, so by default there is none.
        engines: ways to exchange gradients to consider; by default all that the cluster's hosts support.
        out: the plan file to write, for foretrain run, foretrain simulate and attach.
        json: write the numbers.
        fidelity: fidelity of the network of a topology.
    """
    from foretrain.planner import choose, save, saved
    from foretrain.planner.candidate_search import engine_of
    from foretrain.planner.candidate_search import engines as all_engines
    from foretrain.planner.what_if import NOW, WhatIf
    from foretrain.report.planning import candidates, precision

    check_writable(out=out, json=json)
    check_apart(scenario.workload, out=out, json=json)
    if out.suffix != ".toml":
        raise ConfigError("out", str(out), "is not a plan file", "let its name end in .toml")
    workload, place = scenario.read()
    places = all_engines(with_fidelity(place, workload.size, fidelity))
    if engines:
        possible = [engine_of(one) for one in places]
        places = tuple(one for one in places if engine_of(one) in engines)
        if missing := set(engines) - set(possible):
            remedy = f"possible are {', '.join(possible)}; servers of their own need a cluster with ps=K"
            raise ConfigError("engines", ", ".join(sorted(missing)), "is not possible on this cluster", remedy)
    with progress_bar("planning") as progress:
        choice = choose(workload, places, allow=allow or (), progress=progress)
    console = stdout_console()
    console.print(candidates(choice))
    console.print()
    for line in choice.lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(precision([choice]), markup=False, style="dim")
    numbers = WhatIf(NOW, workload, places[0], choice).to_dict()
    write_outputs(
        console, (out, lambda path: save(saved(choice), path)), (json, lambda path: write_json(path, numbers))
    )
