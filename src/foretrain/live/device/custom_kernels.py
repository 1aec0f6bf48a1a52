"""Kernels that are not PyTorch's, launched by the script: an operator that stands for all of them.

A kernel of Triton or of an extension is compiled code, which nothing here runs. What it would do is one launch: it
takes the time that its name is known to take, or else that of the bytes of its tensors, and what it writes has no
values.

# Note [Extensions]
Extensions that a script compiles by ``torch.utils.cpp_extension``: each function is one kernel. There is no compiler
for them, and nothing that could run what it makes. A function's signature in C++ tells what it returns: nothing, or a
tensor, which is taken to be like the first that it is given. What is otherwise, a file of costs says
(`foretrain.device.kernel_costs`). Extensions for CPUs are compiled and run as always.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from foretrain.device.calls import Meta, moved, tensors_in
from foretrain.device.kernel_costs import KernelArguments, KernelCosts, Shape, evaluate
from foretrain.errors import ConfigError
from foretrain.live.device import change_after_import, put

LAUNCH: Final = "foretrain::kernel"
"""The operator, as the extension asks for its cost: a name, names of arguments, tensors written, tensors read, numbers.

A tensor that is both stands in both lists. Names are those of the lists one after the other, each with its position
among the arguments and a space before it."""
RESULT: Final = "result"
"""Placeholder of the position for a tensor that the caller gets back."""


def install() -> torch.library.Library:
    """Register the operator; it lives as long as the returned library."""
    library = torch.library.Library("foretrain", "DEF")
    library.define("kernel(str name, str[] names, Tensor(a!)[] written, Tensor[] read, int[] numbers) -> ()")
    library.impl("kernel", lambda name, names, written, read, numbers: None, "Meta")
    return library


def launch(
    name: str,
    arguments: Mapping[str, Any],
    read: Collection[str] | None = None,
    written: Collection[str] | None = None,
    results: Sequence[torch.Tensor] = (),
) -> None:
    """Launch a kernel on the current stream.

    Args:
        name: with what it belongs to, e.g. ``"liger_kernel.ops.rope._triton_rope"``.
        arguments: by name; other than tensors and whole numbers they do not matter for its time.
        read: names of tensors that it loads; None if that cannot be told.
        written: names of tensors that it stores. If neither can be told, all are taken to be written once.
        results: tensors that it has made for its caller, and stores.
    """
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    for key, tensor in tensors.items():
        if tensor.device.type == "cpu" and tensor.dim():
            raise ValueError(f"Pointer argument {key} of kernel {name} cannot be accessed from the GPU (cpu tensor?)")
    if read is None or written is None:
        read, written = (), tensors
    stores = [key for key in tensors if key in written]
    loads = [key for key in tensors if key in read]
    if not tensors and not results:
        results = (torch.empty(0, device="cuda"),)  # an operator is the GPU's by a tensor
    numbers = [key for key, value in arguments.items() if isinstance(value, int)]
    place = {key: number for number, key in enumerate(arguments)}
    names = [f"{place[key]} {key}" for key in stores]
    names += [f"{RESULT} {number}" for number in range(len(results))]
    names += [f"{place[key]} {key}" for key in (*loads, *numbers)]
    with torch._C._AutoDispatchBelowAutograd():  # as a launch is: the library's own backward pass knows of it
        torch.ops.foretrain.kernel(
            name,
            names,
            [*(tensors[key] for key in stores), *results],
            [tensors[key] for key in loads],
            [int(arguments[key]) for key in numbers],
        )


class Like(NamedTuple):
    """Result of a fused kernel: a tensor of this shape, where one is given, and otherwise like another."""

    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def make(self) -> torch.Tensor:
        """Return an empty tensor."""
        shape = self.tensor.shape if self.shape is None else self.shape
        return self.tensor.new_empty(shape, dtype=self.dtype or self.tensor.dtype)


def fused(name: str, inputs: tuple[torch.Tensor, ...], *results: Like, **numbers: int) -> Any:
    """Return the results, one or a tuple, of a kernel that a library has for its forward and its backward pass.

    Each reads its inputs once and writes its results once; the one backward has the inputs and the results' gradients.
    A file of costs knows inputs as ``input0``, ``input1`` and so on, and ``numbers`` by their names.
    """
    made = _Fused.apply(name, results, numbers, *inputs)
    return made[0] if len(results) == 1 else made


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, results: tuple[Like, ...], numbers: Mapping[str, int], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = tuple(one.make() for one in results)
        _launch_fused(name, inputs, made, numbers)
        ctx.name, ctx.numbers = name, numbers
        ctx.save_for_backward(*inputs)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        inputs = ctx.saved_tensors  # asked for once: PyTorch raises the second time where activations are checkpointed
        wanted = ctx.needs_input_grad[3:]
        made = tuple(torch.empty_like(one) if want else None for one, want in zip(inputs, wanted, strict=True))
        given = tuple(one for one in gradients if one is not None)
        written = tuple(one for one in made if one is not None)
        _launch_fused(f"{ctx.name}_backward", (*inputs, *given), written, ctx.numbers)
        return None, None, None, *made


def _launch_fused(
    name: str, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], numbers: Mapping[str, int]
) -> None:
    read = {f"input{place}": tensor for place, tensor in enumerate(inputs)}
    launch(name, {**read, **numbers}, read, (), results)


def install_extensions(costs: KernelCosts, warn: Callable[[str], None]) -> None:
    """Stand in for extensions with sources for GPUs, once the module that compiles them is imported."""

    def change(module: ModuleType) -> None:
        plain_load, plain_inline = module.load, module.load_inline

        def load(name: str, sources: str | PathLike[str] | Sequence[Any], *rest: Any, **named: Any) -> Any:
            paths = [fspath(each) for each in ([sources] if isinstance(sources, str | PathLike) else sources)]
            if not any(path.endswith((".cu", ".cuh")) for path in paths):
                return plain_load(name, sources, *rest, **named)
            texts = [Path(path).read_text(encoding="utf-8") for path in paths]
            return _extension(name, texts, None, named, costs, warn)

        def load_inline(
            name: str,
            cpp_sources: str | Sequence[str],
            cuda_sources: str | Sequence[str] | None = None,
            sycl_sources: Any = None,
            functions: Any = None,
            *rest: Any,
            **named: Any,
        ) -> Any:
            if not cuda_sources:
                return plain_inline(name, cpp_sources, cuda_sources, sycl_sources, functions, *rest, **named)
            texts = [text for one in (cpp_sources, cuda_sources) for text in ([one] if isinstance(one, str) else one)]
            chosen = [functions] if isinstance(functions, str) else functions
            return _extension(name, texts, chosen, named, costs, warn)

        put(module, load=load, load_inline=load_inline)

    change_after_import({"torch.utils.cpp_extension": change})


def _extension(
    name: str,
    texts: Sequence[str],
    chosen: Iterable[str] | None,
    options: Mapping[str, Any],
    costs: KernelCosts,
    warn: Callable[[str], None],
) -> ModuleType:
    """Return a module with the functions that are ``chosen``, or that the sources bind for Python."""
    if not options.get("is_python_module", True):
        raise ConfigError(
            "load",
            name,
            "registers operators in C++, which a simulation does not compile",
            "register them by torch.library.define and torch.library.register_fake instead",
        )
    source = without_comments("\n".join(texts))
    if "TORCH_LIBRARY" in source:
        warn(
            f"{name} registers operators in C++ (TORCH_LIBRARY), which a simulation does not compile: torch.ops lacks"
            " them; register them by torch.library.define and torch.library.register_fake instead"
        )
    if chosen is not None:
        bound = {function: _signature(source, function) for function in chosen}
    else:
        bound = {found[1]: _bound(source, found) for found in _BINDING.finditer(source)}
    module = ModuleType(name, "Stands for an extension that is not compiled.")
    for exposed, signature in bound.items():
        setattr(module, exposed, _ExtensionFunction(f"{name}.{exposed}", signature, costs, warn))
    return module


_Signature: TypeAlias = tuple[str, tuple[str, ...]]
"""The type that a function returns, empty if that is not known, and the names of its parameters."""

_BINDING = re.compile(
    r'\.def\(\s*"(\w+)"\s*,\s*(?:torch::wrap_pybind_function\s*\(\s*)?&?\s*'
    r"(?:(?:\w+::)*(\w+)|\[[^\]]*\]\s*\(([^;{]*?)\)\s*(?:->\s*([\w:]+(?:\s*<[^;{}()]*>)?)\s*)?\{)"
)
"""A function that pybind11 exposes: its name for Python, and that in C++, or a lambda's parameters and result."""


