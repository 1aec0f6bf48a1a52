"""How far workers may go apart: BSP, asynchronous, or stale-synchronous.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS'13.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from foretrain.errors import ConfigError

_SSP = re.compile(r"ssp\((\d{1,9})\)")


class Consistency(NamedTuple):
    """What a text as ``"ssp(3)"`` says.

    Attributes:
        apart: whether each worker's gradients are an update of their own.
        bound: after how many steps by which it is ahead a worker waits for the slowest; infinite where it never does.
    """

    apart: bool
    bound: float


def consistency(text: str) -> Consistency:
    """What ``text`` says: "bsp", "async", or "ssp(3)"; ConfigError for another."""
    if text == "bsp":
        return Consistency(False, 0)
    if text == "async":
        return Consistency(True, math.inf)
    if (found := _SSP.fullmatch(text)) is not None:
        return Consistency(True, int(found[1]))
    raise ConfigError("consistency", text, "is unknown", "write 'bsp', 'async', or with a bound of steps 'ssp(3)'")
