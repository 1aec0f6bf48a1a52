"""Run plans: ring.cpp, or the same loop in NumPy; and the compiled library of all collectives.

The library has the bounded transport's engine and the parameter server's wire, too. A wheel carries it. Elsewhere it is
compiled on first use and kept in the user's cache, named after the sources, the compiler and its options, so that
another of these compiles anew. Without a compiler NumPy gives the same bits as ring.cpp, slower.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import select
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.collectives.plan import KINDS, Leg
from foretrain.parent_death import run_to_end

Bytes: TypeAlias = NDArray[np.uint8]

_log = logging.getLogger(__name__)

SEGMENT = 128 << 10
"""Bytes that are received before they are added, and sent at once: together they stay in a core's cache."""
_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "ring.cpp", _PACKAGE.parent / "bounded" / "engine.cpp", _PACKAGE.parent / "ps" / "wire.cpp"
_HEADERS = (
    _PACKAGE / "sums.h",
    _PACKAGE.parent / "bounded" / "wire.h",
    *(_PACKAGE.parent / "ps" / name for name in ("inflight.h", "gmac.h", "shard.h")),
)
_PREBUILT = _PACKAGE / "libring.so"
# Not -march=native: a home may be shared by machines. Wide instructions are chosen when it runs. No contraction, or the
# compiler's choice of a fused multiplication would show in the bits.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
_HEADER = 7
"""Numbers of an encoded leg before its extents."""
_COMPILATION = 300.0
"""Seconds that a compilation may take."""
_SIOCATMARK = 0x8905
_MOVING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Runner(Protocol):
    """Runner of encoded plans, one at a time, over descriptors whose sockets stay the caller's.

    It may send the beginning of a plan before that runs; see Note [Ahead] in ring.cpp. Only one plan at a time is
    offered, and its memory stays until it has run.
    """

    def run(self, values: Bytes, kind: str, plan: NDArray[np.int64], ahead: int) -> tuple[int, int] | None:
        """Run ``plan`` to its end, of which ``ahead`` bytes were sent before.

        Returns:
            None; or the descriptor of a peer that was lost, and errno, 0 where it hung up.
        """
        ...

    def start(self, values: Bytes, plan: NDArray[np.int64]) -> int:
        """Send the beginning of ``plan``, without waiting and while nothing runs; return how many bytes."""
        ...

    def offer(self, values: Bytes, plan: NDArray[np.int64]) -> None:
        """Let the beginning of ``plan`` be sent while the plan before it runs in another thread."""
        ...

    def claim(self) -> int:
        """Return how many bytes were sent of what was offered, if anything; offer nothing. Nothing runs meanwhile."""
        ...


def encode(legs: tuple[Leg, ...], descriptors: Mapping[int, int]) -> NDArray[np.int64]:
    """Return ``legs`` as ring.cpp reads them: the number of legs, then the numbers of each."""
    numbers = [len(legs)]
    for leg in legs:
        numbers += [descriptors[leg.to], descriptors[leg.from_], leg.head, leg.lag, leg.adding]
        numbers += [len(leg.sends), len(leg.receives)]
        numbers += [number for extent in leg.sends + leg.receives for number in extent]
    return np.array(numbers, np.int64)


def runner(native: bool | None = None) -> Runner:
    """Return what runs plans; it has memory of its own.

    Args:
        native: whether it is compiled; None where that is possible.

    Raises:
        OSError, subprocess.SubprocessError: it must be compiled, and cannot be.
    """
    compiled = library_if_possible() if native is None else library() if native else None
    return PythonRunner(SEGMENT) if compiled is None else NativeRunner(compiled)


