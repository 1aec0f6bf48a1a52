"""Distributed checkpoints of ranks most of which are represented by others, and asynchronous ones.

Represented ranks report the parts of their representative, so that the plan of a checkpoint has these many times, and
those of represented ranks not at all. The live ranks' share is written, and read again.

# Note [Asynchronous checkpoints]
A thread that agrees with other ranks on a checkpoint while the script trains does so at another moment in every run,
and the clock is the rank's: no two forecasts would be alike. And a rank asks the executor one question at a time, so
that the threads of two ranks could wait for each other's scripts. So the script's own thread does it, at once. Writing
takes no virtual time; agreeing takes what its messages take.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType
from typing import Any

from foretrain.live.device import put
from foretrain.live.device.import_hooks import change_after_import


def install() -> None:
    """Accept such plans and save in the script's thread, once the modules are imported, which takes seconds."""
    package = "torch.distributed.checkpoint"
    change_after_import(
        {f"{package}.default_planner": _drop_duplicates, f"{package}._async_thread_executor": _save_at_once}
    )


def _save_at_once(module: ModuleType) -> None:
    """Save in the script's thread; see Note [Asynchronous checkpoints]."""

    def execute_save(self: Any, staging_future_or_state_dict: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            saved = module.save_wrapper(staging_future_or_state_dict=staging_future_or_state_dict, **named)
        except Exception as error:  # for whoever asks for the result
            done.set_exception(error)
        else:
            done.set_result(saved)
        return done

    put(module._ThreadBasedAsyncCheckpointExecutor, execute_save=execute_save)


def _drop_duplicates(module: ModuleType) -> None:
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
