"""``torch.compile`` without a code generator: the same graphs, run operator by operator, charged as if fused.

TorchInductor turns runs of pointwise operators and reductions into one Triton kernel that reads its inputs and writes
its outputs once. Here Dynamo and AOTAutograd trace and partition as always; then each maximal run of fusible operators
in the order of the graph is charged as one kernel of its boundary's bytes, and its operators cost nothing themselves
(Note [Fused regions] in ``native/kernels.hpp``). Matrix products, convolutions, attention and collectives stay what
they are. Where CUDA graphs are asked for (``mode="reduce-overhead"``, ``"max-autotune"``), the host pays for one launch
a graph.

Departs from Inductor in that a run ends where any other operator stands between, even one that does not depend on
it.

# Note [Skipped operators]
A simulated GPU computes with small tensors (Note [Real values] in ``native/memory.hpp``), and of what integers and
masks hold it expects something (Note [Expectations] in ``native/expectations.hpp``). Of everything else only shapes and
memory matter, which the compiler knows. So a run of arithmetic on large tensors frees what it reads for the last time
and takes memory for what it leaves, as its operators would one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

from foretrain.live.device import change_after_import, put
from foretrain.live.device.script import script_line

Charge = Callable[[int], tuple[int, int]]
"""From bytes moved by a fused kernel to its duration in ps and provenance."""

_charge: list[Charge] = []


def install(device: ModuleType) -> None:
    """Make ``torch.compile`` use this backend where it would use Inductor, CUDA graphs included."""
    plain = torch.compile
    module_compile = torch.nn.Module.compile

    def ours(given: dict[str, Any]) -> dict[str, Any]:
        if given.get("backend", "inductor") not in ("inductor", "cudagraphs"):
            return given
        kept = {name: value for name, value in given.items() if name not in ("mode", "options")}
        replayed = given.get("mode") in _REPLAYED or bool((given.get("options") or {}).get("triton.cudagraphs"))
        return kept | {"backend": _backend(device, replayed)}

    def compiled(model: Any = None, **given: Any) -> Any:
        with_ours = ours(given)
        if _creates_block_mask(model) and with_ours["backend"] is _backends.get(False):
            # Not where it is replayed as a CUDA graph. Imported on first use, as most scripts have no mask.
            from foretrain.live.device.block_mask import without_tracing

            return without_tracing(model, device)
        if getattr(model, "__qualname__", "") == _UNCOMPILED_FLEX:
            _warn_of_scores(device)
        return plain(model, **with_ours)

    def compile_module(self: torch.nn.Module, *args: Any, **given: Any) -> None:
        module_compile(self, *args, **ours(given))

    put(torch, compile=compiled)
    put(torch.nn.Module, compile=compile_module)
    change_after_import({"torch._dynamo.variables.torch": _fold_questions})


def _fold_questions(dynamo: ModuleType) -> None:
    """Let Dynamo ask the GPU while it traces, as it does with PyTorch's own functions, which it knows by identity."""
    from torch._dynamo.utils import common_constant_types  # which ``dynamo`` has imported

    common_constant_types.add(torch.cuda._CudaDeviceProperties)
    for name in ("get_device_properties", "get_device_capability", "is_available"):
        question = getattr(torch.cuda, name)
        question._dynamo_marked_constant = True  # where Dynamo takes it for the script's own
        dynamo.constant_fold_functions[question] = None


def _creates_block_mask(function: Any) -> bool:
    """Return whether this is PyTorch's ``create_block_mask``, without importing it for the question."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and function is module.create_block_mask


_UNCOMPILED_FLEX = "flex_attention.<locals>._flex_attention_hop_wrapper"
"""What PyTorch's ``flex_attention`` compiles, by its parts, where the script has not compiled it."""


def _warn_of_scores(device: ModuleType) -> None:
    text = (
        "{}:{} calls flex_attention without torch.compile: charged as the kernel that torch.compile would make, but "
        "PyTorch then computes and keeps all scores, which takes longer and needs more memory"
    ).format(*script_line())
    device.note(device.WARNING, 0, 0, text.encode())


def set_charge(charge: Charge) -> None:
    """Set the cost function of fused kernels; called in each rank."""
    _charge[:] = [charge]


