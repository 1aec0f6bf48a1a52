"""Pipeline schedules over point-to-point messages: 1F1B and its interleaved form (Narayanan et al., SC'21, §2.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron_turns import Turns
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

Stage = Callable[[Tensor | None, int], Tensor]
"""Activations that came in (None on the first stage) and the micro-batch's number, to activations or a loss."""


@dataclass(frozen=True)
class Line:
    """The ranks of one pipeline, and the activations that pass between them.

    Attributes:
        synchronous: whether the host waits for the GPU after each exchange, as Megatron does where it batches messages
            (``batch_p2p_sync`` of Megatron-Core, always before), so that it never launches ahead of what arrives.
        alike: ranks that have the same activations: each sends its part of them, and the receivers gather the parts
            (Narayanan et al., §4.1, scatter/gather optimization); None where each has its own.
        turns: of a backward pass and the next forward pass beside it; None where one is after the other.
    """

    group: ProcessGroup
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    synchronous: bool = False
    alike: ProcessGroup | None = None
    turns: Turns | None = None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def exchange(
        self, back: Tensor | None, ahead: Tensor | None, from_back: bool, from_ahead: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends to the ranks before and after, and receives from them, all at once; returns what came from each."""
        before, after = (dist.get_global_rank(self.group, (self.rank + step) % self.ranks) for step in (-1, 1))
        came_back = torch.empty(self.shape, dtype=self.dtype, device=self.device) if from_back else None
        came_ahead = torch.empty(self.shape, dtype=self.dtype, device=self.device) if from_ahead else None
        wanted = [(back, came_back, before), (ahead, came_ahead, after)]
        if self.ranks == 2 and self.rank == 1:  # the other rank is before and after, and sends back first
            wanted.reverse()
        ops = [
            P2POp(kind, self._part(tensor), peer, self.group)
            for sent, received, peer in wanted
            for kind, tensor in ((dist.isend, sent), (dist.irecv, received))
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        if self.synchronous and ops and self.device.type == "cuda":
            torch.cuda.synchronize()
        for came in (came_back, came_ahead):
            if came is not None and self.alike:
                dist.all_gather_into_tensor(came.flatten(), self._part(came), self.alike)
        if came_back is not None:
            came_back.requires_grad_()
        return came_back, came_ahead

    def _part(self, x: Tensor | None) -> Tensor | None:
        """What this rank sends or receives of ``x``: a view."""
        if x is None or self.alike is None:
            return x
        return x.contiguous().flatten().chunk(self.alike.size())[self.alike.rank()]


class _Chunk:
    """One stage of a rank, and the micro-batches that it holds between forward and backward."""

    def __init__(self, stage: Stage, last: bool, share: float) -> None:
        self.stage, self.last, self.share = stage, last, share
        self.inputs: deque[Tensor | None] = deque()
        self.gradients: deque[Tensor | None] = deque()
        self.held: deque[tuple[Tensor | None, Tensor]] = deque()
        self.done = 0
        self.loss: Tensor | None = None

    def forward(self) -> Tensor | None:
        """Computes the next micro-batch; None on the last stage, whose output is a loss."""
        came = self.inputs.popleft()
        output = self.stage(came, self.done)
        self.done += 1
        self.held.append((came, output))
        if not self.last:
            return output.detach()
        part = output.detach() * (1 / self.divisor)
        self.loss = part if self.loss is None else self.loss + part
        return None

    divisor = 1
    """Micro-batches of a step."""

    def backward(self) -> Tensor | None:
        """The oldest micro-batch's gradient of what came in; None on the first stage."""
        came, output = self.held.popleft()
        if self.last:
            (output * self.share).backward()
        else:
            torch.autograd.backward(output, self.gradients.popleft())
        return came.grad if came is not None else None


def _chunks(line: Line, stages: Sequence[Stage], micro_batches: int, scale: float) -> list[_Chunk]:
    count = len(stages)
    made = [
        _Chunk(stage, line.rank == line.ranks - 1 and number == count - 1, scale / micro_batches)
        for number, stage in enumerate(stages)
    ]
    for chunk in made:
        chunk.divisor = micro_batches
    if line.rank == 0:
        made[0].inputs.extend([None] * micro_batches)
    return made


def beside(line: Line, stages: Sequence[Stage], micro_batches: int, scale: float) -> Tensor | None:
    """Runs all micro-batches through the only stage, each one's backward pass beside the next one's forward pass."""
    (chunk,) = _chunks(line, stages, micro_batches, scale)
    assert line.turns is not None
    chunk.forward()
    for _ in range(micro_batches - 1):
        line.turns.beside(chunk.backward, chunk.forward)
    chunk.backward()
    return chunk.loss


def one_forward_one_backward(line: Line, stages: Sequence[Stage], micro_batches: int, scale: float) -> Tensor | None:
    """Runs all micro-batches through one stage a rank; the mean loss, on the last rank."""
    (chunk,) = _chunks(line, stages, micro_batches, scale)
    first, last = line.rank == 0, line.rank == line.ranks - 1
    warm = min(line.ranks - line.rank - 1, micro_batches)
    rest = micro_batches - warm

    def receive() -> None:
        if not first:
            chunk.inputs.append(line.exchange(None, None, True, False)[0])

    for _ in range(warm):
        receive()
        line.exchange(None, chunk.forward(), False, False)
    if rest:
        receive()
    for number in range(rest):
        output = chunk.forward()
        if not last:
            chunk.gradients.append(line.exchange(None, output, False, True)[1])
        gradient = chunk.backward()
        more = number < rest - 1 and not first
        came = line.exchange(gradient, None, more, False)[0]
        if more:
            chunk.inputs.append(came)
    for _ in range(warm):
        chunk.gradients.append(line.exchange(None, None, False, True)[1])
        line.exchange(chunk.backward(), None, False, False)
    return chunk.loss


def interleaved(line: Line, stages: Sequence[Stage], micro_batches: int, scale: float) -> Tensor | None:
    """Runs all micro-batches through several stages a rank, each rank's ``ranks`` apart; the mean loss, on the last."""
    chunks = _chunks(line, stages, micro_batches, scale)
    count, ranks, rank = len(chunks), line.ranks, line.rank
    first, last = rank == 0, rank == ranks - 1
    total = micro_batches * count
    warm = 2 * (ranks - rank - 1) + (count - 1) * ranks
    warm += line.turns is not None  # what is forward must not be what is backward beside it
    warm = total if micro_batches == ranks else min(total, warm)

    def of(number: int, forward: bool = True) -> int:
        """The stage whose turn is in step ``number`` of this rank's forward or backward passes."""
        chunk = number % (ranks * count) // ranks
        return chunk if forward else count - 1 - chunk

    if not first:
        chunks[0].inputs.append(line.exchange(None, None, True, False)[0])
    for step in range(warm):
        output = chunks[of(step)].forward()
        following = of(step + 1)
        wants = step < total - 1 and not (first and following == 0)
        backwards = step == warm - 1 and warm < total and not last
        came, gradient = line.exchange(None, output, wants, backwards)
        if wants:
            chunks[following].inputs.append(came)
        if backwards:
            chunks[count - 1].gradients.append(gradient)
    for step in range(total - warm):
        ahead, back = chunks[of(step + warm)].forward, chunks[of(step, False)].backward
        if line.turns:
            gradient, output = line.turns.beside(back, ahead)
        else:
            output, gradient = ahead(), back()
        # The first rank's inputs come from the last one, which is ranks - 1 steps behind; so for gradients on the last.
        if first:
            behind = of(step + warm - (ranks - 1))
            wants, into = behind != count - 1, behind + 1
        else:
            wants, into = True, of(step + warm + 1)
        if last:
            behind = of(step - (ranks - 1), False)
            wants_gradient, gradient_into = behind != 0, behind - 1
        else:
            wants_gradient, gradient_into = True, of(step + 1, False)
        wants = wants and step < total - warm - 1
        came, returned = line.exchange(gradient, output, wants, wants_gradient)
        if wants:
            chunks[into].inputs.append(came)
        if wants_gradient:
            chunks[gradient_into].gradients.append(returned)
    if warm == total and not last:
        chunks[count - 1].gradients.append(line.exchange(None, None, False, True)[1])
    for step in range(total - warm, total):
        gradient = chunks[of(step, False)].backward()
        following = of(step + 1, False)
        wants = step < total - 1 and not (last and following == count - 1)
        returned = line.exchange(gradient, None, False, wants)[1]
        if wants:
            chunks[following].gradients.append(returned)
    return chunks[-1].loss
