"""One run of a recipe: the simulation of the unmodified script, in a worker of a search, and the numbers of it.

A worker keeps the cluster, and processes with PyTorch imported and the device activated
(`foretrain.live.rank_processes.WarmForkServers`), so that a short simulation takes about a second.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import math
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from foretrain.errors import ForetrainError
from foretrain.live.forecast import Forecast, RankForecast, SavedCheckpoint
from foretrain.live.rank_processes import OutOfMemory, ScriptFailed, WarmForkServers
from foretrain.live.refold import ProgressCallbacks
from foretrain.live.simulate import Simulated, simulate
from foretrain.network.deployment import Deployment
from foretrain.network.deployment_notation import equipped, with_faults
from foretrain.network.fidelity import Fidelity
from foretrain.units import Time, to_seconds

LIMIT = 600.0
"""Seconds that a script may compute on the host without a launch before the run is given up."""
_SOURCE = 1 << 20
"""Bytes of a source file, or a configuration, at most."""
_OF_MICRO_BATCH = re.compile(
    r"mm|matmul|attention|convolution|linear|(layer|rms|group|batch)_norm|dropout|gelu|silu|softmax|embedding",
    re.IGNORECASE,
)
"""Kernels that a step launches for micro-batches, unless its optimizer does."""


class Account(msgspec.Struct, frozen=True):
    """Numbers of a simulated step; times in seconds, sizes in bytes. All are extensive: they add up from parts.

    Attributes:
        time: of the step.
        compute, exposed, waiting, idle: what it divides into, on the rank that computes longest.
        spread: standard deviation of the kernels' times on that rank.
        kernels: time by kernel's name on that rank.
        repeated: time of kernels there that every micro-batch launches again.
        flops: of a GPU in the mean, recomputation counted once.
        reserved: GPU memory at its peak, on the rank that needs most.
        state: parameters and the optimizer's state, on the rank that has most.
        carried: time in which the busiest link would carry the step's bytes at its full rate.
        launches: kernels of a step.
        saved: by the GPU that writes most, for a checkpoint of the script; 0 where it saved none.
        allocated: of the GPU memory at its peak, that of tensors.
        copies: time for which saving stops the script where it then writes in the background; 0 where it does not.
    """

    time: float
    compute: float
    exposed: float
    waiting: float
    idle: float
    spread: float
    kernels: dict[str, float]
    repeated: float
    flops: float
    reserved: float
    state: float
    carried: float
    launches: float
    saved: float = 0.0
    copies: float = 0.0
    allocated: float = 0.0

    @property
    def checkpoint(self) -> float:
        """Return the bytes of a checkpoint: those that the script saved, else `state`."""
        return self.saved or self.state


class RunResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of one run.

    Attributes:
        id: the run's.
        status: done; invalid, the script or its simulation failed; memory, it ran out of it; late, it was not begun.
        account: of the last step; None where it failed.
        reason: why it failed, in the script's own words.
        usable: bytes of a GPU's memory that a script can have.
        peak: FLOP/s of a GPU in dense bf16; 0 where it has none.
        stack_range: that of `foretrain.live.forecast.Forecast`.
        live: ranks that ran as processes.
        seconds: that it took.
        cpu: seconds that this machine computed for it.
        unknown: kernels whose times are guesses.
        warnings: of the simulation.
        busiest_expert, busiest_rank: as of `foretrain.live.routed_loads.RoutedLoads`; None where loads of experts were
            not given, or no choices were counted.
    """

    id: str
    status: Literal["done", "invalid", "memory", "late"]
    account: Account | None = None
    reason: str = ""
    usable: int = 0
    peak: float = 0.0
    stack_range: float = 0.0
    live: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    busiest_expert: float | None = None
    busiest_rank: float | None = None


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Settings that all runs of a search share.

    Attributes:
        cluster: in its notation.
        module: whether the script is the name of a module.
        factor: see `foretrain.live.simulate.simulate`.
        device: the cluster's GPUs; None leaves those it has.
        digest: of the files that the script consists of or is given.
        faults: of links and GPUs, see `foretrain.network.deployment_notation.with_faults`.
        experts: loads of experts, see `foretrain.live.simulate.simulate`; of a file, its digest is part of ``digest``.
    """

    cluster: str
    module: bool = False
    factor: str = "1"
    device: str | None = None
    digest: str = ""
    faults: tuple[str, ...] = ()
    experts: str = "balanced"


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """One simulation.

    Attributes:
        setting: of the search.
        argv: the script and its arguments.
        steps: that it makes.
        scratch: folder of the search for temporary files, also of a worker that is killed; None for the system's.
        until: `time.time` after which it is not begun: workers are given simulations ahead.
    """

    setting: RunSetting
    argv: tuple[str, ...]
    steps: int
    scratch: str | None = None
    until: float = math.inf

    @property
    def id(self) -> str:
        """Return a hash of all that decides the outcome, and of what an outcome holds."""
        known = self.setting, self.argv, self.steps, Account.__struct_fields__, RunResult.__struct_fields__
        return hashlib.blake2b(repr(known).encode(), digest_size=10).hexdigest()


def digest_of(script: str, module: bool, others: Iterable[str], apart: Path | None = None) -> str:
    """Return a hash of the script's file, of those that it may import, and of what ``others`` name.

    It may import the files beside it, and packages there; a module those of its own package; and what these sources
    import that is not installed, e.g. from PYTHONPATH. Others may be names of files, or of modules that are not
    installed, e.g. one's own configurations. Of a file that is larger than a source file is, the size and the time of
    the last change count. ``apart`` is a file that does not count only because it lies beside the script.
    """
    others = {*others}
    named = [_top(name) for name in others if all(part.isidentifier() for part in name.split("."))]
    tops = [top for top in named if top is not None and _is_own(top)] + ([_top(script)] if module else [])
    paths = {*map(Path, others)}.union(*map(_sources, tops))
    beside = () if module else (Path(script), *_beside(Path(script).parent))
    paths.update(path for path in beside if apart is None or path.absolute() != apart.absolute())
    paths.update(_imported(paths, ["" if module else str(Path(script).parent), *sys.path[1:]]))
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(paths):
        with contextlib.suppress(OSError, ValueError):  # no file, or none any more
            if not path.is_file():
                continue
            found = path.stat()
            small = found.st_size <= _SOURCE
            digest.update(path.read_bytes() if small else f"{found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _imported(paths: Iterable[Path], places: Sequence[str]) -> set[Path]:
    """Return the sources of all that ``paths`` import from ``places``, and these in turn, that is not installed."""
    waiting, tops, found = [*paths], set(sys.stdlib_module_names), set[Path]()
    while waiting:
        path = waiting.pop()
        if path.suffix != ".py" or not path.is_file():
            continue
        new = _named_imports(path) - tops
        tops |= new
        for top in filter(None, (PathFinder.find_spec(name, places) for name in new)):
            sources = {*_sources(top)} - found if _is_own(top) else set[Path]()
            found |= sources
            waiting += sources
    return found


def _named_imports(path: Path) -> set[str]:
    """Return the names of modules, or of the packages that they are in, that a source imports anywhere."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        return {name.partition(".")[0] for name in names}
    return set()


