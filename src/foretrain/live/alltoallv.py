"""Uneven all-to-alls: what each member sends to each, where only the live members have said what they send.

# Note [Two readings of a row]
A live member stands for others, and only its own row of splits is known: bytes to each member of the group. What those
it stands for send can be read from it in two ways. *Absolute*: they send the same to the same members, as to a hot
expert, to which everybody sends much. *Relative*: they send the same to those that are as far behind them in the group,
as in a shift, by which context parallelism rotates keys and values: there i sends all it has to i + 1.

Which one is meant:

- Where several live members tell, the reading by which a row predicts the next one's better.
- Else, and where both do as well: relative if the row has a zero, absolute if it has none. Read as absolute, a zero
  would be a member to which nobody sends anything, and a shift one to which everybody sends all.

So what a rank sends to itself alone stays with everybody; and experts that get nothing from a live rank get something
from others. ``--live all`` has nothing to read: every rank tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError

Splits = Mapping[int, Sequence[int]] | Sequence[int]
"""Bytes to each rank of a group: from live members by world rank, or the same from all members."""


class Sends(NamedTuple):
    """Messages of an all-to-all, by members' places in the group.

    Attributes:
        source, target, size: one entry a message, int64; sizes in bytes, none of them 0.
        most: bytes that the member has which has most, its own block included.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    size: NDArray[np.int64]
    most: int

    def one_each(self) -> bool:
        """Whether nobody sends to more than one other, as in a shift."""
        senders = self.source[self.source != self.target]
        return len(np.unique(senders)) == len(senders)


@dataclass(frozen=True, slots=True)
class Rows:
    """What was told of one all-to-all.

    Attributes:
        told: ranks and their rows, as bytes of int64.
        alike: whether all members send what the first has told.
    """

    told: tuple[tuple[int, bytes], ...]
    alike: bool

    @classmethod
    def of(cls, group: Sequence[int], splits: Splits) -> Rows:
        """``splits`` of ``group``; ConfigError if a row is not as long as the group."""
        by_rank = splits if isinstance(splits, Mapping) else {group[0]: splits}
        for rank, row in by_rank.items():
            if len(row) != len(group):
                raise ConfigError("splits", len(row), f"of rank {rank} are not one per rank", f"give {len(group)}")
        told = ((rank, np.asarray(row, np.int64).tobytes()) for rank, row in by_rank.items())
        return cls(tuple(told), not isinstance(splits, Mapping))

    def sends(self, group: Sequence[int], representative: Callable[[int], int], most: int) -> Sends | None:
        """The messages of all members, None if they are more than ``most``; see Note [Two readings of a row]."""
        index = {rank: place for place, rank in enumerate(group)}
        rows = {index[rank]: np.frombuffer(row, np.int64) for rank, row in self.told}
        own = np.array(self._tellers(group, representative, index))
        moves = not self.alike and relative(rows)
        parts: list[tuple[NDArray[np.int64], ...]] = []
        messages = 0
        for place, row in rows.items():
            mine, to = np.flatnonzero(own == place), np.flatnonzero(row)
            messages += len(mine) * len(to)
            if messages > most:
                return None
            target = (to + moves * (mine - place)[:, None]) % len(group)
            parts.append((np.repeat(mine, len(to)), target.reshape(-1), np.tile(row[to], len(mine))))
        source, target, size = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.lexsort((target, source))
        return Sends(source[order], target[order], size[order], max(int(row.sum()) for row in rows.values()))

    def _tellers(
        self, group: Sequence[int], representative: Callable[[int], int], index: Mapping[int, int]
    ) -> list[int]:
        """Of each member the place of whose row it shares: the first's where nobody tells of it."""
        places = {rank: index[rank] for rank, _ in self.told}
        first = index[self.told[0][0]]
        return [places.get(rank, places.get(representative(rank), first)) for rank in group]


def relative(rows: Mapping[int, NDArray[np.int64]]) -> bool:
    """Whether ``rows``, by place in the group, are to be read as relative: Note [Two readings of a row]."""
    moved = fixed = 0
    for (place, row), (other, its) in pairwise(sorted(rows.items())):
        moved += int(np.abs(its - np.roll(row, other - place)).sum())
        fixed += int(np.abs(its - row).sum())
    return moved < fixed if moved != fixed else any((row == 0).any() for row in rows.values())
