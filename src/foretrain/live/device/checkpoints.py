"""Checkpoints that the script saves: how many bytes, and for how long the call stops the script.

Counted are tensors that ``torch.save``, `torch.distributed.checkpoint`, Megatron-LM's ``dist_checkpointing.save`` and
``safetensors.torch.save_file`` write, also from the host's memory. Where one calls another, the outermost counts.
Writing takes no virtual time; copies to the host and messages do, and so does nothing in other threads of the script.

# Note [Shares of a checkpoint]
A live rank writes its own part. What do the ranks write that it represents? Of a file, nothing is known: scripts save
files on one rank or on all. `torch.distributed.checkpoint` divides every tensor, whole or sharded, among the ranks that
hold it, so that each byte is written once. A tensor in p parts, held by n ranks that are alike, is written by all of
them as min(n, p) such parts. So a save is told as bytes by number of parts, with 0 for files.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from foretrain.live.device import change_after_import, put
from foretrain.live.device.script import script_line
from foretrain.live.event_log import CHECKPOINT

_DISTRIBUTED = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing"
_TORCH_SAVE = "torch.save"
_FILE = 0
"""Number of parts that stands for a file; see Note [Shares of a checkpoint]."""


def install(device: ModuleType) -> None:
    """Tell of what the script saves in the rank's log."""
    saves = _Saves(device)
    counted_save = saves.counting(_TORCH_SAVE, torch.save)
    for module in (torch, torch.serialization):
        put(module, save=counted_save)
    _count_records(saves)
    change_after_import(
        {
            _DISTRIBUTED: functools.partial(_count_plans, saves),
            f"{_MEGATRON}.serialization": functools.partial(_replace, saves, ("save",), f"{_MEGATRON}.save"),
            "safetensors.torch": functools.partial(_count_safetensors, saves),
        }
    )


class _Saves:
    """The save under way: the outermost call, and the bytes that it has written so far by number of parts."""

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self.call = ""
        self._shares: Counter[int] = Counter()

    def add(self, size: int, parts: int = _FILE) -> None:
        """Count ``size`` bytes of a tensor that ``parts`` of this size make."""
        self._shares[parts] += size

    @contextmanager
    def saving(self, call: str, place: tuple[str, int]) -> Iterator[None]:
        """Tell of a save by ``call`` at ``place``, a file and its line, unless it belongs to another."""
        if self.call:
            yield
            return
        device, waits = self._device, threading.current_thread() is threading.main_thread()
        self.call, begin, before = call, device.host(), device.record()
        try:
            yield
            if shares := dict(self._shares):
                told = json.dumps([call, "{}:{}".format(*place), list(shares.items())]).encode()
                device.note(CHECKPOINT, begin if waits else device.host(), before, told)
        finally:
            self.call = ""
            self._shares.clear()

    def counting(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which users know as ``call``, with its saves told of."""

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            with self.saving(call, script_line()):
                return function(*arguments, **named)

        return counted


def _count_records(saves: _Saves) -> None:
    """Count the storages that torch.save writes."""
    writer = torch._C.PyTorchFileWriter
    plain = writer.write_record

    def write_record(self: Any, name: str, data: Any, size: int) -> None:
        if saves.call == _TORCH_SAVE and name.startswith("data/"):
            saves.add(size)
        plain(self, name, data, size)

    put(writer, write_record=write_record)


def _count_plans(saves: _Saves, package: ModuleType) -> None:
    """Count the tensors that plans of `torch.distributed.checkpoint`, and so of Megatron-LM, have this rank write."""
    _replace(saves, ("save", "async_save", "save_state_dict"), "", sys.modules[f"{_DISTRIBUTED}.state_dict_saver"])
    planner = sys.modules[f"{_DISTRIBUTED}.default_planner"].__dict__["DefaultSavePlanner"]
    plain = planner.finish_plan

    def finish_plan(self: Any, new_plan: Any) -> Any:
        plan = plain(self, new_plan)
        for item in plan.items if saves.call.startswith((_DISTRIBUTED, _MEGATRON)) else ():
            if (tensor := item.tensor_data) is not None:
                sizes = tensor.chunk.sizes
                parts = math.prod(-(-whole // max(part, 1)) for whole, part in zip(tensor.size, sizes, strict=True))
                saves.add(math.prod(sizes) * tensor.properties.dtype.itemsize, parts)
        return plan

    put(planner, finish_plan=finish_plan)


def _replace(saves: _Saves, names: tuple[str, ...], call: str, module: ModuleType) -> None:
    """Count what functions of ``module`` save, wherever its package has imported them."""
    package = module.__name__.rpartition(".")[0]
    for name in names:
        plain = getattr(module, name)
        counted = saves.counting(call or f"{package}.{name}", plain)
        for each in [each for key, each in sys.modules.items() if key.startswith(package)]:
            if getattr(each, name, None) is plain:
                put(each, **{name: counted})


def _count_safetensors(saves: _Saves, module: ModuleType) -> None:
    plain = module.save_file

    @functools.wraps(plain)
    def save_file(tensors: Mapping[str, torch.Tensor], *rest: Any, **named: Any) -> None:
        with saves.saving("safetensors.torch.save_file", script_line()):
            if saves.call == "safetensors.torch.save_file":
                saves.add(sum(tensor.nbytes for tensor in tensors.values()))
            plain(tensors, *rest, **named)

    put(module, save_file=save_file)
