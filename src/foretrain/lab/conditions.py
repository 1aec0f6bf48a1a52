"""Conditions of a lab's links beyond their rate: priority bands, selective drop, loss, and background flows.

All is the traffic control of a stock kernel: no netem, no nftables, no actions. `port_queues` builds it.

Conditions stand in the alias of the switch's bridge, so that a change of rate finds them.

The kernel decides on super-packets of many segments where it may; for single packets to be lost, hosts of such labs
send segments one by one (``gso_max_segs 1``), which costs CPU time: some 3 Gb/s here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

from foretrain.errors import ConfigError, unknown

Drop: TypeAlias = Literal["tail", "selective"]
"""Packets that a full queue drops: those that come last, or first those that may be dropped."""

MTU = 9000
"""Bytes of the largest IP packet of all links."""
BANDS = 3
"""Most bands of a port."""
MOST_BURST = 10_000
_SPARE_SHARE = 0.03
"""Of a queue, what droppable packets may fill; the lab's spike had 15 of 500 kB."""
_LEAST_SPARE = 16 * (MTU + 14)
"""Bytes that a burst of 16 packets takes, with headers of Ethernet."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of all links of a lab.

    Attributes:
        bands: priority classes of a port, 1 to 3; the first is served before the others.
        drop: what a full queue drops.
        loss: share of packets that is lost at random on the way to ``lossy_host``, or to every host.
        lossy_host: the host with a grey link; None is every one.
        burst: mean number of packets that are lost in a row; 1 loses each independently.
        background: share of one port's rate that background flows take on average: that of ``lossy_host``, or of the
            last host.
    """

    bands: int = 1
    drop: Drop = "tail"
    loss: float = 0.0
    lossy_host: int | None = None
    background: float = 0.0
    burst: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.bands, int) or not 1 <= self.bands <= BANDS:
            raise ConfigError("bands", self.bands, "is no number of bands", f"write 1 to {BANDS}")
        if self.drop not in get_args(Drop):
            raise unknown("drop", self.drop, get_args(Drop))
        if not 0 <= self.loss < 1:
            raise ConfigError("loss", self.loss, "is no share of packets", "write e.g. 1%")
        if not 1 <= self.burst <= MOST_BURST:
            raise ConfigError("burst", self.burst, "is no mean number of packets", f"write 1 to {MOST_BURST}")
        if self.burst > 1 and self.loss > self.burst * (1 - self.loss):
            raise ConfigError("loss", self.loss, f"is too much for bursts of {self.burst:g}", "take longer bursts")
        if not 0 <= self.background <= 1:
            raise ConfigError("background", self.background, "is no share of a port's rate", "write e.g. 40%")
        if self.burst > 1 and not self.loss:
            raise ConfigError("burst", self.burst, "needs losses", "add a loss, e.g. 1%, or leave it out")
        if self.lossy_host is not None and not self.loss and not self.background:
            remedy = "add a loss, e.g. 1%, or a background, e.g. 40%, or leave it out"
            raise ConfigError("lossy_host", self.lossy_host, "has neither losses nor background flows", remedy)

    @property
    def plain(self) -> bool:
        """Return whether links only have a rate."""
        return self == Conditions()

    @classmethod
    def read(cls, text: str) -> Conditions:
        """Return the conditions that `written` has written; an empty text has none."""
        return cls(**json.loads(text)) if text else cls()

    def written(self) -> str:
        """Return a line that `read` reads."""
        return json.dumps(asdict(self))

    def loses(self, host: int) -> bool:
        """Return whether packets to ``host`` are lost at random."""
        return self.loss > 0 and self.lossy_host in (None, host)


def spare_of(limit: int) -> int:
    """Return the bytes of the short queue beside one of ``limit`` bytes, where drop is selective."""
    return min(limit, max(_LEAST_SPARE, round(limit * _SPARE_SHARE)))
