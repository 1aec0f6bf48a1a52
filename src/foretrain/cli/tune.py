"""``foretrain tune``: the best schedule for a workload on a cluster, as a plan file that jobs take."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_apart, check_writable
from foretrain.cli.network_options import Closely, placed
from foretrain.cli.progress import progress_bar
from foretrain.errors import ConfigError

_USUALLY = Closely()


def tune(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    allow: tuple[Literal["fp16", "bf16"], ...] = (),
    engines: tuple[Literal["all_reduce", "ps", "ps_colocated"], ...] = (),
    out: Path = Path("plan.toml"),
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """The best of every policy, its knobs, engine and compression, or plain DDP; writes a plan file.

    Args:
        scenario: the workload and the cluster.
        allow: what gradients may be compressed to; it changes what is computed, so that nothing is by default.
        engines: ways to exchange gradients to consider; by default all that the cluster's hosts can have.
        out: the plan file, which foretrain run, foretrain simulate and attach take.
        closely: how closely the network of a topology is simulated.
    """
    from rich.console import Console

    from foretrain.planner import choose, save, saved
    from foretrain.planner.backends import engine_of
    from foretrain.planner.backends import engines as all_engines
    from foretrain.report.planning import candidates

    check_writable(out=out)
    check_apart(scenario.workload, out=out)
    if out.suffix != ".toml":
        raise ConfigError("out", str(out), "is no name of a plan file", "let it end in .toml")
    workload, place = scenario.read()
    places = all_engines(placed(place, workload.size, closely))
    if engines:
        possible = [engine_of(one) for one in places]
        places = tuple(one for one in places if engine_of(one) in engines)
        if missing := set(engines) - set(possible):
            remedy = f"possible are {', '.join(possible)}; servers of their own need a cluster with ps=K"
            raise ConfigError("engines", ", ".join(sorted(missing)), "is not possible on this cluster", remedy)
    with progress_bar("planning") as progress:
        choice = choose(workload, places, allow=allow, progress=progress)
    console = Console(highlight=False)
    console.print(candidates(choice))
    console.print()
    for line in choice.lines:
        console.print(line, markup=False, soft_wrap=True)
    save(saved(choice), out)
    console.print(f"wrote {out}", markup=False, soft_wrap=True)
