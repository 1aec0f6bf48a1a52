"""Kernels that are not PyTorch's, launched by the script: an operator that stands for all of them.

A kernel of Triton or of an extension is compiled code, which nothing here runs. What it would do is one launch: it
takes the time that its name is known to take, or else that of the bytes of its tensors, and what it writes has no
values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

LAUNCH: Final = "foretrain::kernel"
"""The operator, as the extension asks for its cost: a name, names of arguments, tensors written, tensors read, numbers.

A tensor that is both stands in both lists. Names are those of the lists one after the other, each with its position
among the arguments and a space before it."""
RESULT: Final = "result"
"""What stands in place of the position for a tensor that the caller gets back."""


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


def fused(name: str, inputs: tuple[torch.Tensor, ...], *results: Like) -> Any:
    """Return the results, one or a tuple, of a kernel that a library has for its forward and its backward pass.

    Each reads its inputs once and writes its results once; the one backward has the inputs and the results' gradients.
    """
    made = _Fused.apply(name, results, *inputs)
    return made[0] if len(results) == 1 else made


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, results: tuple[Like, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = tuple(one.make() for one in results)
        _launch_fused(name, inputs, made)
        ctx.name = name
        ctx.save_for_backward(*inputs)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        made = tuple(
            torch.empty_like(one) if want else None for one, want in zip(ctx.saved_tensors, wanted, strict=True)
        )
        given = tuple(one for one in gradients if one is not None)
        _launch_fused(
            f"{ctx.name}_backward", (*ctx.saved_tensors, *given), tuple(one for one in made if one is not None)
        )
        return None, None, *made


def _launch_fused(name: str, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
    read = {f"input{place}": tensor for place, tensor in enumerate(inputs)}
    launch(name, read, read, (), results)
