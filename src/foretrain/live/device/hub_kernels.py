"""Kernels that scripts download by the package `kernels`: FlashAttention has a stand-in, since it runs on GPUs only."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from foretrain.live.device import change_after_import, put

_FLASH = re.compile(r"flash[-_]?att(?:n|ention)[-_]?([23]?)$")
"""Names of repositories, e.g. kernels-community/flash-attn3, varunneal/flash-attention-3; 2 if they do not say."""
_LAST = 9
"""Compute capability of the last GPUs that FlashAttention 3 has kernels for."""


def install(tell: Callable[[str], None]) -> None:
    """Let ``kernels.get_kernel`` hand out stand-ins for FlashAttention.

    Args:
        tell: called with the name of each repository that FlashAttention 3's stands for.
    """

    def change(module: ModuleType) -> None:
        plain, plainly_has = module.get_kernel, module.has_kernel

        def get_kernel(repo_id: str, *rest: Any, **named: Any) -> Any:
            if (found := _FLASH.search(repo_id)) is None:
                return plain(repo_id, *rest, **named)
            if found[1] != "3":
                return importlib.import_module("flash_attn")  # which tells of itself where it is a stand-in
            if not _has_third():
                capability = ".".join(map(str, torch.cuda.get_device_capability()))
                raise RuntimeError(f"{repo_id}: FlashAttention 3 has no kernels for GPUs of capability {capability}")
            tell(repo_id)
            return importlib.import_module("foretrain.live.device.stand_ins.flash_attn_3")

        def has_kernel(repo_id: str, *rest: Any, **named: Any) -> bool:
            if (found := _FLASH.search(repo_id)) is None:
                return plainly_has(repo_id, *rest, **named)
            return found[1] != "3" or _has_third()

        put(module, get_kernel=get_kernel, has_kernel=has_kernel)

    change_after_import({"kernels": change})


def _has_third() -> bool:
    return torch.cuda.get_device_capability()[0] <= _LAST
