"""Forward hooks of an attached model.

Copies of a hook do nothing: ``copy.deepcopy(model)`` makes an EMA, ``torch.save(model)`` a file, and neither may carry
threads and sockets along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Hook:
    """Hook that ignores its arguments and calls ``call``; its copies do nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Call ``call`` without arguments."""
        self._call()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Hook, (nothing,))


def nothing() -> None:
    """Do nothing, as a copied hook."""


def parameter_modules(model: nn.Module) -> list[tuple[nn.Module, tuple[nn.Parameter, ...]]]:
    """Return the modules that own parameters, each with its own.

    A compiled module comes with all parameters below it: a wait inside of it would break its graph.
    """
    found: list[tuple[nn.Module, tuple[nn.Parameter, ...]]] = []
    covered: set[nn.Module] = set()
    for module in model.modules():
        if module not in covered:
            compiled = is_compiled(module)
            if compiled:
                covered.update(module.modules())
            own = tuple(module.parameters(recurse=compiled))
            if own or compiled:
                found.append((module, own))
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling ``module`` runs a compiled graph: ``torch.compile(module)`` or ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def before_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Run ``call`` before each forward pass of ``module``, outside of a compiled graph; return what undoes it."""
    if module._compiled_call_impl is None:
        return module.register_forward_pre_hook(Hook(call)).remove
    return _wrap_compiled(module, call, nothing)


def after_forward(module: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Run ``call`` after each forward pass of ``module``, outside of a compiled graph; return what undoes it."""
    if module._compiled_call_impl is None:
        return module.register_forward_hook(Hook(call)).remove
    return _wrap_compiled(module, nothing, call)


def hide_from_compiler() -> None:
    """Keep torch.compile from tracing this package's hooks in models that are compiled after they were attached."""
    from torch._dynamo import trace_rules

    trace_rules.add("foretrain.plugins.torch")


def _wrap_compiled(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    inner: Any = module._compiled_call_impl

    def entered(*arguments: Any, **options: Any) -> Any:
        before()
        result = inner(*arguments, **options)
        after()
        return result

    module._compiled_call_impl = entered
    return partial(setattr, module, "_compiled_call_impl", inner)
