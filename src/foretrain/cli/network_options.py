"""How closely a command simulates the network: its options, what it says before it starts, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foretrain.cli.arguments import PREPARING, patience
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from foretrain.network import Place
    from foretrain.network.fidelity import Fidelity


@dataclass(frozen=True, slots=True)
class Closely:
    """How closely the network is simulated.

    Attributes:
        network: ideal, nobody in anybody's way; fluid, flows that share links; packet, packet by packet; or auto, which
            is packet if that takes no longer than --budget.
        transport: of packets, e.g. newreno, pias or "dctcp(payload=4096B)"; without it "dctcp(least_timeout=1ms)".
        queues: of switches, for packets, e.g. limit=300kB,mark=100kB; without it they suit the transport: DCTCP's mark,
            and drop nothing.
        losses: of wires, for packets: of all, e.g. 0.1%, or from node to node, e.g. leaf0:spine1=1%; 1%x8 is lost in
            bursts of 8 packets.
        budget: what auto lets packets take on this machine.
    """

    network: Literal["ideal", "fluid", "packet", "auto"] = "fluid"
    transport: str | None = None
    queues: str | None = None
    losses: str | None = None
    budget: str | None = None

    def read(self) -> Fidelity:
        """The same, validated."""
        from foretrain.network.fidelity import USUAL, Fidelity
        from foretrain.network.packet.notation import losses, queues, transport
        from foretrain.units import SECOND, parse_time

        if self.network not in ("packet", "auto"):
            for name in ("transport", "queues", "losses"):
                if (value := getattr(self, name)) is not None:
                    problem = f"says nothing to a network that is simulated as {self.network}"
                    raise ConfigError(name, value, problem, "add --network packet, or leave it out")
        if self.budget is not None and self.network != "auto":
            raise ConfigError("budget", self.budget, "is only of --network auto", "add that, or leave it out")
        return Fidelity(
            self.network,
            transport=USUAL if self.transport is None else transport(self.transport),
            switches=None if self.queues is None else queues(self.queues),
            losses=() if self.losses is None else losses(self.losses),
            budget=60.0 if self.budget is None else parse_time(self.budget, "budget") / SECOND,
        )


def placed(place: Place, largest: int, closely: Closely, *, shown: bool = True) -> Place:
    """``place`` with its network simulated so closely, for collectives of up to ``largest`` bytes.

    Says on stderr what that takes, and if ``shown`` simulates with a bar what schedules will ask for.
    """
    from foretrain.network import Cluster

    if closely == Closely():
        return place
    fidelity = closely.read()
    if isinstance(place, Cluster):
        if fidelity.level in ("ideal", "packet"):
            remedy = "name a topology, e.g. star:4@10Gbps, or leave it out"
            raise ConfigError("network", fidelity.level, "cannot be of a simple cluster, which has a formula", remedy)
        return place
    with patience(PREPARING):
        made, why = place.simulated(fidelity).decided(largest)
    if fidelity.level in ("packet", "auto"):
        say(why)
    if shown:
        with progress_bar("packets") as progress:
            made.measure(largest, progress)
    return made


def say(line: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"foretrain: {line}\n")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with an ETA on stderr, gone when done; takes how much is done, and of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
