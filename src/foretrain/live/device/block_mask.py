"""``torch.compile(create_block_mask)`` without Dynamo, charged as what the compiler would make of it.

Scripts compile PyTorch's own ``create_block_mask`` so that the mask of all queries and keys is never written. Dynamo
takes seconds to trace it, in each process and for each shape: most of what a simulation of a few steps takes. Here it
runs as it is, nothing of it is charged, and the operators that it called are: each run of fusible ones as one kernel,
by the rules of ``compiler.py``, the others as themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.live.device.compiler import Kernel, boundary, is_free, runs_of


def without_tracing(create: Callable[..., Any], device: ModuleType) -> Callable[..., Any]:
    """Return ``create_block_mask`` at the cost of its compiled kernels."""

    def created(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of what is compiled itself
            return create(*args, **kwargs)
        recorder = _Recorder()
        device.begin_fused()
        try:
            with recorder:
                mask = create(*args, **kwargs)
        except BaseException:
            device.abandon_fused()
            raise
        launches = recorder.launches(mask.as_tuple(), device)
        device.end_fused()
        for launch in launches:
            launch()
        return mask

    return created


class _Recorder(TorchDispatchMode):
    """Notes the operators that are called as the graph that tracing would find."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # an id stands for one tensor as long as that lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        called = self._graph.call_function(func, *map_aggregate((args, kwargs or {}), self._node))
        called.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._note(result, called)
        elif isinstance(result, (tuple, list)):
            for i, one in enumerate(result):
                part = self._graph.call_function(operator.getitem, (called, i))
                part.meta["val"] = one
                self._note(one, part)
        return result

    def _node(self, tensor: Any) -> Any:
        """Return the node that has made a tensor: where none has, an input's; and other arguments as they are."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in self._nodes:
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                given = self._graph.placeholder(f"input_{len(self._nodes)}")
            given.meta["val"] = tensor
            self._note(tensor, given)
        return self._nodes[id(tensor)]

    def _note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def launches(self, results: Any, device: ModuleType) -> list[Callable[[], object]]:
        """Return what the compiled function launches, in order, given the tensors that it returns; forget the others.

        Those that are only used inside must not be alive when the fused region ends: they would take memory.
        """
        self._graph.output(map_aggregate(results, self._node))
        runs = runs_of(self._graph)
        ends = {run[-1]: Kernel(device, boundary(run), len(run)).launch for run in runs}
        fused = {node for run in runs for node in run}
        launches: list[Callable[[], object]] = []
        for node in self._graph.nodes:
            if node in ends:
                launches.append(ends[node])
            elif node.op == "call_function" and node not in fused and not is_free(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
                launches.append(partial(node.target, *args, **kwargs))
        for node in self._graph.nodes:
            node.meta.clear()
        self._nodes.clear()
        self._alive.clear()
        return launches
