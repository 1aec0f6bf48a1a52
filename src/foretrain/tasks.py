"""The vocabulary policies, engines and worlds share: tasks and chunks, events in, actions out.

A *task* is one gradient tensor to exchange. A *chunk* is what is sent at once: a piece of one task (partition) or
pieces of many (fusion). These are msgspec structs and not dataclasses because hundreds of thousands are made per
simulated second, and a frozen dataclass costs ten times as much to make.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from foretrain.units import Time

Op: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather"]
"""What a chunk does. On a parameter server they read push-and-pull, push, and pull."""


class Task(msgspec.Struct, frozen=True, gc=False):
    """One gradient tensor.

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
    """The backward pass of a step begins."""

    step: int


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Event: a task's gradient is complete and may be sent."""

    task: int


class Done(msgspec.Struct, frozen=True, gc=False):
    """Event: a chunk has arrived everywhere it had to."""

    chunk: Chunk


class Wake(msgspec.Struct, frozen=True, gc=False):
    """The time a policy asked for with `WakeAt` has come."""


class Start(msgspec.Struct, frozen=True, gc=False):
    """Send this chunk now, behind whatever was started before it."""

    chunk: Chunk


class WakeAt(msgspec.Struct, frozen=True, gc=False):
    """Post `Wake` at this time."""

    time: Time


Event: TypeAlias = StepBegin | Ready | Done | Wake
Action: TypeAlias = Start | WakeAt
