"""``nvidia-smi`` inside a simulation: answers for the simulated GPUs of a server.

It is a process of its own, as the real one is, and does not see what scripts allocate: of memory it reports what CUDA's
context takes, and every GPU is idle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from time import asctime, strftime
from typing import Final

from foretrain.live.device import commands

DRIVER: Final = "570.86.15"
"""A driver of the CUDA release that the simulated device claims."""
_WRONG: Final = 2
"""Exit status for arguments that are wrong, as that of the real one."""


def uuid_of(index: int) -> str:
    """Return the identifier of a server's GPU."""
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def bus_of(index: int) -> str:
    """Return the place on the PCI bus of a server's GPU."""
    return f"00000000:{index + 1:02X}:00.0"


@dataclass(frozen=True, slots=True)
class ServerGpu:
    """A GPU of the server.

    Attributes:
        index: of the GPU on its server.
        name: as the driver calls it.
        memory: MiB.
        used: MiB that CUDA's context takes.
        capability: CUDA's compute capability, ``"9.0"``.
        cuda: the release of CUDA that the driver has.
    """

    index: int
    name: str
    memory: int
    used: int
    capability: str
    cuda: str

    @property
    def uuid(self) -> str:
        """Return the GPU's identifier."""
        return uuid_of(self.index)

    @property
    def bus(self) -> str:
        """Return the GPU's place on the PCI bus."""
        return bus_of(self.index)


_FIELDS: dict[str, tuple[str, Callable[[ServerGpu], object]]] = {
    "timestamp": ("", lambda gpu: strftime("%Y/%m/%d %H:%M:%S.000")),
    "index": ("", lambda gpu: gpu.index),
    "name": ("", lambda gpu: gpu.name),
    "gpu_name": ("", lambda gpu: gpu.name),
    "uuid": ("", lambda gpu: gpu.uuid),
    "gpu_uuid": ("", lambda gpu: gpu.uuid),
    "driver_version": ("", lambda gpu: DRIVER),
    "compute_cap": ("", lambda gpu: gpu.capability),
    "pci.bus_id": ("", lambda gpu: gpu.bus),
    "gpu_bus_id": ("", lambda gpu: gpu.bus),
    "pci.domain": ("", lambda gpu: "0x0000"),
    "pci.bus": ("", lambda gpu: f"0x{gpu.index + 1:02X}"),
    "pci.device": ("", lambda gpu: "0x00"),
    "pstate": ("", lambda gpu: "P0"),
    "mig.mode.current": ("", lambda gpu: "Disabled"),
    "persistence_mode": ("", lambda gpu: "Enabled"),
    "compute_mode": ("", lambda gpu: "Default"),
    "memory.total": ("MiB", lambda gpu: gpu.memory),
    "memory.used": ("MiB", lambda gpu: gpu.used),
    "memory.free": ("MiB", lambda gpu: gpu.memory - gpu.used),
    "memory.reserved": ("MiB", lambda gpu: 0),
    "utilization.gpu": ("%", lambda gpu: 0),
    "utilization.memory": ("%", lambda gpu: 0),
    "temperature.gpu": ("", lambda gpu: 30),
}
"""Fields of ``--query-gpu`` by name: their unit, and their value. Of others there is no number to make up."""
_UNSUPPORTED: Final = (
    *("accounting.", "addressing_mode", "clocks.", "clocks_", "display_", "ecc.", "encoder.", "enforced.", "fan."),
    *("gom.", "gpu_serial", "inforom.", "pci.", "pcie.", "power.", "serial", "temperature.", "vbios_"),
)
"""Fields that real GPUs may not have either; the answer is then ``[N/A]``."""