_REPLAYED = ("reduce-overhead", "max-autotune")
"""Modes in which TorchInductor puts what it compiled into CUDA graphs."""

_backends: dict[bool, Any] = {}


def _backend(device: ModuleType, replayed: bool) -> Any:
    # One object each, as Dynamo compiles again for another.
    if replayed not in _backends:
        # Imported on first use: it takes a second, and most scripts do not compile.
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        from foretrain.live.device.in_place import put_masked, write_in_place

        def compiled(graph: fx.GraphModule, backward: bool) -> Any:
            from torch._functorch._aot_autograd.utils import make_boxed_func

            if config._micro_pipeline_tp:
                from foretrain.live.device.symmetric_memory import pipeline

                pipeline(graph)
            write_in_place(graph)
            if backward:
                mark_recomputed(graph, device)
            convert_by_aten(graph)
            fuse(graph, device)
            return make_boxed_func(_run(graph, device, replayed))

        _backends[replayed] = aot_autograd(
            fw_compiler=lambda graph, _: compiled(graph, backward=False),
            bw_compiler=lambda graph, _: compiled(graph, backward=True),
            partition_fn=min_cut_rematerialization_partition,
            # TorchInductor's own: what is kept for the backward pass and what is fused depends on them.
            decompositions={
                **select_decomp_table(),
                torch.ops.aten._unsafe_masked_index_put_accumulate.default: put_masked,
            },
            keep_inference_input_mutations=True,  # as TorchInductor does: in the graph, where they are fused
        )
    return _backends[replayed]


def _run(graph: fx.GraphModule, device: ModuleType, replayed: bool) -> Callable[..., Any]:
    """Return a call of ``graph``; if replayed as a CUDA graph, it costs the host one launch."""

    def run(*inputs: Any) -> Any:
        launch = device.launch()
        if replayed:
            device.spend(launch)
            device.set_launch(0)
        try:
            return graph.forward(*inputs)
        except BaseException:
            device.abandon_fused()
            raise
        finally:
            device.set_launch(launch)

    return run


def convert_by_aten(graph: fx.GraphModule) -> None:
    """Replace conversions of TorchInductor's decompositions, which Python executes, by aten's, which do the same."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            source, dtype = node.args
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}


def fuse(graph: fx.GraphModule, device: ModuleType) -> int:
    """Bracket every run of fusible operators in ``graph``; return how many kernels they became."""
    runs = runs_of(graph.graph)
    for run in runs:
        kernel = Kernel(device, boundary(run), len(run))
        with graph.graph.inserting_before(run[0]):
            graph.graph.call_function(device.begin_fused, tuple(_read(run)))
        with graph.graph.inserting_after(run[-1]):
            graph.graph.call_function(kernel)
        if _only_shapes_matter(run):
            _skip(run)
    graph.recompile()
    return len(runs)


class Kernel:
    """The one kernel that a run of fusible operators becomes."""

    def __init__(self, device: ModuleType, moved: int, operators: int) -> None:
        self._device, self._moved = device, moved
        self.__name__ = self.__qualname__ = f"fused_{operators}"
        self.__module__ = __name__

    def __call__(self) -> None:
        """End the run's region and launch the kernel."""
        self._device.end_fused()
        self.launch()

    def launch(self) -> None:
        """Launch the kernel, where no region is open."""
        duration, provenance = _charge[0](self._moved)
        self._device.launch_fused(f"triton_{self.__name__}", duration, provenance)


class Results:
    """Memory for the results of one operator."""

    def __init__(self, node: fx.Node) -> None:
        self._shapes = [(tuple(one.shape), one.stride(), one.dtype, one.device) for one in _results(node)]
        self._several = not isinstance(node.meta["val"], torch.Tensor)
        self.__name__ = self.__qualname__ = f"results_of_{node.name}"
        self.__module__ = __name__

    def __call__(self) -> Any:
        """Return new tensors."""
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in self._shapes
        ]
        return made if self._several else made[0]


def _skip(run: Sequence[fx.Node]) -> None:
    """Replace the operators of ``run`` by memory for what they leave. Views of that, and of what is read, stay."""
    for node in _written(run):
        if _writes_argument(node):
            continue
        with node.graph.inserting_before(node):
            made = node.graph.call_function(Results(node))
        made.meta = node.meta
        node.replace_all_uses_with(made)
    for node in reversed(run):
        if not node.users and not _writes_argument(node):
            node.graph.erase_node(node)


