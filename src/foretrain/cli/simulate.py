"""``foretrain simulate -- train.py``: an unmodified script on a cluster that is not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from foretrain.cli.arguments import check_writable
from foretrain.errors import ConfigError

_EXAMPLE = "foretrain simulate --cluster dgx-h100:2 -- train.py"


@dataclass(frozen=True, slots=True)
class Options:
    """Run an unmodified training script on a cluster that is not there: foretrain simulate -- train.py ARGUMENTS

    The script runs as torchrun would start it, on simulated GPUs; its clocks show virtual time, so what it prints of its
    own speed and memory is the forecast. Values are not real: the loss it prints means nothing.

    Attributes:
        cluster: servers and network, e.g. dgx-h100:16 or dgx-a100:4,routing=spray; foretrain topology shows them.
        nproc: how many ranks; must be the cluster's, and is there to be checked.
        live: which ranks run as processes: auto, as few as are needed; all; or a number.
        steps: end the script after so many steps of its optimizer.
        factor: multiplies every operator's time, for a framework's own efficiency.
        trace: write every kernel and communication of the last step, for Perfetto.
        json: write the numbers.
        module: the script is a module's name, as with python -m.
    """

    cluster: str = "dgx-h100:1"
    nproc: int | None = None
    live: str = "auto"
    steps: int | None = None
    factor: float = 1.0
    trace: Path | None = None
    json: Path | None = None
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"]), tyro.conf.FlagCreatePairsOff] = False


def run_command(arguments: Sequence[str]) -> None:
    """The command with what follows ``foretrain simulate``."""
    own, script = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, script = own[:cut], own[cut + 1 :]
    elif not {"-h", "--help"}.intersection(own):
        raise ConfigError("command line", " ".join(own), "has no '--' before the script", f"write e.g. {_EXAMPLE}")
    options = tyro.cli(Options, args=own, prog="foretrain simulate")
    _start(options, script)


def simulate(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Run an unmodified training script on a cluster that is not there."""
    _start(options, ())


def _start(options: Options, script: Sequence[str]) -> None:
    module, script = options.module, list(script)
    if script[:1] == ["-m"]:
        module, script = True, script[1:]
    if not script:
        raise ConfigError("script", "", "is missing", f"write it after '--': {_EXAMPLE}")
    check_writable(trace=options.trace, json=options.json)
    if options.steps is not None and options.steps < 1:
        raise ConfigError("steps", options.steps, "is no number of steps", "write 1 or more")
    live = options.live if options.live in ("auto", "all") else _number(options.live)
    from foretrain.live.simulate import simulate as run
    from foretrain.network.deployment_notation import deployment
    from foretrain.report.simulation import Progress, numbers, show

    where = deployment(options.cluster)
    if "collective=" not in options.cluster:
        where = where.carried_by("nccl")
    if options.nproc is not None and options.nproc != where.total_gpus:
        remedy = f"leave it out, or give a cluster of {options.nproc} GPUs"
        raise ConfigError("nproc", options.nproc, f"is not the cluster's {where.total_gpus} GPUs", remedy)
    with Progress(options.steps) as progress:
        done = run(
            script,
            where,
            module=module,
            live=live,
            steps=options.steps,
            kept=1 if options.trace else 0,
            factor=options.factor,
            watch=progress.watch,
        )
    show(done)
    if options.trace:
        from foretrain.report.kineto import write_trace

        write_trace(done.story, options.trace)
    if options.json:
        import msgspec

        from foretrain.files import write_atomically

        write_atomically(options.json, msgspec.json.format(msgspec.json.encode(numbers(done)), indent=2))
    for path in filter(None, (options.trace, options.json)):
        sys.stderr.write(f"wrote {path}\n")


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError("live", text, "is neither auto, all nor a number of ranks", "write e.g. auto")
    return int(text)
