"""What a compiled graph writes in place, as TorchInductor lets it.

AOTAutograd makes of an operator that writes to its arguments one that writes to copies of them: of the script's own
kernels in Triton and of operators that were registered with ``mutates_args``. TorchInductor's pass over the graph says
which of these copies nobody needs. Only a graph with such operators meets it, as its import takes half a second.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops import auto_functionalize
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

_OPERATORS = {
    auto_functionalize.auto_functionalized: auto_functionalize.auto_functionalized_dense,
    auto_functionalize.auto_functionalized_v2: auto_functionalize.auto_functionalized_v2_dense,
}


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
    if not any(node.target in (triton_kernel_wrapper_functional, *_OPERATORS) for node in graph.graph.nodes):
        return
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    reinplace_inplaceable_ops_core(graph.graph)
    for node in graph.graph.nodes:
        if node.target in _OPERATORS:
            node.target = InPlace(node)
