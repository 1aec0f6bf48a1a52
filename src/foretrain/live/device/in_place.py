"""What a compiled graph writes in place, as TorchInductor lets it.

AOTAutograd makes of an operator that writes to its arguments one that writes to copies of them: of the script's own
kernels in Triton, of operators that were registered with ``mutates_args``, and of assignments to parts of a tensor.
TorchInductor's pass over the graph says which of these copies nobody needs. Only a graph with such operators meets it,
as its import takes half a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

_OPERATORS = {
    auto_functionalize.auto_functionalized: auto_functionalize.auto_functionalized_dense,
    auto_functionalize.auto_functionalized_v2: auto_functionalize.auto_functionalized_v2_dense,
}
_PARTS = (
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
)


class InPlace:
    """An operator that writes to its arguments, and to copies of those that are needed as they were."""

    def __init__(self, node: fx.Node) -> None:
        copied = node.meta.get("only_clone_these_tensors")
        self._copied = None if copied is None else tuple(copied)
        self._call: Any = _OPERATORS[node.target]  # pyright: ignore[reportArgumentType]
        self.__name__ = self.__qualname__ = f"in_place_{node.name}"
        self.__module__ = __name__

    def __call__(self, operator: Any, **arguments: Any) -> Any:
        """Call ``operator``; return its results and what it has written to."""
        return self._call(operator, self._copied, **arguments)


def write_in_place(graph: fx.GraphModule) -> None:
    """Let operators of ``graph`` write to their arguments, where nobody can tell."""
    if not any(node.target in (triton_kernel_wrapper_functional, *_OPERATORS, *_PARTS) for node in graph.graph.nodes):
        return
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in graph.graph.nodes])):
        reinplace_inplaceable_ops(FakeTensorUpdater(graph), graph.graph)
    for node in graph.graph.nodes:
        if node.target in _OPERATORS:
            node.target = InPlace(node)


def put_masked(x: torch.Tensor, mask: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor) -> Any:
    """Add ``values`` where ``mask`` says, as TorchInductor does: an embedding's gradient."""
    where = [
        index if index is None else index.clamp(-size, size - 1)
        for index, size in zip(indices, x.shape[: len(indices)], strict=True)
    ]
    return torch.ops.aten._unsafe_index_put(x, where, torch.where(mask, values, 0), True)
