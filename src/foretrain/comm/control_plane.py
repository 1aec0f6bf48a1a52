"""Agreements among the ranks of a job on small values, never pickled, and the measured cost of its network.

All methods are collective and block. `foretrain.plugins.torch.process_groups` agrees over a process group,
`LinkControl` over links to rank 0, where no framework is.
"""

from __future__ import annotations

import array
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.event_loop import POLL_INTERVAL
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost, StallError
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, MICROSECOND, NANOSECOND, Time

_SMALL, _LARGE = 4 << 10, 1 << 20
"""Bytes of the timed operations."""
_SERIES = 150e6
"""Nanoseconds that a series of large operations should take."""
_HAND_OVER: Time = 100 * MICROSECOND
"""Least time to hand over an operation."""
_HAND_OVERS = 4
"""Hand-overs that take as long as the smallest operation of two ranks; both wake threads."""
_WORK = 3
"""CPU time of an operation in this runtime over that of the smallest alone: it is ordered, awaited and used as well."""
_TURN: Time = 500 * MICROSECOND
"""Time from the end of an operation to the start of one that waits for its credit: three threads, two processes."""


class ControlPlane(ABC):
    """Agreements among all ranks.

    Attributes:
        rank: of this process.
        ranks: N.
    """

    rank: int
    ranks: int

    @abstractmethod
    def checking(self, check: Callable[[], None]) -> ControlPlane:
        """Return the same control plane with ``check``, which raises the error that has ended the job, if any."""

    @abstractmethod
    def share(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the ``data`` of rank ``source``, on all ranks."""

    @abstractmethod
    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``values``, of equal length; integers of 64 bits."""

    @abstractmethod
    def series(self, size: int, count: int, depth: int) -> float:
        """Return the ns per all-reduce of ``size`` bytes in a series of ``count`` with ``depth`` in flight."""

    def all_true(self, value: bool) -> bool:
        """Return whether ``value`` is true on all ranks."""
        return all(row[0] for row in self.gather([int(value)]))

    def raise_on_all(self, error: ConfigError | None) -> None:
        """Raise, on all ranks, the ``error`` of the first rank that has one, with the number of that rank.

        A rank that raised alone would leave the others waiting in their next collective.
        """
        failing = [rank for rank, (failed,) in enumerate(self.gather([int(error is not None)])) if failed]
        if not failing:
            return
        parts = (error.field, str(error.value), error.problem, error.remedy) if error is not None else ()
        text = self.share(msgspec.json.encode(parts), failing[0])
        field, value, problem, remedy = msgspec.json.decode(text, type=tuple[str, str, str, str])
        raise ConfigError(field, value, f"{problem} (on rank {failing[0]})", remedy)

    def must_agree(self, what: str, names: Sequence[str], hashes: Sequence[int]) -> None:
        """Raise Disagreement, on all ranks, naming the first of ``names`` whose hash differs."""
        counts = [row[0] for row in self.gather([len(hashes)])]
        if len(set(counts)) > 1:
            numbers = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            raise Disagreement(f"the ranks have {what}s in different numbers: {numbers}")
        rows = self.gather(hashes)
        for place, name in enumerate(names):
            differing = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            if differing:
                raise Disagreement(
                    f"{what} {name!r} (of rank {self.rank}) differs on rank {differing[0]} from rank 0's"
                )

    def cost(self, crowding: float = 0.0) -> CostModel:
        """Return the measured cost of an all-reduce, the same on all ranks.

        Args:
            crowding: share of an operation's work that delays the computation, because no core is free for it.

        κ is that of large operations, two in flight; floor and latency are of the smallest, two in flight and alone.
        θ is what this runtime itself takes to hand an operation over, because gloo's own is hidden behind the bytes; it
        is a share of the floor, which has N − 1 times as many rounds as that of two ranks.
        """
        if self.ranks == 1:
            return CostModel(NANOSECOND, 1)
        (first,) = max(self.gather([int(self.series(_LARGE, 2, 2))]))
        count = max(4, min(32, int(_SERIES / first)))
        large = median(self.series(_LARGE, count, 2) for _ in range(3))
        cpu = time.process_time_ns()
        small = median(self.series(_SMALL, 12, 2) for _ in range(5))
        cpu = (time.process_time_ns() - cpu) // (12 * 5)
        alone = median(self.series(_SMALL, 6, 1) for _ in range(5))
        own = [int(large * NANOSECOND * 2**COST_SHIFT / _LARGE), int(small), int(alone), cpu]
        per_byte, small, alone, cpu = max(self.gather(own))
        hand_over = max(_HAND_OVER, small * NANOSECOND // (_HAND_OVERS * (self.ranks - 1)))
        return CostModel(
            overhead=hand_over + round(crowding * _WORK * cpu) * NANOSECOND,
            per_byte=max(1, per_byte),
            latency=max(0, alone - small) * NANOSECOND + _TURN,
            floor=small * NANOSECOND,
        )


class LinkControl(ControlPlane):
    """Agreements over links between rank 0 and every other rank.

    Args:
        rank: of this process.
        ranks: N.
        links: to rank 0, or from it to all. They stay the caller's.
        stall_timeout: seconds after which an agreement counts as stuck.
        check: raises the error that has ended the job, if any.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        links: Mapping[int, Link],
        stall_timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._links, self._stall_timeout, self._check = links, stall_timeout, check
        self._inbox: dict[int, deque[bytes]] = {peer: deque() for peer in links}
        self.timed: Callable[[int, int, int], float] = lambda size, count, depth: 1.0
        """Implementation of `series`."""

    def checking(self, check: Callable[[], None]) -> LinkControl:
        """Return the same control plane with another ``check``."""
        other = LinkControl(self.rank, self.ranks, self._links, self._stall_timeout, check)
        other._inbox, other.timed = self._inbox, self.timed
        return other

    def share(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the ``data`` of rank ``source``, on all ranks."""
        if self.rank:
            if self.rank == source:
                self._send(0, data or b"")
            return self._receive(0)
        found = self._receive(source) if source else data or b""
        for peer in self._links:
            self._send(peer, found)
        return found

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``values``, of equal length; integers of 64 bits."""
        own = array.array("q", values).tobytes()
        if self.rank:
            self._send(0, own)
            joined = self.share(None)
        else:
            joined = self.share(own + b"".join(self._receive(peer) for peer in range(1, self.ranks)))
        numbers = array.array("q", joined).tolist()
        return [numbers[at : at + len(values)] for at in range(0, len(numbers), max(1, len(values)))]

    def collect(self, values: Sequence[int], timeout: float) -> list[list[int]] | None:
        """Return, on rank 0, every rank's ``values``, of equal length; None where one has not come in ``timeout`` s.

        The other ranks send theirs and go on, with None. It raises nothing, as it is for the end of a job.
        """
        own = array.array("q", values)
        try:
            if self.rank:
                self._send(0, own.tobytes())
                return None
            deadline = time.monotonic() + timeout
            bodies = [self._receive(peer, deadline - time.monotonic()) for peer in range(1, self.ranks)]
        except ForetrainError:
            return None
        rows = [own.tolist(), *(array.array("q", body).tolist() for body in bodies)]
        return rows if len(set(map(len, rows))) == 1 else None

    def series(self, size: int, count: int, depth: int) -> float:
        """Return the ns per all-reduce of ``size`` bytes in a series of ``count`` with ``depth`` in flight."""
        return self.timed(size, count, depth)

    def _send(self, peer: int, body: bytes) -> None:
        try:
            self._links[peer].send(0, body=body)
        except LinkError as error:
            raise self._lost(peer, error) from None

    def _receive(self, peer: int, timeout: float | None = None) -> bytes:
        timeout = self._stall_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while not self._inbox[peer]:
            try:
                self._inbox[peer].extend(m.body for m in self._links[peer].receive(min(POLL_INTERVAL, 0.25)))
            except LinkError as error:
                raise self._lost(peer, error) from None
            self._check()
            if time.monotonic() > deadline:
                text = f"rank {self.rank} waits for rank {peer} to agree, for {timeout:g} s"
                raise StallError(text, [f"rank {peer} has not come to the same call"])
        return self._inbox[peer].popleft()

    def _lost(self, peer: int, error: LinkError) -> PeerLost:
        self._check()  # a better explanation
        return PeerLost(f"rank {peer} is gone while the ranks agree: {error}")
