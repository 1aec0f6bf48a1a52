"""Folding: which ranks are executed, and which of them each other rank is like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class Folding(Protocol):
    """What the conductor must know of it."""

    @property
    def size(self) -> int:
        """Ranks of the world."""
        ...

    @property
    def live(self) -> tuple[int, ...]:
        """The world ranks that are executed, ascending."""
        ...

    def representative(self, rank: int) -> int:
        """The live rank that does what ``rank`` would do."""
        ...

    def multiplicity(self, group: tuple[int, ...]) -> Mapping[int, int]:
        """How many members of ``group`` each of its live members stands for, itself included."""
        ...


@dataclass(frozen=True)
class Representatives:
    """A folding given rank by rank.

    Attributes:
        of: the representative of each rank of the world; a live rank represents itself.
    """

    of: tuple[int, ...]

    @classmethod
    def all_live(cls, size: int) -> Representatives:
        """Every one of ``size`` ranks is executed."""
        return cls(tuple(range(size)))

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return len(self.of)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The ranks that represent themselves."""
        return tuple(rank for rank, other in enumerate(self.of) if rank == other)

    def representative(self, rank: int) -> int:
        """The live rank that does what ``rank`` would do."""
        return self.of[rank]

    def multiplicity(self, group: Sequence[int]) -> dict[int, int]:
        """Members by the live member they are like; one whose representative is elsewhere counts for the first."""
        live = [rank for rank in group if self.of[rank] == rank]
        if not live:
            return {}
        count = Counter(self.of[rank] if self.of[rank] in live else live[0] for rank in group)
        return {rank: count[rank] for rank in live}
