"""A whole calibration: what is measured, beside how many others, and what it is merged with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch

from foretrain.device.calibration import Calibration, OperatorTime, merged
from foretrain.device.calls import OperatorCall
from foretrain.device.presets import preset_of_product
from foretrain.errors import ConfigError
from foretrain.operator_benchmark import grid
from foretrain.operator_benchmark.beside import others
from foretrain.operator_benchmark.described import cores, described, product, stack
from foretrain.operator_benchmark.host import dispatch
from foretrain.operator_benchmark.session import MeasuredOperators, MeasuringSession
from foretrain.units import SECOND

Told: TypeAlias = Callable[[str, int, int], None]
"""Called with what is measured, how many operators of it are, and of how many."""

_NOTHING: Final = MeasuredOperators((), ())
_ROUNDS: Final = 25
_QUICK_ROUNDS: Final = 8


class CalibrationResult(NamedTuple):
    """A calibration, and the calls that could not be repeated, with the reason."""

    calibration: Calibration
    failed: tuple[tuple[OperatorCall, str], ...]


def check_mergeable(before: Calibration | None, device: torch.device, processes: int) -> None:
    """ConfigError, before anything is measured, if ``before`` is of another device or stack."""
    if before is not None:
        merged([Calibration(product(device), stack(device, processes)), before])


def calibrated(
    device: torch.device,
    calls: Sequence[OperatorCall] | None,
    before: Calibration | None = None,
    *,
    quick: bool = False,
    processes: int = 1,
    file: Path | None = None,
    told: Told = lambda what, done, every: None,
) -> CalibrationResult:
    """Measures ``calls``, or a grid of the usual operators where they are None.

    The grid is measured as well where neither a preset nor ``before`` says what the device is.

    Args:
        device: the GPU, or the CPU with as many threads as PyTorch is set to.
        calls: of a script.
        before: a calibration of the same device and stack; its measurements are kept where there are no new ones.
        quick: a small grid, and fewer repetitions.
        processes: that compute at once, this one included; CPU only.
        file: where ``calls`` came from, for the other processes to compute; by default they train a little.
        told: how far it is.

    Raises:
        ConfigError: ``before`` is of another device or stack, or a GPU was to be shared.
    """
    if processes > 1 and device.type == "cuda":
        raise ConfigError("processes", processes, "share a GPU", "measure a GPU alone, or write --device cpu")
    check_mergeable(before, device, processes)
    if calls is not None and device.type == "cpu":  # It has no memory of its own to copy to.
        calls = [call for call in calls if not call.operator.startswith("Memcpy")]
    session = MeasuringSession(device, _QUICK_ROUNDS if quick else _ROUNDS, _budget(device), shared=processes > cores())
    known = preset_of_product(product(device)) or (before and before.description)
    with others(processes - 1, file):
        found = CalibrationResult(Calibration(product(device), stack(device, processes)), ())
        if calls is None or known is None:
            found = _grid(session, processes, quick or calls is not None, told)
        if calls is not None:
            measured, failed = _told(session, "operators", told).calls(calls)
            found = CalibrationResult(
                merged([found.calibration, _of(session, processes, calls=MeasuredOperators(measured, ()))]), failed
            )
    return found._replace(calibration=merged([*([before] if before else []), found.calibration]))


def _grid(session: MeasuringSession, processes: int, quick: bool, told: Told) -> CalibrationResult:
    device = session.device
    measured = _told(session, "grid", told).probes(grid.probes(device, quick))
    calls = _told(session, "convolutions and optimizer", told).calls(grid.calls(device, quick))
    launch = dispatch(session)
    found = _of(session, processes, measured, calls)
    if preset_of_product(found.device):
        return CalibrationResult(_with(found, launch), calls.failed)
    whole = described(device, measured, calls.calls, launch)
    return CalibrationResult(Calibration(found.device, found.stack, found.measured, found.calls, whole), calls.failed)


def _with(found: Calibration, launch: float) -> Calibration:
    return Calibration(found.device, found.stack, found.measured, found.calls, None, round(launch * SECOND))


def _of(
    session: MeasuringSession,
    processes: int,
    measured: tuple[OperatorTime, ...] = (),
    calls: MeasuredOperators = _NOTHING,
) -> Calibration:
    return Calibration(product(session.device), stack(session.device, processes), measured, calls.calls)


def _told(session: MeasuringSession, what: str, told: Told) -> MeasuringSession:
    return MeasuringSession(session.device, session.rounds, session.budget, session.shared, partial(told, what))


def _budget(device: torch.device) -> int:
    """Half of what memory is free on a GPU; 2 GiB of the host's, as other processes may need as much."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 << 30
