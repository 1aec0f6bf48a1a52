"""Distributed checkpoints of ranks most of which are represented by others.

Represented ranks tell what their representative tells, so the plan of a checkpoint has the representative's parts many
times over, and theirs not at all. What is written is the live ranks' share, and that
is what they read again.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from foretrain.fakecuda.replacing import put

_PLANNER = "torch.distributed.checkpoint.default_planner"


def install() -> None:
    """Lets such plans pass; not before the module that checks them is imported, which takes seconds."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PLANNER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _spare(module)

            put(spec.loader, exec_module=exec_module)
        return spec


def _spare(module: ModuleType) -> None:
    plain_dedup, plain_validate = module.dedup_save_plans, module._validate_global_plan

    def dedup_save_plans(plans: list[Any], *rest: Any) -> list[Any]:
        first = {_parts(plan): rank for rank, plan in reversed(list(enumerate(plans)))}
        own = [plan if first[_parts(plan)] == rank else replace(plan, items=[]) for rank, plan in enumerate(plans)]
        return plain_dedup(own, *rest)

    def validate(plans: list[Any], metadata: Any) -> list[str]:
        return [] if any(not plan.items for plan in plans) else plain_validate(plans, metadata)

    put(module, dedup_save_plans=dedup_save_plans, _validate_global_plan=validate)


def _parts(plan: Any) -> frozenset[Any]:
    return frozenset(item.index for item in plan.items)
