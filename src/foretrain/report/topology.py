"""Report of a topology: a summary for a terminal, its numbers, and one HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.network.topology.graph import Topology
from foretrain.network.topology.metrics import bisection, diameter, oversubscription
from foretrain.report.topology_layout import STATES, LinkKind, faults, link_kinds, link_states
from foretrain.units import format_rate, format_time, to_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from foretrain.network.collective_benchmark import CollectiveBenchmark
    from foretrain.report.document import Card


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Properties of a topology, computed once for all outputs.

    Attributes:
        topology: of what.
        kinds: of links.
        states: of each link, an index into `STATES`.
        diameter: see `foretrain.network.topology.metrics`, as the following.
        bisection: bytes/s; None where it would take long.
        oversubscription: by tier.
    """

    topology: Topology
    kinds: list[LinkKind]
    states: NDArray[np.int64]
    diameter: int
    bisection: float | None
    oversubscription: dict[int, float]

    @classmethod
    def of(cls, topology: Topology) -> Facts:
        """Return all metrics; a few seconds for ten thousand ranks."""
        kinds = link_kinds(topology)
        return cls(
            topology,
            kinds,
            link_states(topology, kinds),
            diameter(topology),
            bisection(topology),
            oversubscription(topology),
        )

    def tiers(self) -> dict[int, int]:
        """Switches on each tier."""
        found: dict[int, int] = {}
        for node in self.topology.nodes:
            if node.kind == "switch":
                found[node.tier] = found.get(node.tier, 0) + 1
        return dict(sorted(found.items()))

    def faults_of(self, kind: LinkKind) -> str:
        """Return the faults of links of one kind, as text."""
        counts = np.bincount(self.states[kind.links], minlength=len(STATES))
        return ", ".join(f"{counts[state]} {STATES[state]}" for state in (3, 2, 1) if counts[state])


def summary(topology: Topology) -> Group:
    """Return the summary for ``rich.print``."""
    from rich.console import Group
    from rich.table import Table

    facts = Facts.of(topology)
    table = Table(box=None, pad_edge=False)
    table.add_column("links", no_wrap=True)
    for column in ("count", "rate", "latency"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for kind in facts.kinds:
        table.add_row(kind.label, str(len(kind.links)), kind.rates, kind.latencies, facts.faults_of(kind))
    grid = Table(box=None, pad_edge=False, show_header=False)
    for label, text in _lines(facts):
        grid.add_row(label, text)
    return Group(topology.name, "", grid, "", table)


def _lines(facts: Facts) -> list[tuple[str, str]]:
    counts = facts.topology.counts()
    lines = [
        ("ranks", f"{counts.pop('ranks')} on {_servers(facts.topology)}"),
        ("nodes", ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind != "links")),
        ("links", f"{counts['links']}, each direction counted"),
    ]
    if tiers := facts.tiers():
        lines.append(("switches", ", ".join(f"{count} on tier {tier}" for tier, count in tiers.items())))
    lines.append(("diameter", f"{facts.diameter} links between ranks"))
    lines.append(("bisection", f"{_bisection(facts)} from the first half of the ranks to the second"))
    if facts.oversubscription:
        lines.append(("oversubscribed", _oversubscription(facts)))
    lines.append(("state", "; ".join(faults(facts.topology, facts.states)) or "all links up, no stragglers"))
    return lines


def _servers(topology: Topology) -> str:
    kind = "host" if all(topology.nodes[node].kind == "host" for node in topology.ranks) else "server"
    return f"{topology.servers} {kind}{'s' if topology.servers > 1 else ''}"


def _bisection(facts: Facts) -> str:
    return "not computed" if facts.bisection is None else format_rate(facts.bisection)


def _oversubscription(facts: Facts) -> str:
    return ", ".join(f"{ratio:.3g}:1 at tier {tier}" for tier, ratio in facts.oversubscription.items())


