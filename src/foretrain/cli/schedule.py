"""``foretrain schedule``: what a policy sends, as text that can be edited and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_writable
from foretrain.cli.network_options import Closely, placed
from foretrain.errors import ConfigError

_USUALLY = Closely()


def schedule(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    schedule: Annotated[str, tyro.conf.arg(aliases=["-s"])] = "bytescheduler",
    out: Path | None = None,
    run: Path | None = None,
    barrier: bool = False,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """Print one step of a schedule in steady state, chunk by chunk, or run one that was edited.

    Args:
        scenario: the workload and the cluster.
        schedule: a policy with its knobs, e.g. "bytescheduler(partition=1MB, credit=4MB)"; auto; or a plan file.
        out: a file to write instead of standard output.
        run: validate and simulate the schedule in this file instead.
        barrier: with --run, let all wait for the last gradient.
        closely: how closely the network of a topology is simulated.
    """
    import sys

    from foretrain.files import write_atomically
    from foretrain.planner import requested_schedule, resolved
    from foretrain.schedule.script import Written
    from foretrain.simulation import simulate
    from foretrain.units import format_time

    check_writable(out=out)
    workload, place = scenario.read()
    place = placed(place, workload.size, closely)
    if run:
        text = _read(run)
        found = simulate(workload, place, Written(text, barrier, name=run.name), trace=False)
        time = format_time(found.iteration_time)
        sys.stdout.write(f"{run}: {time} an iteration, {found.gap:.1%} above the optimum\n")
        return
    found = simulate(workload, place, resolved(requested_schedule(schedule), workload, place), trace=False)
    text = f"# {found.schedule} for {workload.name} on {place}\n{found.script()}"
    if out:
        write_atomically(out, text)
    else:
        sys.stdout.write(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("run", str(path), f"cannot be read ({error})", "give the path of a schedule") from None
