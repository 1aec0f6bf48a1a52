"""``foretrain search --space space.toml -- train.py --tp {tp}``: which recipe of an unmodified script is best."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    ARGUMENT_TYPES,
    PREPARING,
    AddressText,
    ClusterName,
    DeviceText,
    FactorText,
    FaultText,
    Folder,
    JsonFile,
    Quiet,
    TimeText,
    check_apart,
    check_writable,
    command_line,
    named,
    patience,
    script_of,
    split_script,
    widen_piped_output,
)
from foretrain.cli.parsing import parsed
from foretrain.cli.progress import searching
from foretrain.errors import ConfigError, unknown
from foretrain.files import NO_ROOM, STDOUT, write_json
from foretrain.units import SECOND, parse_rate, parse_time

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment
    from foretrain.recipe_search.bill import Failures, Stragglers

_EXAMPLE = "foretrain search --space space.toml -- train.py --tp {tp}"
_OF_FAILURES = ("checkpoint", "checkpoint_every", "restart", "repair", "spares", "stragglers")
"""Options that say more of the failures of --mtbf."""
_CHECKPOINT = "write the time that one takes, e.g. 30s, or the rate at which a GPU writes its part, e.g. 2GB/s"
_LONG = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([hd])\s*")
"""Times that are longer than the notation of networks knows."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Find the fastest recipe of a training script: foretrain search --space space.toml -- train.py --tp {tp}

    Each recipe is a live simulation of the unmodified script with other arguments, as foretrain simulate runs it. Those
    that cannot be the best are recognised early. An interrupted search goes on when it is started again.

    Attributes:
        space: values and conditions of the script's arguments (docs/recipe-search.md): a .toml or .py file; or
            torchtitan, megatron.
        cluster: as of foretrain simulate, e.g. dgx-h100:8.
        device: the cluster's GPUs, e.g. A100, or a file written by foretrain calibrate.
        fault: as of foretrain simulate: worse links and GPUs, e.g. link:unit0.rail0-s0.nic0=10%,
            gpu:s0.gpu3=80%.
        experts: as of foretrain simulate: loads of experts, e.g. lognormal(0.3) or a file.
        experts_curve: also simulate the two best recipes with other loads of experts, ten more times each, for curves
            of the step's time against their imbalance on the page (--html) and in the numbers (--json), and a sentence.
        factor: as of foretrain simulate: a number, or a framework with a fitted factor.
        goal: what to minimise for a token: time (step), time with failures (goodput), money (cost) or energy.
        price: of a GPU's hour, in any currency; by default a list price, which is printed with its date.
        mtbf: mean time between failures of one GPU with its part of the server, e.g. 50000h; or of a GPU, a server and
            a cable outside of servers, e.g. gpu=80000h,server=200000h,link=500000h.
        checkpoint: time for which the job stands still to write a checkpoint; or the rate at which a GPU writes its
            part, e.g. 2GB/s, of what the script saves, else of the parameters and the optimizer's state. At a rate, the
            job stands still for the copies alone where the script saves by async_save.
        checkpoint_every: time of work between checkpoints, e.g. 30min; auto is the best.
        restart: time from a failure to the first step again.
        repair: time until a broken server is repaired, for which the job waits where no spare is left.
        spares: servers that stand by.
        stragglers: GPUs that are slow now and then: how often each turns slow, how long it stays so, and its speed
            meanwhile, e.g. every=5000h,lasts=2h,speed=70%.
        run_tokens: of the whole run, to see its days, price and energy, e.g. 2e12.
        compare_with: your own recipe, to see it in the ranking, e.g. tp=8,pp=2.
        budget: time after which no further simulation starts, e.g. 10min.
        exhaustive: simulate every recipe whole.
        jobs: workers on this machine; by default one per core.
        backend: processes here, or the workers of a Dask or Ray cluster.
        address: of a running cluster, e.g. tcp://10.0.0.5:8786; without it dask and ray start one here.
        store: folder that keeps what was simulated; by default SCRIPT.search in the current folder.
        html: write a page with all results.
        json: write the numbers.
        module: the script is the name of a module, as with python -m.
    """

    space: Annotated[str, named("FILE|NAME")]
    cluster: ClusterName = "dgx-h100:1"
    device: DeviceText | None = None
    fault: tuple[FaultText, ...] | None = None
    experts: Annotated[str, named("balanced|lognormal(SIGMA)|FILE")] = "balanced"
    experts_curve: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    factor: FactorText = "1"
    goal: Literal["step", "cost", "energy", "goodput"] = "step"
    price: float | None = None
    mtbf: Annotated[str, named("TIME|TIMES")] | None = None
    checkpoint: Annotated[str, named("TIME|RATE")] = "30s"
    checkpoint_every: Annotated[str, named("TIME|auto")] = "auto"
    restart: TimeText = "5min"
    repair: TimeText = "0s"
    spares: int = 0
    stragglers: Annotated[str, named("every=TIME,lasts=TIME,speed=PERCENT")] | None = None
    run_tokens: float | None = None
    compare_with: Annotated[str, named("RECIPE")] | None = None
    budget: TimeText | None = None
    exhaustive: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    jobs: int | None = None
    backend: Literal["processes", "dask", "ray"] = "processes"
    address: AddressText | None = None
    store: Folder | None = None
    html: Path | None = None
    json: JsonFile = None
    quiet: Quiet = False
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"]), tyro.conf.FlagCreatePairsOff] = False


def run_command(arguments: Sequence[str]) -> None:
    """Run the command with the arguments after ``foretrain search``."""
    own, script = split_script(arguments, _EXAMPLE)
    parse = partial(tyro.cli, SearchOptions, prog="foretrain search", registry=ARGUMENT_TYPES)
    _start(parsed(lambda words: parse(args=words), own), script)


def search(options: tyro.conf.OmitArgPrefixes[SearchOptions]) -> None:
    """Find the fastest recipe of a script, e.g. its parallelism."""
    _start(options, ())


def _start(options: SearchOptions, script: Sequence[str]) -> None:
    words, module = script_of(script, options.module, _EXAMPLE)
    check_writable(html=options.html, json=options.json)
    check_apart(options.space, html=options.html, json=options.json)
    budget = None if options.budget is None else _seconds(options.budget, "budget")
    store = options.store or Path(f"{words[0] if module else Path(words[0]).name}.search")
    with patience(PREPARING):
        from foretrain.network.deployment_notation import equipped
        from foretrain.recipe_search import search as find
        from foretrain.report.recipes import numbers, page, show

        where = equipped(options.cluster, options.device)[0]
    with _as_typed(options):
        failures = _failures(options, where)
    every = None if options.checkpoint_every == "auto" else _seconds(options.checkpoint_every, "checkpoint_every")
    try:
        with searching() as progress, _as_typed(options):
            result = find(
                words, options.space, options.cluster, module=module, device=options.device, factor=options.factor,
                faults=options.fault or (), experts=options.experts, experts_curve=options.experts_curve,
                store=store, budget=budget, goal=options.goal, price=options.price,
                failures=failures, checkpoint_every=every, run_tokens=options.run_tokens,
                compare_with=options.compare_with,
                exhaustive=options.exhaustive, jobs=options.jobs, backend=options.backend, address=options.address,
                progress=progress,
            )  # fmt: skip
    except (KeyboardInterrupt, SystemExit, OSError, ConfigError) as error:
        if isinstance(error, ConfigError) and getattr(error.__cause__, "errno", None) not in NO_ROOM:
            raise  # a retry would fail in the same way
        sys.stderr.write(f"foretrain: what was simulated is kept in {store}; the same command goes on\n")
        raise
    if options.experts_curve and not result.curves:
        sys.stderr.write("foretrain: no curve of loads: no counted choices of a router's topk or argmax were seen\n")
    widen_piped_output()
    show(result)
    if options.html is not None:
        page(result, options.html, command_line())
    if options.json is not None:
        write_json(options.json, numbers(result))
    for path in (options.json, options.html):
        if path is not None and path != STDOUT:
            sys.stderr.write(f"wrote {path}\n")


@contextmanager
def _as_typed(options: SearchOptions) -> Iterator[None]:
    """Name the text that was typed in errors of a number that it became, e.g. ``3min`` for 180 s."""
    try:
        yield
    except ConfigError as error:
        if error.field == "results":  # what a sweep calls the folder that keeps outcomes
            raise ConfigError("store", error.value, error.problem, error.remedy) from error.__cause__
        typed = getattr(options, error.field.partition(".")[0], None)
        if isinstance(typed, str) and isinstance(error.value, int | float):
            raise ConfigError(error.field, typed, error.problem, error.remedy) from None
        raise


def _failures(options: SearchOptions, where: Deployment) -> Failures | None:
    """Return the failures of a job; None where nobody said how often what fails."""
    from foretrain.recipe_search.bill import Failures, job_mtbf, uses_cables

    if options.mtbf is None:
        for each in fields(SearchOptions):
            if each.name in _OF_FAILURES and (value := getattr(options, each.name)) != each.default:
                problem = "does nothing where nobody says how often the job fails"
                raise ConfigError(each.name, value, problem, "give the failures as well: --mtbf 50000h")
        return None
    restart, repair = (_seconds(getattr(options, name), name) for name in ("restart", "repair"))
    if options.checkpoint.rstrip().endswith(("B/s", "bps", "Bps", "bit/s", "b/s")):
        checkpoint, rate = 0.0, parse_rate(options.checkpoint, "checkpoint")
    else:
        checkpoint, rate = _seconds(options.checkpoint, "checkpoint", _CHECKPOINT), math.inf
    if checkpoint == 0 and math.isinf(rate):
        raise ConfigError("checkpoint", options.checkpoint, "is not above 0", _CHECKPOINT)
    slow = None if options.stragglers is None else _stragglers(options.stragglers, where.total_gpus)
    times = _mtbf(options.mtbf)
    if "link" in times and not uses_cables(where):
        sys.stderr.write("foretrain: --mtbf link=… does nothing: the job is in one server, and uses no cable outside\n")
    return Failures(job_mtbf(where, times), checkpoint, restart, repair, options.spares, rate, slow)


def _stragglers(text: str, gpus: int) -> Stragglers:
    """Return the stragglers of a job, of ``"every=5000h,lasts=2h,speed=70%"`` for each GPU."""
    from foretrain.recipe_search.bill import Stragglers

    remedy = "write e.g. every=5000h,lasts=2h,speed=70%"
    parts: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ("every", "lasts", "speed"):
            raise unknown("stragglers", name, ["every", "lasts", "speed"])
        if name in parts:
            raise ConfigError("stragglers", text, f"says {name} twice", "give it once")
        parts[name] = value
    if len(parts) < 3:
        raise ConfigError("stragglers", text, "says not all of every, lasts and speed", remedy)
    speed = parts["speed"].removesuffix("%")
    if not (parts["speed"].endswith("%") and speed.replace(".", "", 1).isdecimal() and 0 < float(speed) <= 100):
        raise ConfigError("stragglers", f"speed={parts['speed']}", "is no speed of a slow GPU", "write e.g. speed=70%")
    every, lasts = _seconds(parts["every"], "stragglers"), _seconds(parts["lasts"], "stragglers")
    if every <= 0 or lasts <= 0:
        raise ConfigError("stragglers", text, "has a time of 0", remedy)
    return Stragglers(every / gpus, lasts, float(speed) / 100)


def _mtbf(text: str) -> dict[str, float]:
    """Return the mean times between failures, s, of a ``gpu``, ``server``, ``link``: of ``"50000h"`` that of a GPU."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, separator, time = part.partition("=")
        name, time = (name.strip(), time.strip()) if separator else ("gpu", part.strip())
        if name not in ("gpu", "server", "link"):
            raise unknown("mtbf", name, ["gpu", "server", "link"])
        if name in found:
            remedy = f"give it once; a time without a name is that of a gpu: {name}={time}"
            raise ConfigError("mtbf", text, f"says {name} twice", remedy)
        found[name] = _seconds(time, "mtbf")
        if found[name] <= 0:
            raise ConfigError("mtbf", part, "is not above 0", "write e.g. 50000h")
    return found


def _seconds(text: str, field: str, remedy: str = "write e.g. 30min or 24h") -> float:
    """Return a time as seconds; hours and days are longer than the notation of networks knows."""
    if match := _LONG.fullmatch(text):
        return float(match[1]) * {"h": 3600, "d": 86400}[match[2]]
    try:
        return parse_time(text, field) / SECOND
    except ConfigError:
        problem = "has no unit" if text.strip().replace(".", "", 1).isdecimal() else "is no time"
        raise ConfigError(field, text, problem, remedy) from None
