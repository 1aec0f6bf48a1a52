"""Causal attention over a sequence that is spread over ranks (Liu et al., Ring attention, ICLR'24).

Each rank has two chunks of 2n, number r and number 2n-1-r, so that all have the same to do; keys and values go round
while the rank computes on those that came before. Partial results join by their log-sum-exp, and the gradient of each
part follows from the joint output and log-sum-exp, as in FlashAttention's own backward pass over blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

_aten = torch.ops.aten


class Part(NamedTuple):
    """Attention of queries to some of the keys: (batch, heads, queries, head), and its log-sum-exp without the last."""

    output: Tensor
    weight: Tensor


def zigzag(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The two chunks of ``x`` along ``dim`` that ``rank`` of ``ranks`` has."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    if q.is_cuda:
        return Part(*_aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2])
    return Part(*_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))


def _attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, part: Part, causal: bool) -> tuple[Tensor, ...]:
    saved = (gradient, q, k, v, part.output, part.weight)
    if q.is_cuda:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
        return _aten._scaled_dot_product_flash_attention_backward(
            *saved, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal)


def _start(tensors: tuple[Tensor, ...], group: ProcessGroup) -> tuple[list[Tensor], list[dist.Work]]:
    """Sends ``tensors`` to the next rank of the ring and receives the previous one's: these, once they have come."""
    rank, ranks = group.rank(), group.size()
    ahead, behind = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    sends = [P2POp(dist.isend, tensor.contiguous(), ahead, group) for tensor in tensors]
    receives = [P2POp(dist.irecv, tensor, behind, group) for tensor in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _seen(step: int, rank: int, length: int) -> tuple[slice, slice, bool]:
    """The queries and the keys that meet in ``step``, and whether causally: see the module's first paragraph."""
    every = slice(0, length)
    if step == 0:
        return every, every, True
    if step <= rank:
        return every, slice(0, length // 2), False
    return slice(length // 2, length), every, False


# Operators of their own, so that a compiler leaves alone what is inside and compiles what is around them.


@torch.library.custom_op("accuracy::ring", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp."""
    group = _resolve_process_group(name)
    rank, ranks, length = group.rank(), group.size(), q.shape[2]
    output = torch.zeros_like(q, dtype=torch.float32)
    weight = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    here, works = (k, v), []
    for step in range(ranks):
        coming, works = _start(here, group) if step < ranks - 1 else (here, [])
        queries, keys, causal = _seen(step, rank, length)
        part = _attend(q[:, :, queries], here[0][:, :, keys], here[1][:, :, keys], causal)
        old, new = weight[:, :, queries], part.weight[:, :, : q[:, :, queries].shape[2]]
        joint = torch.logaddexp(old, new)
        share = (old - joint).exp().unsqueeze(-1), (new - joint).exp().unsqueeze(-1)
        output[:, :, queries] = output[:, :, queries] * share[0] + part.output * share[1]
        weight[:, :, queries] = joint
        _finish(works)
        here = tuple(coming)
    return output.to(q.dtype), weight


@torch.library.custom_op("accuracy::ring_backward", mutates_args=())
def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, weight: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    group, length = _resolve_process_group(name), q.shape[2]
    rank, ranks = group.rank(), group.size()
    of_q = torch.zeros_like(q, dtype=torch.float32)
    of_k, of_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    here = (k, v)
    for step in range(ranks):
        coming, works = _start(here, group) if step < ranks - 1 else (here, [])
        queries, keys, causal = _seen(step, rank, length)
        part = Part(output[:, :, queries].contiguous(), weight[:, :, queries].contiguous())
        blocks = (q[:, :, queries], here[0][:, :, keys], here[1][:, :, keys])
        dq, dk, dv = _attend_backward(gradient[:, :, queries].contiguous(), *blocks, part, causal)
        of_q[:, :, queries] += dq
        of_k[:, :, keys] += dk
        of_v[:, :, keys] += dv
        _finish(works)
        # Gradients of keys follow them round, one step behind, and come home with the last.
        travelling, works = _start((of_k, of_v), group)
        _finish(works)
        (of_k, of_v), here = travelling, tuple(coming)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, weight: Tensor, name: str) -> tuple:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, gradient: Tensor, _: Tensor) -> tuple:
    return *_backward(gradient, *ctx.saved_tensors, ctx.name), None


_forward.register_autograd(_differentiate, setup_context=_save)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """Attention of the queries here to all keys of ``group`` before them: (batch, heads, two chunks, head) each."""
    return _forward(q.contiguous(), k.contiguous(), v.contiguous(), group.group_name)[0]
