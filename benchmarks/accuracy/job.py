"""What the training scripts of this folder share: how a process joins its job, and what it prints of a step."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def join(kind: str) -> torch.device:
    """This process's device of ``kind``, after it has joined the job that torchrun's environment describes."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


class Meter:
    """Prints loss, time, rate and memory of each step, on the ranks where ``talks``.

    Attributes:
        tokens: tokens of a step, of all GPUs together.
    """

    def __init__(self, tokens: int, talks: bool) -> None:
        self.tokens, self.talks = tokens, talks
        self._number, self._start = 0, time.perf_counter()

    def step(self, loss: torch.Tensor) -> None:
        """Ends a step: waits for the GPU, as printing a loss does."""
        value, now = loss.item(), time.perf_counter()
        seconds, self._start = now - self._start, now
        if self.talks:
            rate = self.tokens / dist.get_world_size() / seconds
            peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}"
            held = f"{torch.cuda.max_memory_reserved() / 2**30:.2f}"
            print(
                f"step {self._number}: loss {value:.5f}, {seconds:.4f} s, {rate:,.1f} tokens/s/GPU, "
                f"peak {peak} GiB, reserved {held} GiB",
                flush=True,
            )
        self._number += 1
