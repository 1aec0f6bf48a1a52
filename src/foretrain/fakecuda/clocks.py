"""The script's clocks show virtual time, so that what it prints of its own speed is the forecast.

``time.time`` begins at the real time of the start; the others begin at 0. CPU-time clocks show the same, as a host that
waits for nothing computes. ``time.sleep`` passes virtual time at once.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

_PER_NANOSECOND = 1000
_PER_SECOND = 10**12


def install(host: Callable[[], int], spend: Callable[[int], None]) -> None:
    """Replaces the clocks of module ``time``.

    Args:
        host: the rank's clock, ps.
        spend: lets it pass.
    """
    begin = time.time_ns()

    def seconds() -> float:
        return host() / _PER_SECOND

    def nanoseconds() -> int:
        return host() // _PER_NANOSECOND

    def sleep(secs: float, /) -> None:
        if secs < 0:
            raise ValueError("sleep length must be non-negative")
        spend(round(secs * _PER_SECOND))

    def now_ns() -> int:
        return begin + nanoseconds()

    time.time = lambda: now_ns() / 1e9
    time.time_ns = now_ns
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        setattr(time, name, seconds)
        setattr(time, f"{name}_ns", nanoseconds)
    time.sleep = sleep
    _install_datetime(now_ns)


def _install_datetime(now_ns: Callable[[], int]) -> None:
    """``datetime.now`` reads the clock in C, so the class itself must be another."""
    plain = datetime.datetime

    class Datetime(plain):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Datetime:
            return cls.fromtimestamp(now_ns() / 1e9, tz)

        @classmethod
        def utcnow(cls) -> Datetime:
            return cls.fromtimestamp(now_ns() / 1e9, datetime.UTC).replace(tzinfo=None)

    Datetime.__name__ = Datetime.__qualname__ = "datetime"
    Datetime.__module__ = "datetime"
    datetime.datetime = Datetime
