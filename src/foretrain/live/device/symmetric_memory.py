"""Memory that GPUs read from each other (``torch.distributed._symmetric_memory``), as AsyncTP uses it.

Asynchronous tensor parallelism takes a collective beside matrix products apart: while the products of one part are
computed, the next part is copied from another GPU's memory. TorchInductor's own pass finds such collectives here, too,
and PyTorch's own code pipelines them. This module has the memory between GPUs. All ranks copy at once, each from the
rank that is as far from it: an all-to-all in which each gets something from one.

Departs from GPUs in that an all-to-all occupies multiprocessors, where copies have engines of their own, and in that
barriers between the copies take no time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import ProcessGroup, distributed_c10d
from torch.fx.node import map_arg

from foretrain.live.device import put

_workspaces: dict[str, torch.Tensor] = {}


def install(module: ModuleType) -> None:
    """Let ``torch.distributed._symmetric_memory`` have simulated workspaces, and refuse all else that maps memory."""
    enabled = module._group_name_to_store
    put(
        module,
        enable_symm_mem_for_group=lambda group_name: enabled.setdefault(group_name, None),
        get_symm_mem_workspace=_workspace,
        # Asks the GPU whether its switch can multiply what is written; of use for a few thousand rows at most.
        _should_use_multimem_all_gather_matmul=lambda *_: False,
        empty=_refuse,
        rendezvous=_refuse,
    )


def _refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "torch.distributed._symmetric_memory: memory that GPUs share is simulated for asynchronous tensor parallelism"
        " (AsyncTP) alone; use collectives of torch.distributed instead"
    )


def _workspace(group_name: str, min_size: int) -> Workspace:
    """Return the group's workspace; it grows, as PyTorch's does."""
    known = _workspaces.get(group_name)
    if known is None or known.numel() < min_size:
        known = _workspaces[group_name] = torch.empty(min_size, dtype=torch.uint8, device="cuda")
    resolve: Any = distributed_c10d.__dict__["_resolve_process_group"]
    return Workspace(resolve(group_name), known)


class Workspace:
    """What ranks of a group read from each other.

    Args:
        group: the ranks.
        memory: this rank's part, in bytes.
    """

    def __init__(self, group: ProcessGroup, memory: torch.Tensor) -> None:
        self._group, self._memory = group, memory
        self.rank, self.world_size = group.rank(), group.size()

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Do nothing: copies wait for all ranks anyway."""

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Any:
        """Return a tensor in the memory of ``rank``, ``storage_offset`` elements behind its begin."""
        begin = storage_offset * dtype.itemsize
        size = torch.Size(sizes).numel() * dtype.itemsize
        own = self._memory[begin : begin + size].view(dtype).view(sizes)
        distance = (rank - self.rank) % self.world_size
        return RemoteBuffer(own, self._group, distance) if distance else own


class RemoteBuffer:
    """Tensor in another rank's memory, from which tensors can be copied.

    Args:
        own: the tensor at the same place of this rank's memory.
        group: the ranks.
        distance: how many ranks of the group the other is away.
    """

    def __init__(self, own: torch.Tensor, group: ProcessGroup, distance: int) -> None:
        self._own, self._group, self._distance = own, group, distance

    def numel(self) -> int:
        """Return the number of elements."""
        return self._own.numel()

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self._own.element_size()

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy it to a tensor; nothing else can be done with it."""
        if function != torch.Tensor.copy_ or kwargs:
            _refuse()
        target, source = args
        source._read(target)
        return target

    def _read(self, target: torch.Tensor) -> None:
        rank, ranks = self._group.rank(), self._group.size()
        own = self._own.reshape(-1).view(torch.uint8)
        sent, received = [0] * ranks, [0] * ranks
        sent[(rank - self._distance) % ranks] = received[(rank + self._distance) % ranks] = own.numel()
        whole = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device="cuda")
        dist.all_to_all_single(whole.view(-1).view(torch.uint8), own, received, sent, self._group)
        if whole is not target:
            target.copy_(whole)


def pipeline(module: fx.GraphModule) -> None:
    """Have collectives beside products pipelined with them, as TorchInductor does before it generates code."""
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.inductor_prims import force_stride_order

    graph, aten = module.graph, torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # which the pass looks for
    micro_pipeline_tp_pass(graph)
    for node in graph.find_nodes(op="call_function", target=force_stride_order):
        _copy_in_order(node)
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and mode is not None:
            args, kwargs = map_arg((node.args, node.kwargs), lambda known: known.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)


def _copy_in_order(node: fx.Node) -> None:
    """Replace a demand for strides by a copy that fuses as any; by nothing where the strides are so already."""
    given: Any = node.args
    source, strides = given
    value = source.meta["val"]
    long = [dim for dim in range(value.dim()) if value.shape[dim] > 1]
    result = source
    if any(value.stride(dim) != strides[dim] for dim in long):
        aten = torch.ops.aten
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        back = [order.index(dim) for dim in range(value.dim())]
        with node.graph.inserting_before(node):
            turned = node.graph.call_function(aten.permute.default, (source, order))
            copy = node.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
            result = node.graph.call_function(aten.permute.default, (copy, back))
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
