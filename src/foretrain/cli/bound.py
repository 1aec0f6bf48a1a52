"""``foretrain bound``: the optimum alone."""

from __future__ import annotations

import tyro

from foretrain.cli.arguments import WorkloadOnCluster


def bound(scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster]) -> None:
    """The optimum T* that no schedule can beat, and what makes it so."""
    from rich.console import Console

    from foretrain.simulation import bound as bound_of
    from foretrain.units import format_time

    workload, place = scenario.read()
    found = bound_of(workload, place)
    console = Console(highlight=False, markup=False)
    console.print(f"{workload.name}, batch {workload.batch}, on {place}")
    console.print(str(found))
    console.print(f"computation {format_time(found.compute)}, communication {format_time(found.link)}")
    console.print(f"with a barrier (WFBP, DDP) no less than {format_time(found.wfbp)}")
    console.print(f"with all-reduce split at the barrier (DeAR) no less than {format_time(found.dear)}")
