"""Which operators have kernels of their own on CUDA: what a real build registers, read from PyTorch's own list.

An operator that is not registered for the device falls apart into smaller ones where PyTorch has a composite kernel for
it, e.g. a ``_foreach`` into one operator per tensor. That would be another program than the one that a GPU runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

_ALSO = ("convolution", "convolution_backward")
"""Composite on CUDA as well, but there they end in one kernel of cuDNN, which is no operator of a CPU build."""


def cuda_operators() -> list[str]:
    """Names with overload, e.g. ``"add.Tensor"``, of namespace ``aten``."""
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    entries = dict(_entries(path.read_text(encoding="utf-8")))
    names = [
        name for name, (keys, delegate) in entries.items() if "CUDA" in (keys | entries.get(delegate, _NOTHING)[0])
    ]
    return list(dict.fromkeys([*names, *_ALSO]))


_NOTHING: tuple[frozenset[str], str] = frozenset(), ""


def _entries(text: str) -> Iterator[tuple[str, tuple[frozenset[str], str]]]:
    """Each function's name, the dispatch keys of its kernels, and the function it delegates to.

    PyTorch does not come with a YAML parser, and three kinds of lines tell all.
    """
    for block in text.split("\n- func: ")[1:]:
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
        yield block.split("(", 1)[0], (frozenset(keys), delegate)
