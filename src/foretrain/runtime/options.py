"""attach's arguments, checked."""

from __future__ import annotations

from typing import Literal

import msgspec

from foretrain.schedule import Spec

Agreement = Literal["coordinator", "replay"]


class Options(msgspec.Struct, frozen=True):
    """`attach`'s arguments, checked."""

    schedule: Spec
    compression: str | None
    agreement: Agreement
    broadcast_buffers: bool
    warmup: int
    timeout: float
    patience: float
    check_every: int
    interface: str | None
    trace: bool