def _only_shapes_matter(run: Sequence[fx.Node]) -> bool:
    """Return whether no value that ``run`` leaves is known or expected; see Note [Skipped operators]."""
    inside, small, written = set(run), set[fx.Node](), set(_written(run))
    for node in run:
        if all(source in small if source in inside else _may_hold(source) for source in node.all_input_nodes):
            small |= {node} if _may_hold(node) else set()
    operators = [node for node in run if not is_free(node)]
    return small.isdisjoint(written) and all(
        _writes_argument(node)
        or (_is_arithmetic(node) and not _counts(node, inside) and (node not in written or _has_shape(node)))
        for node in operators
    )


_COMPUTED = 8192
"""Elements up to which a simulated GPU computes with a tensor."""


def _may_hold(node: fx.Node) -> bool:
    """Return whether a result is so small, or of a size so little known, that it may have values."""
    return any(not isinstance(size := one.numel(), int) or size <= _COMPUTED for one in _results(node))


def _is_arithmetic(node: fx.Node) -> bool:
    """Return whether an operator takes and makes new floating-point numbers, or masks of them."""
    tensors = [one for each in (node, *node.all_input_nodes) for one in _results(each)]
    number = (torch.is_floating_point, lambda one: one.dtype is torch.bool)
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and all(any(is_(one) for is_ in number) for one in tensors)


def _counts(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether an operator sums a mask, or what comes from outside and might stand for one."""
    operator = node.target
    assert isinstance(operator, torch._ops.OpOverload)
    if operator.overloadpacket._qualified_op_name not in ("aten::sum", "aten::all"):
        return False
    source = node.all_input_nodes[0]
    while source in inside and (is_free(source) or source.target in _COPIES):
        source = source.all_input_nodes[0]
    return source not in inside or any(one.dtype is torch.bool for one in _results(source))


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def _has_shape(node: fx.Node) -> bool:
    """Return whether all results are tensors on the GPU whose sizes are numbers."""
    values = node.meta.get("val")
    count = len(values) if isinstance(values, tuple | list) else 1
    results = _results(node)
    return len(results) == count and all(
        one.is_cuda and all(isinstance(size, int) for size in (*one.shape, *one.stride())) for one in results
    )


class Recomputed:
    """An operator of a forward pass that a backward pass repeats."""

    def __init__(self, device: ModuleType, operator: Callable[..., Any]) -> None:
        self._device, self._operator = device, operator
        self.__name__ = self.__qualname__ = f"recomputed_{getattr(operator, '__name__', 'operator').replace('.', '_')}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; what it launches counts as computed again."""
        self._device.set_recomputing(True)
        try:
            return self._operator(*args, **kwargs)
        finally:
            self._device.set_recomputing(False)


def mark_recomputed(graph: fx.GraphModule, device: ModuleType) -> None:
    """Mark operators of the forward pass that ``graph`` of a backward pass repeats.

    They are those that need no gradient of an output, which AOTAutograd calls tangents. Fusible operators stay as they
    are: their arithmetic does not count.
    """
    from foretrain.live.device.in_place import InPlace

    operators = torch._ops.OpOverload, torch._ops.HigherOrderOperator, InPlace
    gradients: set[fx.Node] = set()
    again = []
    for node in graph.graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or not gradients.isdisjoint(node.all_input_nodes):
            gradients.add(node)
        elif isinstance(node.target, operators) and not (_fusible(node) or is_free(node)):
            again.append(node)
    for node in again:
        node.target = Recomputed(device, node.target)


def runs_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return maximal runs of two and more fusible operators; views between them belong to them."""
    runs: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    for node in [*graph.nodes, None]:
        if node is not None and node.op == "call_function" and (_fusible(node) or (run and is_free(node))):
            run.append(node)
            continue
        if sum(map(_fusible, run)) > 1:
            runs.append(run)
        run = []
    return runs


def _fusible(node: fx.Node) -> bool:
    """Return whether Inductor would generate Triton: pointwise operators, reductions and normalisations."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _writes_argument(node):
        return True
    if node.target is torch.ops.aten.scatter.value:  # of a constant into a constant: a comparison, in a loss's gradient
        return True
    if node.target is torch.ops.aten.var_mean.correction:  # of rows, whose kernel goes on; of channels, another does
        dims, last = node.args[1] if len(node.args) > 1 else None, _results(node.all_input_nodes[0])[0].dim() - 1
        return isinstance(dims, list | tuple) and set(dims) in ({last}, {-1})
    tags, name = node.target.tags, node.target.overloadpacket._qualified_op_name
    fusible = name in _FUSIBLE or name.startswith("aten::_foreach_")
    return fusible or torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def _writes_argument(node: fx.Node) -> bool:
    """Return whether the node leaves its source in an argument of the graph or a part of it, as updates in place do."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target = node.all_input_nodes[0]
    while is_free(target) and target.all_input_nodes:
        target = target.all_input_nodes[0]
    return target.op == "placeholder"


def is_free(node: fx.Node) -> bool:
    """Return whether the node costs nothing: views, Python's own operators on tuples, and sizes."""
    target = node.target
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    return target.is_view or target is torch.ops.aten.reshape.default


_FUSIBLE_NAMES = (
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    *("native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
    *("native_dropout", "native_dropout_backward", "nll_loss_forward", "nll_loss_backward"),
    *("silu_backward", "gelu_backward", "sum", "mean", "amax"),
    *("cat", "clone", "copy", "_to_copy", "constant_pad_nd", "repeat"),
    *("slice_backward", "slice_scatter", "select_scatter"),
    *("full", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "scalar_tensor", "arange"),
    *("embedding", "index", "_unsafe_index", "gather"),
)
_FUSIBLE = {f"aten::{name}" for name in _FUSIBLE_NAMES} | {"prims::convert_element_type", "prims::iota", "prims::rev"}
"""Operators that Inductor fuses though they are tagged neither pointwise nor reduction."""
_COPIES_TO = frozenset({torch.ops.aten.copy.default, torch.ops.aten.copy_.default})
"""Operators that do not read their first argument."""
_LOOKUPS = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten._unsafe_index.Tensor,
        torch.ops.aten.gather.default,
    }
)
"""Operators that read no more of their first argument than they return."""