def numbers(topology: Topology) -> dict[str, Any]:
    """Return the properties as plain values: rates in bytes/s, latencies in s."""
    facts = Facts.of(topology)
    return {
        "name": topology.name,
        "counts": topology.counts(),
        "servers": topology.servers,
        "switches": {str(tier): count for tier, count in facts.tiers().items()},
        "diameter": facts.diameter,
        "bisection": facts.bisection,
        "oversubscription": {str(tier): ratio for tier, ratio in facts.oversubscription.items()},
        "symmetric": topology.symmetric,
        "links": [
            {
                "between": kind.label,
                "count": len(kind.links),
                "rate": list(kind.rate),
                "latency": [to_seconds(time) for time in kind.latency],
                "down": int((~topology.up[kind.links]).sum()),
                "background": float(topology.background[kind.links].sum()),
            }
            for kind in facts.kinds
        ],
        "stragglers": {node.name: node.slowdown for node in topology.nodes if node.slowdown > 1},
    }


def page(
    topology: Topology,
    path: str | os.PathLike[str],
    collectives: Sequence[CollectiveBenchmark] = (),
    command: str = "",
) -> None:
    """Write the page to ``path``, whole or not at all; with collectives, painted by the first one's use."""
    used = collectives[0].utilisation if collectives else None
    write_atomically(path, render(topology, used, command, collectives))


def render(
    topology: Topology,
    utilisation: NDArray[np.float64] | None = None,
    command: str = "",
    collectives: Sequence[CollectiveBenchmark] = (),
) -> str:
    """Return the page as text.

    Args:
        topology: what to draw.
        utilisation: of each link the part of its rate that is used, 0 to 1, shape (links,): paints it.
        command: shown to copy.
        collectives: what was simulated on it, the fastest first; the headline is then that one's.

    Raises:
        ConfigError: utilisation has another shape or is negative.
        MissingExtra: Jinja2 is not installed.
    """
    from foretrain.report.collective_table import HEADS, NOT_MEASURED, rows, title
    from foretrain.report.document import Card, document
    from foretrain.report.fabric_plot import fabric, servers
    from foretrain.report.topology_layout import DrawnLinks

    if utilisation is not None and (utilisation.shape != (topology.links,) or not (utilisation >= 0).all()):
        raise ConfigError(
            "utilisation", utilisation.shape, "is not a part of 1 for each link", f"give {topology.links} numbers"
        )
    facts, wires = Facts.of(topology), DrawnLinks.of(topology, utilisation)
    figures = {"fabric": fabric(wires)}
    if (servers := servers(wires)) is not None:
        figures["inside"] = servers
    wrong = faults(topology, facts.states)
    reasons = "; ".join([*map(title, collectives[:1]), *wrong])
    shown = reasons if collectives else reasons[:1].upper() + reasons[1:]  # an operation's name stays as it is written
    tiers = facts.tiers()
    return document(
        "topology.html",
        figures,
        command=command,
        topology=topology,
        good=not wrong,
        verdict=_verdict(topology, collectives),
        reasons=shown,
        heads=HEADS,
        collectives=rows(collectives),
        not_measured=NOT_MEASURED,
        cards=[
            *_result(collectives),
            Card("Ranks", str(len(topology.ranks)), f"on {_servers(topology)}"),
            Card("Switches", str(sum(tiers.values())), ", ".join(f"{n} on tier {t}" for t, n in tiers.items())),
            Card("Diameter", f"{facts.diameter} links", "between ranks, on the way that routing takes"),
            Card("Bisection", _bisection(facts), "from the first half of the ranks to the second"),
            Card("Oversubscription", _worst(facts), _oversubscription(facts) or "no tier above another"),
        ],
        counts=topology.counts(),
        kinds=[(kind, facts.faults_of(kind)) for kind in facts.kinds],
        painted=utilisation is not None,
    )


def _verdict(topology: Topology, collectives: Sequence[CollectiveBenchmark]) -> str:
    if not collectives:
        return f"{topology.name}: {len(topology.ranks)} ranks on {_servers(topology)}"
    names = [f"{one.name} {format_time(one.time)}" for one in collectives[:2]]
    return f"Fastest: {', then '.join(names)}"


def _result(collectives: Sequence[CollectiveBenchmark]) -> list[Card]:
    from foretrain.report.document import Card

    if not collectives:
        return []
    first = collectives[0]
    least = f"{first.time / first.least:.2f} × what the slowest port needs at least"
    return [
        Card("Time", format_time(first.time), least),
        Card("Bus bandwidth", f"{first.bandwidth / 1e9:.3g} GB/s", "as nccl-tests define it"),
    ]


def _worst(facts: Facts) -> str:
    ratios = facts.oversubscription.values()
    return f"{max(ratios):.3g}:1" if ratios else "none"
