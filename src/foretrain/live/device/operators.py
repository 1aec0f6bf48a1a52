"""Which operators have kernels of their own on CUDA: what a real build registers, read from PyTorch's own list.

An operator that is not registered for the device falls apart into smaller ones where PyTorch has a composite kernel for
it, e.g. a ``_foreach`` into one operator per tensor. That would be another program than the one that a GPU runs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

_ALSO = ("convolution", "convolution_backward", "linalg_lstsq")
"""Composite on CUDA as well: the first two end in one kernel of cuDNN there, which is no operator of a CPU build, the
last in the variant that writes to tensors whose sizes nobody infers."""


def cuda_operators() -> list[str]:
    """Names with overload, e.g. ``"add.Tensor"``, of namespace ``aten``."""
    entries = dict(_entries(_native_functions()))
    names = [
        name for name, (keys, delegate) in entries.items() if "CUDA" in (keys | entries.get(delegate, _NOTHING)[0])
    ]
    return list(dict.fromkeys([*names, *_ALSO]))


def checked_operators() -> tuple[list[str], list[str]]:
    """Operators that refuse tensors on different devices: by the check that torchgen writes, and by TensorIterator's.

    Names as those of `cuda_operators`; the others check for themselves, or not at all.
    """
    generated: list[str] = []
    iterated: list[str] = []
    for name, block in _blocks(_native_functions()):
        found = re.search(r"^  device_check: NoCheck *(.*)$", block, re.MULTILINE)
        if found is None:
            generated.append(name)
        elif found[1] == "# TensorIterator":
            iterated.append(name)
    known = frozenset(cuda_operators()) - frozenset(_ALSO)
    return [name for name in generated if name in known], [name for name in iterated if name in known]


_NOTHING: tuple[frozenset[str], str] = frozenset(), ""


def _native_functions() -> str:
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    return path.read_text(encoding="utf-8")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each function's name and all that is said of it."""
    for block in text.split("\n- func: ")[1:]:
        yield block.split("(", 1)[0], block


def _entries(text: str) -> Iterator[tuple[str, tuple[frozenset[str], str]]]:
    """Each function's name, the dispatch keys of its kernels, and the function it delegates to.

    PyTorch does not come with a YAML parser, and three kinds of lines tell all.
    """
    for name, block in _blocks(text):
        keys: set[str] = set()
        delegate, dispatch = "", False
        for line in block.splitlines()[1:]:
            if not line.startswith("    "):
                dispatch = line.strip() == "dispatch:"
            if line.startswith("  ufunc_inner_loop:"):
                keys.add("CUDA")  # generated from one loop for CPU and CUDA
            elif line.startswith("  structured_delegate:"):
                delegate = line.split(":", 1)[1].strip()
            elif dispatch and line.startswith("    ") and ":" in line:
                keys.update(key.strip() for key in line.split(":", 1)[0].split(","))
        yield name, (frozenset(keys), delegate)
