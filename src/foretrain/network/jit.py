"""Compilation of the kernels of the fluid and of the packet simulator by numba.

No fastmath: ties of equal flows must stay ties. No reference counts: a kernel keeps nothing, allocates nothing, and
counting every array that it takes out of the state was three quarters of its time. Only what Python calls gets a
wrapper: each of those unpacks the whole state, and they would take longer to compile than the kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

_COMMON: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True, "_nrt": False}
_BARE: dict[str, Any] = _COMMON | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry: Any = njit(**_COMMON, cache=True)
"""Compile a kernel that Python calls; numba's cache on disk looks at the date of this kernel's file only."""
inside: Any = njit(**_BARE)
"""Compile a kernel that only kernels call."""
inlined: Any = njit(**_BARE, inline="always")
"""Compile a kernel into its callers: a call would cost more than it does, since it passes the whole state."""


def packet_entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel of the packet simulator that Python calls; any changed file of that package recompiles it.

    An entry calls into other files of the package, and numba's own cache would not look at these.
    """
    return _kept(njit(**_COMMON)(function))


def packet_callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of the packet simulator that C++ calls, with numba's ``signature``."""

    def compiled(function: Callable[..., Any]) -> Any:
        options = {"nopython": True, "error_model": "numpy", "fastmath": False}
        made = _kept(CFunc(function, normalize_signature(signature), {}, options))
        made.compile()
        return made

    return compiled


def _kept(made: Any) -> Any:
    """Keep ``made`` on disk until a file of the package changes."""
    if hasattr(made, "enable_caching"):  # not where NUMBA_DISABLE_JIT makes it plain Python
        made.enable_caching()
        file = getattr(made._cache, "_cache_file", None)
        if file is not None:
            file._source_stamp = _packet_stamp()
    return made


def _packet_stamp() -> str:
    files = [Path(__file__), *sorted((Path(__file__).parent / "packet").rglob("*.py"))]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()
