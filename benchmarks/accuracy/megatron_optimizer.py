"""Gradients in one buffer, reduced over data-parallel ranks, and Adam on fp32 copies of the parameters.

As in Megatron-LM: gradients of all micro-batches add up in `main_grad`; with the distributed optimizer (ZeRO stage 1,
Rajbhandari et al., SC'20) each data-parallel rank updates a part of the parameters and all gather the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def bucket_size(ranks: int) -> int:
    """How many parameters at least are reduced together while the backward pass runs, over so many data-parallel ranks.

    Megatron-Core's, of all its versions since 0.5, where no ``--ddp-bucket-size`` is given: over many ranks buckets are
    larger, so that what each sends to the next takes longer than a message's latency.
    """
    return max(40_000_000, 1_000_000 * ranks)


def in_buckets(parameters: Iterable[nn.Parameter], least: float) -> Iterator[list[nn.Parameter]]:
    """Yields those of each bucket, which has ``least`` elements or more; ``copied`` parameters are alone in theirs."""
    held: list[nn.Parameter] = []
    for p in parameters:
        copied = getattr(p, "copied", False)
        if copied and held:
            yield held
            held = []
        held.append(p)
        if copied or sum(q.numel() for q in held) >= least:
            yield held
            held = []
    if held:
        yield held


class Bucket:
    """Parameters that lie one after another in flat buffers, and whose gradients travel at once.

    Attributes:
        values, gradients: the buffers, of ``size`` elements, a multiple of the data-parallel ranks.
        replicas: data-parallel ranks, over which the loss is a mean. Each expert is on fewer: its gradient is of the
            tokens of all.
        work: what is under way with the gradients.
        gathering: what is under way with the values.
        shared: whether both are one buffer (``reuse_grad_buf_for_mxfp8_param_ag``): what is gathered there is kept in
            float8 by the layers, and by parameters without `cast` as it is, before gradients add up.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        group: ProcessGroup,
        replicas: int = 0,
        *,
        shared: bool = False,
    ) -> None:
        self.parameters, self.group, self.replicas, self.shared = parameters, group, replicas or group.size(), shared
        self.size = math.ceil(sum(p.numel() for p in parameters) / group.size()) * group.size()
        first = parameters[0]
        self.gradients = torch.zeros(self.size, dtype=dtype, device=first.device)
        self.values = self.gradients if shared else torch.zeros(self.size, dtype=first.dtype, device=first.device)
        self._kept = not shared
        self.work: dist.Work | None = None
        self.gathering: dist.Work | None = None
        offset = 0
        for p in parameters:
            end = offset + p.numel()
            self.values[offset:end].copy_(p.data.flatten())
            if not shared or hasattr(p, "cast"):
                p.data = self.values[offset:end].view_as(p)
            p.main_grad = self.gradients[offset:end].view_as(p)
            p.ready = self.ready
            offset = end

    def part(self, buffer: Tensor) -> Tensor:
        """What this data-parallel rank updates."""
        return buffer.chunk(self.group.size())[self.group.rank()]

    def reduce(self, scatter: bool) -> None:
        """Starts to sum the gradients, to all ranks or to the part of each."""
        self.gradients.div_(self.replicas)
        if scatter:
            self.work = dist.reduce_scatter_tensor(
                self.part(self.gradients), self.gradients, group=self.group, async_op=True
            )
        else:
            self.work = dist.all_reduce(self.gradients, group=self.group, async_op=True)

    def gather(self) -> None:
        """Starts to gather the values that each rank has updated a part of."""
        self._kept = not self.shared
        self.gathering = dist.all_gather_into_tensor(self.values, self.part(self.values), self.group, async_op=True)

    def ready(self) -> None:
        """Waits until the values are there."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
        if not self._kept:
            self._keep()

    def _keep(self) -> None:
        """Takes the values out of the buffer that gradients add up in."""
        for p in self.parameters:
            if hasattr(p, "cast"):
                p.cast()
            else:
                p.data.copy_(p.main_grad)
        self.gradients.zero_()
        self._kept = True

    def zero(self) -> None:
        """Lets gradients add up from 0; where values are still in their place, when those have been kept."""
        if not self.shared:
            self.gradients.zero_()

    def wait(self) -> None:
        if self.work:
            self.work.wait()
            self.work = None


class Gradients:
    """Collects what arrives in the backward passes of a step, and reduces it.

    As in Megatron-Core, only what comes last in a step is reduced in buckets, as only that delays it: the first stage
    of the first rank of a pipeline. Each other stage is one bucket.

    Args:
        stages: parameters of each of this rank's stages, in the order of the forward pass; gradients arrive in about
            the opposite.
        uses: how often a parameter's gradient arrives in one micro-batch, where not once.
        overlap: whether to reduce each bucket as soon as its last gradient is there.
        shared: whether values are gathered where gradients add up; see `Bucket`.
        first: whether this is the first rank of its pipeline.
        experts: ranks that have the same experts, whose parameters are ``expert``; they have buckets of their own. So
            have those that are ``copied`` on another rank of the pipeline, which has the same part of them then.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Parameter]],
        uses: dict[nn.Parameter, int],
        dtype: torch.dtype,
        group: ProcessGroup,
        *,
        scatter: bool,
        overlap: bool,
        first: bool,
        shared: bool = False,
        experts: ProcessGroup | None = None,
    ) -> None:
        self.scatter, self.overlap = scatter, overlap
        self.buckets: list[Bucket] = []
        kinds = [(False, group)] if experts is None else [(False, group), (True, experts)]
        for number, parameters in reversed(list(enumerate(stages))):
            for expert, ranks in kinds:
                least = bucket_size(ranks.size()) if overlap and first and number == 0 else math.inf
                found = [p for p in reversed(parameters) if getattr(p, "expert", False) == expert]
                some = in_buckets(found, least)
                self.buckets += [Bucket(each, dtype, ranks, group.size(), shared=shared) for each in some]
        self._expected = [sum(uses.get(p, 1) for p in bucket.parameters) for bucket in self.buckets]
        self._missing = list(self._expected)
        for number, bucket in enumerate(self.buckets):
            for p in bucket.parameters:
                p.arrived = self._counter(number)
                p.register_post_accumulate_grad_hook(self._keep)

    @staticmethod
    def _keep(p: nn.Parameter) -> None:
        if p.grad is None:  # added already, where it was computed
            return
        p.main_grad.add_(p.grad)
        p.grad = None
        p.arrived()

    def _counter(self, number: int) -> Callable[[], None]:
        def arrived() -> None:
            self._missing[number] -= 1
            if not self._missing[number] and self.overlap:
                self.buckets[number].reduce(self.scatter)

        return arrived

    def zero(self, micro_batches: int) -> None:
        """Begins a step of so many micro-batches."""
        self._missing = [each * micro_batches for each in self._expected]
        for bucket in self.buckets:
            bucket.zero()

    def finish(self) -> None:
        """Reduces what has not been, and waits for all."""
        for bucket in self.buckets:
            if not self.overlap:
                bucket.reduce(self.scatter)
        for bucket in self.buckets:
            bucket.wait()


