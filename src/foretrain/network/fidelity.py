"""How closely a network is simulated: ideal, as a fluid, or packet by packet.

| level  | what it knows |
|---|---|
| ideal  | dependencies, latency, the slowest link of each path; nobody is in anybody's way |
| fluid  | besides, that flows share links, at once and fairly |
| packet | besides, packets, queues, marks, losses and the transport that reacts to them |
| auto   | packet where that takes no longer than a budget on this machine, else fluid |

Each costs more than the one before, and finds more time. ``"auto"`` is decided for known work by
`foretrain.network.estimate.decided`; where the work is not known before, whoever simulates says how it decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.network_simulator import NetworkSimulator
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.default_queues import holding, usual
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.packet.transports.window_based import Dctcp
from foretrain.network.program import Program
from foretrain.network.topology.graph import Topology
from foretrain.units import MILLISECOND

Level: TypeAlias = Literal["ideal", "fluid", "packet", "auto"]
USUAL: Final = Dctcp(least_timeout=MILLISECOND)
"""The transport where none is said: queues that drop nothing make round trips of 200 µs, which are no losses."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A level, and what the packet level needs.

    Attributes:
        level: see this module.
        transport: of all flows.
        switches: queues of what forwards; None for those that the transport is made for: see `usual`.
        budget: seconds that ``"auto"`` lets the packet level take.
        seed: of what is random among packets.
        losses: what wires lose, by ``"*"``, all that are up, or ``"leaf0:spine1"``, the links from one node to another;
            the last that is said of a wire holds.
    """

    level: Level = "fluid"
    transport: Transport = USUAL
    switches: Queues | None = None
    budget: float = 60.0
    seed: int = 0
    losses: tuple[tuple[str, LinkLosses], ...] = ()

    def __post_init__(self) -> None:
        if not self.budget >= 0:
            raise ConfigError("budget", self.budget, "is no number of seconds", "give 0 or more")

    def __str__(self) -> str:
        return f"packets ({type(self.transport).__name__.lower()})" if self.level == "packet" else self.level

    def packets(self, topology: Topology) -> Packets:
        """``topology`` as a network of packets."""
        switches = self.switches or usual(topology, self.transport)
        hosts = holding(topology, self.transport)
        return Packets(
            topology,
            transport=self.transport,
            hosts=hosts,
            switches=switches,
            losses=self._lossy(topology),
            seed=self.seed,
        )

    def _lossy(self, topology: Topology) -> dict[int, LinkLosses]:
        """By link. ConfigError where there is no such link."""
        found: dict[int, LinkLosses] = {}
        for where, what in self.losses:
            links = np.flatnonzero(topology.up) if where == "*" else topology.between(*where.split(":", 1))
            found |= dict.fromkeys(links.tolist(), what)
        return found

    def carrier(self, topology: Topology) -> NetworkSimulator:
        """``topology`` as a network that programs come to while time passes.

        Raises:
            ConfigError: the level is ``"auto"``, which somebody must have decided.
        """
        if self.level == "packet":
            return self.packets(topology).online()
        if self.level == "ideal":
            from foretrain.network.ideal import Ideal

            return Ideal(topology.capacity)
        self._check_decided()
        from foretrain.network.fluid import Fluid

        return Fluid(topology.capacity, name=topology.link_name)

    def finish(
        self, program: Program, topology: Topology, progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float64]:
        """When each flow of ``program`` ends if it is alone on ``topology``, ps, float64 (flows,).

        Args:
            program: what is sent.
            topology: the network.
            progress: told now and then how much has come, of how much; only packets take long enough.

        Raises:
            ConfigError: the level is ``"auto"``; or as of `foretrain.network.packet.Packets.run`.
            StallError: the program can never complete.
        """
        if self.level == "packet":
            return self.packets(topology).run(program, progress=progress).finish.astype(np.float64)
        if self.level == "ideal":
            from foretrain.network.ideal import run as run_ideal

            return run_ideal(program, topology.capacity)
        self._check_decided()
        from foretrain.network.fluid import run

        return run(program, topology.capacity, name=topology.link_name).finish

    def _check_decided(self) -> None:
        if self.level == "auto":
            raise ConfigError("fidelity", "auto", "has not been decided", "see foretrain.network.estimate.decided")


FLUID: Final = Fidelity()
"""What is simulated where nothing else is said."""
