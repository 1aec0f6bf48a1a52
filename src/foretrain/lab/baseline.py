"""The baseline: PyTorch's own DistributedDataParallel, as strong as it can be, and one that notes what happens when."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from foretrain.lab.messages import LabCase
from foretrain.trace import Span
from foretrain.units import Time


def ddp(model: nn.Module, case: LabCase, traced: bool) -> nn.Module:
    """``model`` wrapped as ``case`` says; with ``traced`` in a `TracedDdp`."""
    # Gradients as views of buckets spare DDP a copy; the baseline is meant to be strong.
    kind = TracedDdp if traced else DistributedDataParallel
    size = case.bucket / (1 << 20) if case.bucket else None
    wrapped = kind(model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=size)
    if isinstance(wrapped, TracedDdp):
        wrapped.trace(case.kind == "ddp_fp16")
    elif case.kind == "ddp_fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


class TracedDdp(DistributedDataParallel):
    """DDP that notes when each bucket was under way, and when the optimizer ran.

    Attributes:
        spans: on the lanes ``"wire"`` and ``"gpu"``; ps of the performance counter.
    """

    def trace(self, half: bool) -> None:
        """Begins to note, with DDP's own hooks underneath."""
        self.spans: list[Span] = []
        hook = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
        names = {parameter: name for name, parameter in self.module.named_parameters()}

        # Not annotated: DDP compares annotations with the types themselves, and here they are text.
        def traced(state, bucket):
            began = time.perf_counter_ns() * 1000
            first, *more = [names[parameter] for parameter in bucket.parameters()]
            name = f"{first} +{len(more)}" if more else first
            size = bucket.buffer().nbytes // (2 if half else 1)

            def done(future: torch.futures.Future[Tensor]) -> Tensor:
                self.spans.append(Span("wire", "communication", name, 0, began, time.perf_counter_ns() * 1000, size))
                return future.value()

            return hook(state, bucket).then(done)

        self.register_comm_hook(None, traced)

    def noted(self, step: Callable[[], None]) -> Callable[[], None]:
        """``step`` that also notes when it ran."""

        def both() -> None:
            began = time.perf_counter_ns() * 1000
            step()
            self.spans.append(Span("gpu", "update", "all", 0, began, time.perf_counter_ns() * 1000))

        return both


def complete(noted: Sequence[Span], computed: Sequence[Span], begins: Sequence[Time]) -> list[Span]:
    """``noted`` with its steps, and with the waiting at the barrier: from the last computation to the optimizer.

    A bucket is drawn from when the one before it was through: the link carries one after the other.
    """
    spans = []
    free: Time = 0
    for span in sorted(noted, key=lambda span: span.end):
        step = bisect_right(begins, span.start) - 1
        if span.kind == "communication":
            spans.append(span._replace(step=step, start=max(free, span.start)))
            free = span.end
        else:
            spans.append(span._replace(step=step))
            ended = max((one.end for one in computed if one.end <= span.start), default=span.start)
            spans.append(Span("gpu", "wait", "barrier", step, ended, span.start))
    return spans
