"""What an operator of the fake device costs: asked once per operator and shapes, and remembered in C++."""

from __future__ import annotations

from collections import Counter
from typing import Any

from foretrain.device import preset
from foretrain.device.aten import Meta, work
from foretrain.device.model import OperatorModel
from foretrain.device.tensors import moved
from foretrain.device.work import HostCopy, Memory, Unknown, Work

PROVENANCES = ("measured", "interpolated", "modelled", "unknown")
"""By the number that goes with a kernel in the log."""

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


class Prices:
    """The callable that the extension asks; see ``set_price`` in ``native/kernels.hpp``.

    Args:
        device: a preset.
        factor: multiplies every duration.
    """

    def __init__(self, device: str, factor: float = 1.0) -> None:
        self._model = OperatorModel(preset(device), factor)
        self._unknown: Counter[str] = Counter()

    def __call__(
        self, operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[int, str, int, float, float]:
        """Duration in ps, the kernel's name, the number of its provenance, FLOPs, and the duration's relative sigma."""
        what = _work(operator, _metas(arguments), _metas(results))
        estimate = self._model.estimate(what)
        if isinstance(what, Unknown):
            self._unknown[operator] += 1
        number = PROVENANCES.index(estimate.provenance)
        return estimate.time, operator, number, getattr(what, "flops", 0), estimate.sigma

    def fused(self, moved: int) -> tuple[int, int]:
        """The same of a fused kernel that moves this many bytes."""
        estimate = self._model.estimate(Memory(moved))
        return estimate.time, PROVENANCES.index(estimate.provenance)

    @property
    def unknown(self) -> list[str]:
        """Operators that nothing is known of but the bytes of their arguments."""
        return sorted(self._unknown)


def _work(operator: str, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Work:
    if operator.startswith("Memcpy"):
        return HostCopy(moved(arguments[0]), pinned="Pinned" in operator)
    return work(operator, arguments, results)


def _metas(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with tensors as `Meta`: the extension describes them as (shape, stride, C++ dtype, device)."""
    return tuple(_meta(value) if isinstance(value, tuple) else value for value in values)


def _meta(value: tuple[Any, ...]) -> Any:
    match value:
        case (tuple() as shape, tuple() as stride, str() as dtype, str() as device):
            return Meta(shape, stride, _DTYPES.get(dtype, dtype.lower()), device)
    return _metas(value)
