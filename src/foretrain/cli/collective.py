"""``foretrain collective``: one exchange on a network, by every algorithm that suits it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import tyro

from foretrain.cli.arguments import PREPARING, check_writable, patience
from foretrain.cli.network_options import Closely, progress_bar, say
from foretrain.errors import ConfigError

_USUALLY = Closely()


def collective(
    network: Annotated[str, tyro.conf.Positional],
    *,
    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"] = "all_reduce",
    size: str = "100MB",
    collectives: tuple[str, ...] = (),
    html: Path | None = None,
    json: Path | None = None,
    details: Path | None = None,
    closely: tyro.conf.OmitArgPrefixes[Closely] = _USUALLY,
) -> None:
    """One collective alone on a network, by every algorithm that suits it: time, bus bandwidth, the busiest link.

    Args:
        network: a topology, e.g. bigraph:8x4@100Gbps or fat_tree:8@100Gbps,routing=spray.
        operation: what to do.
        size: bytes, as nccl-tests count them: of the gradient, of all shards together, of what one rank sends to all.
        collectives: which algorithms; all that suit when none is named.
        html: write a page of the network, painted with how much of each link the fastest of them uses.
        json: write the numbers.
        details: with --network packet, a folder for flows.csv, ports.csv and queues.csv of the fastest: how long each
            flow took; what each port and class sent, marked, dropped and lost; how much waited, over time.
        closely: how closely the network is simulated.
    """
    from rich.console import Console

    from foretrain.files import write_atomically
    from foretrain.network.collective_benchmark import exchange
    from foretrain.network.collective_placement import suited
    from foretrain.network.deployment_notation import deployment
    from foretrain.network.fidelity import decided, packet_hops, parts
    from foretrain.report import packets
    from foretrain.report.collective_table import numbers, table
    from foretrain.report.topology import page
    from foretrain.units import parse_size

    check_writable(html=html, json=json)
    data = parse_size(size, "size")
    if data < 1:
        raise ConfigError("size", size, "is nothing to exchange", "write e.g. 100MB")
    fidelity = closely.read()
    with patience(PREPARING):
        place = deployment(network).simulated(fidelity)
        names = collectives or tuple(suited(operation, place.topology, place.members))
        programs = [place.program(operation, data, collective=name) for name in names]
        made = decided(fidelity, place.network, programs)
    if fidelity.level in ("packet", "auto"):
        say(made.why)
    if details and made.fidelity.level != "packet":
        raise ConfigError("details", str(details), "are of packets", "add --network packet, or leave it out")
    place = place.simulated(made.fidelity)
    hops = [packet_hops(program, fidelity.transport.payload) for program in programs]
    waits = nullcontext() if fidelity.level in ("packet", "auto") else patience(PREPARING)
    with waits, progress_bar(str(made.fidelity)) as bar:
        told = zip(names, parts(hops, bar), strict=True)
        found = sorted((exchange(place, operation, data, *each) for each in told), key=lambda one: one.time)
    console = Console(highlight=False)
    console.print(table(found))
    if made.fidelity.level == "packet":
        console.print(packets.table(found))
    if html:
        page(found[0].topology, html, found[0].utilisation)
    if json:
        import msgspec

        write_atomically(json, msgspec.json.format(msgspec.json.encode(numbers(found)), indent=2))
    written = []
    if details:
        with progress_bar("details") as bar:
            written = packets.write(found[0], place, details, bar)
    for path in filter(None, (html, json, *written)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
