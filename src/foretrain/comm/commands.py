"""What ranks agree to send, and the records of when it was sent and applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from foretrain.tasks import Chunk


class CollectiveCommand(NamedTuple):
    """What all ranks issue at one place of their sequence.

    Attributes:
        sequence: that place, counted from 0.
        chunk: what is sent.
        unused: tasks of the chunk that no rank has a gradient for; their bytes are not sent.
    """

    sequence: int
    chunk: Chunk
    unused: frozenset[int] = frozenset()


class CommRecord(NamedTuple):
    """When a chunk was issued and completed, nanoseconds of the monotonic clock."""

    chunk: Chunk
    issued: int
    completed: int


class Applied(NamedTuple):
    """When a batch was updated, nanoseconds of the monotonic clock."""

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
