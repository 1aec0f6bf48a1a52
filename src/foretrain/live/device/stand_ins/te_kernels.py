"""Transformer Engine's products and attention: in FP8 where a recipe says so, divided among the GPUs of a group.

A layer divided by columns gathers its input along the sequence, one divided by rows scatters what it sums; without
sequence parallelism the sum is an all-reduce, in the forward pass of rows and the backward pass of columns. Backward,
communication runs beside the product that does not need it, as Transformer Engine's does without user buffers.

Attention over a divided sequence passes keys and values round a ring. Each rank has an early and a late part of the
sequence, so that causal attention is the same work for all (Megatron-LM divides batches so). In step i a rank attends
to the keys of the rank i places before it: to all of its own, causally; to the first half of an earlier rank's. To a
later rank's keys only the second half of its own queries attend. Backward, keys and values go round again, with their
gradients. Each transfer runs beside a step's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed

from foretrain.live.device.custom_kernels import launch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Division:
    """Division of a product among GPUs, and the place of its weight's gradient.

    Attributes:
        mode: ``"column"`` or ``"row"`` of the weight as Megatron counts; None is not divided.
        group: among whose ranks.
        sequence: whether activations between layers are divided along the sequence.
        accumulates: whether gradients are added to ``weight.main_grad`` by the product that computes them.
    """

    mode: str | None = None
    group: Any = None
    sequence: bool = False
    accumulates: bool = False

    @property
    def ranks(self) -> int:
        """Return among how many ranks the weight is divided."""
        return 1 if self.mode is None or self.group is None else distributed.get_world_size(self.group)


WHOLE = Division()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Any, division: Division = WHOLE) -> Tensor:
    """Return ``x (s, …, k)`` by ``weight (n, k)`` plus ``bias``, in FP8 with a recipe; ``s`` counts the own part."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    made: Any = _Product.apply(x.flatten(0, -2), weight, bias, recipe, division)
    return made.unflatten(0, (-1, *x.shape[1:-1]))


def grouped_product(
    x: Tensor, rows: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: Any, accumulates: bool
) -> Tensor:
    """Return each part of ``x``, of so many rows, by its own weight ``(n, k)``: a product each."""
    if sum(rows) != len(x):  # counted on the simulated GPU, so that they have no values
        each, more = divmod(len(x), len(rows))
        rows = [each + (place < more) for place in range(len(rows))]
    parts = x.split(list(rows))
    given = biases or [None] * len(weights)
    division = Division(accumulates=accumulates)
    made = [product(*one, recipe, division) for one in zip(parts, weights, given, strict=True)]
    return torch.cat(made)


class _Product(torch.autograd.Function):
    """``x (m, k)`` by ``weight (n, k)``; in FP8, both operands are kept for the backward pass, turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Any, division: Division) -> Tensor:
        gathers = division.mode == "column" and division.sequence
        ctx.weight, ctx.recipe, ctx.division, ctx.biased = weight, recipe, division, bias is not None
        if recipe is None:
            ctx.save_for_backward(x)
            every = _gathered(x, division) if gathers else x
            inside = bias if division.mode != "row" else None
            made = every @ weight.t() if inside is None else torch.addmm(inside, every, weight.t())
        else:
            x8, x8_turned = _cast(x, recipe)
            weight8, weight8_turned = _cast(weight, recipe)
            ctx.save_for_backward(x8_turned, weight8_turned)
            every = _gathered(x8, division) if gathers else x8
            made = _product8(every, weight8.t(), x.dtype, recipe)
            inside = None
        if division.mode == "row" and division.ranks > 1:
            made = _reduced(made, division)[0]
        return made if bias is None or inside is not None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad,), division, weight = gradients, ctx.division, ctx.weight
        grad = _gathered(grad, division) if division.mode == "row" and division.sequence else grad.contiguous()
        kept, *turned_weight = (
            ctx.saved_tensors
        )  # asked for once: PyTorch raises the second time where activations are checkpointed
        waited = []
        if division.mode == "column" and division.sequence:
            kept, work = _gathering(kept, division)
            waited.append(work)
        of_x = of_weight = work = None
        eight = ctx.recipe is not None
        grad8, grad8_turned = _cast(grad, ctx.recipe) if eight else (grad, grad)
        if ctx.needs_input_grad[0]:
            if eight:
                of_x = _product8(grad8, turned_weight[0].t(), grad.dtype, ctx.recipe)
            else:
                of_x = grad @ weight
            if division.mode == "column" and division.ranks > 1:
                of_x, work = _reduced(of_x, division, wait=False)
        for one in waited:
            one.wait()
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(grad8_turned, kept.view(weight.shape[1], -1) if eight else kept, weight, ctx)
        if work is not None:
            work.wait()
        # The product that computes the weight's gradient sums the bias's beside it.
        of_bias = grad.new_empty(grad.shape[1]) if ctx.biased else None
        return of_x, of_weight, of_bias, None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    """Return the gradient of ``weight``; what stands for it where it has been added to ``weight.main_grad``."""
    main = getattr(weight, "main_grad", None) if ctx.division.accumulates else None
    if ctx.recipe is not None:
        made = _product8(grad, x.t(), weight.dtype if main is None else main.dtype, ctx.recipe)
        if main is None:
            return made
    elif main is None:
        return grad.t() @ x
    else:
        add_weight_gradient(main, grad, x)
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return dummy_gradient(weight.shape, weight.dtype, weight.device)


def add_weight_gradient(buffer: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Add the product of ``gradient (m, n)``, turned, and ``x (m, k)`` to ``buffer (n, k)``, in one kernel."""
    if buffer.dtype == gradient.dtype:
        torch.addmm(buffer, gradient.t(), x, out=buffer)
    else:
        torch.ops.aten.addmm.dtype_out(buffer, gradient.t(), x, buffer.dtype, out=buffer)


