"""Unmodified scripts: ``foretrain run`` starts them through torchrun and schedules their DistributedDataParallel.

`command` starts torchrun, `worker` is what runs in each process, `takeover` decides whether a model can be taken over,
and `parallel` is the DistributedDataParallel that the script gets instead of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Compression: TypeAlias = Literal["fp16", "bf16"]
"""What gradients are sent as."""

Place: TypeAlias = Literal["workers", "servers"]
"""Where optimizers run."""

__all__ = ["Compression", "LaunchSettings", "Place"]


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What ``foretrain run`` was asked for and every process must know.

    Attributes:
        schedule: a policy with its knobs, ``"auto"``, or a plan file's path, as `foretrain.planner.plan`
        reads it.
        compression: what gradients are sent as; None leaves it to the script.
        timeout: seconds after which a silent rank counts as lost.
        patience: seconds after which work that does not move counts as stuck.
        served: whether gradients go over a parameter server, whose addresses are in the environment.
        updates: where optimizers run then; None leaves it to ``consistency``.
        consistency: how far ranks may go apart, see `foretrain.comm.ps.consistency`.
        elastic: whether ranks go on without one that is lost, as the servers then do.
        tune: whether knobs are searched on as the job runs.
    """

    schedule: str = "bytescheduler"
    compression: Compression | None = None
    timeout: float = 60.0
    patience: float = 1800.0
    served: bool = False
    updates: Place | None = None
    consistency: str = "bsp"
    elastic: bool = False
    tune: bool = False

    def arguments(self) -> list[str]:
        """The options of `foretrain.launch.worker` that say the same."""
        compression = ["--compression", self.compression] if self.compression else []
        waits = ["--timeout", repr(self.timeout), "--patience", repr(self.patience)]
        flags = ["--served"] * self.served + ["--elastic"] * self.elastic + ["--tune"] * self.tune
        flags += ["--updates", self.updates] if self.updates else []
        flags += ["--consistency", self.consistency] if self.consistency != "bsp" else []
        return ["--schedule", self.schedule, *compression, *waits, *flags]
