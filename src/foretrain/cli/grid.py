"""``foretrain grid``: schedules × collectives × topologies on one workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from foretrain.cli.arguments import WorkloadOnCluster, check_writable, split
from foretrain.cli.network_options import Closely, placed
from foretrain.cli.progress import progress_bar

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment

_USUALLY = Closely()


def grid(
    workload: Annotated[str, tyro.conf.Positional],
    cluster: Annotated[str, tyro.conf.Positional],
    more: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")] = (),
    *,
    collectives: tuple[str, ...] = ("auto",),
    schedules: tuple[str, ...] = ("ddp", "bytescheduler"),
    tune: bool = True,
    batch: int | None = None,
    html: Path | None = None,
    json: Path | None = None,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """Schedules × collectives × topologies on one workload: which combination is fastest, and by how much.

    Args:
        workload: a model of the zoo (foretrain catalog lists them) or a recorded workload's .toml file.
        cluster: a topology, e.g. bigraph:8x4@25Gbps, whose GPU computes; a simple cluster as well.
        more: others to compare it with, e.g. fat_tree:4@25Gbps,routing=spray.
        collectives: ring, halving_doubling, double_tree, hierarchical, hdrm, in_network, parameter_server, auto, nccl.
        schedules: policies, with knobs if wanted.
        tune: search each schedule's free knobs for their best in every cell.
        batch: samples per GPU; models of the zoo only.
        html: write a page with a heat map.
        json: write the numbers.
        closely: how closely networks are simulated; a simple cluster has a formula.
    """
    from rich.console import Console

    from foretrain.experiments.grid import grid as grid_of
    from foretrain.files import write_atomically
    from foretrain.report.grid import page, table

    check_writable(html=html, json=json)
    names = tuple(name for text in schedules for name in split(text))
    # All cells train the same step, on the GPU of the first cluster.
    work, _ = WorkloadOnCluster(workload, cluster, batch=batch).read()
    with progress_bar("simulating") as progress:

        def simulated(place: Deployment) -> Deployment:
            return cast("Deployment", placed(place, work.size, closely, shown=False))

        clusters = (cluster, *more)
        made = grid_of(work, clusters, collectives, names, tuned=tune, progress=progress, simulated=simulated)
    console = Console(highlight=False)
    console.print(table(made))
    if html:
        page(made, html)
    if json:
        import msgspec

        write_atomically(json, msgspec.json.format(msgspec.json.encode(made.to_dict()), indent=2))
    for path in filter(None, (html, json)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
