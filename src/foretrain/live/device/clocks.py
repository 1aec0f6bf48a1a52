"""Clocks of the script, in virtual time, so that the speed it prints of itself is the forecast.

``time.time`` begins at the real time of the start; the others begin at 0. CPU-time clocks show the same, as a host that
waits for nothing computes. ``time.sleep`` passes virtual time at once, and reading a clock a little, so that a loop
that waits for a time gets there. Modules that wait for other processes keep the real clocks: what they wait for takes
real time.

# Note [Threads and the clock]
A rank's clock is that of the thread that runs the script, and of autograd's, which launch for it. Other threads, e.g.
one that reports every second, run beside it: they sleep for real and leave the rank's clock alone. So that a deadline
passes for them even while the script waits for them, their own clock goes on when the rank's stands still.
The script's thread may poll what another process or thread does, ``while not path.exists(): time.sleep(0.5)``. So that
those get on meanwhile, it sleeps for real as well: a millisecond, and twice as long each time it does nothing else.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib
import threading
import time
import timeit
from collections.abc import Callable
from types import ModuleType

from foretrain.units import MICROSECOND, NANOSECOND, SECOND, Time

READ: Time = 100 * NANOSECOND
"""Time to read a clock from Python; 50 to 100 ns are usual."""
_YIELD = 0.001
"""Seconds that the script's thread sleeps at least for real, if it sleeps so long."""
_MOST_YIELD = 0.1
"""Seconds that it sleeps at most for real."""
_IDLE: Time = 100 * MICROSECOND
"""Time between two sleeps below which the script does nothing but sleep."""
_WAITING = (
    "asyncio.base_events",
    "multiprocessing.connection",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
)
"""Modules that compare the clocks of module ``time`` with how long they really wait."""


def install(host: Callable[[], Time], spend: Callable[[Time], None]) -> None:
    """Replace the clocks of module ``time``.

    Args:
        host: the rank's clock, ps.
        spend: lets it pass.
    """
    _keep_real()
    begin = time.time_ns()
    clock = _Clock(host, spend, time.sleep)

    def seconds() -> float:
        return clock.read() / SECOND

    def nanoseconds() -> int:
        return clock.read() // NANOSECOND

    def sleep(secs: float, /) -> None:
        if secs < 0:
            raise ValueError("sleep length must be non-negative")
        clock.sleep(secs)

    def now_ns() -> int:
        return begin + nanoseconds()

    time.time = lambda: now_ns() / 1e9
    time.time_ns = now_ns
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        setattr(time, name, seconds)
        setattr(time, f"{name}_ns", nanoseconds)
    time.sleep = sleep
    importlib.reload(timeit)  # it has taken its clock when it was imported
    _install_datetime(now_ns)


class _Clock:
    """Rank's clock as the calling thread sees it; see Note [Threads and the clock].

    Args:
        host: the rank's clock, ps.
        spend: lets it pass.
        sleep: the real ``time.sleep``.
    """

    def __init__(self, host: Callable[[], Time], spend: Callable[[Time], None], sleep: Callable[[float], None]) -> None:
        self._host, self._spend, self._real_sleep = host, spend, sleep
        self._woke: Time = -_IDLE
        self._yield = _YIELD
        self._own = threading.local()

    def read(self) -> Time:
        """Return the time, after what it takes to read it."""
        if not _is_script_thread():
            return self._pass(READ)
        self._spend(READ)
        return self._host()

    def sleep(self, seconds: float) -> None:
        """Pass virtual time in the script's thread, real time in others."""
        duration, began = round(seconds * SECOND), self._host()
        if _is_script_thread():
            self._yield = min(2 * self._yield, _MOST_YIELD) if began - self._woke < _IDLE else _YIELD
            self._real_sleep(min(seconds, self._yield))
            self._spend(duration)
            self._woke = self._host()
        else:
            self._real_sleep(seconds)
            self._pass(duration if self._host() == began else 0)

    def _pass(self, duration: Time) -> Time:
        """Advance the own clock of a thread that is not the script's."""
        own = self._own
        own.now = max(getattr(own, "now", 0), self._host()) + duration
        return own.now


def _is_script_thread() -> bool:
    """Return whether this thread is the script's or autograd's; the latter is none of Python's."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


def _keep_real() -> None:
    real = ModuleType("time")
    real.__dict__.update(time.__dict__)
    for name in _WAITING:
        importlib.import_module(name).__dict__["time"] = real


def _install_datetime(now_ns: Callable[[], int]) -> None:
    """Replace ``datetime.now``, which reads the clock in C.

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
