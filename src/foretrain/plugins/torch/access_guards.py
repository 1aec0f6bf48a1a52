"""Guards of accesses to parameters and gradients: a reader waits until the pending update or sum is complete.

Communication runs on across `optimizer.step()`, so for a while a parameter's last update and a gradient's sum are
pending. Module hooks alone miss readers (``nn.MultiheadAttention`` uses its ``out_proj.weight`` without calling
``out_proj``; a tied head uses ``embedding.weight``; loggers, clippers and GradScaler read ``.grad``), and a missed
reader computes with half of an update, silently. While anything is attached, these accesses therefore wait:

    parameter.grad, .data, .detach(), .clone(), .cpu(), .numpy(), .tolist(), deepcopy and pickle of a parameter,
    module.<parameter>, module.parameters(), group["params"] of an attached optimizer, zero_grad()

Each costs a lookup in a dictionary that is empty most of the time. Arithmetic on a list of parameters made earlier,
between ``step()`` and the next forward pass, is not guarded: call `Attached.synchronize` before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
        """Clear the gradient of the parameter with this id, to zeros or None."""
        ...


pending_updates: dict[int, Callable[[int], None]] = {}
"""By id of a parameter with a pending update: waits for the update, called with the id."""
held: dict[int, GradientOwner] = {}
"""By id of a parameter whose gradient is not in ``.grad``: the gradient's owner."""
updating: dict[int, dict[int, torch.Tensor]] = {}
"""By thread that runs an optimizer in the background: the gradients it sees, by id of the parameter."""
watching: dict[int, Callable[[int], None]] = {}
"""By id of a parameter whose first use is observed: called with the id on every use."""
passes = 0
"""Backward passes begun. One inside of another, as under reentrant checkpointing, does not count."""
pass_begins: list[Callable[[Sequence[torch.Tensor]], None]] = []
"""Functions to call before each backward pass that counts, with the tensors that it begins with."""
pass_ends: list[Callable[[], None]] = []
"""Functions to call at the end of the current backward pass, on its thread; not if the pass fails."""

_GRAD: Any = torch._C.TensorBase.grad
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
"""Unguarded getter of ``.grad``."""
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__
"""Unguarded setter of ``.grad``."""
_DATA: Any = torch._C.TensorBase.data
_READING = ("detach", "clone", "cpu", "numpy", "tolist")
"""Methods by which scripts read a parameter's values."""

_SWITCH_INTERVAL = 0.0005
"""Seconds a thread may keep the interpreter; Python's own 5 ms are longer than most messages take."""

_lock = threading.Lock()
_users = 0
_original_switch_interval = 0.0
_originals: list[tuple[type | ModuleType, str, Any]] = []


def install() -> None:
    """Install the guards and shorten the interpreter's switch interval; counts its calls."""
    global _users, _original_switch_interval
    with _lock:
        _users += 1
        if _users == 1:
            _original_switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_original_switch_interval, _SWITCH_INTERVAL))
            _replace(nn.Parameter, "grad", property(_get_grad, _set_grad, lambda parameter: _set_grad(parameter, None)))
            _replace(nn.Parameter, "data", property(_after_update(_DATA.__get__), _after_update(_DATA.__set__)))
            for name in (*_READING, "__deepcopy__", "__reduce_ex__"):
                _replace(nn.Parameter, name, _after_update(getattr(nn.Parameter, name)))
            _replace(nn.Module, "__getattr__", _guarded_getattr(nn.Module.__getattr__))
            _replace(nn.Module, "named_parameters", _guarded_enumeration(nn.Module.named_parameters))
            _replace(nn.Module, "zero_grad", _module_zero_grad)
            _replace(torch.optim.Optimizer, "zero_grad", _optimizer_zero_grad)
            # Not `backward`, which scripts may have imported by name.
            _replace(torch.autograd, "_engine_run_backward", _counted(_run_backward))


def remove() -> None:
    """Undo `install` when called as often as that."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            sys.setswitchinterval(_original_switch_interval)
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
    if held and (owner := held.get(key)) is not None:
        owner.fetch()
    return raw_grad(parameter)


def _set_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    if held and (owner := held.get(id(parameter))) is not None:
        owner.drop(id(parameter), False)
    set_raw_grad(parameter, value)


def _after_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(parameter: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        _wait_for_update(parameter)
        return original(parameter, *args, **kwargs)

    return guarded


def _guarded_getattr(original: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        value = original(self, name)
        if (pending_updates or watching) and isinstance(value, nn.Parameter):
            touch(id(value))
        return value

    return __getattr__


def _wait_for_update(parameter: nn.Parameter) -> None:
    if (wait := pending_updates.get(id(parameter))) is not None:
        wait(id(parameter))


def touch(key: int) -> None:
    """Wait for the pending update of the parameter with this id, and report its use to the observer."""
    if (wait := pending_updates.get(key)) is not None:
        wait(key)
    if (watch := watching.get(key)) is not None:
        watch(key)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(roots: Sequence[torch.Tensor], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if not accumulate_grad or torch._C._current_graph_task_id() >= 0:
            return original(roots, *args, accumulate_grad=accumulate_grad, **kwargs)
        global passes
        passes += 1
        for begin in pass_begins:
            begin(roots)
        try:
            result = original(roots, *args, accumulate_grad=accumulate_grad, **kwargs)
            for end in pass_ends:
                end()
            return result
        finally:
            pass_ends.clear()

    return run_backward


def _guarded_enumeration(original: Callable[..., Any]) -> Callable[..., Any]:
    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # Wait when each parameter is taken, not when this is called.
        for name, parameter in original(self, *args, **kwargs):
            _wait_for_update(parameter)
            yield name, parameter

    return named_parameters


class Members(list[Any]):
    """List of a parameter group's parameters whose readers wait for pending updates. Copies are plain lists."""

    def __iter__(self) -> Iterator[Any]:
        for parameter in self.raw():
            _wait_for_update(parameter)
            yield parameter

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        for parameter in found if isinstance(place, slice) else [found]:
            _wait_for_update(parameter)
        return found

    def raw(self) -> Iterator[Any]:
        """Return an iterator that does not wait."""
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    # Not through parameters(), whose guard would wait for updates.
    for module in self.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                _clear(parameter, set_to_none)


def _clear(parameter: nn.Parameter, set_to_none: bool) -> None:
    if (owner := held.get(id(parameter))) is not None:
        owner.drop(id(parameter), not set_to_none)
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
