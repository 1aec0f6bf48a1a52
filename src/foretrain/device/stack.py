"""What depends on the software around the kernels: its factor, the host's launches, and communication beside them."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain import errors
from foretrain.units import MICROSECOND, Time

if TYPE_CHECKING:
    from foretrain.device.gpu import Device

HOST_LAUNCH: Time = 6 * MICROSECOND
"""Host time of one operator of eager PyTorch with a small kernel; between 5 and 10 us on the hosts of GPU servers."""

COMMUNICATION_SMS = 16
"""Multiprocessors that NCCL's kernel takes from computation: one a channel, 16 to 32 channels with NVLink and fewer
where the network is the bound (DeepSeek-V3's own kernels take 20 of 132)."""


def overlap_slowdown(device: Device) -> float:
    """How much longer computation takes while a collective runs beside it.

    Large GEMMs lose the multiprocessors the collective holds: 1.14 on H100, 1.17 on A100, 1.12 on B200. Echo (2025)
    measured 1.38 as the mean over all kernels, small ones that share the memory's bandwidth included; what a
    transformer spends its time on is large GEMMs, hence the smaller number. 1.15 where the device does not say.
    """
    if device.overlap:
        return device.overlap
    if not device.sms:
        return 1.15
    held = min(COMMUNICATION_SMS, device.sms // 6)  # small GPUs are on links that fewer channels fill
    return device.sms / (device.sms - held)


def stack_factor(device: Device, stack: str | float) -> float:
    """By what operator times of ``stack`` differ from the table's on this GPU; 1 where nothing was fitted.

    ``stack`` may be the number itself. Raises ConfigError for a stack that ``stacks.toml`` does not have.
    """
    if (factor := _number(stack)) is None:
        factors = _of(str(stack))
        factor = float(factors.get(device.name, factors.get("default", 1.0)))
    if not 0 < factor < math.inf:
        raise errors.ConfigError("factor", stack, "is not a factor above 0", "write e.g. 1.1 for 10 % slower")
    return factor


def host_launch(device: Device, stack: str | float) -> Time:
    """Host time of one operator of ``stack`` with a small kernel, on the servers that have this GPU.

    `HOST_LAUNCH` where nothing was fitted: a framework that does more in Python around each kernel (hooks of
    parameters, states of random numbers kept for recomputation, checks) has a ``host`` factor in ``stacks.toml``.
    Nor is it known where ``stack`` is but a number. Raises ConfigError for a stack that ``stacks.toml`` does not have.
    """
    if _number(stack) is not None:
        return HOST_LAUNCH
    return round(HOST_LAUNCH * float(_of(str(stack)).get("host", {}).get(device.name, 1.0)))


def _number(stack: str | float) -> float | None:
    """None of a name."""
    try:
        return float(stack)
    except ValueError:
        return None


def stacks() -> tuple[str, ...]:
    """The stacks `stack_factor` knows."""
    return tuple(_factors())


def _of(stack: str) -> dict[str, Any]:
    factors = _factors()
    if stack not in factors:
        raise errors.unknown("factor", stack, factors)
    return factors[stack]


@cache
def _factors() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("stacks.toml").read_text("utf-8"))
