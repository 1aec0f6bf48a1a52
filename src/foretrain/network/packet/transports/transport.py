"""Settings of all transports. Rates are bytes/s here, bytes/ps in the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.units import MICROSECOND, MILLISECOND, SECOND, Time


@dataclass(frozen=True, slots=True)
class Transport:
    """Settings that all transports share; use a class derived from it.

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
        """Raise ConfigError where a value is impossible; a class with more attributes checks these, too."""
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

    protocol: ClassVar[int] = c.WINDOWED

    @property
    def tolerated(self) -> float:
        """Return the share of a step's bytes that may be lost."""
        return 0.0

    @property
    def tolerates(self) -> bool:
        """Return whether its receivers count bytes of steps."""
        return self.protocol == c.BOUNDED

    @property
    def remembers(self) -> bool:
        """Return whether its senders keep a bit for each packet."""
        return self.protocol in (c.NEAREST_FIRST, c.PULLED, c.BOUNDED)

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
        found = np.zeros(c.PARAMETER_COLUMNS)
        found[c.FIRST_WINDOW], found[c.MOST] = self.first_window, self.most
        found[c.LEAST_TIMEOUT], found[c.MOST_TIMEOUT] = self.least_timeout, self.most_timeout
        found[c.REPLY_SIZE], found[c.ADAPTIVE] = self.reply, self.adaptive
        return found


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
        """Return the gain of α's average; 0 for a transport that ignores marks."""
        return 0.0

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
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
        """Return the gain of α's average."""
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
        """Return its parameters as a row of the kernels' memory."""
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

    protocol: ClassVar[int] = c.NEAREST_FIRST


DEFAULT: Final = Dctcp()


@dataclass(frozen=True, slots=True)
class Ndp(Transport):
    """NDP (SIGCOMM 2017); switches need ``Queues(limit=(…, 8 packets, …), cut_to=84)``, flows many paths (``others``).

    ``first_window`` should be a bandwidth-delay product. Data is of class 1 at least.
    """

    first_window: int = 12
    least_timeout: Time = MILLISECOND

    protocol: ClassVar[int] = c.PULLED

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
        found = Transport.row(self)
        found[c.LEAST_CLASS] = 1
        found[c.MARKABLE] = 1  # a queue that drops selectively is not meant for it
        return found


FIXED, DCQCN, TIMELY, AIMD = range(4)
"""Kinds of rate control; the kernels' numbers."""
SLOWEST: Final = 1e-3
"""No rate falls below this share of the slowest link's (ours; papers have 10 to 40 Mb/s)."""


def _positive(of: object, *names: str) -> None:
    for name in names:
        if getattr(of, name) <= 0:
            raise ConfigError(name, getattr(of, name), "is not positive", "give more than 0")


def _timely_row(found: NDArray[np.float64], step: float, low: Time, high: Time, trip: Time) -> None:
    """Fill in the paper's values, of which the weight is from Zhu et al., CoNEXT 2016, table 2."""
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

    protocol: ClassVar[int] = c.IN_ORDER

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
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

    protocol: ClassVar[int] = c.IN_ORDER

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
        found = Transport.row(self)
        found[c.LAW], found[c.MARKABLE] = TIMELY, 1
        _timely_row(found, self.step, self.low, self.high, self.trip)
        return found


Law: TypeAlias = Literal["aimd", "timely", "fixed"]
"""``"aimd"`` is DLCP's, ``"timely"`` MLT's; ``"fixed"`` sends at the slowest link's rate."""


@dataclass(frozen=True, slots=True)
class Bounded(Transport):
    """Bounded loss (DLCP, arXiv 2008.08445; MLT, NSDI 2024): a step is complete with 1 − ``tolerance`` of it.

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
        prompt: whether what is missing is asked for when the last packet has been acknowledged, and receivers that have
            enough wait until then, as foretrain's engine does.
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
    prompt: bool = False

    def _check(self) -> None:
        Transport._check(self)
        _positive(self, "g", "low", "step", "trip", "most_tries")
        if not 0 <= self.tolerance < 1:
            raise ConfigError("tolerance", self.tolerance, "is not a share", "give 0 or more, and less than 1")
        if not 0 <= self.important <= 1:
            raise ConfigError("important", self.important, "is not a share", "give 0 to 1")
        if self.law not in ("aimd", "timely", "fixed"):
            raise ConfigError("law", self.law, "is unknown", "give aimd, timely or fixed")

    protocol: ClassVar[int] = c.BOUNDED

    @property
    def tolerated(self) -> float:
        """Return the share of a step's bytes that may be lost."""
        return self.tolerance

    def row(self) -> NDArray[np.float64]:
        """Return its parameters as a row of the kernels' memory."""
        found = Transport.row(self)
        found[c.LAW] = {"aimd": AIMD, "timely": TIMELY, "fixed": FIXED}[self.law]
        if self.law == "timely":
            _timely_row(found, self.step, self.low, self.high, self.trip)
        else:
            found[c.LAWS] = self.g
        found[c.IMPORTANT], found[c.MOST_TRIES] = self.important * 2**32, self.most_tries
        found[c.LAWS + 11], found[c.TOLERATED] = self.header, self.tolerance
        found[c.INSISTENT], found[c.LAWS + 12] = self.insistent, self.prompt
        return found
