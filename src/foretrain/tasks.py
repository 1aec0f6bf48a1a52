"""Vocabulary of policies, engines and worlds: tasks and chunks, events and actions.

A *task* is one gradient tensor to exchange. A *chunk* is what is sent at once: a piece of one task (partition) or
pieces of many (fusion). These are msgspec structs and not dataclasses because hundreds of thousands are made per
simulated second, and a frozen dataclass costs ten times as much to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from foretrain.units import Time

Op: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather"]
"""Operation of a chunk. On a parameter server they mean push-and-pull, push, and pull."""

Priorities: TypeAlias = Mapping[Op, Sequence[int]]
"""Tasks of each operation, the most urgent first; of an operation that is not there, none goes before another."""
AS_THEY_COME: Priorities = MappingProxyType({})
"""No task goes before another."""


class Task(msgspec.Struct, frozen=True, gc=False):
    """Gradient tensor to exchange.

    Attributes:
        index: its place in registration order and in every table indexed by task.
        name: the parameter's name.
        size: bytes.
        first_use: rank among all tasks by observed first use in the forward pass; 0 is the most urgent.
    """

    index: int
    name: str
    size: int
    first_use: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[offset, offset + size)`` of one task."""

    task: int
    offset: int
    size: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Unit of communication, sent at once. ``size`` is the sum over ``pieces``."""

    op: Op
    pieces: tuple[Piece, ...]
    size: int


class StepBegin(msgspec.Struct, frozen=True, gc=False):
    """Event: the backward pass of a step begins."""

    step: int


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Event: a task's gradient is complete and may be sent."""

    task: int


class Done(msgspec.Struct, frozen=True, gc=False):
    """Event: a chunk has arrived everywhere it had to."""

    chunk: Chunk


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Event: the time that a policy requested with `WakeAt` has come."""


class Start(msgspec.Struct, frozen=True, gc=False):
    """Action: send a chunk behind all that were started before it."""

    chunk: Chunk


class WakeAt(msgspec.Struct, frozen=True, gc=False):
    """Action: post `Wake` at a time."""

    time: Time


Event: TypeAlias = StepBegin | Ready | Done | Wake
Action: TypeAlias = Start | WakeAt
