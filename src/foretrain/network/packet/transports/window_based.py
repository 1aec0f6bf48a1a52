"""What can be set of transports that keep a window: NewReno, DCTCP, PIAS, and pFabric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Transport
from foretrain.units import MICROSECOND, Time


@dataclass(frozen=True, slots=True)
class NewReno(Transport):
    """TCP NewReno; see `foretrain.network.packet.transports.newreno` for what is left out.

    Attributes:
        reordering: duplicate acknowledgements that mean a loss. Where packets of a flow take several ways, more.
    """

    reordering: int = 3

    def _check(self) -> None:
        Transport._check(self)
        if self.reordering < 1:
            raise ConfigError("reordering", self.reordering, "is below 1", "give a positive whole number")

    @property
    def gain(self) -> float:
        """Of α; 0 where marks mean nothing."""
        return 0.0

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Transport.row(self)
        found[c.REORDERING], found[c.GAIN], found[c.MARKABLE] = self.reordering, self.gain, self.gain > 0
        return found


@dataclass(frozen=True, slots=True)
class Dctcp(NewReno):
    """DCTCP: NewReno, and windows that shrink by half the share of marked packets.

    Attributes:
        g: of the moving average of that share (RFC 8257 has 1/16).
    """

    g: float = 1 / 16

    def _check(self) -> None:
        NewReno._check(self)
        if not 0 < self.g <= 1:
            raise ConfigError("g", self.g, "is no weight of an average", "give more than 0 and at most 1")

    @property
    def gain(self) -> float:
        """Of α."""
        return self.g


@dataclass(frozen=True, slots=True)
class Pias(Dctcp):
    """PIAS (Bai et al., NSDI 2015): DCTCP, and the more of a message has gone, the lower its class.

    Nothing need be known of how long messages are. A message is a step of a flow.

    Attributes:
        demotions: bytes of a message after which its packets go down a class, ascending, at most seven. The paper
            derives them from the distribution of sizes; these are ours.
    """

    demotions: tuple[int, ...] = (20_000, 100_000, 1_000_000)

    def _check(self) -> None:
        Dctcp._check(self)
        if not 1 <= len(self.demotions) < c.CLASSES or list(self.demotions) != sorted({*self.demotions}):
            raise ConfigError("demotions", self.demotions, "do not ascend, or are too many", "give one to seven sizes")
        if self.demotions[0] < 1:
            raise ConfigError("demotions", self.demotions[0], "is no size", "give bytes")

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Dctcp.row(self)
        found[c.DEMOTIONS] = len(self.demotions)
        packets = [-(-size // self.payload) for size in self.demotions]
        found[c.DEMOTED_FROM : c.DEMOTED_FROM + len(packets)] = packets
        return found


@dataclass(frozen=True, slots=True)
class Pfabric(Transport):
    """pFabric (SIGCOMM 2013); switches need ``Queues(nearest=True, room=...)`` of two bandwidth-delay products.

    ``first_window`` should be a bandwidth-delay product, ``least_timeout`` three round trips (45 µs in the paper).
    """

    first_window: int = 12
    most: int = 12
    least_timeout: Time = 45 * MICROSECOND

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.NEAREST_FIRST


DEFAULT: Final = Dctcp()
