"""Settings of simulated ranks: script, server and device."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foretrain.device import Device, preset
from foretrain.device.calibration import Calibration, load
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, Time

LAUNCH: Time = 6 * MICROSECOND
"""Host time of an eager framework for one kernel; 5 to 10 µs are usual."""
WATCHED = 2
"""Steps to watch before a policy schedules. The first pays for allocations; in virtual time more are alike."""
STAND_INS = (
    "apex", "causal_conv1d", "deep_ep", "flash_attn", "flash_attn_interface", "grouped_gemm", "mamba_ssm",
    "transformer_engine", "triton",
)  # fmt: skip
"""Libraries that can be stood in for."""


_LOGNORMAL = re.compile(r"lognormal\(([^,()]+)(?:,([^,()]+))?\)")
_LOADS_REMEDY = "write balanced, lognormal(0.3), lognormal(0.3,SEED), or a file of loads"


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Loads that routers give to their experts, relative to each other.

    Attributes:
        text: as the user wrote them.
        sigma: standard deviation of the loads' logarithms, drawn anew for each router and step.
        seed: of the draws.
        rows: loads of the experts, the same in all steps: one row for all routers, or one for each; empty to draw.
    """

    text: str
    sigma: float = 0.0
    seed: int = 0
    rows: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def parse(text: str) -> ExpertLoads | None:
        """Return the loads that ``text`` means: ``lognormal(SIGMA[,SEED])`` or a file; None for ``balanced``.

        A file is .csv, a router in each row; or .json or .toml with ``loads``, one list or a list of lists.

        Raises:
            ConfigError: it is none of these, or the file has no loads.
        """
        if text == "balanced":
            return None
        if not isinstance(text, str):
            raise ConfigError("experts", text, "is no text", _LOADS_REMEDY)
        if text.startswith("lognormal"):
            found = _LOGNORMAL.fullmatch(text.replace(" ", ""))
            try:
                sigma, seed = (float(found[1]), int(found[2] or 0)) if found else (math.nan, 0)
            except ValueError:
                sigma, seed = math.nan, 0
            if not 0 <= sigma < math.inf:
                raise ConfigError("experts", text, "needs a standard deviation of 0 or more", _LOADS_REMEDY)
            return ExpertLoads(text, sigma, seed)
        path = Path(text)
        if not path.is_file():
            raise ConfigError("experts", text, "is neither a distribution of loads nor a file", _LOADS_REMEDY)
        return ExpertLoads(text, rows=_rows(path))

    def weights(self, router: int, step: int, experts: int) -> Sequence[float]:
        """Return the relative loads of ``experts`` experts of a router in a step.

        Raises:
            ConfigError: the file has another number of experts or of routers.
        """
        if not self.rows:
            drawn = random.Random(f"{self.seed}/{router}/{step}")
            return [math.exp(self.sigma * drawn.gauss(0.0, 1.0)) for _ in range(experts)]
        if len(self.rows) > 1 and router >= len(self.rows):
            problem = f"has loads of {len(self.rows)} routers, and the script has more"
            raise ConfigError("experts", self.text, problem, "give one row for each, or one for all")
        row = self.rows[router if len(self.rows) > 1 else 0]
        if len(row) != experts:
            problem = f"has loads of {len(row)} experts, and a router of the script has {experts}"
            raise ConfigError("experts", self.text, problem, "give one load for each expert")
        return row


def _rows(path: Path) -> tuple[tuple[float, ...], ...]:
    """Return the loads in a file."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            loads: Any = [[float(cell) for cell in row] for row in csv.reader(text.splitlines()) if row]
        else:
            loads = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
            loads = loads["loads"] if isinstance(loads, dict) else loads
        rows = loads if isinstance(loads[0], list) else [loads]
        found = tuple(tuple(float(load) for load in row) for row in rows)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        remedy = "write .csv with a router in each row, or .json or .toml with loads = [[3, 1, 1, 2]]"
        raise ConfigError("experts", str(path), f"has no loads of experts ({error})", remedy) from None
    for row in found:
        if not all(0 <= load < math.inf for load in row) or not sum(row):
            raise ConfigError("experts", str(path), f"has the loads {row[:8]}", "write loads of 0 or more, not all 0")
    return found


_TUPLES = ("script", "stand_ins", "slow", "routers_before")
"""Fields that JSON has as lists."""


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
        live: how many ranks are processes; the others are represented by these.
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
        experts: loads that routers give to their experts; None for even ones.
        routers_before: for each rank, the routers of the pipeline's stages before its own; empty for none.
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
    live: int = 1
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
    experts: ExpertLoads | None = None
    routers_before: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Encode for `from_json`, in another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankSettings:
        """Decode the output of `to_json`."""
        fields = json.loads(text)
        if (experts := fields["experts"]) is not None:
            fields["experts"] = ExpertLoads(**experts | {"rows": tuple(map(tuple, experts["rows"]))})
        fields["slow"] = map(tuple, fields["slow"])  # all hashable, as those of a device are keys
        return RankSettings(**fields | {name: tuple(fields[name]) for name in _TUPLES})

    def of_device(self) -> RankSettings:
        """Return these without what the activation of a device, and what is imported then, does not depend on."""
        return replace(
            self,
            script=self.script[:1],
            store="",
            live=1,
            movable=False,
            steps=None,
            operators=None,
            experts=None,
            routers_before=(),
        )

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
