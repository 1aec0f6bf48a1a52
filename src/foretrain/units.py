"""Time, size and rate: one unit each inside, text with units only at the border.

Time is an ``int`` of picoseconds, a size an ``int`` of bytes, a rate a ``float`` of bytes per second.
Integers make simultaneous events *exactly* simultaneous, and 2**63 ps would last 106 days.

What comes from outside is text (``"2us"``, ``"25MB"``, ``"100Gbps"``) and a bare number is an error. Case carries
meaning where the field's habit says so: ``b`` is bits and ``B`` bytes; ``MB`` is 10**6 and ``MiB`` 2**20.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from foretrain.errors import ConfigError

Time: TypeAlias = int
"""Picoseconds."""

PICOSECOND: Time = 1
NANOSECOND: Time = 10**3
MICROSECOND: Time = 10**6
MILLISECOND: Time = 10**9
SECOND: Time = 10**12

# Bounded, so that no text makes a number that takes long to compute with.
_DIGITS = "[0-9]{1,40}"
_NUMBER = re.compile(rf"\s*({_DIGITS}(?:\.[0-9]{{0,40}})?(?:[eE][+-]?[0-9]{{1,2}})?|\.{_DIGITS})\s*([A-Za-zµμ/]+)\s*")
_TIMES = {
    "ps": PICOSECOND,
    "ns": NANOSECOND,
    "us": MICROSECOND,
    "µs": MICROSECOND,
    "μs": MICROSECOND,
    "ms": MILLISECOND,
    "s": SECOND,
    "min": 60 * SECOND,
}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATES = {
    prefix + unit: Fraction(factor, bits)
    for prefix, factor in (_DECIMAL | _BINARY).items()
    for unit, bits in (("bps", 8), ("bit/s", 8), ("b/s", 8), ("B/s", 1), ("Bps", 1))
}

_FASTEST = 10**18
"""A faster link is a mistake of the unit."""


def _parse(text: object, field: str, kind: str, units: dict[str, int] | dict[str, Fraction], example: str) -> Fraction:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ConfigError(field, text, f"is not a {kind}", f"write e.g. '{example}'")
    return Fraction(match[1]) * units[match[2]]


def parse_time(text: object, field: str = "time") -> Time:
    """Picoseconds of a text such as ``"2us"`` or ``"1.5 ms"``, rounded up."""
    return math.ceil(_parse(text, field, "time", _TIMES, "2us"))


def parse_size(text: object, field: str = "size") -> int:
    """Bytes of a text such as ``"25MB"`` or ``"1MiB"``, rounded up."""
    return math.ceil(_parse(text, field, "size", _SIZES, "25MB"))


def parse_rate(text: object, field: str = "rate") -> float:
    """Bytes per second of a text such as ``"100Gbps"`` or ``"1.2GB/s"``; zero is refused."""
    rate = _parse(text, field, "rate", _RATES, "100Gbps")
    if not 0 < rate <= _FASTEST:
        raise ConfigError(field, text, "is not a rate above 0 and up to 10^18 B/s", "write e.g. '100Gbps'")
    return float(rate)


def parse_share(text: str, field: str = "share") -> float:
    """0.035 of ``"3.5%"`` and of ``"0.035"``; what is larger than 1 is not refused."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        raise ConfigError(field, text, "is not a share", "write e.g. '3.5%'")
    return float(match[1]) / (100 if match[2] else 1)


def to_seconds(time: Time) -> float:
    """Seconds of a number of picoseconds: for people and for plots, never for arithmetic on events."""
    return time / SECOND


def exact_time(time: Time) -> str:
    """Text that `parse_time` turns back into exactly ``time``: ``12345678`` is ``"12.345678us"``."""
    for unit in ("s", "ms", "us", "ns"):
        scale = _TIMES[unit]
        if time >= scale:
            whole, rest = divmod(time, scale)
            decimals = str(rest).rjust(len(str(scale)) - 1, "0").rstrip("0")
            return f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"
    return f"{time}ps"


def exact_size(size: int) -> str:
    """Text that `parse_size` turns back into exactly ``size``."""
    for unit in ("GB", "GiB", "MB", "MiB", "kB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return f"{size}B"


def exact_rate(rate: float) -> str:
    """Text that `parse_rate` turns back into exactly ``rate``: ``1.25e10`` is ``"100Gbps"``."""
    bits = Fraction(rate) * 8
    for prefix in ("T", "G", "M", "k"):
        if bits and not bits % _DECIMAL[prefix]:
            return f"{bits // _DECIMAL[prefix]}{prefix}bps"
    return f"{float(rate)!r}B/s"


_LEAST = (99.95, 9.995, 0.9995, 0.09995, 0.009995)
"""The least numbers that three digits write with 0, 1, 2, 3 and 4 decimals."""


def _significant(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Write ``value`` with three significant digits in the largest unit of ``steps`` that leaves it at 1 or above."""
    scale, unit = next((step for step in steps if abs(value) >= step[0] * 0.9995), steps[-1])
    scaled = value / scale
    digits = next((count for count, least in enumerate(_LEAST) if abs(scaled) >= least), 2)
    return f"{scaled:.{digits}f} {unit}"


@lru_cache(maxsize=4096)  # pictures of a timeline write the same times of layers again and again
def format_time(time: float) -> str:
    """Three significant digits for a person: ``"850 ms"``; ``"0 s"`` for no time."""
    if not time:
        return "0 s"
    return _significant(time, ((SECOND, "s"), (MILLISECOND, "ms"), (MICROSECOND, "us"), (NANOSECOND, "ns"), (1, "ps")))


@lru_cache(maxsize=4096)
def format_size(size: float) -> str:
    """Three significant digits for a person: ``"25.0 MB"``."""
    return _significant(size, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def format_rate(rate: float) -> str:
    """Three significant digits, in bits per second as links are sold: ``"100 Gbps"``."""
    return _significant(rate * 8, ((1e12, "Tbps"), (1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps"), (1, "bps")))


# Note [Exact costs]
# A cost per byte is an int of picoseconds × 2**32. A float would do for any one chunk, but then ten thousand chunks
# could sum to a picosecond less than the bound computed from their total, and "no policy beats T*" would hold only
# approximately. With integers it holds exactly: sum(ceil(s·κ)) >= floor(sum(s)·κ).
COST_SHIFT = 32


def per_byte(rate: float, factor: Fraction | float = 1) -> int:
    """The cost of a byte that crosses a link of ``rate`` ``factor`` times; see Note [Exact costs]."""
    return math.ceil(Fraction(factor) * (SECOND << COST_SHIFT) / Fraction(rate))


def moving(size: int, cost: int) -> Time:
    """Return the picoseconds that ``size`` bytes take at ``cost``, rounded up; see Note [Exact costs]."""
    return -(-size * cost >> COST_SHIFT)
