"""``foretrain collective``: one exchange on a network, by every algorithm that suits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from foretrain.cli.arguments import check_writable, patience
from foretrain.errors import ConfigError


def collective(
    network: Annotated[str, tyro.conf.Positional],
    *,
    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"] = "all_reduce",
    size: str = "100MB",
    collectives: tuple[str, ...] = (),
    html: Path | None = None,
    json: Path | None = None,
) -> None:
    """One collective alone on a network, by every algorithm that suits it: time, bus bandwidth, the busiest link.

    Args:
        network: a topology, e.g. bigraph:8x4@100Gbps or fat_tree:8@100Gbps,routing=spray.
        operation: what to do.
        size: bytes, as nccl-tests count them: of the gradient, of all shards together, of what one rank sends to all.
        collectives: which algorithms; all that suit when none is named.
        html: write a page of the network, painted with how much of each link the fastest of them uses.
        json: write the numbers.
    """
    from rich.console import Console

    from foretrain.files import write_atomically
    from foretrain.network.arrangement import suited
    from foretrain.network.deployment_notation import deployment
    from foretrain.network.exchange import exchange
    from foretrain.report.exchange import numbers, table
    from foretrain.report.topology import page
    from foretrain.units import parse_size

    check_writable(html=html, json=json)
    data = parse_size(size, "size")
    if data < 1:
        raise ConfigError("size", size, "is nothing to exchange", "write e.g. 100MB")
    with patience("preparing the network (on first use its simulator is compiled, which takes some 10 s)"):
        place = deployment(network)
        names = collectives or tuple(suited(operation, place.topology, place.members))
        found = sorted((exchange(place, operation, data, name) for name in names), key=lambda one: one.time)
    console = Console(highlight=False)
    console.print(table(found))
    if html:
        page(found[0].topology, html, found[0].utilisation)
    if json:
        import msgspec

        write_atomically(json, msgspec.json.format(msgspec.json.encode(numbers(found)), indent=2))
    for path in filter(None, (html, json)):
        console.print(f"wrote {path}", markup=False)