class NativeRunner:
    """A `Runner` that is ring.cpp, which runs without the interpreter lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._scratch, self._failed = np.empty(SEGMENT, np.uint8), np.zeros(2, np.int64)
        self._next = np.zeros(3, np.int64)
        self._next_at = self._next.ctypes.data
        self._fixed = self._next_at, self._failed.ctypes.data
        self._scratch_at = self._scratch.ctypes.data
        self._codes = {kind: code for code, kind in enumerate(KINDS)}

    def run(self, values: Bytes, kind: str, plan: NDArray[np.int64], ahead: int) -> tuple[int, int] | None:
        """Run ``plan`` to its end."""
        where = values.ctypes.data, self._scratch_at, SEGMENT, self._codes[kind], plan.ctypes.data + plan.itemsize
        if self._library.foretrain_run_plan(*where, int(plan[0]), ahead, *self._fixed):
            return int(self._failed[0]), int(self._failed[1])
        return None

    def start(self, values: Bytes, plan: NDArray[np.int64]) -> int:
        """Send the beginning."""
        self.offer(values, plan)
        self._library.foretrain_send_ahead(self._next_at, SEGMENT)
        return self.claim()

    def offer(self, values: Bytes, plan: NDArray[np.int64]) -> None:
        """Let the beginning be sent while `run` only waits."""
        self._library.foretrain_offer(self._next_at, plan.ctypes.data + plan.itemsize, values.ctypes.data)

    def claim(self) -> int:
        """Return how much of what was offered is sent, and offer nothing."""
        sent = int(self._next[2])
        self._next[:] = 0
        return sent


@functools.cache
def library_if_possible() -> ctypes.CDLL | None:
    """Return the library; None, with a warning, where it does not compile or load."""
    try:
        return library()
    except (OSError, subprocess.SubprocessError) as error:
        problem = getattr(error, "stderr", None) or error
        _log.warning(
            "foretrain: collectives run in Python, which is slower, because their C++ does not compile or load here"
            " (%s); install a compiler, e.g. with `apt install g++`, or name yours in CXX",
            str(problem).strip()[:500],
        )
        return None


def build(path: str) -> None:
    """Compile the library to ``path``, for a wheel.

    Raises:
        OSError, subprocess.SubprocessError: that fails.
    """
    _compile(_compiler(), Path(path))


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or [
        next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")
    ]


def _compile(compiler: list[str], library: Path) -> None:
    """Compile all sources side by side."""
    with tempfile.TemporaryDirectory(prefix="foretrain-") as scratch:
        objects = [os.path.join(scratch, f"{source.stem}.o") for source in _SOURCES]
        units = zip(_SOURCES, objects, strict=True)
        commands = ([*compiler, *_FLAGS, "-c", str(source), "-o", made] for source, made in units)
        run_to_end(*commands, timeout=_COMPILATION)
        run_to_end([*compiler, "-shared", "-pthread", *objects, "-o", str(library)], timeout=_COMPILATION)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library.

    Raises:
        OSError, subprocess.SubprocessError: it must be compiled, and cannot be.
    """
    with suppress(OSError):  # there is none, or it is for another machine
        return _loaded(_PREBUILT)
    compiler = _compiler()
    kept = _folder() / f"collectives-{_fingerprint(compiler)}.so"
    if kept.exists():
        return _loaded(kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock = open(kept.with_suffix(".lock"), "w", encoding="ascii")  # noqa: SIM115
    except OSError:  # no home that can be written: compiled for this process alone
        with tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
            return _compiled(compiler, Path(folder, kept.name))
    with lock:  # ranks that start together wait for the one that compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _loaded(kept) if kept.exists() else _compiled(compiler, kept)


def _compiled(compiler: list[str], kept: Path) -> ctypes.CDLL:
    unfinished = kept.with_suffix(".unfinished")
    try:
        _compile(compiler, unfinished)
        unfinished.replace(kept)
    finally:
        unfinished.unlink(missing_ok=True)
    return _loaded(kept)


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    where, number = ctypes.c_void_p, ctypes.c_int64
    library.foretrain_run_plan.argtypes = [where, where, number, number, where, number, number, where, where]
    library.foretrain_offer.argtypes = [where, where, where]
    library.foretrain_send_ahead.argtypes = [where, number]
    library.foretrain_bounded_new.argtypes, library.foretrain_bounded_new.restype = [where] * 6, where
    library.foretrain_bounded_peer.argtypes = [where, number, where, number, number, where, where, where]
    library.foretrain_bounded_submit.argtypes = [where, where, number, where, where, *[where, number] * 2]
    library.foretrain_bounded_next_held.argtypes, library.foretrain_bounded_next_held.restype = [where], number
    library.foretrain_bounded_resume.argtypes = [where, number]
    library.foretrain_bounded_next.argtypes, library.foretrain_bounded_next.restype = [where] * 3, number
    library.foretrain_bounded_say_goodbye.argtypes = [where, number]
    library.foretrain_bounded_inject.argtypes = [where, where, where, number]
    library.foretrain_bounded_seal.argtypes = [where, number, where, number]
    for name in ("start", "close", "delete"):
        getattr(library, f"foretrain_bounded_{name}").argtypes = [where]
    return library


def _fingerprint(compiler: list[str]) -> str:
    """Return a hash of the source and of what compiles it, wherever it is installed."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES + _HEADERS))
    digest.update(" ".join([*compiler, *_FLAGS, platform.machine(), *platform.libc_ver()]).encode())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root, "foretrain", "collectives")


class _Lost(Exception):
    """A peer hung up; ``args`` are its descriptor and errno."""


class PythonRunner:
    """A `Runner` that moves at most ``segment`` bytes at once, and none ahead."""

    def __init__(self, segment: int) -> None:
        self._scratch = np.empty(segment, np.uint8)

    def run(self, values: Bytes, kind: str, plan: NDArray[np.int64], ahead: int) -> tuple[int, int] | None:
        """Run ``plan`` to its end."""
        del ahead
        legs, *numbers = plan.tolist()
        try:
            for _ in range(legs):
                end = _HEADER + 2 * (numbers[5] + numbers[6])
                leg, numbers = numbers[:end], numbers[end:]
                with _sockets(leg[0], leg[1]) as (to, from_):
                    _Run(values, self._scratch, kind, to, from_, leg).all()
        except _Lost as lost:
            return lost.args
        return None

    def start(self, values: Bytes, plan: NDArray[np.int64]) -> int:
        """Send nothing."""
        return 0

    def offer(self, values: Bytes, plan: NDArray[np.int64]) -> None:
        """Leave it for later."""

    def claim(self) -> int:
        """Return 0."""
        return 0


@contextmanager
def _sockets(*descriptors: int) -> Iterator[list[socket.socket]]:
    """Yield sockets for descriptors that stay open."""
    made = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    try:
        yield made
    finally:
        for each in made:
            each.detach()


class _Cursor:
    """Place in a stream of extents."""

    def __init__(self, numbers: list[int]) -> None:
        self.extents = list(zip(numbers[::2], numbers[1::2], strict=True))
        self.total = sum(numbers[1::2])
        self.passed = self._within = self._extent = 0

    @property
    def place(self) -> int:
        return self.extents[self._extent][0] + self._within

    @property
    def rest(self) -> int:
        return self.extents[self._extent][1] - self._within if self.passed < self.total else 0

    def pass_(self, size: int) -> None:
        self.passed += size
        self._within += size
        if self._within == self.extents[self._extent][1]:
            self._extent, self._within = self._extent + 1, 0


class _Run:
    """One leg under way; the names are those of ring.cpp."""

    def __init__(
        self, values: Bytes, scratch: Bytes, kind: str, to: socket.socket, from_: socket.socket, leg: list[int]
    ) -> None:
        self._values, self._scratch, self._kind = values, scratch, kind
        self._view, self._scratch_view = values.data, scratch.data
        self._to, self._from = to, from_
        self._head, self._lag, self._adding = leg[2:5]
        received = _HEADER + 2 * leg[5]
        self._out, self._in = _Cursor(leg[_HEADER:received]), _Cursor(leg[received:])
        self._held = 0

    def all(self) -> None:
        while self._out.passed < self._out.total or self._in.passed < self._in.total:
            moved = self._add() + self._send()
            if self._look(moved > 0):
                self._receive()

    def _ready(self) -> int:
        return min(self._out.total, self._head + self._in.passed) - self._out.passed

    def _room(self) -> int:
        rest = self._in.rest - self._held
        return min(rest, len(self._scratch) - self._held) if self._in.passed < self._adding else rest

    def _send(self) -> int:
        size = min(self._out.rest, self._ready(), len(self._scratch))
        if size <= 0:
            return 0
        at = self._out.place
        sent = _tried(self._to, lambda: self._to.send(self._view[at : at + size], _MOVING)) or 0
        self._out.pass_(sent)
        return sent

    def _look(self, moved: bool) -> bool:
        """Wait for a peer, unless something moved; return whether there is something to receive."""
        sends, receives, owes = self._ready() > 0, self._room() > 0, self._out.passed < self._out.total
        to, from_ = self._to.fileno(), self._from.fileno()
        events = {from_: select.POLLIN | select.POLLPRI} if receives else {}
        if owes:
            events[to] = events.get(to, 0) | (select.POLLOUT if sends else select.POLLRDHUP)
        poll = select.poll()
        for descriptor, mask in events.items():
            poll.register(descriptor, mask)
        found = dict(poll.poll(0 if moved else None))
        # Who hangs up before it has all from us has failed.
        if owes and not sends and found.get(to, 0) & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
            raise _Lost(to, 0)
        seen = found.get(from_, 0) if receives else 0
        # Bytes are received only where they are seen first: recv would pass over the mark of urgent data.
        if seen & select.POLLPRI and fcntl.ioctl(from_, _SIOCATMARK, b"\0\0\0\0") != b"\0\0\0\0":
            raise _Lost(from_, 0)
        return bool(seen & ~select.POLLOUT)

    def _receive(self) -> None:
        adds = self._in.passed < self._adding
        at, view = (self._held, self._scratch_view) if adds else (self._in.place, self._view)
        size = self._room()
        got = _tried(self._from, lambda: self._from.recv_into(view[at : at + size], 0, socket.MSG_DONTWAIT))
        if got == 0:
            raise _Lost(self._from.fileno(), 0)
        if adds:
            self._held += got or 0
        elif got:
            self._in.pass_(got)

    def _add(self) -> int:
        size = min(self._held, self._out.passed - self._in.passed) if self._lag else self._held
        size -= size % KINDS[self._kind]
        if size <= 0:
            return 0
        at = self._in.place
        _add(self._kind, self._values[at : at + size], self._scratch[:size])
        self._scratch[: self._held - size] = self._scratch[size : self._held].copy()
        self._held -= size
        self._in.pass_(size)
        return size


def _tried(peer: socket.socket, call: Callable[[], int]) -> int | None:
    """Return what ``call`` moved, None where it would have to wait."""
    try:
        return call()
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as error:
        raise _Lost(peer.fileno(), error.errno or errno.EIO) from None


def _add(kind: str, into: Bytes, more: Bytes) -> None:
    """Add elements; 16-bit floats in single precision, rounded to nearest, ties to even."""
    with np.errstate(all="ignore"):
        if kind == "bfloat16":
            into.view(np.uint16)[:] = _to_bfloat16(_from_bfloat16(into) + _from_bfloat16(more))
        elif kind == "float16":
            half = into.view(np.float16)
            half[:] = half.astype(np.float32) + more.view(np.float16).astype(np.float32)
        else:
            sums = into.view(kind)
            np.add(sums, more.view(kind), out=sums)


def _from_bfloat16(values: Bytes) -> NDArray[np.float32]:
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded)
