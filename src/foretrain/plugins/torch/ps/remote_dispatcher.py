"""The training thread's side where servers update: what `GradientDispatcher` does with sums must not be done with
parameters.

A gradient that was pushed is applied, whether step() is called or not, and what comes back is no gradient. So whatever
would need it later is refused, in words: reading ``.grad``, steps that are left out, sums that are added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn, optim

from foretrain.comm.coordinator.protocol import CoordinatedExchange
from foretrain.errors import ConfigError
from foretrain.plugins.torch.deferred_optimizer import DeferredOptimizer
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher, GradientLocation
from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer
from foretrain.plugins.torch.streams import HostStreams

_INSTEAD: Final = "write updates='workers' (--updates workers)"


class _Gone:
    """A `guards.Holder` of gradients that nobody can have back."""

    def __init__(self, scheduled: RemoteDispatcher) -> None:
        self._scheduled = scheduled

    def fetch(self) -> None:
        """Somebody has read ``.grad``."""
        what = "is read (to clip or log its norm, or by a GradScaler?), and servers have updated with it already"
        raise ConfigError("gradient", ".grad", what, f"do without, or {_INSTEAD}")

    def drop(self, key: int, zeros: bool) -> None:
        """It was cleared."""
        self._scheduled.drop(key, zeros)


class RemoteDispatcher(GradientDispatcher):
    """`GradientDispatcher` over servers that update. Every round is one step.

    Args:
        parameters: indexed by task.
        gradients: their flat buffers; parameters come back in them.
        fires: per task, how often its gradient accumulates in one backward pass before it is complete.
        passes: backward passes per step, to begin with.
        exchange: told what is ready.
        updates: puts parameters in their places.
        streams: of the model's device.
        ranks: by how much gradients are divided: N, or 1 where each worker's are an update of their own.
        remote: the optimizers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: GradientBuffer,
        fires: Sequence[int],
        passes: int,
        exchange: CoordinatedExchange,
        updates: DeferredOptimizer,
        streams: HostStreams,
        ranks: int,
        remote: RemoteOptimizer,
    ) -> None:
        super().__init__(parameters, gradients, fires, passes, exchange, updates, streams, ranks)
        self._remote = remote
        self._everything = dict.fromkeys(self._everything, _Gone(self))
        self._places = {place for place, tasks in enumerate(remote.tasks) if tasks}

    def fetch(self) -> None:
        """Waits until everything that was pushed has come back, and is in its place."""
        self.finish()
        self._updates.wait_all()
        self.settled()

    def _begin(self) -> None:
        self.settled()
        for tasks in self._remote.tasks:
            for task in tasks:
                self._check_cleared(task)
        self._updates.wait_wanted()
        self._remote.check_parameters()
        super()._begin()

    def _recall(self, task: int) -> None:
        self._check_cleared(task)
        super()._recall(task)

    def _check_cleared(self, task: int) -> None:
        if self._held[task] is not GradientLocation.NO:
            what = "was not cleared, and the sum to add to is gone: servers have updated with it"
            raise ConfigError("gradient", f"task {task}", what, f"call zero_grad() in every step, or {_INSTEAD}")

    def settled(self) -> None:
        """ConfigError where servers have updated with gradients for which step() was not called."""
        if self.rounds and self._stepped != self._places:
            again = "all optimizers step once after each backward(), or after as many as in the first steps"
            what = "was not called for gradients with which servers have updated"
            raise ConfigError("optimizer.step()", "", what, f"see to it that {again}; or {_INSTEAD}")

    def step(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Parameters are used as they come back from here on; True, as nothing is left to be done here."""
        self._remote.check_rules(place)
        return super().step(place, optimizer, tasks)

    def _step_now(self) -> bool:
        what = "steps with other gradients than the last backward() has made: they were cleared, or put there"
        raise ConfigError(
            "optimizer", "step()", what, f"call backward(), step() and zero_grad() in turn, or {_INSTEAD}"
        )
