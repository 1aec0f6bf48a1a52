"""``foretrain simulate -- train.py``: an unmodified script on a cluster that is not there."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import PREPARING, asked, check_writable, patience
from foretrain.cli.broken_pipe import ReaderGone, while_read
from foretrain.cli.network_options import Closely
from foretrain.errors import ConfigError
from foretrain.units import Time, parse_size, parse_time

if TYPE_CHECKING:
    from foretrain.live.simulate import Simulated
    from foretrain.planner import Wanted
    from foretrain.report.findings import SimulationFindings
    from foretrain.schedule import Spec

_STEPS_KEPT = 2
"""Steps of which a trace has every kernel: Holistic Trace Analysis leaves out the last."""
_LEAST_MEMORY = 2 << 30
"""Bytes of the smallest GPU."""
_EXAMPLE = "foretrain simulate --cluster dgx-h100:2 -- train.py"


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Run an unmodified training script on a cluster that is not there: foretrain simulate -- train.py ARGUMENTS

    The script runs as torchrun would start it, on simulated GPUs; its clocks show virtual time, so what it prints of
    its own speed and memory is the forecast. Values are not real: the loss it prints means nothing. The exit status is
    the script's.

    Attributes:
        cluster: servers and network, e.g. dgx-h100:16, dgx-h100:1,ranks=0-3 or dgx-a100:4,routing=spray (foretrain
            topology shows them); 4x8xA100@100Gbps, on one switch; or H100, a single GPU.
        nproc: how many ranks; must be the cluster's, and is there to be checked.
        live: which ranks run as processes: auto, as few as are needed; all; or a number.
        steps: end the script after so many steps of its optimizer.
        factor: multiplies every operator's time that was not measured: a number, or a framework for which one was
            fitted, e.g. torchtitan (docs/live/accuracy.md lists them).
        host: what launching an operator costs the host: modelled, as on servers with GPUs; a time, e.g. 4us; or
            measured, the CPU time that the script takes on this machine, with which no two forecasts are alike.
        device: what the cluster's GPUs are, e.g. A100, or a file that foretrain calibrate wrote.
        memory: of a GPU, e.g. 120GiB, instead of what its kind has: how much would the script need?
        record_operators: write the operators that the script launches, for foretrain calibrate.
        schedule: have a policy exchange DistributedDataParallel's gradients, e.g. prophet or
            bytescheduler(partition=4MB); or auto, what is best for the first steps.
        plan: a plan file that foretrain tune wrote, instead of a schedule.
        compare: run with PyTorch's own DistributedDataParallel too, and say what --schedule gains.
        tokens: of one step over all ranks, for tokens/s.
        trace: write every kernel and communication of the last two steps, a file for each live rank, for Perfetto and
            Holistic Trace Analysis; a folder, or a name that ends in .json or .json.gz.
        html: write a page that shows all of it.
        json: write the numbers.
        module: the script is a module's name, as with python -m.
        closely: how closely the network is simulated; auto decides exchange by exchange.
    """

    cluster: str = "dgx-h100:1"
    nproc: int | None = None
    live: str = "auto"
    steps: int | None = None
    factor: str = "1"
    host: str = "modelled"
    schedule: str | None = None
    plan: Path | None = None
    compare: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    device: str | None = None
    memory: str | None = None
    record_operators: Path | None = None
    tokens: int | None = None
    trace: Path | None = None
    html: Path | None = None
    json: Path | None = None
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"]), tyro.conf.FlagCreatePairsOff] = False
    closely: tyro.conf.OmitArgPrefixes[Closely] = field(default_factory=Closely)


def run_command(arguments: Sequence[str]) -> None:
    """The command with what follows ``foretrain simulate``."""
    own, script = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, script = own[:cut], own[cut + 1 :]
    elif not {"-h", "--help"}.intersection(own):
        raise ConfigError("command line", " ".join(own), "has no '--' before the script", f"write e.g. {_EXAMPLE}")
    options = tyro.cli(SimulateOptions, args=own, prog="foretrain simulate")
    _start(options, script)


def simulate(options: tyro.conf.OmitArgPrefixes[SimulateOptions]) -> None:
    """Run an unmodified training script on a cluster that is not there."""
    _start(options, ())


def _check(options: SimulateOptions) -> None:
    """Raises ConfigError for what can be known to be wrong before anything starts."""
    check_writable(html=options.html, json=options.json, record_operators=options.record_operators)
    if options.trace is not None and not options.trace.is_dir():
        check_writable(trace=options.trace, html=options.html, json=options.json)
        if options.trace.exists() and not options.trace.name.lower().endswith((".json", ".json.gz")):
            problem = "is a file, though its name does not end in .json or .json.gz"
            raise ConfigError("trace", str(options.trace), problem, "name another, or a folder")
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError("tokens", options.tokens, "is no number of tokens", "write those of all ranks in one step")
    if options.steps is not None and options.steps < 1:
        raise ConfigError("steps", options.steps, "is no number of steps", "write 1 or more")
    if options.compare and options.schedule is None and options.plan is None:
        raise ConfigError("compare", True, "has nothing to compare with", "name a policy: --schedule prophet --compare")


def _host(options: SimulateOptions) -> Time | Literal["measured"] | None:
    if options.host == "measured":
        return "measured"
    return None if options.host == "modelled" else parse_time(options.host, "host")


