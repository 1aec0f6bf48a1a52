"""Rank's side of optimizers on a server over a transport with bounded loss.

    gradients ──▶ server: their mean, its optimizer ──▶ `PulledParameters` ──▶ the model's parameters, at step()

# Note [Lost pulls]
A packet of parameters that is lost leaves in this rank's copy what was there before, for a step: the next pull must not
lose it again, and brings what the server has by then. Only where the policy cuts tensors otherwise by then, it may. The
server's copy is never another, and gradients of stale parameters are as those of an asynchronous worker. Before a
checkpoint, and in the end, a rank fetches over TCP what its last pull has lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from foretrain.comm.bounded.collectives import BoundedCollectives
from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.buffers import BufferSlice
from foretrain.comm.collectives.executor import Work
from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.comm.event_loop import POLL_INTERVAL
from foretrain.comm.ps.placement import Declaration, Declared, dtype_name
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.plugins.torch.process_group_executor import HostOperations, IssuedWork, ProcessGroupExecutor, memory
from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer
from foretrain.plugins.torch.ps.server.parameter_store import PartState, decode, encode
from foretrain.tasks import Task


class PulledOptimizer(RemoteOptimizer):
    """Optimizers on a server that updates under bounded loss.

    Args:
        parameters: indexed by task.
        attachments: of the optimizers, with their tasks.
        passes: backward passes of a step.
        collectives: to the server.
        order: task indices, first used first.
    """

    lossy = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        attachments: Sequence[OptimizerHooks],
        passes: int,
        collectives: BoundedCollectives,
        order: Sequence[int],
    ) -> None:
        super().__init__(parameters, attachments, "bsp", passes)
        assert collectives.state is not None
        self._collectives, self._server = collectives, collectives.state
        self.pulled = GradientBuffer(parameters, order)
        """Parameters as the server has sent them."""
        self._views = self.pulled.views
        self._stale: set[int] = set()
        """Tasks of whose last pull, before this round, something was lost."""
        self._came: set[int] = set()
        self._lost: set[int] = set()
        """Tasks that were pulled in this round, and those of them that lost something."""

    def operations(self, ledger: Ledger | None) -> PullOperations:
        """Return the operations that push and pull; ``ledger`` books what is lost."""
        assert ledger is not None
        return PullOperations(self._collectives, ledger, self)

    def open(self, tasks: Sequence[Task], check: Callable[[], None], *, seeds: bool) -> None:
        """Begin with the parameters of now; ``check`` raises the error that ends the job, and one rank ``seeds``."""
        self._check = check
        with torch.no_grad():
            for view, parameter in zip(self._views, self._parameters, strict=True):
                view.copy_(parameter)
        if not seeds:
            return
        kinds = zip(tasks, self._parameters, strict=True)
        declared = tuple(Declared(task.name, task.size, dtype_name(p.dtype), task.first_use) for task, p in kinds)
        self._server.declare(Declaration(declared, self._collectives.ranks, optimized=self.optimized).encode())
        for task, place in enumerate(self._owner):
            if place >= 0:
                self._server.load(task, encode(self._task_state(task)))
        self._server.wait_ready(check)

    def begin_round(self) -> None:
        """Tell the server the current hyperparameters."""
        self._settle()
        self._collectives.announce(self._announce())

    def came(self, tasks: Collection[int], lost: Collection[int]) -> None:
        """Note that parts of ``tasks`` were pulled, and that those of ``lost`` did not come whole."""
        self._came.update(tasks)
        self._lost.update(task for task in lost if self._owner[task] >= 0)  # of others the server has none

    def _settle(self) -> None:
        """End a round, whose pulls are all done."""
        self._stale = (self._stale - self._came) | self._lost
        self._came, self._lost = set(), set()

    def recover(self) -> None:
        """Fetch over TCP what the last pulls have lost; see Note [Lost pulls]."""
        self._settle()
        stale, self._stale = sorted(self._stale), set()
        # A backward pass may follow for which a forward pass has saved them.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(self._parameters[k] for k in stale)):
            for task, found in self._fetched(stale):
                self._set_parameter(task, found)
        for task in stale:
            self._versions[task] = self._parameters[task]._version

    def _set_parameter(self, task: int, found: PartState) -> None:
        super()._set_parameter(task, found)
        with torch.no_grad():
            self._views[task].copy_(self._parameters[task])

    def _fetched(self, tasks: Collection[int]) -> Iterator[tuple[int, PartState]]:
        for task, frames in self._server.fetch(list(tasks), self._check):
            yield task, decode(frames)


class _Pull(NamedTuple):
    """Pull of ``places``, which are one after the other in ``pulled``: copies of ``targets`` if they are several."""

    places: list[BufferSlice]
    pulled: torch.Tensor
    targets: list[torch.Tensor]
    tasks: set[int]


class PullOperations(HostOperations):
    """`TensorOperations` that push gradients to a server that updates, and pull parameters.

    Args:
        collectives: to the server.
        ledger: books what is lost.
        remote: the parameters.
    """

    def __init__(self, collectives: BoundedCollectives, ledger: Ledger, remote: PulledOptimizer) -> None:
        super().__init__(collectives, ledger)
        self._server, self._losses, self._remote = collectives, ledger, remote
        self._pulls: dict[Work, _Pull] = {}

    def all_reduce(self, tensors: list[torch.Tensor], places: list[BufferSlice]) -> Work:
        """Begin to push ``tensors``, of which there is one, and to pull the parameters of ``places``."""
        (tensor,) = tensors
        hint, targets = self._losses.hint("update", places), [self._remote.pulled.slice(place) for place in places]
        pulled = targets[0] if len(targets) == 1 else torch.cat(targets)
        bfloat16 = tensor.dtype == torch.bfloat16
        work = self._server.update(memory(tensor), memory(pulled), bfloat16=bfloat16, hint=hint)
        assert hint.tensors is not None
        self._pulls[work] = _Pull(places, pulled, targets, set(hint.tensors[:, 0].tolist()))
        return work

    def finish(self, work: Work, check: Callable[[], None]) -> None:
        """Wait for an operation, and call ``check`` now and then."""
        while not work.wait(POLL_INTERVAL):
            check()
        pull = self._pulls.pop(work)
        if len(pull.targets) > 1:
            for target, values in zip(pull.targets, pull.pulled.split([len(t) for t in pull.targets]), strict=True):
                target.copy_(values)
        self._remote.came(pull.tasks, self._losses.note(pull.places, work))


class PullExecutor(ProcessGroupExecutor):
    """Executor of pushes and pulls. A push that a policy would gather later is pulled at once: the server has it."""

    def _begin(self, command: CollectiveCommand) -> list[IssuedWork]:
        chunk = command.chunk
        if chunk.op == "all_gather":
            return []
        pieces = [piece for piece in chunk.pieces if piece.task not in command.unused]
        return [self._reduce(places) for places in self._by_buffer(pieces)]
