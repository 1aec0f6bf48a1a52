"""Settings of simulated ranks: script, server and device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from foretrain.device import Device, preset
from foretrain.device.calibration import Calibration, load
from foretrain.units import MICROSECOND, Time

LAUNCH: Time = 6 * MICROSECOND
"""Host time of an eager framework for one kernel; 5 to 10 µs are usual."""
WATCHED = 2
"""Steps to watch before a policy schedules. The first pays for allocations; in virtual time more are alike."""
STAND_INS = ("apex", "flash_attn", "transformer_engine", "triton")
"""Libraries that can be stood in for."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of all ranks alike; sent to them as JSON.

    Attributes:
        script: the script, or with ``module`` a module's dotted name, and its arguments.
        module: whether it is named as ``python -m`` would.
        device: a preset of `foretrain.device`, or what the device of ``calibration`` is called.
        world: ranks of the job.
        gpus: GPUs, and so ranks, of one server.
        store: the file in which ranks meet; see Note [Stores] in `foretrain.live.device.process_groups`.
        folded: whether some ranks of the job are only represented by others.
        movable: whether another rank can stand for all in place of this one, the only live one.
        steps: of the optimizer after which the script is ended; None lets it run to its own end.
        launch: ps the host spends on launching a kernel.
        measured_host: whether it spends this machine's CPU time instead.
        factor: by which every predicted time of an operator is multiplied, for a framework's own efficiency.
        slow: ranks whose GPUs are slower than their kind, each with how many times longer they compute.
        tracing: whether every kernel is logged, or only runs of them.
        calibration: a file of what was measured on the device, or None.
        costs: a file of what kernels of the script's own cost, or None.
        stand_ins: libraries to stand in for where they are not installed; see `foretrain.live.device.stand_ins`.
        operators: where to write which operators were launched, with the rank behind it, or None.
        schedule: the policy that exchanges gradients in place of DistributedDataParallel's own; None leaves them to it.
        memory: bytes of GPU memory, overriding the preset, or None.
        reserve: bytes of a GPU's memory that PyTorch does not see: CUDA's context and NCCL's buffers.
    """

    script: tuple[str, ...]
    device: str
    world: int
    gpus: int
    store: str
    module: bool = False
    folded: bool = False
    movable: bool = False
    steps: int | None = None
    launch: Time = LAUNCH
    measured_host: bool = False
    factor: float = 1.0
    slow: tuple[tuple[int, float], ...] = ()
    tracing: bool = False
    memory: int | None = None
    reserve: int = 1 << 30
    calibration: str | None = None
    costs: str | None = None
    stand_ins: tuple[str, ...] = STAND_INS
    operators: str | None = None
    schedule: str | None = None

    def to_json(self) -> str:
        """Encode for `from_json`, in another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankSettings:
        """Decode the output of `to_json`."""
        fields = json.loads(text)
        return RankSettings(**fields | {name: tuple(fields[name]) for name in ("script", "stand_ins", "slow")})

    def of_device(self) -> RankSettings:
        """Return these without what the activation of a device, and what is imported then, does not depend on."""
        return replace(self, script=self.script[:1], store="", movable=False, steps=None, operators=None)

    def measured(self) -> tuple[Device, Calibration | None]:
        """Return the device, and what was measured on it.

        Raises:
            ConfigError: there is no such device, or the calibration is none.
        """
        calibration = None if self.calibration is None else load(self.calibration)
        device = preset(self.device) if calibration is None else calibration.described()
        return (device if self.memory is None else replace(device, memory=self.memory)), calibration

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torchrun sets for ``rank``, on this many servers."""
        node, local = divmod(rank, self.gpus)
        here = min(self.gpus, self.world - node * self.gpus)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(here),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(-(-self.world // self.gpus)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "foretrain",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
