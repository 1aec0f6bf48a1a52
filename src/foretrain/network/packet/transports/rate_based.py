"""What can be set of transports that send at a rate: DCQCN and TIMELY over RoCE, and bounded loss.

Rates are bytes/s here, bytes/ps in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.network.packet.transports.transport import Transport
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time

FIXED, DCQCN, TIMELY, AIMD = range(4)
"""What sets a rate; the kernels' numbers."""
SLOWEST: Final = 1e-3
"""No rate falls below this share of the slowest link's (ours; papers have 10 to 40 Mb/s)."""


def _positive(of: object, *names: str) -> None:
    for name in names:
        if getattr(of, name) <= 0:
            raise ConfigError(name, getattr(of, name), "is not positive", "give more than 0")


def _timely_row(found: NDArray[np.float64], step: float, low: Time, high: Time, trip: Time) -> None:
    """The paper's values, of which the weight is from Zhu et al., CoNEXT 2016, table 2."""
    found[c.LAWS : c.LAWS + 10] = [0.875, low, high, step / SECOND, 0.8, trip, 16_000, 5, 5, SLOWEST]


@dataclass(frozen=True, slots=True)
class Dcqcn(Transport):
    """DCQCN (SIGCOMM 2015) over RoCE: lossless networks need ``Queues(xoff=…, mark_from=5 kB, mark_to=200 kB,
    mark_chance=0.01)``, which are the paper's.

    Attributes:
        g: of α's moving average.
        quiet: ps between two notices of a receiver.
        decay: ps without a notice after which α shrinks.
        raise_after: ps, and ``raise_bytes`` bytes, between two raises of the rate.
        fast: raises that go back half of the way to the rate before the cut.
        step: bytes/s that the aim rises by after those: 40 Mb/s.
        leap: bytes/s that it rises by when both timer and bytes are past them (ours: ten steps).
    """

    header: int = 82
    least_timeout: Time = 4 * MILLISECOND
    g: float = 1 / 256
    quiet: Time = 50 * MICROSECOND
    decay: Time = 55 * MICROSECOND
    raise_after: Time = 55 * MICROSECOND
    raise_bytes: int = 10_000_000
    fast: int = 5
    step: float = 5e6
    leap: float = 5e7

    def _check(self) -> None:
        Transport._check(self)
        _positive(self, "quiet", "decay", "raise_after", "raise_bytes", "fast", "step", "leap")
        if not 0 < self.g < 1:
            raise ConfigError("g", self.g, "is no weight of an average", "give more than 0 and less than 1")

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.IN_ORDER

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Transport.row(self)
        found[c.LAW], found[c.MARKABLE] = DCQCN, 1
        found[c.LAWS : c.LAWS + 8] = [
            self.g,
            self.decay,
            self.raise_after,
            self.raise_bytes,
            self.fast,
            self.step / SECOND,
            self.leap / SECOND,
            SLOWEST,
        ]
        found[c.LAWS + 10] = self.quiet
        return found


@dataclass(frozen=True, slots=True)
class Timely(Transport):
    """TIMELY (SIGCOMM 2015) over RoCE: lossless networks need ``Queues(xoff=…)``.

    Attributes:
        low, high: ps, round trips below which the rate rises and above which it falls, whatever the gradient.
        step: bytes/s of a rise: 10 Mb/s.
        trip: ps of a round trip in an empty network.
    """

    header: int = 82
    least_timeout: Time = 4 * MILLISECOND
    low: Time = 50 * MICROSECOND
    high: Time = 500 * MICROSECOND
    step: float = 1.25e6
    trip: Time = 20 * MICROSECOND

    def _check(self) -> None:
        Transport._check(self)
        _positive(self, "low", "step", "trip")
        if self.high < self.low:
            raise ConfigError("high", self.high, f"is below low, {self.low}", "raise it")

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.IN_ORDER

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Transport.row(self)
        found[c.LAW], found[c.MARKABLE] = TIMELY, 1
        _timely_row(found, self.step, self.low, self.high, self.trip)
        return found


Law: TypeAlias = Literal["aimd", "timely", "fixed"]
"""``"aimd"`` is DLCP's, ``"timely"`` MLT's; ``"fixed"`` sends at the slowest link's rate."""


@dataclass(frozen=True, slots=True)
class Bounded(Transport):
    """Bounded loss (DLCP, arXiv 2008.08445; MLT, NSDI 2024): a step has come when 1 − ``tolerance`` of it has.

    Attributes:
        least_timeout: ps from the last packet to a probe, at least: some round trips (papers probe at once).
        tolerance: the share of a step's bytes that may be lost.
        important: the share of packets that are marked rather than dropped (ECT), chosen at random; `Packets.run`
            takes others by name. All are where ``tolerance`` of a step is less than a full packet.
        law: what holds packets back: a window as DCTCP's, which begins with ``first_window``, a rate as TIMELY's, or
            the slowest link's rate alone.
        g: of the moving average of marks (``"aimd"``).
        low, high, step, trip: of ``"timely"``, see there.
        most_tries: probes in a row without an answer after which a flow gives up.
        insistent: whether what goes again is important, too, and no more of it goes than is still needed. The papers do
            not say; what may be dropped again and again makes a small ``tolerance`` slower than none.
    """

    least_timeout: Time = 100 * MICROSECOND
    tolerance: float = 0.1
    important: float = 0.0
    law: Law = "aimd"
    g: float = 1 / 16
    low: Time = 50 * MICROSECOND
    high: Time = 500 * MICROSECOND
    step: float = 1.25e8
    trip: Time = 20 * MICROSECOND
    most_tries: int = 16
    insistent: bool = True

    def _check(self) -> None:
        Transport._check(self)
        _positive(self, "g", "low", "step", "trip", "most_tries")
        if not 0 <= self.tolerance < 1:
            raise ConfigError("tolerance", self.tolerance, "is no share", "give 0 or more, and less than 1")
        if not 0 <= self.important <= 1:
            raise ConfigError("important", self.important, "is no share", "give 0 to 1")
        if self.law not in ("aimd", "timely", "fixed"):
            raise ConfigError("law", self.law, "is unknown", "give aimd, timely or fixed")

    @property
    def flavour(self) -> int:
        """Which protocol its flows follow, for the kernels."""
        return c.BOUNDED

    @property
    def tolerated(self) -> float:
        """The share of a step's bytes that may be lost."""
        return self.tolerance

    def row(self) -> NDArray[np.float64]:
        """Its parameters, for the kernels."""
        found = Transport.row(self)
        found[c.LAW] = {"aimd": AIMD, "timely": TIMELY, "fixed": FIXED}[self.law]
        if self.law == "timely":
            _timely_row(found, self.step, self.low, self.high, self.trip)
        else:
            found[c.LAWS] = self.g
        found[c.IMPORTANT], found[c.MOST_TRIES] = self.important * 2**32, self.most_tries
        found[c.LAWS + 11], found[c.TOLERATED] = self.header, self.tolerance
        found[c.INSISTENT] = self.insistent
        return found
