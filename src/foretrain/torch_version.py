"""PyTorch's releases: which were tested and how, and everything that differs between them.

`TESTED` is the table. A release that is not in it is not refused: `require_torch` warns once, as when hooks fire may
differ and a wrong recording looks like a right one; `require_simulable_torch` first looks for the private interfaces
that the simulated GPU stands on, and names those that are gone.

# Note [NCCL's backends]
Release 2.13 makes every backend in `_new_process_group_helper` itself. Since 2.14 a table of creators does, which
packages may add to, and which has a second and a third backend of NCCL: "nccl2" and "nccl-lazy", of classes of their
own. 2.15 makes "nccl" by the second, ProcessGroupNCCL2, unless ``TORCH_DIST_USE_NCCL2=0``; what the first does is
"nccl-legacy" there. The simulated device has one class for all of them, and every name leads to its first creator: how
a communicator is set up takes no simulated time.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from foretrain.errors import ForetrainError, MissingExtra

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TestedRelease:
    """A minor release of PyTorch and how it was tested; ``builds`` ran on Linux, x86-64, without a GPU."""

    release: str
    builds: tuple[str, ...]
    pythons: tuple[str, ...]
    how: str


TESTED: Final = (
    TestedRelease("2.13", ("2.13.0+cpu",), ("3.11",), "all tests, with every change"),
    TestedRelease("2.14", ("2.14.1+cu130",), ("3.11",), "smoke tests and live examples, 2026-11-26"),
    TestedRelease(
        "2.15",
        ("2.15.0+cu132",),
        ("3.11", "3.12", "3.13", "3.14"),
        "smoke tests and live examples, 2026-11-26; with 3.12 and 3.13 on 2026-11-25",
    ),
)
"""Oldest first. Releases between the first and the last behave alike in all that the tests see."""


def release_of(version: str) -> tuple[int, int]:
    """Return the minor release of a version, e.g. (2, 15) of ``"2.15.0a0+git1234"``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def was_tested(version: str) -> bool:
    """Return whether ``version`` belongs to a tested minor release."""
    return release_of(version) in [release_of(one.release) for one in TESTED]


def require_torch(purpose: str = "recording") -> None:
    """Warn once if the release of torch was not tested.

    Raises:
        MissingExtra: torch is not installed.
    """
    version = torch_version(purpose)
    # One voice is enough for a job.
    if not was_tested(version) and os.environ.get("RANK", "0") == "0":
        _warn(
            f"torch {version} is not among the releases that foretrain was tested with"
            f" ({_tested_releases()}); {purpose} goes on, but check its results, or: {_remedy()}"
        )


def require_simulable_torch(purpose: str) -> str:
    """Return torch's version; warn once if its release was not tested, or say why it cannot work.

    Raises:
        MissingExtra: torch is not installed.
        ForetrainError: an untested release lacks what ``purpose`` stands on.
    """
    version = torch_version(purpose)
    if was_tested(version):
        return version
    if lacking := _lacking(_SIMULATION_NEEDS):
        if len(lacking) > _NAMED:
            lacking = [*lacking[:_NAMED], f"and {len(lacking) - _NAMED} more"]
        raise ForetrainError(
            f"{purpose} was tested with torch {_tested_releases()}; torch {version} is installed, and lacks"
            f" {', '.join(lacking)}; {_remedy()}"
        )
    _warn(
        f"{purpose} stands on private interfaces of torch, and was tested with {_tested_releases()}, not"
        f" with {version}, which has those that were looked for; if it fails, {_remedy()}"
    )
    return version


