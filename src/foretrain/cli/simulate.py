"""``foretrain simulate -- train.py``: an unmodified script on a simulated cluster."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    ARGUMENT_TYPES,
    PREPARING,
    ClusterName,
    DeviceText,
    FactorText,
    FaultText,
    FidelityOptions,
    JsonFile,
    Quiet,
    ScheduleText,
    SizeText,
    check_writable,
    command_line,
    named,
    patience,
    requested_schedule_text,
    script_of,
    split_script,
    widen_piped_output,
    without_separator,
)
from foretrain.cli.parsing import parsed
from foretrain.cli.progress import StdoutClosed, end_with_reader
from foretrain.errors import ConfigError, unknown
from foretrain.files import STDOUT, write_json
from foretrain.launch import check_no_interpreter, launched
from foretrain.launch.launchers import started
from foretrain.units import SECOND, Time, format_time, parse_size, parse_time

if TYPE_CHECKING:
    from foretrain.live.imbalance import ImbalancePoint
    from foretrain.live.simulate import Simulated
    from foretrain.planner import ScheduleRequest
    from foretrain.report.findings import SimulationFindings
    from foretrain.schedule import Spec

_STEPS_KEPT = 2
"""Last steps whose kernels a trace has: Holistic Trace Analysis leaves out the last."""
_LEAST_MEMORY = 2 << 30
"""Smallest memory of a GPU, bytes."""
_EXAMPLE = "foretrain simulate --cluster dgx-h100:2 -- train.py"


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Run an unmodified training script on a simulated cluster: foretrain simulate -- train.py ARGUMENTS

    The script runs as torchrun would start it, on simulated GPUs. Its clocks show virtual time, so that the speed and
    memory that it prints are the forecast. Values are not computed: the loss that it prints has no meaning. The exit
    status is the script's.

    Attributes:
        cluster: servers and network, e.g. dgx-h100:16, dgx-h100:1,ranks=0-3 or dgx-a100:4,routing=spray (foretrain
            topology shows them); 4x8xA100@100Gbps, on one switch; or H100, a single GPU.
        nproc: number of ranks; only checked against the cluster's.
        live: ranks that run as processes: auto, as few as needed; all; or a number.
        steps: end the script after this many optimizer steps.
        factor: multiplies the time of every operator that was not measured: a number, or a framework with a fitted
            factor, e.g. torchtitan (docs/live/accuracy.md lists them).
        host: host time to launch an operator: modelled, as on servers with GPUs; a time, e.g. 4us; or measured, the
            script's CPU time on this machine, with which forecasts vary from run to run.
        device: the cluster's GPUs, e.g. A100, or a file written by foretrain calibrate.
        costs: a file that says what kernels cost that are not PyTorch's, e.g. Triton's (docs/live/kernels.md).
        stand_ins: libraries that a script may import though they are not installed: all, none, or names with commas
            between: apex, causal_conv1d, deep_ep, flash_attn, flash_attn_interface, grouped_gemm, mamba_ssm,
            transformer_engine, triton.
        fault: links and GPUs that are worse than their kind, e.g. link:unit0.rail0-s0.nic0=10%,
            link:unit0.rail0-s0.nic0=down, gpu:s0.gpu3=80% (foretrain topology show names nodes).
        experts: loads that routers give to experts: balanced; lognormal(SIGMA), drawn for each router and step, e.g.
            lognormal(0.3) or lognormal(0.3,SEED); or a .csv, .json or .toml file of loads (docs/live/experts.md).
        experts_curve: also simulate with other loads of experts, ten more times, for a curve of the step's time against
            their imbalance on the page (--html) and in the numbers (--json).
        memory: overrides GPU memory, e.g. 120GiB, to find the peak that a script would need.
        record_operators: file to write with the operators that the script launches, for foretrain calibrate.
        schedule: policy that exchanges DistributedDataParallel's gradients, e.g. prophet or
            bytescheduler(partition=4MB); or auto, the best for the first steps.
        plan: a plan file written by foretrain plan, instead of a schedule.
        compare: also run with PyTorch's own DistributedDataParallel, and report the gain of --schedule.
        tokens: tokens of one step over all ranks, for tokens/s.
        trace: write every kernel and communication of the last two steps, a file for each live rank, for Perfetto and
            Holistic Trace Analysis; a folder, or a name that ends in .json or .json.gz.
        html: write a page with all results.
        json: write the numbers.
        module: the script is the name of a module, as with python -m.
        fidelity: fidelity of the network; auto decides for each exchange.
    """

    cluster: ClusterName = "dgx-h100:1"
    nproc: int | None = None
    live: Annotated[str, named("auto|all|N")] = "auto"
    steps: int | None = None
    factor: FactorText = "1"
    host: Annotated[str, named("modelled|TIME|measured")] = "modelled"
    schedule: ScheduleText | None = None
    plan: Path | None = None
    compare: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    device: DeviceText | None = None
    costs: Path | None = None
    stand_ins: Annotated[str, named("all|none|NAME,...")] = "all"
    fault: tuple[FaultText, ...] | None = None
    experts: Annotated[str, named("balanced|lognormal(SIGMA)|FILE")] = "balanced"
    experts_curve: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    memory: SizeText | None = None
    record_operators: Path | None = None
    tokens: int | None = None
    trace: Annotated[Path, named("FILE|FOLDER", Path)] | None = None
    html: Path | None = None
    json: JsonFile = None
    quiet: Quiet = False
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"]), tyro.conf.FlagCreatePairsOff] = False
    fidelity: tyro.conf.OmitArgPrefixes[FidelityOptions] = field(default_factory=FidelityOptions)