def _top(module: str) -> ModuleSpec | None:
    """Return where a module, or the package that it is in, is; None where it cannot be imported."""
    return PathFinder.find_spec(module.partition(".")[0], ["", *sys.path])


def _is_own(top: ModuleSpec) -> bool:
    """Return whether a module is neither Python's nor installed, nor a folder that has no sources to import."""
    installed = [path for name, path in sysconfig.get_paths().items() if name.endswith("lib")]
    return bool(top.origin) and not any(Path(top.origin or "").is_relative_to(path) for path in installed)


def _sources(top: ModuleSpec | None) -> list[Path]:
    """Return the sources of a module, or of a package."""
    if top is None:
        return []
    packages = [*(top.submodule_search_locations or ())]
    if not packages:
        return [Path(top.origin)] if top.origin else []
    return [path for package in packages for path in Path(package).rglob("*.py")]


def _beside(folder: Path) -> Iterator[Path]:
    """Yield the sources of a folder, and of the packages in it."""
    yield from folder.glob("*.py")
    for package in folder.iterdir():
        if package.is_dir() and any(package.glob("*.py")):
            yield from package.rglob("*.py")


def run(asked: RecipeRun) -> RunResult:
    """Simulate; an outcome holds the error of a run that fails. Only bugs raise."""
    if time.time() > asked.until:
        return RunResult(asked.id, "late")
    warm, output = _warm()
    output.seek(0)
    output.truncate()
    where, calibration = _where(asked.setting.cluster, asked.setting.device, asked.setting.faults)
    began, computed = time.perf_counter(), time.process_time() + warm.cpu
    usual = tempfile.tempdir
    if asked.scratch is not None and Path(asked.scratch).is_dir():  # not on another machine
        tempfile.tempdir = asked.scratch
    try:
        done = simulate(
            asked.argv,
            where,
            module=asked.setting.module,
            steps=asked.steps,
            factor=asked.setting.factor,
            calibration=calibration,
            experts=asked.setting.experts,
            watch=ProgressCallbacks(waiting=_give_up),
            warm=warm,
        )
        result = _result(asked.id, done)
    except OutOfMemory as error:
        result = RunResult(asked.id, "memory", reason=str(error))
    except ForetrainError as error:
        output.seek(0)
        reason = (last_words(output.read()) if isinstance(error, ScriptFailed) else "") or str(error)
        result = RunResult(asked.id, "invalid", reason=reason)
    finally:
        tempfile.tempdir = usual
    seconds, cpu = time.perf_counter() - began, time.process_time() + warm.cpu - computed
    return msgspec.structs.replace(result, seconds=seconds, cpu=cpu)


