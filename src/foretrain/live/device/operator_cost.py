"""Costs of operators: on the simulated GPU, asked once per operator and shapes and remembered in C++; and on the host.

Computing on the host is otherwise free (docs/live/index.md): scripts for GPUs do little of it. An optimizer of a
billion parameters on the host, as with CPU offload, is the exception, and what offloading costs is what its users want
to know: its steps take the host's time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foretrain.device import calls
from foretrain.device.aten import Meta, work
from foretrain.device.calibration import Calibration
from foretrain.device.calls import OperatorCall, moved
from foretrain.device.gpu import Device
from foretrain.device.model import PROVENANCES, OperatorModel
from foretrain.device.work import Attention, Gemm, HostCopy, MemoryWork, Nothing, Unknown, Work
from foretrain.units import SECOND, Time

_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def share(device: Device) -> None:
    """Read the tables of ``device`` that most scripts need, 16 MiB, so that ranks forked later share them."""
    model = OperatorModel(device)
    for shape in (Gemm(128, 128, 128), Attention(1, 1, 1, 128, 128, 128)):
        model.estimate(shape)


class Prices:
    """Cost function of operators that the extension calls; see ``set_price`` in ``native/kernels.hpp``.

    Args:
        device: what computes.
        factor: multiplies every duration that was not measured on such a device.
        measured: durations measured on such a device.
        remembering: whether to keep the calls, for `write`.
    """

    def __init__(
        self, device: Device, factor: float = 1.0, measured: Calibration | None = None, *, remembering: bool = False
    ) -> None:
        self._models = {(False, True): OperatorModel(device, factor, measured=measured)}
        self._unknown: Counter[str] = Counter()
        self._remembering = remembering
        self._asked: dict[object, OperatorCall] = {}

    def __call__(
        self, operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[int, str, int, float, float]:
        """Return duration in ps, kernel name, number of the provenance, FLOPs, and relative sigma of the duration."""
        call = OperatorCall(operator, _metas(arguments))
        what = _work(operator, call.arguments, _metas(results))
        if self._remembering and not isinstance(what, Nothing):
            self._asked.setdefault(call.key, call)
        model = self._model(*_tf32())
        known = model.measured_call(call)
        estimate = known or model.estimate(what)
        if isinstance(what, Unknown) and not known:
            self._unknown[operator] += 1
        number = PROVENANCES.index(estimate.provenance)
        return estimate.time, operator, number, getattr(what, "flops", 0), estimate.sigma

    def fused(self, moved: int) -> tuple[int, int]:
        """Return duration in ps and provenance of a fused kernel that moves this many bytes."""
        estimate = self._model(*_tf32()).estimate(MemoryWork(moved))
        return estimate.time, PROVENANCES.index(estimate.provenance)

    def _model(self, products: bool, convolutions: bool) -> OperatorModel:
        """Return the model for FP32 in TF32 or not; measurements, made with PyTorch's defaults, are taken for all."""
        found = self._models.get((products, convolutions))
        if found is None:
            default = self._models[False, True]
            found = replace(default, tf32=products, tf32_convolutions=convolutions)
            self._models[products, convolutions] = found
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the different operators that it was asked for, as `foretrain.device.calls` reads them."""
        calls.dump(self._asked.values(), path)

    @property
    def unknown(self) -> list[str]:
        """Return the operators that are charged for the bytes of their arguments alone."""
        return sorted(self._unknown)


def _tf32() -> tuple[bool, bool]:
    """Return whether FP32 matrix products and convolutions may use TF32 now, however the script has said so."""
    precision = torch._C._get_fp32_precision_getter
    return precision("cuda", "matmul") == "tf32", precision("cuda", "conv") == "tf32"


def _work(operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Work:
    if operator.startswith("Memcpy"):
        return HostCopy(moved(arguments[0]), pinned="Pinned" in operator)
    return work(operator, arguments, results)


def _metas(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return values with tensors as `Meta`: the extension describes them as (shape, stride, C++ dtype, device)."""
    return tuple(_meta(value) if isinstance(value, tuple) else value for value in values)


def _meta(value: tuple[Any, ...]) -> Any:
    match value:
        case (tuple() as shape, tuple() as stride, str() as dtype, str() as device):
            return Meta(shape, stride, _DTYPES.get(dtype, dtype.lower()), device)
    return _metas(value)


THREAD_BANDWIDTH: Final = 10e9
"""Bytes/s that one thread of element-wise operators reads and writes: what a core of a server gets."""
RANK_BANDWIDTH: Final = 50e9
"""Bytes/s that a rank has with any number of threads: two sockets of eight channels, 410 GB/s with DDR4-3200 and 614
GB/s with DDR5-4800 (the memory of DGX A100 and H100 by NVIDIA's user guides), shared by eight ranks."""
_LEAST: Final = 1 << 20
"""Bytes of parameters below which an optimizer's step on the host is not worth counting."""


def host_bandwidth() -> float:
    """Return bytes/s for the rank's threads; torchrun gives one where there are several ranks."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return min(RANK_BANDWIDTH, int(threads) * THREAD_BANDWIDTH) if threads.isdecimal() else RANK_BANDWIDTH


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, or a tensor that is none."""
    return getattr(tensor, "_local_tensor", tensor)


class HostOptimizerStep:
    """Charges an optimizer's step for the memory that its operators on the host read and write.

    Args:
        spend: has the rank's clock advance, ps.
        warn: tells the user.
    """

    def __init__(self, spend: Callable[[Time], None], warn: Callable[[str], None]) -> None:
        self._spend, self._warn = spend, warn
        self._traffic: _Traffic | None = None
        self._warned = False

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the step of an optimizer of ``parameters``."""
        if self._traffic is not None:  # The step before has failed, and the script goes on.
            self._traffic.bytes = 0
        elif sum(tensor.nbytes for tensor in parameters if tensor.device.type == "cpu") >= _LEAST:
            self._traffic = _Traffic()
            self._traffic.__enter__()

    def end(self) -> None:
        """End the step of the optimizer, and charge it."""
        if (traffic := self._traffic) is None:
            return
        self._traffic = None
        traffic.__exit__(None, None, None)
        rate = host_bandwidth()
        self._spend(round(traffic.bytes / rate * SECOND))
        if not self._warned:
            self._warned = True
            self._warn(
                f"an optimizer's parameters are on the host: the {traffic.bytes / 1e9:.1f} GB that its step reads and "
                f"writes there are charged at an assumed {rate / 1e9:.0f} GB/s; --host measured takes this machine's"
            )


class _Traffic(TorchDispatchMode):
    """Counts the bytes of host memory that operators read and write: of distributed tensors, those of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(
                local_part(value).nbytes
                for value in tree_iter((args, kwargs, result))
                if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            )
        return result
