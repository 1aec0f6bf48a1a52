"""How kernels are compiled.

No fastmath: ties of equal flows must stay ties. No reference counts: a kernel keeps nothing, allocates nothing, and
counting every array that it takes out of the state was three quarters of its time. Only what Python calls gets a
wrapper: each of those unpacks the whole state, and they would take longer to compile than the kernels.
"""

from __future__ import annotations

from typing import Any

from numba import njit

_OPTIONS: dict[str, Any] = {"cache": True, "fastmath": False, "error_model": "numpy", "nogil": True, "_nrt": False}
_BARE: dict[str, Any] = _OPTIONS | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

entry: Any = njit(**_OPTIONS)
"""A kernel that Python calls."""
inside: Any = njit(**_BARE)
"""A kernel that only kernels call."""
inlined: Any = njit(**_BARE, inline="always")
"""A kernel that becomes part of its callers: a call would cost more than it does, since it passes the whole state."""
