"""Triton without a compiler: kernels can be launched on a simulated GPU. See `foretrain.live.device.triton_kernels`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from foretrain.live.device.stand_ins import submodule
from foretrain.live.device.triton_kernels import (
    SimulatedDriver,
    bench,
    launch_triton,
    refuse_compiled,
    run_first_configuration,
)

__version__ = "3.7.1"
__all__ = ["Config", "autotune", "cdiv", "heuristics", "jit", "language", "next_power_of_2", "runtime", "testing"]


def cdiv(x: int, y: int) -> int:
    """Divide, and round up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


class KernelInterface:
    """Kernel that is launched by ``kernel[grid](...)``."""

    run: Callable[..., Any]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        @torch.compiler.disable
        def launch(*args: Any, **named: Any) -> Any:
            return self.run(*args, grid=grid, warmup=False, **named)

        return launch


class JITFunction(KernelInterface):
    """A kernel."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.arg_names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
        self.signature = inspect.signature(fn)

    @property
    def src(self) -> str:
        """Its source without decorators, of which libraries make other kernels."""
        text = textwrap.dedent(inspect.getsource(self.fn))
        return text[text.index(f"def {self.__name__}") :]

    def _unsafe_update_src(self, new_src: str) -> None:
        """Take note of nothing: it is launched by its function."""

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Launch it."""
        if warmup:
            refuse_compiled(self.__name__)
        launch_triton(self.fn, args, named, grid)

    def warmup(self, *args: Any, grid: Any, **named: Any) -> None:
        """Refuse: there is no compiler."""
        refuse_compiled(self.__name__)

    def __call__(self, *args: Any, **named: Any) -> None:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


def jit(fn: Any = None, **options: Any) -> Any:
    """Make a kernel of a function; options are the compiler's."""
    return JITFunction(fn) if fn is not None else JITFunction


class Config:
    """A choice of ``autotune``."""

    def __init__(
        self,
        kwargs: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        pre_hook: Callable[[dict[str, Any]], object] | None = None,
        **_: Any,
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages, self.num_ctas = kwargs, num_warps, num_stages, num_ctas
        self.maxnreg, self.pre_hook = maxnreg, pre_hook

    def all_kwargs(self) -> dict[str, Any]:
        """Return the arguments that it chooses, and the compiler's options."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Autotuner(KernelInterface):
    """A kernel with several configurations."""

    run = run_first_configuration

    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: list[Config],
        key: Sequence[str] | None = None,
        reset_to_zero: Sequence[str] | None = None,
        restore_value: Sequence[str] | None = None,
        pre_hook: Callable[..., object] | None = None,
        post_hook: Callable[..., object] | None = None,
        prune_configs_by: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        self.fn, self.arg_names, self.configs = fn, arg_names, configs or [Config({})]
        self.keys, self.cache, self.best_config = list(key or ()), dict[Any, Config](), self.configs[0]
        self.reset_to_zero, self.restore_value = list(reset_to_zero or ()), list(restore_value or ())
        self.user_defined_pre_hook, self.user_defined_post_hook = pre_hook is not None, post_hook is not None
        self.pre_hook, self.post_hook = pre_hook, post_hook  # of trials, which there are none of
        self.early_config_prune = (prune_configs_by or {}).get("early_config_prune")


def autotune(configs: list[Config], key: Any = None, **options: Any) -> Callable[[Any], Autotuner]:
    """Give a kernel configurations to choose from."""
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, **options)


class Heuristics(KernelInterface):
    """A kernel some of whose arguments follow from others."""

    def __init__(self, fn: Any, arg_names: list[str], values: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        self.fn, self.arg_names, self.values = fn, arg_names, values

    def run(self, *args: Any, **named: Any) -> Any:
        """Launch the kernel with the arguments that follow."""
        for name, value in self.values.items():
            named[name] = value({**dict(zip(self.arg_names, args, strict=False)), **named})
        return self.fn.run(*args, **named)


def heuristics(values: dict[str, Callable[[dict[str, Any]], Any]]) -> Callable[[Any], Heuristics]:
    """Have arguments of a kernel computed from others."""
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def set_allocator(allocator: Callable[..., object]) -> None:
    """Take note of nothing: no kernel asks for memory of its own."""


class GPUTarget(NamedTuple):
    """Triton's description of a GPU."""

    backend: str
    arch: int
    warp_size: int


class TensorDescriptor(NamedTuple):
    """A tensor that is read in blocks by Hopper's Tensor Memory Accelerator."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: list[int], padding: str = "zero") -> TensorDescriptor:
        """Describe all of a tensor."""
        return cls(tensor, list(tensor.shape), list(tensor.stride()), block_shape, padding)


class CompiledKernel:
    """The type of compiled kernels, of which there are none."""


class OutOfResources(Exception):
    """A kernel needs more registers or shared memory than there are; never raised here."""


class dtype:  # noqa: N801
    """A type of numbers, or of pointers to them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"


class constexpr:  # noqa: N801
    """A value that is known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Name:
    """A function or type of the language: what is made of it is named, and nothing else."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> _Name:
        return _Name(f"{self.__name__}(...)")  # e.g. the type of a pointer, which annotates a parameter

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


def placeholder(name: str) -> Any:
    """Return what stands for a name of the language."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name)


_TYPES = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8e4nv", "float8e5", "float8e4b15", "float16", "bfloat16", "float32", "float64", "void"),
)

_driver = SimpleNamespace(active=SimulatedDriver(GPUTarget), set_active=lambda driver: None)
_autotuner = (Autotuner, Config, Heuristics, OutOfResources)
language = submodule(
    f"{__name__}.language",
    dtype,
    constexpr,
    **{name: dtype(name) for name in _TYPES},
    __getattr__=placeholder,
)
submodule(f"{__name__}.runtime.jit", JITFunction, KernelInterface)
submodule(f"{__name__}.runtime.autotuner", *_autotuner)
submodule(f"{__name__}.runtime.driver", driver=_driver)
# After its modules: as in Triton, runtime.driver is the driver, not the module.
runtime = submodule(f"{__name__}.runtime", JITFunction, KernelInterface, *_autotuner, driver=_driver)
testing = submodule(f"{__name__}.testing", do_bench=bench, do_bench_cudagraph=bench)
submodule(f"{__name__}.compiler", CompiledKernel)
submodule(f"{__name__}.backends.compiler", GPUTarget)
submodule(f"{__name__}.tools.tensor_descriptor", TensorDescriptor)