def run_command(arguments: Sequence[str]) -> None:
    """Run the command with the arguments after ``foretrain simulate``."""
    own, script = split_script(arguments, _EXAMPLE)
    parse = partial(tyro.cli, SimulateOptions, prog="foretrain simulate", registry=ARGUMENT_TYPES)
    _start(parsed(lambda words: parse(args=words), own), script)


def simulate(options: tyro.conf.OmitArgPrefixes[SimulateOptions]) -> None:
    """Run an unmodified training script on a simulated cluster."""
    _start(options, ())


def _check(options: SimulateOptions) -> None:
    """Raise ConfigError for options that are wrong, before anything starts."""
    check_writable(html=options.html, json=options.json, record_operators=options.record_operators)
    if options.trace is not None and not options.trace.is_dir():
        check_writable(trace=options.trace, html=options.html, json=options.json)
        if options.trace.exists() and not options.trace.name.lower().endswith((".json", ".json.gz")):
            problem = "is a file, though its name does not end in .json or .json.gz"
            raise ConfigError("trace", str(options.trace), problem, "name another, or a folder")
    for name, remedy in (("tokens", "write the tokens of all ranks in one step"), ("steps", "write 1 or more")):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(name, value, f"is not a positive number of {name}", remedy)
    if options.experts_curve and options.html is None and options.json is None:
        raise ConfigError("experts_curve", True, "is shown nowhere", "add --html page.html or --json numbers.json")
    if options.compare and options.schedule is None and options.plan is None:
        raise ConfigError(
            "compare", True, "needs a schedule to compare with", "name a policy: --schedule prophet --compare"
        )


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


def _stand_ins(text: str) -> tuple[str, ...]:
    from foretrain.live.device.settings import STAND_INS

    if text in ("all", "none"):
        return STAND_INS if text == "all" else ()
    for name in text.split(","):
        if name not in STAND_INS:
            raise unknown("stand_ins", name, ("all", "none", *STAND_INS))
    return tuple(text.split(","))


def _start(options: SimulateOptions, script: Sequence[str]) -> None:
    script, module = script_of(script, options.module, _EXAMPLE)
    script = without_separator(script)
    words = ["-m", *script] if module else script
    if found := started(words):
        script, module = list(found.script), found.module
        os.environ.update(found.environment)
        if found.name:
            sys.stderr.write(f"foretrain: {found.name} is read, not run: the cluster says which ranks there are\n")
    elif launcher := launched(words):
        raise launcher.refusal("script", "simulate")
    check_no_interpreter(script[0])
    _check(options)
    live = options.live if options.live in ("auto", "all") else _number(options.live)
    host = _host(options)
    memory = _memory(options)
    stand_ins = _stand_ins(options.stand_ins)
    if options.experts != "balanced":
        from foretrain.live.device.settings import ExpertLoads

        ExpertLoads.parse(options.experts)  # before anything starts
    if options.costs is not None:
        from foretrain.device import kernel_costs

        kernel_costs.load(options.costs)  # before anything starts
    from foretrain.live.device import native_build
    from foretrain.live.rank_processes import OutOfMemory, ScriptFailed
    from foretrain.live.simulate import plan_differences
    from foretrain.live.simulate import simulate as run
    from foretrain.network.deployment_notation import equipped, with_faults
    from foretrain.planner import SavedPlan, requested_schedule
    from foretrain.report.findings import SimulationFindings
    from foretrain.report.simulation import SimulationProgress, show, show_comparison

    network_fidelity = options.fidelity.read()
    with native_build.building() as wait:
        with patience(PREPARING):
            where, calibration = equipped(options.cluster, options.device)
            where = with_faults(where, options.fault or ()).simulated(network_fidelity)
        if options.nproc is not None and options.nproc != where.total_gpus:
            remedy = f"leave it out, or give a cluster of {options.nproc} GPUs"
            raise ConfigError("nproc", options.nproc, f"is not the cluster's {where.total_gpus} GPUs", remedy)
        named = requested_schedule_text(options.schedule, options.plan)
        schedule = None if named is None else requested_schedule(named)  # before anything starts
        with SimulationProgress(None) as progress:
            wait(progress.watch.building)

    simulated = partial(
        run,
        script,
        where,
        module=module,
        live=live,
        factor=options.factor,
        host=host,
        calibration=calibration,
        costs=options.costs,
        stand_ins=stand_ins,
        memory=memory,
    )

    def once(schedule: str | Spec | None, kept: int, steps: int | None = options.steps) -> Simulated:
        with end_with_reader(), SimulationProgress(steps) as progress:
            return simulated(
                steps=steps,
                kept=kept,
                experts=options.experts,
                operators=options.record_operators,
                schedule=schedule,
                watch=progress.watch,
            )

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
            raise StdoutClosed from None
        # Lists of who waits are indented, below the line that they belong to.
        sys.stderr.write(indent(str(failed), "foretrain: ", lambda line: not line.startswith(" ")) + "\n")
        sys.exit(failed.status)
    if isinstance(schedule, SavedPlan) and (others := plan_differences(done, schedule)):
        sys.stderr.write(f"foretrain: the plan was made under other conditions: {'; '.join(others)}\n")
    curve = (
        _experts_curve(done, partial(simulated, steps=options.steps, schedule=policy)) if options.experts_curve else ()
    )
    found = SimulationFindings(done, options.tokens, curve)
    widen_piped_output()
    show(found)
    if stock is not None:
        show_comparison(stock, done)
    for path in _write(found, stock, options):
        if path != STDOUT:
            sys.stderr.write(f"wrote {path}\n")


