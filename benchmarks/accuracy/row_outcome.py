"""One published run simulated, and how far off its forecast is."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rows import Row

if TYPE_CHECKING:
    from foretrain.live.forecast import Forecast
    from foretrain.live.rank_processes import WarmForkServers

HERE = Path(__file__).parent

STEPS = 2
"""One to warm up, in which optimizer states and buffers are made, and one to measure; the others would be alike."""

LARGE = 1024
"""`Row.effort` above which steps of a pipeline are simulated with fewer micro-batches; see `first_steps`."""

DEVICES = {
    "a100-40gb": "A100-40GB",
    "a100-80gb": "A100",
    "h100-80gb": "H100",
    "h100-96gb-hbm2e-500w": "H100-HBM2e",
    "h200": "H200",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
}
"""Presets by the rows' names of GPUs."""

STACKS = {
    "torchtitan": "torchtitan",
    "fmsfsdp": "fms-fsdp",
    "llmfoundry": "llm-foundry",
    "vtrain-single": "megatron-deepspeed",
    "vtrain-multi": "megatron-deepspeed",
    "korthikanti22": "megatron",
    "dgxc": "nemo",
    "mbridge": "megatron-bridge",
    "simumax-b200": "megatron",
    "neusight": "neusight",
}
"""Names of stacks by family."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its forecast.

    Attributes:
        predicted, measured: seconds of an iteration.
        memory, memory_measured: peak bytes on a GPU, reserved or as `Row.allocated`; None where not published.
        failure: why there is no forecast.
        wall: seconds that the simulation took.
        spread: standard deviation of the forecast, seconds, as far as operators and collectives are uncertain.
        shares: of kernels' time, by provenance: measured, interpolated, modelled, unknown.
        command, code: digests of what the forecast depends on; see kept.py.
    """

    id: str
    family: str
    model: str
    device: str
    stack: str
    ranks: int
    measured: float
    predicted: float | None = None
    memory: int | None = None
    memory_measured: int | None = None
    failure: str = ""
    wall: float = 0.0
    roomy: bool = False
    """Whether the simulated GPU has more memory than the real one; see `ROOM`."""
    spread: float = 0.0
    shares: Sequence[float] = ()
    command: str = ""
    code: str = ""
    exact: bool = True
    """False where ``predicted`` was read back from an earlier page, to three digits."""
    extrapolated: bool = False
    """Whether ``predicted`` follows from steps with fewer micro-batches; see `first_steps`."""

    @property
    def error(self) -> float:
        """Of the iteration's time, relative."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        """Of the peak memory, relative."""
        if not self.memory or not self.memory_measured:
            return None
        return self.memory / self.memory_measured - 1


ROOM = 1.08
"""A run that was published has fitted into its GPU. Where the forecast of its memory is too much for it, the run is
simulated once more with so many times the GPU's memory: what is off by a little is then off by a little."""


def outcome(row: Row, factor: float | None = None, host: float | None = None) -> Outcome:
    """Simulates ``row``; with the stack's own factors of operators and of the host, or others."""
    from foretrain.device import preset

    found = _outcome(row, factor, host)
    if "out of memory" not in found.failure:
        return found
    again = _outcome(row, factor, host, memory=round(ROOM * preset(found.device).memory))
    return found if again.failure else replace(again, roomy=True)


def device_of(row: Row) -> str:
    """The preset of ``row``'s GPU."""
    return row.device or DEVICES[row.gpu]


def stack_of(row: Row) -> str:
    """The stack of ``row``'s family, or that of the run itself; a stack never seen is eager PyTorch's."""
    return STACKS.get(row.family, row.factor or "eager")


def first_steps(row: Row) -> tuple[int, ...]:
    """Micro-batches of the three steps that are simulated in place of one with all; none where that one is.

    Once a pipeline is full, as many micro-batches as it has stages always add the same time, and what comes before and
    behind them takes as long however many there are. So the time of a step is a straight line over their number, of
    which the second and the third step are two points. The first warms up.
    """
    stages = int(row.given("pp", "1"))
    if row.script != "megatron.py" or row.effort <= LARGE or row.of_a_pipeline <= 4 * stages:
        return ()
    return stages, 2 * stages, 3 * stages


def _extrapolated(found: Forecast, counts: Sequence[int], count: int) -> float:
    """The time of a step with ``count`` micro-batches, ps; the first three had ``counts``."""
    _, shorter, longer = (max(rank.steps[n].end - rank.steps[n].begin for rank in found.ranks) for n in range(3))
    return longer + (longer - shorter) * (count - counts[2]) / (counts[2] - counts[1])


def _outcome(row: Row, factor: float | None, host: float | None, memory: int | None = None) -> Outcome:
    from foretrain.device import HOST_LAUNCH
    from foretrain.errors import ForetrainError
    from foretrain.live.simulate import simulate
    from foretrain.network.deployment_notation import deployment, place
    from foretrain.units import SECOND

    device, stack = device_of(row), stack_of(row)
    known = Outcome(row.id, row.family, row.model, device, stack, row.ranks, row.seconds, memory_measured=row.memory)
    launch = None if host is None else round(HOST_LAUNCH * host)
    if row.gpu:
        ranks = "" if "ranks=" in row.cluster else f",ranks=0-{row.ranks - 1}"
        where = deployment(f"{row.cluster},device={device}{ranks}").carried_by("nccl")
    else:
        where = place(row.cluster)
    begin = time.perf_counter()
    warm, said = _warm()
    said.seek(0)
    said.truncate()
    counts = first_steps(row)
    script = [str(HERE / row.script), *row.argv, *(("--first", *map(str, counts)) if counts else ())]
    measured = Path(row.calibration) if row.calibration else None
    try:
        found = simulate(
            script,
            where,
            steps=len(counts) or STEPS,
            factor=stack if factor is None else factor,
            host=launch,
            memory=memory,
            calibration=measured,
            warm=warm,
        ).forecast
    except ForetrainError as error:
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if "Error" in line]
        reason = (lines or [str(error)])[-1][:300]
        return replace(known, failure=reason, wall=time.perf_counter() - begin)
    peaks = [rank.memory.allocated if row.allocated else rank.memory.reserved for rank in found.ranks]
    times = found.first.times
    time_of_all = _extrapolated(found, counts, row.of_a_pipeline) if counts else found.iteration_time
    return replace(
        known,
        predicted=time_of_all / SECOND,
        memory=max(peaks),
        wall=time.perf_counter() - begin,
        spread=found.sigma / found.iteration_time * time_of_all / SECOND,
        shares=[round(each / (sum(times) or 1), 4) for each in times],
        extrapolated=bool(counts),
    )


@lru_cache(maxsize=1)
def _warm() -> tuple[WarmForkServers, IO[bytes]]:
    """Return what forks this process's simulations, so that they import PyTorch once, and where scripts print."""
    from foretrain.live.rank_processes import WarmForkServers

    said = tempfile.TemporaryFile()  # noqa: SIM115, it lives as the process
    return WarmForkServers(said.fileno()).__enter__(), said
