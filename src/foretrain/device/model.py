"""Times of operators on a GPU, with the source of each estimate.

In this order: what the user measured (`foretrain.device.calibration`), a measured shape of the table
(`foretrain.device.table`), its neighbours, a roofline. An operator nobody knows costs the bytes it touches: none is
free. One factor per software stack (`foretrain.device.gpu`) scales everything that was not measured by the user.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from foretrain.device.arithmetic import attention_seconds, copy_time, rate, twins
from foretrain.device.gpu import ACHIEVED_BANDWIDTH, KERNEL_OVERHEAD
from foretrain.device.presets import preset
from foretrain.device.work import Attention, Convolution, Gemm, HostCopy, MemoryWork, Nothing, Unknown
from foretrain.errors import ConfigError
from foretrain.units import SECOND, Time

if TYPE_CHECKING:
    from foretrain.device.calibration import Calibration
    from foretrain.device.calls import OperatorCall
    from foretrain.device.gpu import Device
    from foretrain.device.table import Gemms, Prediction
    from foretrain.device.work import Format, Work

Provenance: TypeAlias = Literal["measured", "interpolated", "modelled", "unknown"]
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)
"""In the order in which simulated ranks number them."""

FAR = 1.0
"""Distance (`Prediction.distance`) from which the table only lends its efficiency: a size is e times beyond it."""

MEASURED_SIGMA = 0.02
NEAR_SIGMA = 0.03
GEMM_SIGMA = 0.15
MEMORY_SIGMA = 0.15
CONVOLUTION_SIGMA = 0.2
COPY_SIGMA = 0.3
UNKNOWN_SIGMA = 1.0

ROWWISE = 0.74
"""FLOP/s of FP8 products with a scale for each row by those with one for each tensor, on Hopper, with what it takes to
find the scales: torchtitan's commit 7a04053 reports 6,424 and 7,186 tokens/s of Llama 3 8B on 8 H100s, and the products
are a third of the step."""
ROWWISE_SIGMA = 0.1


class OperatorEstimate(NamedTuple):
    """Estimated time of an operator.

    Attributes:
        time: picoseconds, above 0 unless there is no kernel at all.
        sigma: relative standard deviation of the time, 0.1 for ±10 %.
        provenance: how it is known; ``"interpolated"`` between measured shapes, ``"modelled"`` by a roofline.
    """

    time: Time
    sigma: float
    provenance: Provenance


class Seconds(NamedTuple):
    """An `OperatorEstimate` before the stack's factor."""

    seconds: float
    sigma: float
    provenance: Provenance


