"""Causal attention over a sequence that is spread over ranks (Liu et al., Ring attention, ICLR'24).

Each rank has two chunks of 2n, number r and number 2n-1-r, so that all have the same to do. Partial results join by
their log-sum-exp, and the gradient of each part follows from the joint output and log-sum-exp, as in FlashAttention's
own backward pass over blocks. Keys and values travel as in one of two stacks:

- Transformer Engine's send them round by messages, while the rank computes on those that came before.
- PyTorch's ``context_parallel`` gathers those of all ranks (its ``allgather``, the default of torchtitan), shifts their
  gradients by all-to-all, and sums up in float32. In a compiled graph each of these is waited for where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

_aten = torch.ops.aten
Kernel = Literal["flash", "cudnn"]


class Part(NamedTuple):
    """Attention of queries to some of the keys: (batch, heads, queries, head), and its log-sum-exp without the last."""

    output: Tensor
    weight: Tensor


def zigzag(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The two chunks of ``x`` along ``dim`` that ``rank`` of ``ranks`` has."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str) -> Part:
    if not q.is_cuda:
        return Part(*_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))
    if kernel == "cudnn":
        output, weight, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    else:
        output, weight, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return Part(output, weight.reshape(q.shape[:3]))


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, part: Part, causal: bool, kernel: str
) -> tuple[Tensor, ...]:
    saved = (gradient, q, k, v, part.output, part.weight)
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    lengths = q.shape[2], k.shape[2]
    if kernel == "cudnn":
        saved = (*saved[:5], part.weight.unsqueeze(-1), unused, unused, None, None, None)
        return _aten._scaled_dot_product_cudnn_attention_backward(*saved, *lengths, 0.0, causal)
    return _aten._scaled_dot_product_flash_attention_backward(*saved, None, None, *lengths, 0.0, causal, unused, unused)


def join(output: Tensor, weight: Tensor, more: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys as attention to both, of outputs and their log-sum-exp."""
    joint = torch.logaddexp(weight, its)
    shares = (weight - joint).exp().unsqueeze(-1), (its - joint).exp().unsqueeze(-1)
    return (output * shares[0] + more * shares[1]).to(output.dtype), joint


def fuse() -> None:
    """Lets the compiler make one kernel of `join`, for which Transformer Engine has one."""
    globals()["join"] = torch.compile(join)


def _start(tensors: tuple[Tensor, ...], group: ProcessGroup) -> tuple[list[Tensor], list[dist.Work]]:
    """Sends ``tensors`` to the next rank of the ring and receives the previous one's: these, once they have come."""
    ahead, behind = (dist.get_global_rank(group, one) for one in _neighbours(group.rank(), group.size()))
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    sends = [P2POp(dist.isend, tensor, ahead, group) for tensor in tensors]
    receives = [P2POp(dist.irecv, tensor, behind, group) for tensor in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _travelling(k: Tensor, v: Tensor, group: ProcessGroup, gathered: bool) -> Iterator[tuple[Tensor, ...]]:
    """Keys and values of each step: the rank's own, and then those of the ranks before it."""
    rank, ranks = group.rank(), group.size()
    if gathered:
        own = torch.cat((k.flatten(), v.flatten()))
        whole = own.new_empty(ranks * own.numel())
        dist.all_gather_into_tensor(whole, own, group=group)
        yield k, v
        for step in range(1, ranks):
            parts = whole.chunk(ranks)[(rank - step) % ranks].chunk(2)
            yield tuple(part.view_as(k) for part in parts)
        return
    here: tuple[Tensor, ...] = k, v
    for step in range(ranks):
        coming, works = _start(here, group) if step < ranks - 1 else (here, [])
        yield here
        _finish(works)
        here = tuple(coming)


def _shifted(tensors: tuple[Tensor, ...], group: ProcessGroup, gathered: bool) -> tuple[Tensor, ...]:
    """The previous rank's ``tensors``, all of one shape, for those of this rank."""
    if not gathered:
        arriving, works = _start(tensors, group)
        _finish(works)
        return tuple(arriving)
    rank, ranks = group.rank(), group.size()
    leaving = torch.cat([tensor.flatten() for tensor in tensors])
    came = torch.empty_like(leaving)
    to, from_ = ([leaving.numel() * (other == one) for other in range(ranks)] for one in _neighbours(rank, ranks))
    dist.all_to_all_single(came, leaving, from_, to, group=group)
    return tuple(part.view_as(tensors[0]) for part in came.chunk(len(tensors)))


def _neighbours(rank: int, ranks: int) -> tuple[int, int]:
    """The ranks after and before it in the ring."""
    return (rank + 1) % ranks, (rank - 1) % ranks


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
def _forward(q: Tensor, k: Tensor, v: Tensor, name: str, kernel: str, gathered: bool) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp."""
    group = _resolve_process_group(name)
    rank, length = group.rank(), q.shape[2]
    output = weight = q
    for step, here in enumerate(_travelling(k, v, group, gathered)):
        queries, keys, causal = _seen(step, rank, length)
        part = _attend(q[:, :, queries], here[0][:, :, keys], here[1][:, :, keys], causal, kernel)
        if step == 0:
            output, weight = part.output.float() if gathered else part.output, part.weight
        elif queries == slice(0, length):
            output, weight = join(output, weight, *part)
        else:
            output[:, :, queries], weight[:, :, queries] = join(output[:, :, queries], weight[:, :, queries], *part)
    return output.to(q.dtype), weight


@torch.library.custom_op("accuracy::ring_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    weight: Tensor,
    name: str,
    kernel: str,
    gathered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    group, length = _resolve_process_group(name), q.shape[2]
    travelling, totals = _travelling(k, v, group, gathered), (q, k, v)
    here = next(travelling)
    for step in range(group.size()):
        queries, keys, causal = _seen(step, group.rank(), length)
        part = Part(output[:, :, queries], weight[:, :, queries])
        blocks = (q[:, :, queries], here[0][:, :, keys], here[1][:, :, keys])
        found = _attend_backward(gradient[:, :, queries], *blocks, part, causal, kernel)
        if step == 0:
            totals = tuple(one.float() if gathered else one for one in found)
        else:
            for total, part_of, more in zip(totals, (queries, keys, keys), found, strict=True):
                total[:, :, part_of] += more
        here = next(travelling, here)
        # Gradients of keys follow them round, one step behind, and come home with the last.
        totals = (totals[0], *_shifted(totals[1:], group, gathered))
    of_q, of_k, of_v = (total.to(one.dtype, copy=gathered) for total, one in zip(totals, (q, k, v), strict=True))
    return of_q, of_k, of_v


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, name: str, kernel: str, gathered: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, gradient: Tensor, _: Tensor) -> tuple:
    return *_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, kernel: Kernel = "flash", *, gathered: bool = False
) -> Tensor:
    """Attention of the queries here to all keys of ``group`` before them: (batch, heads, two chunks, head) each.

    ``kernel`` is whose attention CUDA runs; on CUDA, keys and values may have fewer heads. ``gathered`` is the second
    of the two ways above.
    """
    return _forward(q, k, v, group.group_name, kernel, gathered)[0]
