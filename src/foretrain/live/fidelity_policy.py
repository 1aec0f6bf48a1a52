"""How closely each exchange of a live simulation is simulated, which nobody knows before the script has asked for it.

With ``"auto"`` an exchange goes packet by packet if what it takes alone is within what is left of the budget, and is
then taken from it; what meets one that does not is a fluid, too. What exchanges take that contend is not foreseen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from foretrain.network.deployment import Deployment
from foretrain.network.fidelity import Fidelity, PacketEstimate, packet_hops, speed
from foretrain.network.program import Program

_LONG: Final = 5.0
"""Seconds from which on an exchange is told of before it is simulated."""


class FidelityPolicy:
    """Decides exchange by exchange.

    Args:
        where: the cluster, and its fidelity.
        tell: told what takes long, and what is not simulated packet by packet, a line each.
    """

    def __init__(self, where: Deployment, tell: Callable[[str], None]) -> None:
        self._where, self._tell = where, tell
        self._left = where.fidelity.budget
        self._speed = 0.0
        self._said = False

    def of(self, program: Program) -> Fidelity:
        """What an exchange is simulated with."""
        fidelity = self._where.fidelity
        if fidelity.level in ("ideal", "fluid"):
            return fidelity
        if not self._speed:
            self._speed = speed(fidelity, self._where.fluid.network, program)
        found = PacketEstimate(packet_hops(program, fidelity.transport.payload), self._speed)
        if fidelity.level == "packet" or found.seconds <= self._left:
            self._left -= found.seconds
            if found.seconds > _LONG:
                self._tell(f"packet level: an exchange of {found}")
            return dataclasses.replace(fidelity, level="packet")
        if not self._said:
            self._said = True
            self._tell(f"auto: an exchange of {found} is more than what is left of the budget; such ones are fluids")
        return dataclasses.replace(fidelity, level="fluid")
