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
from foretrain.device.aten import work
from foretrain.device.calibration import Calibration
from foretrain.device.calls import Meta, OperatorCall, moved, tensors_in
from foretrain.device.gpu import Device
from foretrain.device.kernel_costs import KernelArguments, KernelCost, KernelCosts
from foretrain.device.model import MEASURED_SIGMA, PROVENANCES, OperatorEstimate, OperatorModel
from foretrain.device.work import Attention, Gemm, HostCopy, MemoryWork, Nothing, Unknown, Work
from foretrain.live.device.custom_kernels import LAUNCH, RESULT
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
        costs: of kernels by name.
        remembering: whether to keep the calls, for `write`.
        slowdown: multiplies every duration: this GPU is slower than its kind.
    """

    def __init__(
        self,
        device: Device,
        factor: float = 1.0,
        measured: Calibration | None = None,
        *,
        costs: KernelCosts | None = None,
        remembering: bool = False,
        slowdown: float = 1.0,
    ) -> None:
        self._slowdown = slowdown
        self._costs = costs or KernelCosts()
        self._models = {(False, True): OperatorModel(device, factor, measured=measured)}
        self._unknown: Counter[str] = Counter()
        self._remembering = remembering
        self._asked: dict[object, OperatorCall] = {}

    def __call__(
        self, operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[int, str, int, float, float]:
        """Return duration in ps, kernel name, number of the provenance, FLOPs, and relative sigma of the duration."""
        call, given = _called(operator, _metas(arguments), _metas(results))
        model = self._model(*_tf32())
        estimate, what = self._estimate(call, given, model)
        if self._remembering and not isinstance(what, Nothing):
            self._asked.setdefault(call.key, call)
        if isinstance(what, Unknown) and estimate.provenance == "unknown":
            self._unknown[call.operator] += 1
        number = PROVENANCES.index(estimate.provenance)
        name = call.operator.rpartition(".")[2] if operator == LAUNCH else operator
        return round(estimate.time * self._slowdown), name, number, getattr(what, "flops", 0), estimate.sigma

    def _estimate(
        self, call: OperatorCall, given: KernelArguments, model: OperatorModel
    ) -> tuple[OperatorEstimate, Work | None]:
        """Return the time of a call, and its work as far as that is known: what was measured counts first."""
        known = model.measured_call(call)
        cost = self._costs.find(call.operator, call.operator.rpartition(".")[2], entries=_prices)
        said = cost and cost.of(given)
        if isinstance(said, int):
            return known or OperatorEstimate(said, MEASURED_SIGMA, "measured"), None
        what = said or _work(call.operator, call.arguments, given)
        return known or model.estimate(what), what

    def fused(self, moved: int) -> tuple[int, int]:
        """Return duration in ps and provenance of a fused kernel that moves this many bytes."""
        estimate = self._model(*_tf32()).estimate(MemoryWork(moved))
        return round(estimate.time * self._slowdown), PROVENANCES.index(estimate.provenance)

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

    @property
    def unused(self) -> list[str]:
        """Return the names of the user's entries of costs that no kernel has taken."""
        return self._costs.unused


def _tf32() -> tuple[bool, bool]:
    """Return whether FP32 matrix products and convolutions may use TF32 now, however the script has said so."""
    precision = torch._C._get_fp32_precision_getter
    return precision("cuda", "matmul") == "tf32", precision("cuda", "conv") == "tf32"


def _prices(entry: KernelCost) -> bool:
    return entry.time is not None or bool(entry.table) or entry.work is not None


def _called(
    operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]
) -> tuple[OperatorCall, KernelArguments]:
    """Return what was called, a kernel of the script's own by its own name, and the names of its arguments."""
    if operator != LAUNCH:
        names = () if operator.startswith(("aten::", "Memcpy")) else _names(operator)
        every = tuple(tensors_in((arguments, results)))
        return OperatorCall(operator, arguments), KernelArguments(names, arguments, moved(*every), results)
    name, names, written, read, numbers = arguments
    given: dict[int, tuple[str, Any]] = {}
    returned: list[Meta] = []
    for text, value in zip(names, (*written, *read, *numbers), strict=True):
        place, _, own = text.partition(" ")
        if place == RESULT:
            returned.append(value)
        else:
            given[int(place)] = own, value
    every = [given.get(place, ("", None)) for place in range(max(given, default=-1) + 1)]
    own_names, values = tuple(own for own, _ in every), tuple(value for _, value in every)
    return OperatorCall(name, values), KernelArguments(own_names, values, moved(*written, *read), tuple(returned))


def _names(operator: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments, of one of its overloads."""
    space, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    return tuple(one.name for one in getattr(packet, packet.overloads()[0])._schema.arguments)


def _work(operator: str, arguments: tuple[Any, ...], given: KernelArguments) -> Work:
    if operator.startswith("Memcpy"):
        return HostCopy(moved(arguments[0]), pinned="Pinned" in operator)
    if "::" not in operator:
        return Unknown(given.moved)
    return work(operator, arguments, given.results)


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
