"""Process groups, and their members as those see them who meet them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from foretrain.live.comm_launch import Order
from foretrain.live.folding import Folding
from foretrain.live.rank_trace import RankTrace
from foretrain.live.streams import SmShares

if TYPE_CHECKING:
    from foretrain.live.collectives import Collective


class Group:
    """A process group, the same object for all its ranks.

    Attributes:
        members: world ranks in the group's order.
        live: those that are executed, in the same order.
        family: number of the family it was made in.
        index: rank in the group of each member.
        weights: how many members each of ``live`` stands for.
        called: how many collectives each of ``live`` has called.
        pending: collectives that some of ``live`` have called and some have not, by number.
    """

    def __init__(self, members: tuple[int, ...], family: int, folding: Folding) -> None:
        self.members, self.family = members, family
        self.index = {rank: position for position, rank in enumerate(members)}
        self.weights = folding.multiplicity(members)
        self.live = tuple(rank for rank in members if rank in self.weights)
        self.called = dict.fromkeys(self.live, 0)
        self.pending: dict[int, Collective] = {}
        self._folding = folding

    def stand_in(self, member: int) -> int:
        """The live member that does what ``member`` would do."""
        stand_in = self._folding.representative(member)
        return stand_in if stand_in in self.weights else self.live[0]

    @cached_property
    def stand_ins(self) -> bytes:
        """Who stands for each member, as int32 ranks in the group; empty if each of ``live`` does for those behind."""
        found, last = [], 0
        usual = True
        for position, member in enumerate(self.members):
            found.append(self.index[self.stand_in(member)])
            last = position if member in self.weights else last
            usual = usual and found[-1] == last
        return b"" if usual else struct.pack(f"<{len(found)}i", *found)

    def __str__(self) -> str:
        return f"group {ranks_text(self.members)}"


class RankHandle:
    """A live rank as those see it who meet it: its number, how fast its GPUs compute, its story."""

    __slots__ = ("_posted", "chapter", "paces", "rank")

    def __init__(self, rank: int, paces: SmShares, chapter: RankTrace) -> None:
        self.rank, self.paces, self.chapter = rank, paces, chapter
        self._posted = 0

    def order(self) -> Order:
        """The place of the next communication that it posts."""
        self._posted += 1
        return self.rank, self._posted


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a person: ``[0..7]``, ``[0, 8 .. 56]``, or the first of them."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
            return f"[{ranks[0]}..{ranks[-1]}]" if stride == 1 else f"[{ranks[0]}, {ranks[1]} .. {ranks[-1]}]"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}, … {len(ranks)} ranks]" if len(ranks) > 8 else f"[{shown}]"


def who(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 1 and 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