@dataclass(frozen=True, slots=True, eq=False)
class OperatorModel:
    """Operator times of one GPU under one software stack.

    Attributes:
        device: the GPU.
        factor: of the software stack, above 1 where it is slower than the table's; see `foretrain.device.gpu`.
        tf32: whether products of FP32 matrices may use TF32 (``torch.backends.cuda.matmul.allow_tf32``).
        tf32_convolutions: the same of convolutions (``torch.backends.cudnn.allow_tf32``).
        measured: what was measured on such a GPU; preferred, and not scaled.
    """

    device: Device
    factor: float = 1.0
    tf32: bool = False
    tf32_convolutions: bool = True
    measured: Calibration | None = None
    _times: dict[Work, OperatorEstimate] = field(default_factory=dict, init=False, repr=False)
    _calls: dict[Any, OperatorEstimate] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigError("factor", self.factor, "is not a factor above 0", "write e.g. 1.1 for 10 % slower")
        if self.measured is not None:
            self.measured.check(self.device)
            self._times.update(
                (found.work, self._launched(OperatorEstimate(found.time, found.spread or MEASURED_SIGMA, "measured")))
                for found in self.measured.measured
            )
            self._calls.update(
                (
                    found.call.key,
                    self._launched(OperatorEstimate(found.time, found.spread or MEASURED_SIGMA, "measured")),
                )
                for found in self.measured.calls
            )

    def estimate(self, work: Work) -> OperatorEstimate:
        """Return the time of ``work`` on an otherwise idle GPU, without the host's launch. Remembered."""
        known = self._times.get(work)
        if known is None:
            known = self._times[work] = self._estimate(work)
        return known

    def measured_call(self, call: OperatorCall) -> OperatorEstimate | None:
        """Return the time of ``call`` if just that was measured."""
        return self._calls.get(call.key) if self._calls else None

    def _launched(self, found: OperatorEstimate) -> OperatorEstimate:
        """Add the host's launch, where host and device are one."""
        return found._replace(time=found.time + self.device.launch) if self.device.serial else found

    def _estimate(self, work: Work) -> OperatorEstimate:
        if isinstance(work, Nothing) or (self.device.serial and isinstance(work, HostCopy)):
            return OperatorEstimate(0, 0.0, "modelled")
        return self._launched(self._modelled(work))

    def _modelled(self, work: Work) -> OperatorEstimate:
        match work:
            case Nothing():
                return OperatorEstimate(0, 0.0, "modelled")
            case HostCopy():
                # Not scaled: the link is no part of the software stack.
                return OperatorEstimate(copy_time(self.device, work.moved, work.pinned), COPY_SIGMA, "modelled")
            case Gemm():
                found = self._gemm(work)
                if work.rowwise and self.device.capability[0] < 10:
                    found = Seconds(found.seconds / ROWWISE, math.hypot(found.sigma, ROWWISE_SIGMA), "modelled")
            case Attention():
                found = Seconds(*attention_seconds(self.device, work))
            case Convolution():
                found = Seconds(self._convolution(work), CONVOLUTION_SIGMA, "modelled")
            case MemoryWork():
                found = Seconds(self._streaming(work.moved, work.kernels), MEMORY_SIGMA, "modelled")
            case Unknown():
                achieved = rate(self.device, work.dtype).arithmetic.peak * work.efficiency
                least = max(self._streaming(work.moved), work.flops / achieved)
                found = Seconds(least, UNKNOWN_SIGMA, "unknown")
        return OperatorEstimate(max(1, math.ceil(found.seconds * self.factor * SECOND)), found.sigma, found.provenance)

    def _streaming(self, moved: float, kernels: int = 1) -> float:
        """Return the seconds of kernels that only move bytes."""
        return moved / (ACHIEVED_BANDWIDTH * self.device.bandwidth) + kernels * KERNEL_OVERHEAD

    def _convolution(self, work: Convolution) -> float:
        wanted = "tf32" if work.dtype == "fp32" and self.tf32_convolutions else work.dtype
        achieved = rate(self.device, wanted).arithmetic.achieved("winograd" if work.winograd else "conv")
        return max(work.flops / achieved + KERNEL_OVERHEAD, self._streaming(work.moved))

    def _gemm(self, work: Gemm) -> Seconds:
        if min(work.m, work.n, work.k, work.batch) < 1:  # an empty product still launches a kernel or two
            return Seconds(self._streaming(work.moved), MEMORY_SIGMA, "modelled")
        wanted: Format = "tf32" if work.dtype == "fp32" and self.tf32 else work.dtype
        computed, arithmetic = rate(self.device, wanted)
        table = self._table(computed)
        if table is None:
            compute = work.flops / arithmetic.achieved("gemm") + KERNEL_OVERHEAD
            return Seconds(max(compute, self._streaming(work.moved)), GEMM_SIGMA, "modelled")
        name, gemms = table
        source = preset(self.device.measured_as or self.device.name)
        own = computed == work.dtype and name == "own" and work.batch == 1
        if own and twins(self.device, source) and (seconds := gemms.measured(work.m, work.n, work.k)) is not None:
            return Seconds(seconds, MEASURED_SIGMA, "measured")
        peak = rate(source, "bf16" if gemms.size == 2 else "fp8").arithmetic.peak
        near = gemms.near(work.m * work.batch, work.n, work.k, peak, source.bandwidth)
        roof = max(work.flops / arithmetic.peak, work.moved / self.device.bandwidth) + KERNEL_OVERHEAD
        seconds = roof * math.exp(near.ratio)
        if own and near.distance < FAR:
            return Seconds(seconds, interpolation_sigma(near), "interpolated")
        return Seconds(seconds, math.hypot(GEMM_SIGMA, near.spread), "modelled")

    def _table(self, computed: Format) -> tuple[Literal["own", "borrowed"], Gemms] | None:
        """Return measured GEMMs in this format, or in the nearest of tensor cores, to borrow their efficiency."""
        if self.device.measured_as is None or computed in ("fp32", "fp64"):
            return None
        from foretrain.device import table

        if computed in ("fp16", "bf16"):
            found = table.gemms(self.device.measured_as, "half")
            return ("own", found) if found else None
        if computed in ("fp8", "fp8_block") and (found := table.gemms(self.device.measured_as, computed)):
            return "own", found
        found = table.gemms(self.device.measured_as, "half")
        return ("borrowed", found) if found else None


def interpolation_sigma(near: Prediction) -> float:
    """Return the relative uncertainty between measured shapes: at least their scatter."""
    return math.hypot(NEAR_SIGMA, near.spread)
