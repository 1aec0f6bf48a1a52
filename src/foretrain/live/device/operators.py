"""CUDA's operators: which have kernels of their own, and FlexAttention.

The list of operators with CUDA kernels is read from PyTorch's own. An operator that is not registered for the device
falls apart into smaller ones where PyTorch has a composite kernel for it, e.g. a ``_foreach`` into one operator per
tensor. That would be another program than the one that a GPU runs.

FlexAttention is the one kernel that it is compiled to, with the time of attention to as many keys as its mask leaves.
The list of blocks is a value on the GPU, which does not exist here, so the mask's own function is asked about a sample
of blocks on the host. What it reads from tensors without values, e.g. where documents end, counts as zeros: as one
document. Eager PyTorch would build the whole matrix of scores instead.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_ALSO = ("convolution", "convolution_backward", "linalg_lstsq")
"""Composite on CUDA as well: the first two end in one kernel of cuDNN there, which is no operator of a CPU build, the
last in the variant that writes to tensors whose sizes nobody infers."""


@cache
def cuda_operators() -> tuple[str, ...]:
    """Return names with overload, e.g. ``"add.Tensor"``, of namespace ``aten``."""
    entries = dict(_entries(_native_functions()))
    names = [
        name for name, (keys, delegate) in entries.items() if "CUDA" in (keys | entries.get(delegate, _NO_ENTRY)[0])
    ]
    return tuple(dict.fromkeys([*names, *_ALSO]))


@cache
def checked_operators() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return operators that refuse tensors on different devices: by torchgen's check, and by TensorIterator's.

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
    return tuple(name for name in generated if name in known), tuple(name for name in iterated if name in known)


_NO_ENTRY: tuple[frozenset[str], str] = frozenset(), ""


def _native_functions() -> str:
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    return path.read_text(encoding="utf-8")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each function's name and its whole entry."""
    for block in text.split("\n- func: ")[1:]:
        yield block.split("(", 1)[0], block


def _entries(text: str) -> Iterator[tuple[str, tuple[frozenset[str], str]]]:
    """Yield each function's name, the dispatch keys of its kernels, and the function it delegates to.

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


def install_flex(has_values: Callable[[torch.Tensor], bool]) -> None:
    """Register the operators' kernels for CUDA. Imports little, but late: most scripts do not use them.

    Args:
        has_values: whether a tensor's values are known.
    """
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_mod_other_buffers: Sequence[Any] = (),
        mask_mod_other_buffers: Sequence[Any] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kept = _kept(block_mask, mask_mod_other_buffers, query.shape[2], key.shape[2], has_values)
        return _flex_forward(query, key, value, scale, kept)

    def backward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        grad_out: torch.Tensor | None,
        grad_logsumexp: torch.Tensor | None,
        fw_graph: Any,
        joint_graph: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_mod_other_buffers: Sequence[Any] = (),
        mask_mod_other_buffers: Sequence[Any] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        kept = _kept(block_mask, mask_mod_other_buffers, query.shape[2], key.shape[2], has_values)
        _attention_backward(out if grad_out is None else grad_out, query, key, value, out, logsumexp, scale, kept)
        captured = tuple(torch.zeros_like(one) if torch.is_tensor(one) else None for one in score_mod_other_buffers)
        return _like(query, query.shape), _like(key, key.shape), _like(value, value.shape), captured

    flex_attention.py_impl(DispatchKey.CUDA)(forward)
    flex_attention_backward.py_impl(DispatchKey.CUDA)(backward)


_BLOCK = 128
"""Queries, and keys, of which the kernel computes all scores or none, unless the mask says otherwise."""
_SAMPLE = 32
"""Rows of blocks that are asked about."""


class _Kept(NamedTuple):
    """Keys that each query meets, on average, and whether these are just those before it."""

    keys: int
    causal: bool


def _kept(
    block_mask: tuple[Any, ...],
    buffers: Sequence[Any],
    queries: int,
    keys: int,
    has_values: Callable[[torch.Tensor], bool],
) -> _Kept:
    """Return what a mask keeps: of the blocks in a sample of rows, those in which a corner is kept."""
    mask, sizes = block_mask[-1], block_mask[-3:-1]
    across, along = (int(size) if isinstance(size, int) and size < 1 << 20 else _BLOCK for size in sizes)
    stride = max(1, queries // across // _SAMPLE)
    rows = torch.arange(stride // 2, -(-queries // across), stride)
    q, k = (
        torch.stack((first * size, (first * size + size - 1).clamp(max=every - 1)), 1).flatten()
        for first, size, every in ((rows, across, queries), (torch.arange(-(-keys // along)), along, keys))
    )
    none = torch.zeros((), dtype=torch.int64)
    with _on_host(has_values):
        kept = torch.as_tensor(mask(none, none, q[:, None], k[None, :], *buffers)).expand(len(q), len(k))
    blocks = kept.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).any(3).any(1)
    before = (q[:, None] >= k).unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).any(3).any(1)
    share = float(blocks.float().mean())
    return _Kept(max(1, round(keys * share)), queries == keys and bool((blocks == before).all()))


def _on_host(has_values: Callable[[torch.Tensor], bool]) -> Any:
    """Return a context in which operators run on the host; GPU tensors without values are zeros to them."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        return tensor.cpu() if has_values(tensor) else torch.zeros(tensor.shape, dtype=tensor.dtype)

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs or {}))
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    return OnHost()


def _flex_forward(
    query: torch.Tensor,  # (batch, heads, sequence, width); key and value may have fewer heads
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    kept: _Kept,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    attended = _attention(query, key, value, scale, kept)[0]
    output = _like(query, (*query.shape[:-1], value.shape[-1]))
    if attended.stride() == output.stride():
        output = attended
    return output, logsumexp, torch.empty_like(logsumexp)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kept: _Kept) -> Any:
    k, v = _met(k, kept), _met(v, kept)
    if _half(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, kept.causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, kept.causal, scale=scale)


def _attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    kept: _Kept,
) -> None:
    k, v = _met(k, kept), _met(v, kept)
    aten, random = torch.ops.aten, torch.empty((), dtype=torch.int64, device=q.device)
    if _half(q):
        lengths = None, None, q.shape[2], k.shape[2]
        aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, logsumexp, *lengths, 0.0, kept.causal, random, random, scale=scale
        )
    else:
        wanted = [True, True, True, False]
        aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, logsumexp, random, random, 0.0, wanted, kept.causal, scale=scale
        )


def _met(keys: torch.Tensor, kept: _Kept) -> torch.Tensor:
    """Return as many keys, or values, as a query meets; those of a causal mask its kernel leaves out itself."""
    return keys if kept.causal else keys[:, :, : kept.keys]


def _half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of ``shape``, with its dimensions in memory in the order of ``tensor``'s."""
    order = sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim), reverse=True)
    return tensor.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
