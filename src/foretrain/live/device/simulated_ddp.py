"""``foretrain simulate --schedule``: a simulated rank's DistributedDataParallel under a policy.

`foretrain.launch.ddp_patch` and `foretrain.launch.scheduled_ddp` decide what can be taken over, as they do for real
jobs; what stays with PyTorch's own DistributedDataParallel becomes a warning of the forecast.
"""

from __future__ import annotations

from types import ModuleType
from typing import cast

from torch.optim import Optimizer

from foretrain.launch import LaunchSettings
from foretrain.launch.ddp_patch import DdpPatch
from foretrain.launch.scheduled_ddp import AgreedPlan, ModelRecord, ScheduledDataParallel
from foretrain.live.device.logged_exchange import SimulatedAttached
from foretrain.live.device.settings import WATCHED
from foretrain.schedule import spec
from foretrain.units import Time


class SimulatedParallel(ScheduledDataParallel):
    """A DistributedDataParallel whose gradients the conductor's policy exchanges where that is possible."""

    def _attach(self, optimizers: tuple[Optimizer, ...]) -> None:
        taking = cast("SimulatedTakeover", self.takeover)
        self._record.attached = SimulatedAttached(
            taking.device,
            self.module,
            optimizers,
            self.process_group,
            spec(taking.settings.schedule),
            self._role.compression,
            taking.launch,
        )
        self._note(optimizers)


class SimulatedTakeover(DdpPatch):
    """A context manager around the script.

    Args:
        device: the loaded extension.
        schedule: a policy with its knobs.
        launch: ps the host spends on launching a kernel.
    """

    parallel = SimulatedParallel

    def __init__(self, device: ModuleType, schedule: str, launch: Time) -> None:
        super().__init__(LaunchSettings(schedule=schedule))
        self.device, self.launch = device, launch

    def recorded(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """A record whose words go to the conductor."""
        return _Record(wrapper, self)

    def warn(self, text: str) -> None:
        """Tells the user, as a warning of the forecast."""
        self.device.note(self.device.WARNING, 0, 0, text.encode())

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """As for real jobs; and one rank alone has nothing to exchange."""
        if wrapper.process_group.size() < 2:
            reason = reason or "one rank alone exchanges nothing"
        return super().plan(wrapper, reason)

    def _summary(self) -> list[str]:
        lines = super()._summary()
        if not any(record.steps for record in self._records):
            for line in lines:
                self.warn(f"--schedule: {line}")
        return []


class _Record(ModelRecord):
    def __init__(self, wrapper: ScheduledDataParallel, taking: SimulatedTakeover) -> None:
        super().__init__(wrapper)
        self._taking = taking

    def end(self, error: BaseException | None = None) -> None:
        if self.attached is not None and self.attached.schedule is None:
            self._taking.warn(
                f"--schedule: {self.name} was only watched: the policy begins after {WATCHED} steps, give it more"
            )
        super().end(error)

    def stock(self, reason: str) -> None:
        self.reason = reason
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()
        self._taking.warn(f"--schedule: {self.name} runs with PyTorch's own DistributedDataParallel: {reason}")
