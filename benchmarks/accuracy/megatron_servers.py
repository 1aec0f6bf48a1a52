"""Exchanges of tokens among the ranks of several servers, to each of which a token travels once.

As DeepEP's and HybridEP's: a token that experts of another server want is sent to the rank there that has the sender's
place in its server, which passes it on to those of its neighbours that have the experts; what experts give goes back
the same way, and is summed in each server. Departs in that all messages are equally long: as long as if experts were
drawn equally likely, times a factor; tokens for which there is no room are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Servers:
    """Ranks that share experts, in several servers.

    Attributes:
        across: the ranks that have this one's place, in all servers.
        within: the ranks of this server.
        factor: by which messages are longer than on average.
    """

    across: ProcessGroup
    within: ProcessGroup
    factor: float

    def rooms(self, tokens: int, top: int) -> tuple[int, int]:
        """How many rows go to each server, and from it to each of its ranks, if each has ``tokens``."""
        servers = self.across.size()
        to_server = tokens * _chance(servers, top)
        to_rank = servers * tokens * _chance(servers * self.within.size(), top)
        return (
            min(tokens, math.ceil(self.factor * to_server)),
            min(servers * tokens, math.ceil(self.factor * to_rank)),
        )


def _chance(parts: int, top: int) -> float:
    """That at least one of ``top`` experts is in a certain one of so many parts."""
    return 1 - (1 - 1 / parts) ** top


# `fuse` makes kernels of these two.
def picked(wanted: Tensor, room: int) -> Tensor:
    """Of (rows, parts), the numbers of the first ``room`` rows that each part wants; one too great for none."""
    rows, parts = wanted.shape
    rank = wanted.cumsum(0) - 1
    starts = torch.arange(0, parts * room, room, device=wanted.device)
    slots = torch.where(wanted & (rank < room), starts + rank, parts * room)
    numbers = torch.arange(rows, device=wanted.device).unsqueeze(1).expand_as(slots)
    found = slots.new_full((parts * room + 1,), rows)
    return found.scatter_(0, slots.flatten(), numbers.flatten())[:-1]


def sorted_by_part(wanted: Tensor, total: int) -> Tensor:
    """The places in (parts, rows), flat, of what each part of (rows, parts) wants, ``total`` together."""
    flat = wanted.t().flatten()
    slots = torch.where(flat, flat.cumsum(0) - 1, total)
    found = slots.new_zeros(total + 1)
    return found.scatter_(0, slots, torch.arange(len(flat), device=flat.device))[:-1]


def fuse() -> None:
    """Lets the compiler make kernels of both functions above."""
    for function in (picked, sorted_by_part):
        globals()[function.__name__] = torch.compile(function)


class Pick(torch.autograd.Function):
    """The rows ``sources`` of (rows, hidden), some perhaps more than once; gradients of the same row add up."""

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.rows = len(x)
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, *ctx.saved_tensors, ctx.rows), None


class Put(torch.autograd.Function):
    """The opposite of `Pick`: ``rows`` rows, each of which is the sum of those that came from it."""

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(sources)
        return _added(x, sources, rows)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def _added(x: Tensor, sources: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, *x.shape[1:]).index_add_(0, sources, x)
