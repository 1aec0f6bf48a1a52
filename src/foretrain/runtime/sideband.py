"""Small agreements beside the gradients: bytes that all ranks see, over a process group. Never pickled.

Everything here is collective and blocks; it is for setting up, not for every step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from foretrain.errors import Disagreement
from foretrain.schedule import Cost
from foretrain.units import COST_SHIFT, NANOSECOND

_SMALL, _LARGE = 4 << 10, 1 << 20
"""Bytes of the operations that measure θ and κ."""


class Sideband:
    """The ranks of ``group``, for tensors on ``device``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's ``data``, on all ranks."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        payload = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0 and data:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(payload, group=self._group, group_src=0)
        return bytes(payload.cpu().tolist())

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's ``values``, as long on one as on the other."""
        own = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        all_of_them = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(all_of_them, own, group=self._group)
        return [other.tolist() for other in all_of_them]

    def everywhere(self, value: bool) -> bool:
        """Whether ``value`` is true on all ranks."""
        return all(row[0] for row in self.gather([int(value)]))

    def must_agree(self, what: str, names: Sequence[str], hashes: Sequence[int]) -> None:
        """Raises Disagreement, on every rank alike, naming the first of ``names`` whose hash differs."""
        counts = [row[0] for row in self.gather([len(hashes)])]
        if len(set(counts)) > 1:
            raise Disagreement(f"the ranks have {what}s in different numbers: {_by_rank(counts)}")
        rows = self.gather(hashes)
        for place, name in enumerate(names):
            differing = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            if differing:
                raise Disagreement(
                    f"{what} {name!r} (of rank {self.rank}) differs on rank {differing[0]} from rank 0's"
                )

    def cost(self, samples: int = 3) -> Cost:
        """θ and κ of one all-reduce here, from small and large operations with two in flight, on all ranks the same.

        Latency is not told apart from θ: with two operations in flight what is left of it delays nothing.
        """
        if self.ranks == 1:
            return Cost(NANOSECOND, 1)
        small = self._time(_SMALL, 12, samples)
        large = self._time(_LARGE, 6, samples)
        per_byte = max(0.0, (large - small) / (_LARGE - _SMALL))
        theta = max(0.0, small - per_byte * _SMALL)
        row = max(self.gather([int(theta * NANOSECOND), int(per_byte * NANOSECOND * 2**COST_SHIFT)]))
        return Cost(max(1, row[0]), max(1, row[1]))

    def _time(self, size: int, count: int, samples: int) -> float:
        """Nanoseconds per all-reduce of ``size`` bytes, the best of ``samples`` series of ``count``."""
        buffers = [torch.zeros(size // 4, device=self._device) for _ in range(2)]
        best = float("inf")
        for _ in range(samples + 1):
            dist.barrier(group=self._group)
            self._finish()
            began = time.perf_counter_ns()
            works: list[dist.Work] = []
            for k in range(count):
                if k >= 2:
                    works[k - 2].wait()
                work = dist.all_reduce(buffers[k % 2], group=self._group, async_op=True)
                assert work is not None
                works.append(work)
            for work in works[-2:]:
                work.wait()
            self._finish()
            best = min(best, (time.perf_counter_ns() - began) / count)
        return best

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
