"""What can be set of every transport."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.units import MICROSECOND, MILLISECOND, Time


@dataclass(frozen=True, slots=True)
class Transport:
    """What all have. Take one that is derived from it.

    Attributes:
        payload: bytes of a full packet that are data.
        header: bytes of every data packet besides, on the wire: 78 are Ethernet with preamble and gap, IPv4 and TCP.
        reply: bytes of an acknowledgement or signal on the wire.
        first_window: packets that may go before anything is known.
        most: packets that may ever be under way.
        least_timeout: ps; 200 µs is what data centres set (RFC 6298 has a second).
        most_timeout: ps.
        adaptive: whether a flow with several paths avoids those of which the last packet met congestion.
    """

    payload: int = 1460
    header: int = 78
    reply: int = 84
    first_window: int = 10
    most: int = 1024
    least_timeout: Time = 200 * MICROSECOND
    most_timeout: Time = 60_000 * MILLISECOND
    adaptive: bool = False

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Raises ConfigError where something makes no sense; those who add attributes check these, too."""
        for name in ("payload", "header", "reply", "first_window", "most", "least_timeout"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "is below 1", "give a positive whole number")
        if self.payload + self.header > c.SIZE_MASK:
            most = c.SIZE_MASK - self.header
            raise ConfigError("payload", self.payload, "makes packets too large", f"give at most {most}")
        if self.first_window > self.most:
            raise ConfigError("first_window", self.first_window, f"is more than ever may go, {self.most}", "lower it")
        if self.most_timeout < self.least_timeout:
            raise ConfigError("most_timeout", self.most_timeout, "is below least_timeout", "raise it")

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.WINDOWED

    @property
    def tolerated(self) -> float:
        """The share of a step's bytes that may be lost."""
        return 0.0

    @property
    def tolerates(self) -> bool:
        """Whether its receivers count bytes of steps."""
        return self.flavour == c.BOUNDED

    @property
    def remembers(self) -> bool:
        """Whether its senders keep a bit of each packet."""
        return self.flavour in (c.NEAREST_FIRST, c.PULLED, c.BOUNDED)

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = np.zeros(c.PARAMETER_COLUMNS)
        found[c.FIRST_WINDOW], found[c.MOST] = self.first_window, self.most
        found[c.LEAST_TIMEOUT], found[c.MOST_TIMEOUT] = self.least_timeout, self.most_timeout
        found[c.REPLY_SIZE], found[c.ADAPTIVE] = self.reply, self.adaptive
        return found
