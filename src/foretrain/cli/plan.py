"""``foretrain plan``: what would help: faster links, more hosts, another batch, topology or compression?"""

from __future__ import annotations

from pathlib import Path

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_apart, check_writable
from foretrain.cli.network_options import Closely, placed
from foretrain.cli.progress import progress_bar

_USUALLY = Closely()
_PRECISION = (
    "A search of knobs ends within 1 % of the schedule's bound; "
    "foretrain compare searches on, and may find an iteration up to 1 % shorter."
)


def plan(
    scenario: tyro.conf.OmitArgPrefixes[WorkloadOnCluster],
    *,
    what_if: tuple[str, ...] = (),
    html: Path | None = None,
    json: Path | None = None,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """What-ifs side by side, each with the schedule that is best then: which single change helps most?

    Args:
        scenario: the workload and the cluster.
        what_if: changes, one at a time: rate=25Gbps, hosts=8, batch=128, topology=bigraph:8x4@25Gbps, servers=2,
            compression=fp16; by default twice the rate, the hosts and the batch, and half the bytes.
        html: write an interactive page.
        json: write the numbers.
        closely: how closely the network of a topology is simulated.
    """
    import dataclasses

    from rich.console import Console

    from foretrain.planner.what_if import scaled, usual
    from foretrain.planner.what_if import what_if as compare_all
    from foretrain.report.planning import page, what_ifs
    from foretrain.workload import Workload

    check_writable(html=html, json=json)
    check_apart(scenario.workload, html=html, json=json)
    workload, place = scenario.read()
    place = placed(place, workload.size, closely)

    def rebatched(batch: int) -> Workload:
        if place.device is None:  # recorded: nobody knows how its operators scale
            return scaled(workload, batch)
        return dataclasses.replace(scenario, batch=batch).read()[0]

    with progress_bar("planning") as progress:
        changes = what_if or usual(workload, place)
        found = compare_all(workload, place, changes, rebatched=rebatched, progress=progress)
    console = Console(highlight=False)
    console.print(what_ifs(found))
    console.print()
    console.print(found.advice, markup=False)
    console.print(_PRECISION, markup=False, style="dim")
    if html:
        page(found, html)
    if json:
        import msgspec

        from foretrain.files import write_atomically

        write_atomically(json, msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=2))
    for path in filter(None, (html, json)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
