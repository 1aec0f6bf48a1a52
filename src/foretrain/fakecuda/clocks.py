"""The script's clocks show virtual time, so that what it prints of its own speed is the forecast.

``time.time`` begins at the real time of the start; the others begin at 0. CPU-time clocks show the same, as a host that
waits for nothing computes. ``time.sleep`` passes virtual time at once, and reading a clock a little, so that a loop
that waits for a time gets there. Modules that wait for other processes keep the real clocks: what they wait for takes
real time.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib
import time
from collections.abc import Callable
from types import ModuleType

from foretrain.units import NANOSECOND, SECOND, Time

READ: Time = 100 * NANOSECOND
"""What reading a clock costs from Python; 50 to 100 ns are usual."""
_WAITING = (
    "asyncio.base_events",
    "multiprocessing.connection",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
)
"""Modules that compare the clocks of module ``time`` with how long they really wait."""


def install(host: Callable[[], Time], spend: Callable[[Time], None]) -> None:
    """Replaces the clocks of module ``time``.

    Args:
        host: the rank's clock, ps.
        spend: lets it pass.
    """
    _keep_real()
    begin = time.time_ns()

    def read() -> Time:
        spend(READ)
        return host()

    def seconds() -> float:
        return read() / SECOND

    def nanoseconds() -> int:
        return read() // NANOSECOND

    def sleep(secs: float, /) -> None:
        if secs < 0:
            raise ValueError("sleep length must be non-negative")
        spend(round(secs * SECOND))

    def now_ns() -> int:
        return begin + nanoseconds()

    time.time = lambda: now_ns() / 1e9
    time.time_ns = now_ns
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        setattr(time, name, seconds)
        setattr(time, f"{name}_ns", nanoseconds)
    time.sleep = sleep
    _install_datetime(now_ns)


def _keep_real() -> None:
    real = ModuleType("time")
    real.__dict__.update(time.__dict__)
    for name in _WAITING:
        importlib.import_module(name).__dict__["time"] = real


def _install_datetime(now_ns: Callable[[], int]) -> None:
    """``datetime.now`` reads the clock in C.

    The class cannot be replaced by another: extensions, e.g. pandas', derive types from it by its layout. And as it is
    a static type that refuses new attributes, they are put into its dictionary.
    """
    kind = datetime.datetime

    def now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(now_ns() / 1e9, tz)

    def utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(now_ns() / 1e9, datetime.UTC).replace(tzinfo=None)

    (attributes,) = (one for one in gc.get_referents(kind.__dict__) if isinstance(one, dict))
    attributes.update(now=classmethod(now), utcnow=classmethod(utcnow))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