def _policy(schedule: ScheduleRequest, once: Callable[[Spec, int, int], Simulated], device: str | None) -> Spec:
    """Return the policy that ``schedule`` names; for auto the planner's choice after a few observed steps."""
    from foretrain.live.simulate import PLANNING_STEPS, recommended_schedule
    from foretrain.planner import Auto, SavedPlan
    from foretrain.schedule import Spec

    if isinstance(schedule, SavedPlan):
        return schedule.schedule
    if not isinstance(schedule, Auto):
        return schedule
    sys.stderr.write(f"foretrain: first {PLANNING_STEPS} steps, to choose a schedule for\n")
    choice = recommended_schedule(once(Spec("ddp"), 0, PLANNING_STEPS), device)
    if choice is None:
        sys.stderr.write("foretrain: auto: plain DDP: no model exchanges gradients by a policy\n")
        return Spec("ddp")
    sys.stderr.write("".join(f"foretrain: {line}\n" for line in choice.lines))
    return choice.schedule


def _experts_curve(done: Simulated, simulated: Callable[..., Simulated]) -> tuple[ImbalancePoint, ...]:
    """Simulate again with other loads of experts, without the script's output, and tell how far that is."""
    from foretrain.live.imbalance import COUNT, imbalance_points
    from foretrain.live.rank_processes import WarmForkServers

    longest = format_time(round(done.forecast.wall * COUNT) * SECOND)
    sys.stderr.write(f"foretrain: {COUNT} more simulations, with other loads of experts: at most about {longest}\n")
    points: list[ImbalancePoint] = []
    with end_with_reader(), tempfile.TemporaryFile() as output, WarmForkServers(output.fileno()) as warm:
        for point in imbalance_points(lambda loads: simulated(experts=loads, warm=warm)):
            points.append(point)
            time = format_time(point.time) if point.time else point.failure
            sys.stderr.write(f"foretrain: {len(points)} of {COUNT}: lognormal({point.sigma},{point.seed}): {time}\n")
    if not points:
        sys.stderr.write("foretrain: no curve of loads: no counted choices of a router's topk or argmax were seen\n")
    return tuple(points)


def _write(found: SimulationFindings, stock: Simulated | None, options: SimulateOptions) -> Iterator[Path]:
    """Write the requested files; yield their paths."""
    traces: list[Path] = []
    if options.trace:
        from foretrain.report.kineto import write_trace

        forecast = found.forecast
        traces = write_trace(found.done.trace, options.trace, world=forecast.world, device=forecast.device)
        yield from traces
    if options.html:
        from foretrain.report.simulation_page import page

        page(found, options.html, command_line())
        yield options.html
    if options.json:
        from foretrain.report.findings import SimulationFindings, comparison_numbers, numbers

        document = (
            numbers(found) if stock is None else comparison_numbers(SimulationFindings(stock, options.tokens), found)
        )
        # The explorer opens them from there.
        write_json(options.json, document | {"traces": [str(path.resolve()) for path in traces]})
        yield options.json
    if options.record_operators:
        yield options.record_operators


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ConfigError("live", text, "is neither auto, all nor a number of ranks", "write e.g. auto")
    return int(text)
