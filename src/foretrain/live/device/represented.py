"""Signs that ranks which are only represented matter to a script: objects that it gathers, and its last rank.

A rank that stands for others gives its own objects for theirs, and nobody prints what only a represented rank would. A
rank cannot see either, but it can tell the executor where the script depends on it; see `foretrain.live.refold`.

Distributed checkpoints: represented ranks report the parts of their representative, so that the plan of a checkpoint
has these many times, and those of represented ranks not at all. The live ranks' share is written, and read again.

# Note [Asynchronous checkpoints]
A thread that agrees with other ranks on a checkpoint while the script trains does so at another moment in every run,
and the clock is the rank's: no two forecasts would be alike. And a rank asks the executor one question at a time, so
that the threads of two ranks could wait for each other's scripts. So the script's own thread does it, at once. Writing
takes no virtual time; agreeing takes what its messages take.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from foretrain.live.device import change_after_import, put
from foretrain.live.device.script import LIBRARY, script_line
from foretrain.live.event_log import GATHERED, SINGLED_OUT

_VARIABLE = r"(\w+\.)*(environ\['{0}'\]|(environ\.get|getenv)\('{0}'(, [^()]*)?\))"
_NAMES = {
    "rank": re.compile(r"(\w+\.)*(rank|global_rank|\w*get_rank\(\))|" + _VARIABLE.format("RANK")),
    "size": re.compile(r"(\w+\.)*(world_size|get_world_size\(\))|" + _VARIABLE.format("WORLD_SIZE")),
}
"""Expressions for a rank of the world, and for its size."""
_LAST = {("rank", "last"), ("next", "size")}
"""Kinds that are equal on the last rank alone, and of which the first is the greater on none."""


def install(device: ModuleType, world: int) -> None:
    """Tell of gathered objects, and of comparisons with the last of ``world`` ranks, in the rank's log."""
    _tell_of_objects(device)
    _tell_of_last_rank(device, world)


def _tell_of_objects(device: ModuleType) -> None:
    told: set[tuple[str, tuple[int, ...]]] = set()

    def tell(group: Any) -> None:
        group = distributed_c10d._group_or_default_group(group)
        # Some are not: torch.distributed.rpc makes a bare backend of its own.
        known = group in distributed_c10d._world.pg_group_ranks
        if known and not distributed_c10d._rank_not_in_group(group):
            ranks = tuple(dist.get_process_group_ranks(group))
            place = "{}:{}".format(*script_line())
            if (place, ranks) not in told:
                told.add((place, ranks))
                device.note(GATHERED, 0, 0, json.dumps([place, ranks]).encode())

    plain, plain_gather = dist.all_gather_object, dist.gather_object

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        tell(group)
        plain(object_list, obj, group)

    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, dst: Any = None, group: Any = None, group_dst: Any = None
    ) -> None:
        tell(group)
        plain_gather(obj, object_gather_list, dst, group, group_dst)

    for module in (dist, distributed_c10d):
        put(module, all_gather_object=all_gather_object, gather_object=gather_object)


def _tell_of_last_rank(device: ModuleType, world: int) -> None:
    """Look for comparisons with the last rank in files that ask for a rank or the world's size, or whose helpers do."""
    seen: set[str] = set()

    def look(frame: FrameType | None) -> None:
        # Whoever asks may be a helper: then it is its caller that compares.
        for each in (frame, frame and frame.f_back):
            file = each.f_code.co_filename if each else LIBRARY
            # A fake world has one process, and the script knows: its last rank does nothing.
            if file in seen or not dist.is_initialized() or dist.get_backend() == "fake":
                continue
            seen.add(file)
            line = None if file.startswith(LIBRARY) else _line_of_comparison(file)
            if line is not None:
                device.note(SINGLED_OUT, world - 1, 0, f"{file}:{line}".encode())

    plain_rank, plain_size = dist.get_rank, dist.get_world_size

    def get_rank(group: Any = None) -> int:
        look(sys._getframe(1))
        return plain_rank(group)

    def get_world_size(group: Any = None) -> int:
        look(sys._getframe(1))
        return plain_size(group)

    for function in (get_rank, get_world_size):
        function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    plain_init = dist.init_process_group

    def init_process_group(*given: Any, **named: Any) -> None:
        plain_init(*given, **named)
        look(sys._getframe(1))  # who calls it may have its rank from the environment

    for module in (dist, distributed_c10d):
        put(module, get_rank=get_rank, get_world_size=get_world_size, init_process_group=init_process_group)


def _line_of_comparison(file: str) -> int | None:
    """Return the first line of a file that compares a rank with the size of the world less 1; None without one.

    Both are known by their names, and by what has been assigned to a variable anywhere in the file.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    variables: dict[str, str] = {}
    for name, value in _assignments(tree):
        if kind := _kind(value, variables):
            variables[name] = kind
    lines = (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Compare) and _singles_out(node, variables))
    return min(lines, default=None)


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield variables and attributes, with what is assigned to them."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                yield from zip(map(ast.unparse, names), values, strict=False)
            case ast.Assign(targets, value):
                yield from ((ast.unparse(target), value) for target in targets)
            case ast.AnnAssign(target, _, ast.expr() as value):
                yield ast.unparse(target), value
            case _:
                pass


def _singles_out(comparison: ast.Compare, variables: Mapping[str, str]) -> bool:
    """Return whether a comparison is true on the last rank alone."""
    left, right = _kind(comparison.left, variables), _kind(comparison.comparators[0], variables)
    match comparison.ops[0]:
        case ast.Eq():
            return not _LAST.isdisjoint({(left, right), (right, left)})
        case ast.GtE():
            return (left, right) in _LAST
        case ast.LtE():
            return (right, left) in _LAST
        case _:
            return False


def _kind(side: ast.expr, variables: Mapping[str, str]) -> str:
    """Return what an expression is of the world: its "size", a "rank", the "last" rank, the "next" of a rank, or ""."""
    match side:
        case ast.BinOp(whole, ast.Sub(), ast.Constant(1)):
            return "last" if _kind(whole, variables) == "size" else ""
        case ast.BinOp(whole, ast.Add(), ast.Constant(1)) | ast.BinOp(ast.Constant(1), ast.Add(), whole):
            return "next" if _kind(whole, variables) == "rank" else ""
        case ast.Call(ast.Name("int"), [text]):
            return _kind(text, variables)
        case _:
            text = ast.unparse(side)
            return next((kind for kind, names in _NAMES.items() if names.fullmatch(text)), variables.get(text, ""))


def install_checkpoints(folded: bool) -> None:
    """Save in the script's thread, and if ``folded`` accept such plans, once the modules are imported."""
    package = "torch.distributed.checkpoint"
    changes = {f"{package}._async_thread_executor": _save_at_once}
    if folded:
        changes[f"{package}.default_planner"] = _drop_duplicates
    change_after_import(changes)


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
