"""Commands that all ranks issue in the same order, and records of when chunks were sent and updates applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from foretrain.tasks import Chunk


class CollectiveCommand(NamedTuple):
    """One collective that all ranks issue at the same place of their sequences.

    Attributes:
        sequence: that place, counted from 0.
        chunk: what is sent.
        unused: tasks of the chunk that no rank has a gradient for; their bytes are not sent.
    """

    sequence: int
    chunk: Chunk
    unused: frozenset[int] = frozenset()


class CommRecord(NamedTuple):
    """Times at which a chunk was issued and completed, in nanoseconds of the monotonic clock."""

    chunk: Chunk
    issued: int
    completed: int


class Applied(NamedTuple):
    """Times at which a batch of updates began and ended, in nanoseconds of the monotonic clock."""

    tasks: tuple[int, ...]
    step: int
    began: int
    ended: int


class CommandExecutor(Protocol):
    """Issues commands in the order of their sequence numbers, on a thread of its own.

    Attributes:
        sequence: number of the next command.
        digest: hash over all commands so far; equal on ranks that issued the same.
    """

    @property
    def sequence(self) -> int:
        """Number of the next command."""
        ...

    @property
    def digest(self) -> bytes:
        """Hash over all commands so far."""
        ...

    def start(self, order: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        """Issue ``order``; call ``done`` when its result has arrived."""
        ...

    def last(self) -> str:
        """Return a line on the last command, for error messages."""
        ...
