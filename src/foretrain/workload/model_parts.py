"""The parts of a model by number, and which models cannot be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrain.errors import RecordError

if TYPE_CHECKING:
    import torch

_WRAPPERS = {
    "DataParallel": "record the module inside it, without communication",
    "DistributedDataParallel": "record the module inside it, without communication",
    "FullyShardedDataParallel": "record the model before it is sharded",
    "FSDPModule": "record the model before it is sharded",
    "OptimizedModule": "record the model before torch.compile, which melts layers together",
}


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, by number.

    Attributes:
        modules: qualified names; the model itself is number 0 and carries its class's name.
        parents: of each module, the module that contains it; 0 for the model itself.
        parameters: qualified names, in registration order; a shared parameter once, under its first name.
        owners: of each parameter, the modules that own it directly; more than one when it is shared.
        frozen: parameters that ask for no gradient.
    """

    modules: tuple[str, ...]
    parents: tuple[int, ...]
    parameters: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    frozen: frozenset[int]


def dissect(model: torch.nn.Module) -> Anatomy:
    """The anatomy of ``model``; RecordError when its steps could not be recorded."""
    _check(model)
    number = {name: index for index, (name, _) in enumerate(model.named_modules())}
    owners: dict[int, list[int]] = {}
    for index, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(index)
    named = dict(model.named_parameters())
    return Anatomy(
        modules=tuple(name or type(model).__name__ for name in number),
        parents=tuple(number[name.rpartition(".")[0]] for name in number),
        parameters=tuple(named),
        owners=tuple(tuple(owners[id(parameter)]) for parameter in named.values()),
        frozen=frozenset(index for index, parameter in enumerate(named.values()) if not parameter.requires_grad),
    )


def _check(model: torch.nn.Module) -> None:
    from torch.nn.parameter import is_lazy

    for name, module in model.named_modules():
        for kind in (kind.__name__ for kind in type(module).__mro__):
            if kind in _WRAPPERS:
                raise RecordError(f"{name or 'the model'} is a {kind}; {_WRAPPERS[kind]}")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise RecordError(f"{name or 'the model'} is compiled; {_WRAPPERS['OptimizedModule']}")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise RecordError("the model has lazy parameters without a shape; run one batch through it first")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecordError("no parameter of the model requires a gradient, so there is nothing to exchange")
