"""``foretrain schedule``: what a policy sends, as text that can be edited and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from foretrain.cli.arguments import Scenario, check_writable


def schedule(
    scenario: tyro.conf.OmitArgPrefixes[Scenario],
    *,
    schedule: Annotated[str, tyro.conf.arg(aliases=["-s"])] = "bytescheduler",
    out: Path | None = None,
) -> None:
    """Print one step of a schedule in steady state, chunk by chunk.

    Args:
        scenario: the workload and the cluster.
        schedule: a policy with its knobs, e.g. "bytescheduler(partition=1MB, credit=4MB)".
        out: a file to write instead of standard output.
    """
    import sys

    from foretrain.files import write_atomically
    from foretrain.schedule import script
    from foretrain.virtual import simulate
    from foretrain.virtual.simulation import job_on

    check_writable(out=out)
    workload, place = scenario.read()
    run = simulate(workload, place, schedule, trace=False)
    chunks = script.of_step(run.log, len(run.begins) - 2)
    text = f"# {run.schedule} for {workload.name} on {place}\n" + script.write(chunks, job_on(workload, place).tasks)
    if out:
        write_atomically(out, text)
    else:
        sys.stdout.write(text)