def clock_time(deadline: float) -> float:
    """Return the `time.time`, which workers on other machines have, too, of a `time.monotonic`."""
    return time.time() + deadline - time.monotonic()


def _give_up(ranks: tuple[int, ...], seconds: float) -> None:
    if seconds > LIMIT:
        raise ForetrainError(f"rank {ranks[0]} computed on its host for {seconds:.0f} s without launching anything")


@lru_cache(maxsize=1)
def _warm() -> tuple[WarmForkServers, TextIO]:
    """Return the process of this worker that forks simulations, and the file that scripts write to; see `close`."""
    output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, it lives as the process
    return WarmForkServers(output.fileno()).__enter__(), output


def close() -> None:
    """End the process that `run` keeps in this one; that of a worker ends with the worker."""
    if _warm.cache_info().currsize:
        warm, output = _warm()
        warm.__exit__()
        output.close()
        _warm.cache_clear()


@lru_cache(maxsize=8)
def _where(cluster: str, device: str | None, faults: tuple[str, ...]) -> tuple[Deployment, Path | None]:
    where, calibration = equipped(cluster, device)
    return with_faults(where, faults).simulated(Fidelity("fluid")), calibration


_ERROR = re.compile(r"^(?:\S+: )*(?:(?:fatal )?error: .+|ERROR\b.+|\w*(?:Error|Exception|Exit)\b.*)$")


def last_words(output: str) -> str:
    """Return the last line of a script's output that looks like an error, else the box or the line at its end."""
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith("foretrain: ")]
    errors = [line for line in lines if _ERROR.match(line) or ": error: " in line]
    boxed = " ".join(text for line in lines if line.startswith("│") and (text := line.strip("│─ ")))
    return ([*lines[-1:], *([boxed] if boxed else []), *errors[-1:]] or [""])[-1][:300]


def _result(name: str, done: Simulated) -> RunResult:
    forecast = done.forecast
    slowest = max(forecast.ranks, key=lambda rank: rank.mean("compute"))
    arithmetic = forecast.device.bf16 or forecast.device.fp16
    return RunResult(
        name,
        "done",
        _account(forecast, slowest, _carried(done)),
        usable=done.usable,
        peak=arithmetic.peak if arithmetic else 0.0,
        stack_range=forecast.stack_range,
        live=len(forecast.ranks),
        unknown=forecast.unknown,
        warnings=tuple(forecast.warnings),
        busiest_expert=None if done.loads is None else done.loads.busiest_expert,
        busiest_rank=None if done.loads is None else done.loads.busiest_rank,
    )


def _account(forecast: Forecast, slowest: RankForecast, carried: float) -> Account:
    step = forecast.iteration_time
    own = sum(slowest.mean(name) for name in ("compute", "exposed", "waiting", "idle"))
    parts = {
        name: to_seconds(slowest.mean(name)) * step / max(own, 1) for name in ("compute", "exposed", "waiting", "idle")
    }
    return Account(
        time=to_seconds(step),
        **parts,
        spread=to_seconds(slowest.spread),
        kernels={name: to_seconds(time) for name, time in slowest.by_name.items()},
        repeated=_repeated(slowest.by_name) - _repeated(slowest.updates),
        flops=forecast.flops * to_seconds(step),
        reserved=float(max(rank.memory.reserved for rank in forecast.ranks)),
        state=float(max(map(_state, forecast.ranks))),
        carried=carried,
        launches=float(slowest.kernels),
        saved=float(max((checkpoint.largest for checkpoint in forecast.checkpoints), default=0)),
        allocated=float(max(rank.memory.allocated for rank in forecast.ranks)),
        copies=max((to_seconds(one.time) for one in forecast.checkpoints if _is_background(one)), default=0.0),
    )


def _is_background(checkpoint: SavedCheckpoint) -> bool:
    """Return whether the script goes on while the checkpoint is written."""
    return all(call.partition(" ")[0].endswith(".async_save") for call in checkpoint.calls)


def _repeated(times: Mapping[str, Time]) -> float:
    """Return the seconds of kernels of micro-batches."""
    return sum(to_seconds(time) for name, time in times.items() if _OF_MICRO_BATCH.search(name))


def _state(rank: RankForecast) -> int:
    return sum(rank.memory.breakdown.get(name, 0) for name in ("parameters", "optimizer"))


def _carried(done: Simulated) -> float:
    """Return the time that the busiest link takes for the step's bytes, s."""
    rate = done.network.rate
    return float(max((size / speed for size, speed in zip(done.carried, rate, strict=True) if speed > 0), default=0.0))