def torch_version(purpose: str) -> str:
    """Return torch's version, without importing torch, which takes seconds.

    Raises:
        MissingExtra: torch is not installed.
    """
    if loaded := sys.modules.get("torch"):
        return str(loaded.__version__)
    try:
        stated = torch_folder() / "version.py"
    except LookupError:
        raise MissingExtra("torch", "torch", purpose) from None
    text = stated.read_text("utf-8") if stated.exists() else ""
    found = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    return found[1] if found else str(import_module("torch").__version__)


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it; raise LookupError if there is none."""
    try:
        found = find_spec("torch")
    except ValueError:  # what is loaded under that name is no package
        found = None
    if found is None or not found.submodule_search_locations:
        raise LookupError("torch is not installed")
    return Path(found.submodule_search_locations[0])


def _tested_releases() -> str:
    return f"{TESTED[0].release} to {TESTED[-1].release}"


def _remedy() -> str:
    return f"install a tested one, e.g. with: pip install 'torch=={TESTED[-1].release}.*'"


@functools.cache
def _warn(text: str) -> None:
    """Warn once of the same thing."""
    _log.warning("%s", text)


_NAMED: Final = 3
"""Number of missing names in a message."""
_SIMULATION_NEEDS: Final = (
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._distributed_c10d.Backend.Options",
    "torch._C._distributed_c10d.FileStore",
    "torch._tensor_str._str",
    "torch.cuda.graphs.CUDAGraph",
    "torch.cuda.nvtx._nvtx",
    "torch.distributed.distributed_c10d._get_object_coll_device",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._object_to_tensor",
    "torch.distributed.distributed_c10d._tensor_to_object",
    "torch.distributed.distributed_c10d.default_pg_nccl_timeout",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
    "torchgen.packaged",
)
"""Private names of PyTorch without which no rank is simulated; the native code has more, which its compiler names."""


def _lacking(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that lead nowhere, as attributes of the longest part that can be imported."""
    return [name for name in names if not _leads_somewhere(name)]


def _leads_somewhere(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def nccl_classes(c10d: ModuleType) -> tuple[str, ...]:
    """Return the names that the process groups of NCCL's backends have in ``c10d``, in a build with NCCL."""
    if hasattr(c10d, "_create_nccl2_process_group"):
        return ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    return ("ProcessGroupNCCL",)


_NCCL_BACKENDS: Final = ("nccl-legacy", "nccl2", "nccl-lazy")
"""Of 2.14 and later, besides "nccl"."""


def register_nccl(c10d: ModuleType) -> None:
    """Make every backend of NCCL out of ``c10d.ProcessGroupNCCL``; see Note [NCCL's backends].

    Args:
        c10d: `torch.distributed.distributed_c10d`.
    """
    create = getattr(c10d, "_create_nccl_process_group", None)
    if create is None:  # 2.13: "nccl" is the only one, and needs no registration
        return
    kinds = c10d.ProcessGroup.BackendType
    for name, kind in [("nccl", kinds.NCCL), *((name, kinds.CUSTOM) for name in _NCCL_BACKENDS)]:
        c10d.Backend.register_backend(name, create, extended_api=True, devices=["cuda"], _backend_type=kind)
    # 2.15 has groups write down their collectives, but for those of backends that do so themselves. Nobody reads that.
    recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.update(("nccl", *_NCCL_BACKENDS))


def replace_cuda_kernels(torch: Any) -> object:
    """Replace kernels that a build for CUDA has outside of namespace ``aten``, and that a script may meet.

    Since 2.15 FSDP copies gradients by ``fsdp::chunk_cat_mixed_dtype`` before it reduces them. Departs from its kernel
    in that gradients of several dtypes are cast one by one, as on other devices, and not while they are copied.

    Args:
        torch: the module.

    Returns:
        What has to live as long as the kernels.
    """
    if not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):
        return None

    def chunk_cat_mixed_dtype(tensors: list[Any], dim: int, num_chunks: int, *, out: Any) -> None:
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            tensors = [tensor.to(out.dtype) for tensor in tensors]
        torch._chunk_cat(tensors, dim, num_chunks, out=out)

    library = torch.library.Library("fsdp", "IMPL", "CUDA")
    library.impl("chunk_cat_mixed_dtype", chunk_cat_mixed_dtype, allow_override=True)
    return library