def _memory(options: SimulateOptions) -> int | None:
    if options.memory is None:
        return None
    memory = parse_size(options.memory, "memory")
    if memory < _LEAST_MEMORY:
        remedy = f"write at least {_LEAST_MEMORY >> 30}GiB; CUDA's context and NCCL's buffers take 1GiB"
        raise ConfigError("memory", options.memory, "is too little for a GPU", remedy)
    return memory


def _start(options: SimulateOptions, script: Sequence[str]) -> None:
    module, script = options.module, list(script)
    if script[:1] == ["-m"]:
        module, script = True, script[1:]
    if not script:
        raise ConfigError("script", "", "is missing", f"write it after '--': {_EXAMPLE}")
    _check(options)
    live = options.live if options.live in ("auto", "all") else _number(options.live)
    host = _host(options)
    memory = _memory(options)
    from foretrain.live.auto_schedule import differences
    from foretrain.live.cluster_spec import equipped
    from foretrain.live.failures import ScriptFailed
    from foretrain.live.out_of_memory import OutOfMemory
    from foretrain.live.simulate import simulate as run
    from foretrain.planner import SavedPlan, requested_schedule
    from foretrain.report.findings import SimulationFindings
    from foretrain.report.simulation import SimulationProgress, show, show_comparison

    fidelity = options.closely.read()
    with patience(PREPARING):
        where, calibration = equipped(options.cluster, options.device)
        where = where.simulated(fidelity)
    if options.nproc is not None and options.nproc != where.total_gpus:
        remedy = f"leave it out, or give a cluster of {options.nproc} GPUs"
        raise ConfigError("nproc", options.nproc, f"is not the cluster's {where.total_gpus} GPUs", remedy)

    def once(schedule: str | Spec | None, kept: int, steps: int | None = options.steps) -> Simulated:
        with while_read(), SimulationProgress(steps) as progress:
            return run(
                script,
                where,
                module=module,
                live=live,
                steps=steps,
                kept=kept,
                factor=options.factor,
                host=host,
                calibration=calibration,
                memory=memory,
                operators=options.record_operators,
                schedule=schedule,
                watch=progress.watch,
            )

    named = asked(options.schedule, options.plan)
    schedule = None if named is None else requested_schedule(named)  # before anything starts
    try:
        policy = None if schedule is None else _policy(schedule, once, where.device)
        stock = None
        if options.compare:
            sys.stderr.write("foretrain: first with PyTorch's own DistributedDataParallel\n")
            stock = once(None, 0)
            sys.stderr.write(f"foretrain: now with {policy}\n")
        done = once(policy, _STEPS_KEPT if options.trace or options.html else 0)
    except (ScriptFailed, OutOfMemory) as failed:
        if failed.status == 128 + signal.SIGPIPE:
            raise ReaderGone from None
        sys.stderr.write(f"foretrain: {failed}\n")
        sys.exit(failed.status)
    if isinstance(schedule, SavedPlan) and (others := differences(done, schedule)):
        sys.stderr.write(f"foretrain: the plan was made for something else: {'; '.join(others)}\n")
    found = SimulationFindings(done, options.tokens)
    show(found)
    if stock is not None:
        show_comparison(stock, done)
    for path in _write(found, stock, options):
        sys.stderr.write(f"wrote {path}\n")


def _policy(schedule: Wanted, once: Callable[[Spec, int, int], Simulated], device: str | None) -> Spec:
    """The policy that ``schedule`` asks for; what the planner chooses for a few steps that it watches."""
    from foretrain.live.auto_schedule import STEPS, chosen
    from foretrain.planner import Auto, SavedPlan
    from foretrain.schedule import Spec

    if isinstance(schedule, SavedPlan):
        return schedule.schedule
    if not isinstance(schedule, Auto):
        return schedule
    sys.stderr.write(f"foretrain: first {STEPS} steps, to choose a schedule for\n")
    choice = chosen(once(Spec("ddp"), 0, STEPS), device)
    if choice is None:
        sys.stderr.write("foretrain: auto: plain DDP: no model exchanges gradients by a policy\n")
        return Spec("ddp")
    sys.stderr.write("".join(f"foretrain: {line}\n" for line in choice.lines))
    return choice.schedule


def _write(found: SimulationFindings, stock: Simulated | None, options: SimulateOptions) -> Iterator[Path]:
    """The files that were asked for."""
    if options.trace:
        from foretrain.report.kineto import write_trace

        forecast = found.forecast
        yield from write_trace(found.done.story, options.trace, world=forecast.world, device=forecast.device)
    if options.html:
        from foretrain.report.simulation_page import page

        page(found, options.html)
        yield options.html
    if options.json:
        import msgspec

        from foretrain.files import write_atomically
        from foretrain.report.findings import SimulationFindings
        from foretrain.report.simulation_json import comparison_numbers, numbers

        told = numbers(found) if stock is None else comparison_numbers(SimulationFindings(stock, options.tokens), found)
        write_atomically(options.json, msgspec.json.format(msgspec.json.encode(told), indent=2))
        yield options.json
    if options.record_operators:
        yield options.record_operators


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ConfigError("live", text, "is neither auto, all nor a number of ranks", "write e.g. auto")
    return int(text)
