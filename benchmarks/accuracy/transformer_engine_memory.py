"""What Transformer Engine does about memory: a loss that needs no copy of the logits, and gradients that stand in.

`fused_cross_entropy` is its ``parallel_cross_entropy``, which Megatron takes with ``--cross-entropy-loss-fusion`` and
``--cross-entropy-fusion-impl te``: logits keep their dtype and are overwritten by their gradient in the forward pass.

Where a product adds a weight's gradient to ``main_grad`` itself, autograd is still given a tensor of the weight's shape
and dtype. Transformer Engine keeps one for all weights of a shape, since its version 2.3 (``get_dummy_wgrad``);
Megatron's output layer makes one each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_kept: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


def let_stand_in(weights: Iterable[nn.Parameter], output: nn.Parameter | None) -> None:
    """Give autograd gradients besides those of ``weights`` that products add up; ``output`` is of the output layer."""
    for weight in weights:
        weight.stand_in_is_kept = weight is not output


def added(weight: nn.Parameter) -> Tensor | None:
    """Return the gradient for autograd of a weight whose ``main_grad`` has it, having taken its stand-in's memory."""
    if (kept := getattr(weight, "stand_in_is_kept", None)) is not None:
        key = weight.shape, weight.dtype
        made = _kept[key] if key in _kept else torch.empty_like(weight, requires_grad=False)
        if kept:
            _kept[key] = made
    return weight.arrived()


def row_statistics(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's maximum, its sum of exponentials over that, and its logit number ``wanted``, in float32."""
    wide = logits.float()
    largest = wide.amax(-1)
    whole = (wide - largest.unsqueeze(-1)).exp().sum(-1)
    return largest, whole, logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1).float()


def fuse() -> None:
    """Let the compiler make one kernel of `row_statistics`, for which Transformer Engine has one."""
    globals()["row_statistics"] = torch.compile(row_statistics)


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        here = targets - logits.shape[-1] * group.rank()
        elsewhere = (here < 0) | (here >= logits.shape[-1])
        here = here.masked_fill(elsewhere, 0)
        largest, whole, wanted = row_statistics(logits, here)
        parts = torch.stack((largest, whole, wanted.masked_fill(elsewhere, -torch.inf)))
        gathered = parts
        if group.size() > 1:
            gathered = parts.new_empty(group.size() * len(parts), *parts.shape[1:])
            dist.all_gather_into_tensor(gathered, parts, group=group)
        gathered = gathered.view(group.size(), *parts.shape)
        most = gathered[:, 0].amax(0)
        normal = most + (gathered[:, 1] * (gathered[:, 0] - most).exp()).sum(0).log()
        # Transformer Engine's second kernel does these three in one, in registers; they take a thousandth of a step.
        logits.sub_(normal.unsqueeze(-1)).exp_()
        logits.scatter_add_(-1, here.unsqueeze(-1), elsewhere.to(logits.dtype).unsqueeze(-1) - 1)
        ctx.save_for_backward(logits)
        return normal - gathered[:, 2].amax(0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (of_logits,) = ctx.saved_tensors
        return of_logits.mul_(gradient.unsqueeze(-1)), None, None


def fused_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Return the loss of logits split by words, (..., words here), to targets of shape (...); logits are lost."""
    return _FusedCrossEntropy.apply(logits, targets, group)
