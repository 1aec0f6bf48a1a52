"""``pynvml`` inside a simulation, whether or not it is installed: the driver that it would ask has other GPUs, or none.

It answers for the simulated GPUs of the rank's server; of memory, what this rank has taken. Load, temperature, power
and clocks are those that ``torch.cuda`` tells.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from foretrain.live.device.nvidia_smi import DRIVER, bus_of, uuid_of


def install() -> None:
    """Let imports of ``pynvml`` find what is simulated of it."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == "pynvml" else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_content())


class NVMLError(Exception):
    """An error of NVML's."""


_ERRORS = tuple(
    f"NVMLError_{kind}" for kind in ("DriverNotLoaded", "InvalidArgument", "LibraryNotFound", "NotSupported", "Unknown")
)
"""Errors that scripts catch, none of which comes."""


class Memory(NamedTuple):
    """Bytes of a GPU."""

    total: int
    free: int
    used: int


class Utilization(NamedTuple):
    """Percent of the time in which kernels ran, and in which they moved memory."""

    gpu: int
    memory: int


class PciInfo(NamedTuple):
    """Place of a GPU on the PCI bus."""

    busId: str  # noqa: N815


def _content() -> dict[str, Any]:
    cuda = torch.cuda

    def by_index(index: int) -> int:
        if not 0 <= int(index) < cuda.device_count():
            raise NVMLError("Invalid Argument")
        return int(index)

    def named(name: Any, name_of: Any) -> int:
        text = name.decode() if isinstance(name, bytes) else str(name)
        names = [name_of(index) for index in range(cuda.device_count())]
        return by_index(names.index(text) if text in names else -1)

    def memory(handle: int, version: Any = None) -> Memory:
        free, total = cuda.mem_get_info(handle)
        return Memory(total, free, total - free)

    def cuda_version() -> int:
        major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
        return 1000 * major + 10 * minor

    def affinity(handle: int, size: int) -> list[int]:
        """Return bit masks of 64 CPUs each."""
        cpus = os.cpu_count() or 1
        return [((1 << cpus) - 1) >> (64 * word) & ((1 << 64) - 1) for word in range(size)]

    def missing(name: str) -> Any:
        known = ", ".join(one for one in answers if one.startswith("nvml"))
        raise AttributeError(f"pynvml: a simulated GPU has no {name!r}; it has: {known}")

    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        **{name: type(name, (NVMLError,), {}) for name in _ERRORS},
        "NVML_TEMPERATURE_GPU": 0,
        **{name: number for number, name in enumerate(("NVML_CLOCK_GRAPHICS", "NVML_CLOCK_SM", "NVML_CLOCK_MEM"))},
        "nvmlInit": lambda: None,
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
        "nvmlSystemGetCudaDriverVersion": cuda_version,
        "nvmlSystemGetCudaDriverVersion_v2": cuda_version,
        "nvmlDeviceGetCount": cuda.device_count,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: named(uuid, uuid_of),
        "nvmlDeviceGetHandleByPciBusId": lambda bus: named(bus, bus_of),
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: cuda.get_device_name(handle),
        "nvmlDeviceGetUUID": uuid_of,
        "nvmlDeviceGetPciInfo": lambda handle: PciInfo(bus_of(handle)),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: cuda.get_device_capability(handle),
        "nvmlDeviceGetCpuAffinity": affinity,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: Utilization(cuda.utilization(handle), 100),
        "nvmlDeviceGetTemperature": lambda handle, sensor: cuda.temperature(handle),
        "nvmlDeviceGetPowerUsage": lambda handle: cuda.power_draw(handle),
        "nvmlDeviceGetClockInfo": lambda handle, kind: cuda.clock_rate(handle),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
        "__getattr__": missing,
    }
    return answers