@cache
def dummy_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one gradient that stands for all of weights like this, summed elsewhere."""
    return torch.empty(shape, dtype=dtype, device=device)


def _gathering(x: Tensor, division: Division) -> tuple[Tensor, Any]:
    """Return the parts of all ranks along the first dimension, when the work is done."""
    x = x.contiguous()
    every = x.new_empty((len(x) * division.ranks, *x.shape[1:]))
    return every, distributed.all_gather_into_tensor(every, x, group=division.group, async_op=True)


def _gathered(x: Tensor, division: Division) -> Tensor:
    every, work = _gathering(x, division)
    work.wait()
    return every


def _reduced(x: Tensor, division: Division, wait: bool = True) -> tuple[Tensor, Any]:
    """Return the sum over ranks, with sequence parallelism the own part of it."""
    if division.sequence:
        made = x.new_empty((len(x) // division.ranks, *x.shape[1:]))
        work = distributed.reduce_scatter_tensor(made, x, group=division.group, async_op=True)
    else:
        made, work = x, distributed.all_reduce(x, group=division.group, async_op=True)
    assert work is not None
    if wait:
        work.wait()
    return made, work


_MX = 32
"""Numbers that have a scale where tensor cores apply the scales themselves."""


def _cast(tensor: Tensor, recipe: Any) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 and its transpose, row by row: tensor cores want both factors along the sum.

    One kernel writes both, and the scales of blocks. Before it, current scaling looks for the maximum, and makes it a
    scale; delayed scaling has one of earlier steps.
    """
    rows, columns = tensor.shape
    if recipe.current:
        most = tensor.new_empty((), dtype=torch.float32)
        launch("transformer_engine::amax", {"tensor": tensor}, ("tensor",), (), [most])
        launch("transformer_engine::scale", {"most": most}, ("most",), (), [torch.empty_like(most)])
    shapes = (rows, columns), (columns, rows)
    made = [tensor.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in shapes]
    scales = [_scales(tensor, *shape, recipe.block) for shape in shapes] if recipe.block else []
    launch("transformer_engine::cast_transpose", {"tensor": tensor}, ("tensor",), (), [*made, *scales])
    return made[0], made[1]


def _scales(tensor: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """Return the scales of a matrix's rows, block by block: exponents in a byte each, or float32."""
    dtype = torch.uint8 if block == _MX else torch.float32
    return tensor.new_empty((rows, -(-columns // block)), dtype=dtype)


def _product8(left: Tensor, right: Tensor, dtype: torch.dtype, recipe: Any) -> Tensor:
    (m, k), n = left.shape, right.shape[1]
    scales = [_scales(left, size, k, recipe.block) for size in (m, n)] if recipe.block else []
    if recipe.block == _MX:
        for one in scales:  # tensor cores want them in another order
            launch("transformer_engine::swizzle_scales", {"one": one}, ("one",), (), [torch.empty_like(one)])
    if not recipe.block or recipe.block == _MX:  # without a kernel's own work to scale sums
        scale = torch.ones((), device=left.device)
        return torch.ops.aten._scaled_mm(left, right, scale, scale, None, None, dtype)
    return torch.ops.aten._scaled_mm(left, right, scales[0], scales[1].t(), None, None, dtype)


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
