"""How these kernels are compiled: as those of `foretrain.network.fluid.jit`, over several files.

numba's cache on disk looks at the date of the file that an entry is in. Here an entry calls into other files of this
package, so all of them count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from foretrain.network.fluid.jit import inside

__all__ = ["entry", "inside"]


def entry(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls. It is compiled anew when any file of the kernels has changed."""
    options: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True, "_nrt": False}
    made: Any = njit(**options)(function)
    if hasattr(made, "enable_caching"):  # not where NUMBA_DISABLE_JIT makes it plain Python
        made.enable_caching()
        file = getattr(made._cache, "_cache_file", None)
        if file is not None:
            file._source_stamp = _stamp()
    return made


def _stamp() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()
