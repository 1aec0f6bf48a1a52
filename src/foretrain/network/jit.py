"""Compilation of the kernels of routing and of the network simulators by numba.

No fastmath: ties of equal flows must stay ties. No reference counts in simulators: a kernel keeps nothing, allocates
nothing, and counting every array that it takes out of the state was three quarters of its time. Only what Python calls
gets a wrapper: each of those unpacks the whole state, and they would take longer to compile than the kernels.

What is compiled is kept on disk. A wheel may carry some of it (``make wheel``), compiled for any x86-64 processor,
which is looked for first. numba computes the same with it: it neither contracts nor reorders operations on reals.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

_HERE = Path(__file__).parent
_CARRIED = _HERE / "prebuilt" / f"numba{numba.__version__}"
"""Kernels that a wheel carries, a folder for each package."""
_ALLOCATING: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
_COMMON: dict[str, Any] = _ALLOCATING | {"_nrt": False}
_BARE: dict[str, Any] = {"cache": False, "no_cpython_wrapper": True}

inside: Any = njit(**_COMMON, **_BARE)
"""Compile a kernel that only kernels call."""
inlined: Any = njit(**_COMMON, **_BARE, inline="always")
"""Compile a kernel into its callers: a call would cost more than it does, since it passes the whole state."""
allocating: Any = njit(**_ALLOCATING, **_BARE)
"""Compile a kernel that makes arrays or lists, and that only kernels call."""


def entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls when it is first called; any changed file of its package recompiles it."""
    return _kept(njit(**_COMMON)(function), function)


def allocating_entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that makes arrays or lists, and that Python calls, as `entry` does."""
    return _kept(njit(**_ALLOCATING)(function), function)


def packet_callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of the packet simulator that C++ calls, with numba's ``signature``."""

    def compiled(function: Callable[..., Any]) -> Any:
        options = {"nopython": True, "error_model": "numpy", "fastmath": False}
        made = _kept(CFunc(function, normalize_signature(signature), {}, options), function)
        made.compile()
        return made

    return compiled


class _CarriedFirst:
    """Cache of one kernel on disk that looks into ``carried``, a wheel's, before numba's ``own``."""

    def __init__(self, own: IndexDataCacheFile, carried: IndexDataCacheFile) -> None:
        self._own, self._carried = own, carried
        self.save, self.flush = own.save, own.flush

    def load(self, key: tuple[Any, ...]) -> Any:
        """Return what was compiled for ``key``, of signature, processor and bytecode; None if nothing was."""
        signature, (system, *_), code = key
        return self._carried.load((signature, (system, "generic", ""), code)) or self._own.load(key)


def _kept(made: Any, function: Callable[..., Any]) -> Any:
    """Keep ``made`` of ``function`` on disk until a file of the package changes."""
    if hasattr(made, "enable_caching"):  # not where NUMBA_DISABLE_JIT makes it plain Python
        made.enable_caching()
        folders = _folders(function)
        cache = made._cache
        # numba's own stamp is that of the one file, and a kernel calls into others.
        cache._cache_file._source_stamp = stamp = _stamp(folders)
        carried = IndexDataCacheFile(_CARRIED / folders[0].name, cache._impl.filename_base, stamp)
        cache._cache_file = _CarriedFirst(cache._cache_file, carried)
    return made


def _folders(function: Callable[..., Any]) -> tuple[Path, ...]:
    """Return the folders of the packages whose kernels ``function`` may call, its own first."""
    file = Path(function.__code__.co_filename)
    return (
        (_HERE / file.relative_to(_HERE).parts[0],) if file.is_relative_to(_HERE) else (file.parent, _HERE / "packet")
    )


@functools.cache
def _stamp(folders: tuple[Path, ...]) -> str:
    """Return a hash of all that is compiled in ``folders``, and of how."""
    files = [Path(__file__), *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()
