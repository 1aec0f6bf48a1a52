"""Hooks that vanish when what they are on is copied or pickled.

``copy.deepcopy(model)`` makes an EMA, ``torch.save(model)`` a file: neither may carry threads and sockets along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn


class Handle(Protocol):
    """What registering a hook returns."""

    def remove(self) -> None:
        """Unregisters it."""
        ...


class Hook:
    """Calls ``call`` with nothing but what it was made with; its copies do nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Whatever the hook is handed is not its business."""
        self._call()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Hook, (nothing,))


def nothing() -> None:
    """What a copied hook does."""


def entrances(model: nn.Module) -> list[tuple[nn.Module, tuple[nn.Parameter, ...]]]:
    """Where a forward pass of ``model`` first needs which parameters: modules, and what they own.

    A compiled module is entered as a whole: a wait inside of it would break its graph, so it stands for everything
    below it.
    """
    found: list[tuple[nn.Module, tuple[nn.Parameter, ...]]] = []
    _collect(model, found, set())
    return found


def _collect(module: nn.Module, found: list[tuple[nn.Module, tuple[nn.Parameter, ...]]], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if is_compiled(module):
        found.append((module, tuple(module.parameters())))
        seen.update(id(child) for child in module.modules())
        return
    own = tuple(parameter for parameter in module._parameters.values() if parameter is not None)
    if own:
        found.append((module, own))
    for child in module.children():
        _collect(child, found, seen)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling ``module`` runs a compiled graph: ``torch.compile(module)`` or ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def before_forward(module: nn.Module, call: Callable[[], None]) -> Handle:
    """Runs ``call`` before each forward pass of ``module``, and outside of its graph if it is compiled."""
    if module._compiled_call_impl is None:
        return module.register_forward_pre_hook(Hook(call))
    return _around(module, call, nothing)


def after_forward(module: nn.Module, call: Callable[[], None]) -> Handle:
    """Runs ``call`` after each forward pass of ``module``, and outside of its graph if it is compiled."""
    if module._compiled_call_impl is None:
        return module.register_forward_hook(Hook(call))
    return _around(module, nothing, call)


def hide_from_compiler() -> None:
    """Makes torch.compile step around this package's hooks in models that are compiled after they were attached."""
    from torch._dynamo import trace_rules

    trace_rules.add("foretrain.plugins.torch")


def _around(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Handle:
    inner: Any = module._compiled_call_impl

    def entered(*arguments: Any, **options: Any) -> Any:
        before()
        result = inner(*arguments, **options)
        after()
        return result

    module._compiled_call_impl = entered
    return _Restore(module, inner)


class _Restore:
    """Undoes `_around`."""

    def __init__(self, module: nn.Module, inner: Any) -> None:
        self._module, self._inner = module, inner

    def remove(self) -> None:
        """Puts the compiled call back."""
        self._module._compiled_call_impl = self._inner


def remove_all(handles: Iterable[Handle]) -> None:
    """Unregisters all, the last first: where several are around one module, each restores what it found."""
    for handle in reversed(list(handles)):
        handle.remove()
