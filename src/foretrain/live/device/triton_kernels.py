"""Kernels of Triton on the simulated GPU: launched, but neither compiled nor run.

Which tensors a kernel reads and writes is read from its source: it loads and stores by pointers that it computes from
its arguments. Autotuning takes the first configuration, as all take equally long here.

What ``torch.library.triton_op`` makes is an operator to `torch.compile`, which would look for kernels inside to inline.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch

from foretrain.live.device import SimulatedNames, change_after_import, put
from foretrain.live.device.custom_kernels import launch


def install() -> None:
    """Change Triton, where it is installed, and what PyTorch makes of its kernels, when they are imported."""
    change_after_import(
        {
            "triton.runtime.jit": lambda module: put(module.JITFunction, run=_run),
            "triton.runtime.autotuner": lambda module: put(module.Autotuner, run=run_first_configuration),
            "triton.runtime.driver": _activate,
            "torch._library.triton": lambda module: put(module, is_wrap_triton_enabled=lambda: False),
            "torch._higher_order_ops.triton_kernel_wrap": lambda module: put(module, get_mutated_tensors=written_of),
            "torch._functorch.config": lambda module: put(module, decompose_custom_triton_ops=False),
        }
    )


def _activate(module: ModuleType) -> None:
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    module.driver.set_active(SimulatedDriver(GPUTarget))


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    if warmup:
        refuse_compiled(self.__name__)
    launch_triton(self.fn, args, named, grid)


def refuse_compiled(name: str) -> NoReturn:
    """Raise NotImplementedError: somebody asks for what a compiler would have made of a kernel."""
    raise NotImplementedError(
        f"Triton kernel {name}: a simulation compiles no kernels, so it has no registers, shared memory or code to ask"
        " for; launch it by kernel[grid](...), with sizes that do not hang on them"
    )


def run_first_configuration(self: Any, *args: Any, **named: Any) -> Any:
    """Run the kernel of an ``Autotuner`` with its first configuration."""
    config = self.configs[0]
    self.best_config = config
    chosen = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **named, **chosen})
    return self.fn.run(*args, **named, **chosen)


def launch_triton(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], grid: Any) -> None:
    """Launch the kernel that is compiled from ``function``.

    Args:
        function: the source in Python.
        args: of the kernel.
        named: also of the kernel, and options of the compiler.
        grid: how many programs, or what gives that from the arguments.
    """
    signature = _signature(function)
    bound = signature.bind(*args, **{key: value for key, value in named.items() if key in signature.parameters})
    bound.apply_defaults()
    if callable(grid):
        grid = grid({**bound.arguments, **named})
    if 0 in tuple(grid):
        return  # no program, no kernel
    read, written = accesses(function)
    # A descriptor of Tensor Memory Access is a tensor with the shape of its blocks.
    tensors = {key: getattr(value, "base", value) for key, value in bound.arguments.items()}
    launch(f"{function.__module__}.{function.__name__}".removeprefix("__main__."), tensors, read, written)


def written_of(kernel: int, constants: int, tensors: Mapping[str, Any], _: object) -> list[str]:
    """Return the names of the tensors that a kernel in a compiled graph stores to.

    PyTorch would let Triton translate the kernel, and count the ways to each argument through the result. There may be
    so many that it does not come to an end: of kernels with long loops that are unrolled.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    function: Any = kernel_side_table.get_kernel(kernel)
    while hasattr(function, "fn"):  # of autotuners, heuristics and the kernel itself
        function = function.fn
    written = accesses(function)[1]
    return [name for name, value in tensors.items() if torch.is_tensor(value) and (written is None or name in written)]


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@cache
def accesses(function: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the parameters by which a kernel loads, and by which it stores; None where its source does not say."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None, None
    return _Accesses(source, set(_signature(function).parameters)).found()


class _Accesses:
    """Parameters that the pointers of loads and stores are computed from, in whatever order the source has them."""

    def __init__(self, source: ast.AST, parameters: set[str]) -> None:
        self._nodes = list(ast.walk(source))
        self._origins = {name: {name} for name in parameters}
        self._read: set[str] = set()
        self._written: set[str] = set()

    def found(self) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        while self._spread():
            pass
        for node in self._nodes:
            if isinstance(node, ast.Call):
                self._call(node)
        if not self._written:
            return None, None  # by ways that are not seen
        return frozenset(self._read), frozenset(self._written)

    def _spread(self) -> bool:
        """Give variables the origins of what is assigned to them; return whether any got more."""
        grown = False
        for node in self._nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                origins = self._of(node.value)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}:
                    known = self._origins.setdefault(name, set())
                    grown = grown or not origins <= known
                    known |= origins
        return grown

    def _of(self, node: ast.AST) -> set[str]:
        return set().union(*(self._origins.get(name, ()) for name in _names(node)))

    def _call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = self._of(called.value) if isinstance(called, ast.Attribute) else set[str]()
        given = [*node.args[:1], *(word.value for word in node.keywords if word.arg in _POINTERS)]
        pointer = owner.union(*map(self._of, given))
        if _does("load", name):
            self._read |= pointer
        elif _does("store", name):
            self._written |= pointer
        elif name.startswith("atomic_"):
            self._read |= pointer
            self._written |= pointer
        elif isinstance(called, ast.Name) and name not in _BUILTINS:  # another kernel's function, which may do both
            all_given = set[str]().union(*(self._of(one) for one in (*node.args, *(k.value for k in node.keywords))))
            self._read |= all_given
            self._written |= all_given


_POINTERS = frozenset({"pointer", "desc", "desc_pointer", "block_ptr"})
"""Names under which Triton's functions take what they load from and store to."""


def _does(what: str, name: str) -> bool:
    """Return whether a function loads or stores: ``load``, ``load_tensor_descriptor``, and older names."""
    return what in name.split("_")


_BUILTINS = frozenset({"range", "min", "max", "abs", "float", "int", "bool", "len", "print", "tuple", "zip"})


def _names(node: ast.AST) -> Iterator[str]:
    """Yield names in an expression, but not those of the addresses that it loads from: a value is no pointer."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _does("load", node.func.attr):
        return
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


class SimulatedDriver:
    """Driver of Triton, which is asked what the GPU is.

    Args:
        target: makes Triton's description of it, of a backend, a capability and the threads of a warp.
    """

    def __init__(self, target: Callable[[str, int, int], Any]) -> None:
        self._target = target
        self.utils = SimulatedNames("driver.active.utils", get_device_properties=self._properties)

    def get_current_target(self) -> Any:
        """Return the description of the current GPU."""
        major, minor = torch.cuda.get_device_capability()
        return self._target("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Return the number of the current GPU."""
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        """Make another GPU the current one."""
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the handle of the current stream."""
        return torch.cuda.current_stream(device).cuda_stream

    def get_active_torch_device(self) -> torch.device:
        """Return the current GPU as PyTorch names it."""
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        """Return the module of PyTorch for its GPUs."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., float]:
        """Return a function that measures a function in ms of virtual time."""
        return bench

    def _properties(self, device: int) -> dict[str, int]:
        found: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "max_num_regs": found.regs_per_multiprocessor,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": found.warp_size,
            "sm_clock_rate": found.clock_rate,
            "mem_clock_rate": found.memory_clock_rate,
            "mem_bus_width": found.memory_bus_width,
        }


def bench(function: Callable[[], object], *_: Any, **__: Any) -> float:
    """Return the ms of virtual time that the GPU takes for ``function``: all calls take equally long."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
