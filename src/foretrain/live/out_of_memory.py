"""A rank whose simulated GPU has too little memory: said as such, with what the memory was used for."""

from __future__ import annotations

import re

from foretrain.errors import ForetrainError
from foretrain.live.collectives import who
from foretrain.live.rank_trace import RankTrace, SimulationTrace

_TRIED = re.compile(r"Tried to allocate (.+?)\. ")


class OutOfMemory(ForetrainError):
    """A rank needs more memory than its GPU has.

    Attributes:
        ranks: the live ranks that failed so.
        tried: what the first of them wanted, as PyTorch writes sizes.
        status: the exit status of a script that does not handle it.
    """

    status = 1

    def __init__(self, chapters: tuple[RankTrace, ...]) -> None:
        first = chapters[0]
        self.ranks = tuple(chapter.rank for chapter in chapters)
        found = _TRIED.search(first.memory["out_of_memory"])
        self.tried = found[1] if found else "more than there is"
        others = f", as did {who(self.ranks[1:])}" if len(self.ranks) > 1 else ""
        super().__init__(
            f"rank {first.rank} ran out of memory in step {len(first.steps) + 1}{others}: it tried to allocate "
            f"{self.tried} when {gibibytes(first.memory['reserved'])} were reserved. Of them were allocated "
            f"{_breakdown(first)}. Try a smaller batch, activation checkpointing, or sharding over more GPUs"
        )


def check_memory(story: SimulationTrace) -> None:
    """OutOfMemory if any rank has failed for want of it."""
    failed = tuple(chapter for chapter in story.chapters.values() if chapter.memory.get("out_of_memory"))
    if failed:
        raise OutOfMemory(failed)


def gibibytes(size: float) -> str:
    """As PyTorch writes sizes of memory: ``"45.08 GiB"``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _breakdown(chapter: RankTrace) -> str:
    parts = {name: size for name, size in chapter.memory["breakdown"].items() if size}
    shown = (f"{gibibytes(size)} for {name}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    return ", ".join(shown) or "none"
