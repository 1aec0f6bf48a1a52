"""Transformer Engine's attention over a sequence that is divided among GPUs: keys and values go round a ring.

Each rank has an early and a late part of the sequence, so that causal attention is the same work for all (Megatron-LM
divides batches so). In step i a rank attends to the keys of the rank i places before it: to all of its own, causally;
to the first half of an earlier rank's; of a later rank's only the second half of its own queries attend. Backward, keys
and values go round again, with their gradients. Each transfer runs beside a step's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from foretrain.live.device.custom_kernels import launch

Tensor = torch.Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, dropout: float) -> Tensor:
    """Return attention of ``q (batch, heads, own queries, width)`` to the keys of all ranks of ``group``."""
    made: Any = _Ring.apply(q, torch.stack((k, v)), group, causal, dropout)
    return made


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, group: Any, causal: bool, dropout: float) -> Tensor:
        ctx.group, ctx.causal, ctx.dropout, ctx.kept = group, causal, dropout, []
        own, made = kv, torch.empty_like(q)
        ranks = distributed.get_world_size(group)
        for step in range(ranks):
            coming, works = _passed_on((kv,), group) if step < ranks - 1 else ((kv,), ())
            part, mask = _parts(q, kv, step, group, causal)
            one = torch.ops.aten._scaled_dot_product_cudnn_attention(*part, None, True, dropout, mask)
            ctx.kept.append((one[1], *one[2:8]))  # log-sum-exp, lengths, random state
            launch(
                "transformer_engine::attention_correction", {"one": one[0], "made": made}, ("one", "made"), ("made",)
            )
            for work in works:
                work.wait()
            (kv,) = coming
        ctx.save_for_backward(q, own, made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, kv, made = ctx.saved_tensors
        grad, of_q, of_kv = gradients[0].contiguous(), torch.empty_like(q), torch.empty_like(kv)
        ranks = distributed.get_world_size(ctx.group)
        for step in range(ranks):
            coming, works = _passed_on((kv, of_kv), ctx.group) if step < ranks - 1 else ((kv, of_kv), ())
            (queries, keys, values), mask = _parts(q, kv, step, ctx.group, ctx.causal)
            sums, first, second, most, more, *random = ctx.kept[step]
            length = queries.shape[2]
            mine = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad[:, :, -length:], queries, keys, values, made[:, :, -length:], sums, *random, None, first, second,
                most, more, ctx.dropout, mask,
            )  # fmt: skip
            added = {"of_q": of_q, "of_kv": of_kv} | {f"mine{place}": one for place, one in enumerate(mine)}
            launch("transformer_engine::attention_correction", added, added, ("of_q", "of_kv"))
            for work in works:
                work.wait()
            kv, of_kv = coming
        return of_q, of_kv, None, None, None


def _parts(q: Tensor, kv: Tensor, step: int, group: Any, causal: bool) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """Return the queries, keys and values that meet in a step, and whether causally."""
    k, v = kv
    if step and causal and step <= distributed.get_rank(group):
        half = k.shape[2] // 2
        return (q, k[:, :, :half], v[:, :, :half]), False
    if step and causal:
        return (q[:, :, q.shape[2] // 2 :], k, v), False
    return (q, k, v), causal


def _passed_on(tensors: tuple[Tensor, ...], group: Any) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Return what comes from the rank before when the works are done, while this goes to the rank behind."""
    ranks = distributed.get_process_group_ranks(group)
    here = distributed.get_rank(group)
    coming = tuple(torch.empty_like(one) for one in tensors)
    behind, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    sends = [distributed.P2POp(distributed.isend, one, behind, group) for one in tensors]
    receives = [distributed.P2POp(distributed.irecv, one, before, group) for one in coming]
    return coming, distributed.batch_isend_irecv([*sends, *receives])
