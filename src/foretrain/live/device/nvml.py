"""``pynvml`` inside a simulation, whether or not it is installed: the driver that it would ask has other GPUs, or none.

It answers for the simulated GPUs of the rank's server; of memory, what this rank has taken. Load, temperature, power
and clocks are those that ``torch.cuda`` tells.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

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
    """An error of NVML's, with its number."""

    value = 999


_NUMBERS = {"InvalidArgument": 2, "NotSupported": 3, "DriverNotLoaded": 9, "LibraryNotFound": 12, "Unknown": 999}
_ERRORS = {f"NVMLError_{kind}": type(f"NVMLError_{kind}", (NVMLError,), {"value": n}) for kind, n in _NUMBERS.items()}
"""Errors by name; of these, an argument may be invalid, and a question not supported."""


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
    domain: int
    bus: int
    device: int


def _content() -> dict[str, Any]:
    cuda = torch.cuda

    def by_index(index: int) -> int:
        if not 0 <= int(index) < cuda.device_count():
            raise _ERRORS["NVMLError_InvalidArgument"](f"Invalid Argument: there is no GPU {index}")
        return int(index)

    def of(answer: Callable[[int], Any]) -> Callable[..., Any]:
        return lambda handle, *_: answer(by_index(handle))

    def named(name: Any, name_of: Any) -> int:
        text = name.decode() if isinstance(name, bytes) else str(name)
        names = [name_of(index) for index in range(cuda.device_count())]
        return by_index(names.index(text) if text in names else -1)

    def memory(handle: int) -> Memory:
        free, total = cuda.mem_get_info(handle)
        return Memory(total, free, total - free)

    def cuda_version() -> int:
        major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
        return 1000 * major + 10 * minor

    def affinity(handle: int, size: int) -> list[int]:
        """Return bit masks of 64 CPUs each."""
        cpus = os.cpu_count() or 1
        return [((1 << cpus) - 1) >> (64 * word) & ((1 << 64) - 1) for word in range(size)]

    def clock(handle: int, kind: int) -> int:
        properties: Any = cuda.get_device_properties(by_index(handle))
        return (properties.memory_clock_rate if kind == answers["NVML_CLOCK_MEM"] else properties.clock_rate) // 1000

    def missing(name: str) -> Any:
        known = ", ".join(one for one in answers if one.startswith("nvml"))
        text = f"pynvml: a simulated GPU has no {name!r}; it has: {known}"
        if not name.startswith("nvml"):
            raise AttributeError(text)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise _ERRORS["NVMLError_NotSupported"](text)

        return refuse

    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        **_ERRORS,
        "NVML_SUCCESS": 0,
        "NVML_ERROR_INVALID_ARGUMENT": _NUMBERS["InvalidArgument"],
        "NVML_ERROR_NOT_SUPPORTED": _NUMBERS["NotSupported"],
        "nvmlMemory_v2": 0x02000028,
        "__version__": "13.580.82",
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
        "nvmlDeviceGetIndex": of(lambda handle: handle),
        "nvmlDeviceGetMinorNumber": of(lambda handle: handle),
        "nvmlDeviceGetName": of(lambda handle: cuda.get_device_name(handle)),
        "nvmlDeviceGetUUID": of(uuid_of),
        "nvmlDeviceGetPciInfo": of(lambda handle: PciInfo(bus_of(handle), 0, handle + 1, 0)),
        "nvmlDeviceGetCudaComputeCapability": of(lambda handle: cuda.get_device_capability(handle)),
        "nvmlDeviceGetCpuAffinity": affinity,
        "nvmlDeviceGetMemoryInfo": of(memory),
        "nvmlDeviceGetUtilizationRates": of(lambda handle: Utilization(cuda.utilization(handle), 100)),
        "nvmlDeviceGetTemperature": of(lambda handle: cuda.temperature(handle)),
        "nvmlDeviceGetPowerUsage": of(lambda handle: cuda.power_draw(handle)),
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetComputeRunningProcesses": of(lambda handle: []),
        "nvmlDeviceGetGraphicsRunningProcesses": of(lambda handle: []),
        "__getattr__": missing,
    }
    return answers