def main(facts: str, arguments: Sequence[str]) -> int:
    """Answer the arguments for the GPUs in the file ``facts``; return the exit status."""
    gpus = [ServerGpu(*one) for one in json.loads(Path(facts).read_text("utf-8"))]
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, sign, value = rest.pop(0).partition("=")
        name = _SHORT.get(name, name)
        if name not in _KNOWN:
            return _refuse(
                f"{' '.join(arguments)}: a simulated nvidia-smi answers a plain call, -L, -i, and --query-gpu=FIELDS"
                " --format=csv[,noheader][,nounits]"
            )
        options[name] = value if sign or not _KNOWN[name] or not rest else rest.pop(0)
    if "--id" in options:
        chosen = options["--id"].split(",")
        gpus = [gpu for gpu in gpus if {str(gpu.index), gpu.uuid, gpu.bus} & set(chosen)]
        if not gpus:
            print("No devices were found")
            return 6
    if "--query-gpu" in options:
        return _query(gpus, options["--query-gpu"].split(","), options.get("--format", "").split(","))
    if "--query-compute-apps" in options:
        if "noheader" not in options.get("--format", ""):
            print(options["--query-compute-apps"].replace(",", ", "))
        return 0
    if "--list-gpus" in options:
        for gpu in gpus:
            print(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
        return 0
    print(_summary(gpus))
    return 0


_SHORT = {"-L": "--list-gpus", "-i": "--id"}
_KNOWN = {"--list-gpus": False, "--id": True, "--query-gpu": True, "--format": True, "--query-compute-apps": True}
"""Options, and whether they have a value."""


def _refuse(text: str) -> int:
    sys.stderr.write(text + "\n")
    return _WRONG


def _query(gpus: Sequence[ServerGpu], names: Sequence[str], how: Sequence[str]) -> int:
    names = [name.strip() for name in names]
    if "csv" not in how:
        return _refuse('"--format=" switch is missing. Write --format=csv, --format=csv,noheader or so')
    columns: list[tuple[str, str, Callable[[ServerGpu], object]]] = []
    for name in names:
        if name == "count":
            columns.append((name, "", lambda gpu: len(gpus)))
        elif name in _FIELDS:
            columns.append((name, *_FIELDS[name]))
        elif name.startswith(_UNSUPPORTED):
            columns.append((name, "", lambda gpu: "[N/A]"))
        else:
            return _refuse(f'Field "{name}" is not a valid field to query.')
    if "noheader" not in how:
        print(", ".join(f"{name} [{unit}]" if unit else name for name, unit, _ in columns))
    for gpu in gpus:
        suffix = "" if "nounits" in how else " "
        print(", ".join(f"{value(gpu)}{suffix and unit and suffix + unit}" for _, unit, value in columns))
    return 0


_RULE = "+-----------------------------------------+------------------------+----------------------+"


def _summary(gpus: Sequence[ServerGpu]) -> str:
    head = f"NVIDIA-SMI {DRIVER:<22} Driver Version: {DRIVER:<14} CUDA Version: {gpus[0].cuda:<8}"
    lines = [
        asctime(),
        f"+{'-' * 89}+",
        f"| {head:<87} |",
        f"|{_RULE[1:-1]}|",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        f"|{_RULE[1:-1].replace('-', '=')}|",
    ]
    for gpu in gpus:
        memory = f"{gpu.used}MiB / {gpu.memory:>6}MiB"
        lines += [
            f"| {gpu.index:>3}  {gpu.name:<30.30} On  |   {gpu.bus:<16} Off |                    0 |",
            f"| N/A   30C    P0             N/A /  N/A  | {memory:>22} |      0%      Default |",
            "|                                         |                        |             Disabled |",
            _RULE,
        ]
    return "\n".join(lines)


def install(folder: str, gpus: Sequence[ServerGpu]) -> None:
    """Write the command and what it answers into ``folder``."""
    facts = Path(folder, "gpus.json")
    facts.write_text(json.dumps([astuple(gpu) for gpu in gpus]), encoding="utf-8")
    commands.write(folder, "nvidia-smi", __name__, str(facts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
