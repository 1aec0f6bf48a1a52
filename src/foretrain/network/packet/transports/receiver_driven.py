"""What can be set of transports whose receivers say when a packet may go: NDP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Transport
from foretrain.units import MILLISECOND, Time


@dataclass(frozen=True, slots=True)
class Ndp(Transport):
    """NDP (SIGCOMM 2017); switches need ``Queues(limit=(…, 8 packets, …), cut_to=84)``, flows many paths (``others``).

    ``first_window`` should be a bandwidth-delay product. Data is of class 1 at least.
    """

    first_window: int = 12
    least_timeout: Time = MILLISECOND

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.PULLED

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Transport.row(self)
        found[c.LEAST_CLASS] = 1
        found[c.MARKABLE] = 1  # a queue that drops selectively is not meant for it
        return found
