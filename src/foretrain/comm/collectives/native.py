"""Compile ring.cpp on first use, keep it in the user's cache, and load it; where that is impossible, use Python.

What is kept is named after the source, the compiler and its options, so that another of these compiles anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.collectives import fallback
from foretrain.comm.collectives.fallback import Bytes, Runner
from foretrain.comm.collectives.plan import KINDS, Leg

_log = logging.getLogger(__name__)

SEGMENT = 128 << 10
"""Bytes that are received before they are added, and sent at once: together they stay in a core's cache."""
_SOURCE = Path(__file__).with_name("ring.cpp")
# Not -march=native: a home may be shared by machines. ring.cpp chooses wide instructions when it runs. No contraction,
# or the compiler's choice of a fused multiplication would show in the bits.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")


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
    library = _library_if_possible() if native is None else _library() if native else None
    return fallback.PythonRunner(SEGMENT) if library is None else NativeRunner(library)


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
def _library_if_possible() -> ctypes.CDLL | None:
    try:
        return _library()
    except (OSError, subprocess.SubprocessError) as error:
        problem = getattr(error, "stderr", None) or error
        _log.warning(
            "foretrain: collectives run in Python, which is slower, because their C++ does not compile or load here"
            " (%s); install a compiler, e.g. with `apt install g++`, or name yours in CXX",
            str(problem).strip()[:500],
        )
        return None


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CXX", "")) or [
        next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")
    ]
    command = [*compiler, *_FLAGS, str(_SOURCE)]
    kept = _folder() / f"ring-{_fingerprint(command)}.so"
    if not kept.exists():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="unfinished-", dir=kept.parent)
        except OSError:  # no home that can be written: compiled for this process alone
            folder = tempfile.mkdtemp(prefix="foretrain-")
            kept = Path(folder, kept.name)
        return _compiled(command, kept, Path(folder))
    return _loaded(kept)


def _compiled(command: list[str], kept: Path, folder: Path) -> ctypes.CDLL:
    """Compile in ``folder``, which is removed; ranks that start together each do, and the last one's file stays."""
    try:
        made = folder / "made.so"
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=300)
        made.replace(kept)
        return _loaded(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    where, number = ctypes.c_void_p, ctypes.c_int64
    library.foretrain_run_plan.argtypes = [where, where, number, number, where, number, number, where, where]
    library.foretrain_offer.argtypes = [where, where, where]
    library.foretrain_send_ahead.argtypes = [where, number]
    return library


def _fingerprint(command: list[str]) -> str:
    """Return a hash of the source and of what compiles it, wherever it is installed."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    digest.update(" ".join([*command[:-1], platform.machine(), *platform.libc_ver()]).encode())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root, "foretrain", "collectives")
