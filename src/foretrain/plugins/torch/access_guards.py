"""Reading waits: whoever looks at a gradient or a parameter that is under way gets it when it is whole.

Communication runs on across `optimizer.step()`, so for a while a parameter's last update and a gradient's sum are still
to come. Module hooks alone miss readers (``nn.MultiheadAttention`` uses its ``out_proj.weight`` without calling
``out_proj``; a tied head uses ``embedding.weight``; loggers, clippers and GradScaler read ``.grad``), and a reader that
is missed computes with half of an update, silently. While anything is attached, these therefore ask first:

    parameter.grad, .data, .detach(), .clone(), .cpu(), .numpy(), .tolist(), deepcopy and pickle of a parameter,
    module.<parameter>, module.parameters(), group["params"] of an attached optimizer, zero_grad()

Each costs a look into a dictionary that is empty most of the time. What remains unseen is arithmetic on a list of
parameters kept from before, between ``step()`` and the next forward pass: `Attached.synchronize` is for that.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward as _run_backward


class GradientOwner(Protocol):
    """Owner of gradients that are not in ``.grad``."""

    def fetch(self) -> None:
        """Bring all gradients back, summed."""
        ...

    def drop(self, key: int, zeros: bool) -> None:
        """Forget the gradient of the parameter with this id; ``zeros`` says whether zeros shall take its place."""
        ...


pending_updates: dict[int, Callable[[int], None]] = {}
"""Per id of a parameter whose update is still to come: called with the id, it returns when the update is there."""
held: dict[int, GradientOwner] = {}
"""Per id of a parameter whose gradient is with the scheduler: who has it."""
updating: dict[int, dict[int, torch.Tensor]] = {}
"""Per thread that runs an optimizer in the background: the gradients it shall see, by id of the parameter."""
watching: dict[int, Callable[[int], None]] = {}
"""Per id of a parameter whose first use is being observed: called with the id on every use."""
passes = 0
"""Backward passes begun. One that runs inside of another, as under reentrant checkpointing, is a part of that."""
pass_ends: list[Callable[[], None]] = []
"""Called when the backward pass under way is over, in the thread that called backward(); not if it fails."""

_GRAD: Any = torch._C.TensorBase.grad
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
"""``.grad`` as the C++ side sees it, without asking."""
_DATA: Any = torch._C.TensorBase.data
_TAKING = ("detach", "clone", "cpu", "numpy", "tolist")
"""Methods by which scripts take a parameter's values."""
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__

_SWITCH = 0.0005
"""Seconds a thread may keep the interpreter from another; Python's own 5 ms are longer than most messages take."""

_lock = threading.Lock()
_users = 0
_switch = 0.0
"""What the interpreter had before."""
_originals: list[tuple[type | ModuleType, str, Any]] = []


def install() -> None:
    """Puts the guards in place, and lets threads change more often; counts its callers."""
    global _users, _switch
    with _lock:
        _users += 1
        if _users == 1:
            _switch = sys.getswitchinterval()
            sys.setswitchinterval(min(_switch, _SWITCH))
            _replace(nn.Parameter, "grad", property(_get_grad, _set_grad, _delete_grad))
            _replace(nn.Parameter, "data", property(_after_update(_DATA.__get__), _after_update(_DATA.__set__)))
            for name in _TAKING:
                _replace(nn.Parameter, name, _after_update(getattr(nn.Parameter, name)))
            _replace(nn.Parameter, "__deepcopy__", _after_update(nn.Parameter.__deepcopy__))
            _replace(nn.Parameter, "__reduce_ex__", _after_update(nn.Parameter.__reduce_ex__))
            _replace(nn.Module, "__getattr__", _guarded_getattr(nn.Module.__getattr__))
            _replace(nn.Module, "named_parameters", _guarded_enumeration(nn.Module.named_parameters))
            _replace(nn.Module, "zero_grad", _module_zero_grad)
            _replace(torch.optim.Optimizer, "zero_grad", _optimizer_zero_grad)
            # Not `backward`, which scripts may have imported by its name.
            _replace(torch.autograd, "_engine_run_backward", _counted(_run_backward))


def remove() -> None:
    """Undoes what `install` did when the last of its callers has gone."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            sys.setswitchinterval(_switch)
        while not _users and _originals:
            owner, name, original = _originals.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replace(owner: type | ModuleType, name: str, new: Any) -> None:
    _originals.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, new)


def _get_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    key = id(parameter)
    if updating and (own := updating.get(threading.get_ident())) is not None:
        return own.get(key)
    if held and (holder := held.get(key)) is not None:
        holder.fetch()
    return raw_grad(parameter)


def _set_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    if held and (holder := held.get(id(parameter))) is not None:
        holder.drop(id(parameter), False)
    set_raw_grad(parameter, value)


def _delete_grad(parameter: nn.Parameter) -> None:
    _set_grad(parameter, None)


def _after_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(parameter: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        if (wait := pending_updates.get(id(parameter))) is not None:
            wait(id(parameter))
        return original(parameter, *args, **kwargs)

    return guarded


def _guarded_getattr(original: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        value = original(self, name)
        if (pending_updates or watching) and isinstance(value, nn.Parameter):
            touch(id(value))
        return value

    return __getattr__


def touch(key: int) -> None:
    """The parameter of this id is about to be used."""
    if (wait := pending_updates.get(key)) is not None:
        wait(key)
    if (watch := watching.get(key)) is not None:
        watch(key)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if not accumulate_grad or torch._C._current_graph_task_id() >= 0:
            return original(*args, accumulate_grad=accumulate_grad, **kwargs)
        global passes
        passes += 1
        try:
            result = original(*args, accumulate_grad=accumulate_grad, **kwargs)
            for end in pass_ends:
                end()
            return result
        finally:
            pass_ends.clear()

    return run_backward


def _guarded_enumeration(original: Callable[..., Any]) -> Callable[..., Any]:
    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # What counts is when each is taken, not when this is called.
        for name, parameter in original(self, *args, **kwargs):
            if (wait := pending_updates.get(id(parameter))) is not None:
                wait(id(parameter))
            yield name, parameter

    return named_parameters


class Members(list[Any]):
    """The parameters of an optimizer's group: who takes one out of it gets it updated. Copies are plain lists."""

    def __iter__(self) -> Iterator[Any]:
        for parameter in self.raw():
            if (wait := pending_updates.get(id(parameter))) is not None:
                wait(id(parameter))
            yield parameter

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        for parameter in found if isinstance(place, slice) else [found]:
            if (wait := pending_updates.get(id(parameter))) is not None:
                wait(id(parameter))
        return found

    def raw(self) -> Iterator[Any]:
        """All of them, without waiting."""
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    # Not through parameters(): its guard would wait for updates that clearing gradients does not need.
    for module in self.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                _clear(parameter, set_to_none)


def _clear(parameter: nn.Parameter, set_to_none: bool) -> None:
    if (holder := held.get(id(parameter))) is not None:
        holder.drop(id(parameter), not set_to_none)
    elif (gradient := raw_grad(parameter)) is not None:
        if set_to_none:
            set_raw_grad(parameter, None)
        else:
            gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
            gradient.zero_()


def _optimizer_zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    for group in self.param_groups:
        for parameter in list.__iter__(group["params"]):
            _clear(parameter, set_to_none)