def _bound(source: str, found: re.Match[str]) -> _Signature:
    """Return the signature of what a match of `_BINDING` exposes."""
    if found[2] is not None:
        return _signature(source, found[2])
    return re.sub(r"\s", "", found[4] or ""), _names(found[3])


class _ExtensionFunction:
    """A function of an extension.

    Args:
        name: of the kernel.
        signature: of the function in C++.
        costs: what the user says of kernels.
        warn: tells the user what is assumed.
    """

    def __init__(self, name: str, signature: _Signature, costs: KernelCosts, warn: Callable[[str], None]) -> None:
        self.__name__, self._warn = name, warn
        self._returns, self._parameters = signature
        said = costs.find(name, name.rpartition(".")[2], entries=lambda entry: entry.results is not None)
        self._results = () if self._returns == "void" else None
        if said is not None:
            self._results = said.results

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Launch it, and return what it would."""
        arguments = self._named(args) | named
        values = list(arguments.values())
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        if not places:
            return self._without_tensors()
        if self._results is None:
            self._results = (self._first(places[0]),)
        metas = tuple(map(_meta, values))
        given = KernelArguments(tuple(arguments), metas, moved(*tensors_in(metas)))
        results = [self._result(shape, values, given, values[places[0]]) for shape in self._results]
        names = [list(arguments)[place] for place in places]
        # Without results it writes what it is given.
        launch(self.__name__, arguments, names if results else (), () if results else names, results)
        return None if not results else results[0] if len(results) == 1 else results

    def _without_tensors(self) -> None:
        """Do nothing, as e.g. a function that sets something up; ConfigError if it would return something."""
        if self._returns not in ("", "void"):
            problem = f"returns {self._returns}, which a simulation, that compiles no C++, cannot know"
            raise ConfigError("kernel", self.__name__, problem, "compute it in Python, at least in simulations")
        if not self._returns:
            self._warn(f"{self.__name__} is taken to return nothing, as it is given no tensor")

    def _first(self, place: int) -> int:
        """Return the position of the argument that the result is taken to be like; ConfigError if there are several."""
        if self._returns.rpartition("::")[2] != "Tensor":
            problem = (
                f"returns {self._returns or 'what its source does not tell'}, whose shapes a simulation cannot know"
            )
            remedy = "say them in a file (--costs): [[kernel]] with this name and e.g. results = [0, ['dim(0, 0)', 64]]"
            raise ConfigError("kernel", self.__name__, problem, remedy)
        self._warn(
            f"{self.__name__} is taken to return a tensor like the first that it is given; if it does not, say so by"
            " 'results' in a file (--costs)"
        )
        return place

    def _named(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return arguments by their names in C++, where those are known; of a list, each tensor by itself."""
        found: dict[str, Any] = {}
        for place, value in enumerate(args):
            name = self._parameters[place] if place < len(self._parameters) else f"argument{place}"
            whole = not isinstance(value, list | tuple)
            found |= {name: value} if whole else {f"{name}{k}": one for k, one in enumerate(value)}
        return found

    def _result(self, shape: Shape, values: Sequence[Any], given: KernelArguments, first: torch.Tensor) -> torch.Tensor:
        if isinstance(shape, tuple):
            return first.new_empty([round(evaluate(one, given, "results")) for one in shape])
        if shape >= len(values) or not isinstance(values[shape], torch.Tensor):
            problem = f"is not the position of a tensor that {self.__name__} is given"
            raise ConfigError("results", shape, problem, "count arguments from 0")
        return torch.empty_like(values[shape])


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Meta(tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch."), str(value.device))


def without_comments(source: str) -> str:
    """Return a source in C++ without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def _signature(source: str, function: str) -> _Signature:
    """Return what the source says of a function in C++."""
    declared = rf"([\w:]+(?:\s*<[^;{{}}()]*>)?)[\s&]+{re.escape(function)}\s*\(([^;{{}}]*?)\)\s*[;{{]"
    for returns, parameters in re.findall(declared, source):
        if returns not in ("return", "else", "new"):
            return re.sub(r"\s", "", returns), _names(parameters)
    return "", ()


def _names(parameters: str) -> tuple[str, ...]:
    """Return the names of parameters in C++."""
    plain = re.sub(r"<[^<>]*>|=[^,]*", "", parameters)
    return tuple(re.findall(r"(\w+)\s*(?:,|$)", plain.strip()))
