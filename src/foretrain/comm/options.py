"""attach's arguments, checked."""

from __future__ import annotations

from typing import Literal

import msgspec

from foretrain.comm.ps.consistency import consistency
from foretrain.planner import Wanted

Agreement = Literal["coordinator", "replay"]
Place = Literal["workers", "servers"]
"""Where optimizers run."""
Means = Literal["all_reduce", "ps"]
"""How gradients become sums: collectives, or a parameter server."""


class AttachOptions(msgspec.Struct, frozen=True):
    """`attach`'s arguments, checked."""

    schedule: Wanted
    compression: str | None
    agreement: Agreement
    broadcast_buffers: bool
    warmup: int
    timeout: float
    patience: float
    check_every: int
    interface: str | None
    trace: bool
    engine: Means = "all_reduce"
    servers: tuple[tuple[str, int], ...] = ()
    updates: Place = "workers"
    consistency: str = "bsp"
    elastic: bool = False
    tune: bool = False

    @property
    def apart(self) -> bool:
        """Whether each rank goes its own way, so that nothing may wait for all of them."""
        return consistency(self.consistency).apart