class MixedPrecisionAdam:
    """Adam on fp32 copies, with gradients clipped, and with a loss scale where they are in fp16.

    Args:
        shared: groups that hold the other parts of the model, over which norms are summed.
        counted: parameters that count in the norm here: others are counted by another rank.
        overlap: whether what is gathered may still be under way after a step; see `wait_before_use`.
    """

    def __init__(
        self,
        gradients: Gradients,
        shared: tuple[ProcessGroup, ...],
        counted: set[nn.Parameter],
        clip: float = 1.0,
        *,
        overlap: bool = False,
    ) -> None:
        self.gradients, self.shared, self.counted, self.clip = gradients, shared, counted, clip
        self.overlap = overlap
        self.scale = 2.0**16 if gradients.buckets[0].gradients.dtype == torch.float16 else 1.0
        if gradients.scatter:
            pairs = [(bucket.part(bucket.values), bucket.part(bucket.gradients)) for bucket in gradients.buckets]
        else:
            pairs = [(p.data, p.main_grad) for bucket in gradients.buckets for p in bucket.parameters]
        self.values, self.found = (list(side) for side in zip(*pairs, strict=True))
        self.masters = [nn.Parameter(value.detach().clone().float()) for value in self.values]
        self.adam = torch.optim.Adam(self.masters, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def _sum(self, x: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        for group in self.shared:
            dist.all_reduce(x, operation, group)
        return x

    def _unscale(self) -> bool:
        """Whether gradients are finite; divides them by the loss scale."""
        device = self.masters[0].device
        bad, inverse = torch.zeros(1, device=device), torch.tensor([1 / self.scale], device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in self.masters], bad, inverse)
        if self._sum(bad, dist.ReduceOp.MAX).item():
            self.scale /= 2
            return False
        return True

    def _clip(self) -> None:
        grads = [p.grad for p in self.masters if p.grad is not None]
        owners = [bucket.parameters for bucket in self.gradients.buckets]
        if not self.gradients.scatter:
            owners = [[p] for some in owners for p in some]
        of_norm = [grad for grad, some in zip(grads, owners, strict=True) if self.counted.intersection(some)]
        norms = torch.stack(torch._foreach_norm(of_norm)) if of_norm else torch.zeros(1, device=grads[0].device)
        total = self._sum(norms.square().sum()).sqrt()
        torch._foreach_mul_(grads, (self.clip / (total + 1e-6)).clamp(max=1.0))

    def step(self) -> None:
        """Updates the parameters, unless a gradient in fp16 is not finite."""
        for master, found in zip(self.masters, self.found, strict=True):
            master.grad = found.float()
        if self.scale == 1 or self._unscale():
            self._clip()
            self.adam.step()
            torch._foreach_copy_(self.values, [p.data for p in self.masters])
            if self.gradients.scatter:
                for bucket in reversed(self.gradients.buckets):  # as the forward pass wants them
                    bucket.gather()
                for bucket in self.gradients.buckets if not self.overlap else ():
                    bucket.ready()
        self.adam.zero_grad(set_to_none=True)


def wait_before_use(model: nn.Module) -> None:
    """Lets each module wait for its own parameters when it is about to use them (``overlap_param_gather``)."""

    def wait(module: nn.Module, _: object) -> None:
        for p in module.parameters(recurse=False):
            p.ready()

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(wait)


def counted(parameters: Iterable[nn.Parameter], split_rank: int) -> set[nn.Parameter]:
    """Those that no other rank of the tensor-parallel group has, and on its first rank the others too."""
    return {p for p in parameters if p.split or split_rank == 0}


def sum_partial(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Sums gradients of parameters of which each tensor-parallel rank saw a part of the sequence alone."""
    found = [p.main_grad for p in parameters if getattr(p, "partial", False)]
    if found and group.size() > 1:
        flat = torch.cat([grad.flatten() for grad in found])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(found, flat.split([grad.numel() for grad in found]), strict=True):
            grad.copy_(total.view_as(grad))