def boundary(run: Sequence[fx.Node]) -> int:
    """Return the bytes that one kernel of ``run`` reads from outside and writes for users outside."""
    return sum(map(_bytes, _read(run))) - _looked_up(run) + sum(map(_bytes, _written(run)))


def _read(run: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(run)
    reading = (node for node in run if not (is_free(node) and _only_written(node)))
    sources = (source for node in reading for source in node.all_input_nodes[node.target in _COPIES_TO :])
    return list(dict.fromkeys(source for source in sources if source not in inside))


def _only_written(view: fx.Node) -> bool:
    """Return whether a view is the target of copies, and nothing else."""
    return bool(view.users) and all(
        _only_written(user) if is_free(user) else user.target in _COPIES_TO and user.all_input_nodes[0] is view
        for user in view.users
    )


def _looked_up(run: Sequence[fx.Node]) -> int:
    """Return the bytes of tables of which ``run`` only reads the rows that its lookups leave."""
    inside, found = set(run), dict[fx.Node, int]()
    for table in _read(run):
        users = [user for user in table.users if user in inside]
        if all(user.target in _LOOKUPS and user.all_input_nodes[0] is table for user in users):
            found[table] = max(0, _bytes(table) - sum(map(_bytes, users)))
    return sum(found.values())


def _written(run: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(run)

    def leaves(node: fx.Node) -> bool:
        if _writes_argument(node):  # what it stores counts where it is computed
            return node.all_input_nodes[-1] not in inside
        return any(_outside(user, inside) for user in node.users)

    return [node for node in run if not is_free(node) and leaves(node)]


def _outside(user: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether a result leaves the run by way of ``user``, perhaps as a view."""
    left = user not in inside or _writes_argument(user)
    return left or (is_free(user) and any(_outside(next_, inside) for next_ in user.users))


def _bytes(node: fx.Node) -> int:
    return sum(int(one.numel()) * one.element_size() for one in _results(node))


def _results(node: fx.Node) -> list[torch.Tensor]:
    values = node.meta.get("val")
    several = values if isinstance(values, tuple | list) else (values,)
    return [one for one in several if isinstance(one, torch.Tensor)]
