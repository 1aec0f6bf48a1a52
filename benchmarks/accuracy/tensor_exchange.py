"""What ranks of a tensor-parallel group exchange along the first dimension, at once or in pieces beside products.

In ``pieces``, each rank has one block of every piece of the sequence, so that a piece is gathered in order; while it
travels, the product of the one before runs. Transformer Engine does so with buffers and kernels of its own
(``ub_tp_comm_overlap``, userbuffers), in as many pieces as there are ranks. A group of one exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Pending = tuple[Tensor, tuple[dist.Work, ...]]
"""A result, and what to wait for before it is there, piece by piece."""

Multiply = Callable[[Tensor, Tensor], object]
"""Writes the product of a piece, the first argument, into the second."""


def gather(x: Tensor, group: ProcessGroup, pieces: int = 1) -> Pending:
    """The parts of all ranks. Float8 numbers travel as bytes, which all backends know."""
    x = x.contiguous()
    if group.size() == 1:
        return x, ()
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    sides = (whole.view(torch.uint8), x.view(torch.uint8)) if x.itemsize == 1 else (whole, x)
    parts = zip(*(side.chunk(pieces) for side in sides), strict=True)
    return whole, tuple(dist.all_gather_into_tensor(to, part, group, async_op=True) for to, part in parts)


def scatter_sum(x: Tensor, group: ProcessGroup, pieces: int = 1) -> Pending:
    """This rank's part of the sum over ranks."""
    x = x.contiguous()
    if group.size() == 1:
        return x, ()
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    sides = zip(part.chunk(pieces), x.chunk(pieces), strict=True)
    return part, tuple(dist.reduce_scatter_tensor(to, whole, group=group, async_op=True) for to, whole in sides)


def total(x: Tensor, group: ProcessGroup) -> Pending:
    """The sum over ranks."""
    whole = x.contiguous()
    if group.size() == 1:
        return whole, ()
    return whole, (dist.all_reduce(whole, group=group, async_op=True),)


def done(pending: Pending) -> Tensor:
    """The result, once it is there."""
    wait(pending)
    return pending[0]


def wait(pending: Pending) -> None:
    """Until the result is there."""
    for work in pending[1]:
        work.wait()


def gather_and_multiply(x: Tensor, group: ProcessGroup, pieces: int, multiply: Multiply, out: Tensor) -> Tensor:
    """The parts of all ranks, whose product with something is written to ``out``, of as many rows."""
    whole, works = gather(x, group, pieces)
    if len(works) < 2:
        wait((whole, works))
        multiply(whole, out)
        return whole
    for work, piece, result in zip(works, whole.chunk(pieces), out.chunk(pieces), strict=True):
        work.wait()
        multiply(piece, result)
    return whole


def multiply_and_scatter(x: Tensor, group: ProcessGroup, pieces: int, multiply: Multiply, out: Tensor) -> Tensor:
    """This rank's part of the sum over ranks of what `multiply` makes of ``x``; ``out`` is room for all of it."""
    if group.size() == 1:
        multiply(x, out)
        return out
    part = out.new_empty(out.shape[0] // group.size(), *out.shape[1:])
    works = []
    for piece, result, to in zip(x.chunk(pieces), out.chunk(pieces), part.chunk(pieces), strict=True):
        multiply(piece, result)
        works.append(dist.reduce_scatter_tensor(to, result, group=group, async_op=True))
    return done((part, tuple(works)))


def own(x: Tensor, group: ProcessGroup, pieces: int) -> Tensor:
    """The part of the whole that this rank has when it is split."""
    return x.unflatten(0, (pieces, group.size(), -1))[:, group.rank()].flatten(0, 1)
