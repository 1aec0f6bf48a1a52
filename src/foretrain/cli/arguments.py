"""Arguments that commands share: the workload and cluster, the fidelity of the network, and the files to write."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from foretrain.cli.progress import percent_bar
from foretrain.device import Precision
from foretrain.errors import ConfigError
from foretrain.files import STDOUT

if TYPE_CHECKING:
    from rich.console import Console

    from foretrain.network import Place
    from foretrain.network.fidelity import Fidelity
    from foretrain.workload import Workload


def named(metavar: str, kind: Any = str) -> PrimitiveConstructorSpec[Any]:
    """Return, for ``Annotated``, how help names an argument of type ``kind``."""

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(words[0]) from None  # `foretrain.cli.parsing` says the rest

    accepted: Any = (int, float) if kind is float else kind if isinstance(kind, type) else object
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, accepted),
        str_from_instance=lambda value: [str(value)],
    )


TimeText: TypeAlias = Annotated[str, named("TIME")]
RateText: TypeAlias = Annotated[str, named("RATE")]
SizeText: TypeAlias = Annotated[str, named("SIZE")]
ShareText: TypeAlias = Annotated[str, named("SHARE")]
"""A text that `foretrain.units` reads, or a share such as 1%."""
ScheduleText: TypeAlias = Annotated[str, named("SCHEDULE")]
AlgorithmText: TypeAlias = Annotated[str, named("ALGORITHM")]
FaultText: TypeAlias = Annotated[str, named("FAULT")]
DeviceText: TypeAlias = Annotated[str, named("GPU|FILE")]
FactorText: TypeAlias = Annotated[str, named("NUMBER|NAME")]
AddressText: TypeAlias = Annotated[str, named("ADDRESS")]
NameText: TypeAlias = Annotated[str, named("NAME")]
Folder: TypeAlias = Annotated[Path, named("FOLDER", Path)]
JsonFile: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE|-")]
"""File that ``--json`` writes; - is stdout."""
Quiet: TypeAlias = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(help="print nothing on standard output but what --json - asks for."),
]
"""``--quiet`` in the help of commands; `foretrain.cli.main` takes it from the command line before they see it."""
WorkloadName: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD")]
ClusterName: TypeAlias = Annotated[str, tyro.conf.arg(metavar="CLUSTER")]

RUN_SCRIPTS = ("run", "simulate", "search")
"""Commands whose last words are a script and its arguments, after --."""
ARGUMENT_TYPES = ConstructorRegistry()
"""Names of argument types in help: TEXT, N, NUMBER, FILE; the same whether an argument may be left out or not."""
_METAVARS: dict[object, str] = {str: "TEXT", int: "N", float: "NUMBER", Path: "FILE"}


@ARGUMENT_TYPES.primitive_rule
def _plain(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind: Any = info.type
    return named(_METAVARS[kind], kind) if kind in _METAVARS else None


@ARGUMENT_TYPES.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kinds = tuple(kind for kind in get_args(info.type) if kind is not types.NoneType)
    if types.NoneType not in get_args(info.type) or not kinds:
        return None
    kind: Any = Union[kinds]  # noqa: UP007, of a tuple
    made: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    return dataclasses.replace(
        made,
        is_instance=lambda value: value is None or made.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else made.str_from_instance(value),
    )


def leave_out_empty_defaults() -> None:
    """Let help name no default of an argument that is none, nor of a flag, which is off without it."""
    from tyro import _arguments  # pyright: ignore[reportPrivateUsage], tyro has no setting for it

    shown: Any = _arguments.generate_argument_helptext
    if hasattr(shown, "__wrapped__"):
        return

    @wraps(shown)
    def without(argument: Any, lowered: Any, *rest: Any, **options: Any) -> Any:
        field = argument.field
        if field.argconf.help_behavior_hint is None and (field.default is None or field.default is False):
            silent = dataclasses.replace(field.argconf, help_behavior_hint="")
            argument = dataclasses.replace(argument, field=dataclasses.replace(field, argconf=silent))
        return shown(argument, lowered, *rest, **options)

    _arguments.generate_argument_helptext = without


def name_script_in_usage() -> None:
    """Let the first line of help of a command that runs a script end with the script."""
    from tyro._backends import _tyro_help_formatting  # pyright: ignore[reportPrivateUsage], tyro has no setting for it

    shown: Any = _tyro_help_formatting.format_help
    if hasattr(shown, "__wrapped__"):
        return

    @wraps(shown)
    def with_script(prog: str, *rest: Any, **options: Any) -> list[str]:
        usage, *lines = shown(prog, *rest, **options)
        runs = prog.removeprefix("foretrain ") in RUN_SCRIPTS
        return [f"{usage.rstrip()} -- SCRIPT [ARGUMENT ...]" if runs else usage, *lines]

    _tyro_help_formatting.format_help = with_script


PREPARING = "preparing the network (on first use its simulator is compiled, which takes some 10 s)"
"""Message of `patience` while a network is prepared."""


@dataclass(frozen=True, slots=True)
class WorkloadOnCluster:
    """A workload on a cluster.

    Attributes:
        workload: a model of the zoo (foretrain catalog lists them) or a recorded workload's .toml file.
        cluster: e.g. 4x8xV100@100Gbps, "4 workers @ 1Gbps", 4x1xV100@10Gbps,ps=2, dgx-h100:16, a topology such as
            bigraph:8x4@100Gbps,collective=hdrm, or a .toml or .graphml file.
        batch: samples per GPU; models of the zoo only.
        precision: of computation and gradients; models of the zoo only.
        throughput: samples/s that one GPU reaches alone, if measured; models of the zoo only.
    """

    workload: WorkloadName
    cluster: ClusterName
    batch: int | None = None
    precision: Precision | None = None
    throughput: float | None = None

    def read(self) -> tuple[Workload, Place]:
        """Return the workload and the cluster, validated."""
        from foretrain.network import cluster
        from foretrain.network.notation import DEFAULT_DEVICE
        from foretrain.workload import load, zoo

        with patience(PREPARING):
            place = cluster(self.cluster)
        if self.workload.endswith(".toml") or Path(self.workload).is_file():
            for field in ("batch", "precision", "throughput"):
                if (value := getattr(self, field)) is not None:
                    raise ConfigError(field, value, "does not apply to a recorded workload", "leave it out")
            # Its times belong to the machine that recorded it, whatever GPU the cluster names.
            return load(self.workload), dataclasses.replace(place, device=None)
        work = zoo(
            self.workload,
            batch=self.batch,
            device=place.device or DEFAULT_DEVICE,
            precision=self.precision,
            throughput=self.throughput,
        )
        return work, place


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Write on stderr that ``what`` takes long, if the block does not end within two seconds."""
    late = threading.Timer(2.0, lambda: sys.stderr.write(f"foretrain: {what}\n"))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def check_writable(**paths: Path | None) -> None:
    """Raise ConfigError for an output that cannot be written, before any work is done."""
    seen: dict[Path, str] = {}
    for field, path in paths.items():
        if path is None or (path == STDOUT and field == "json"):
            continue
        if path == STDOUT:
            raise ConfigError(field, "-", "is stdout, which only --json takes", "name a file")
        if (other := seen.setdefault(path.resolve(), field)) != field:
            raise ConfigError(field, str(path), f"is already the file of --{other}", "name another file")
        if not path.resolve().parent.is_dir():
            raise ConfigError(field, str(path), "is in a folder that does not exist", "make the folder first")
        if path.is_dir():
            raise ConfigError(field, str(path), "is a folder", "name a file")


def write_outputs(console: Console, *outputs: tuple[Path | None, Callable[[Path], object]]) -> None:
    """Write each file that was asked for, and print its name."""
    for path, write in outputs:
        if path is not None:
            write(path)
            if path != STDOUT:
                console.print(f"wrote {path}", markup=False, soft_wrap=True)


def check_apart(source: str | Path, **paths: Path | None) -> None:
    """Raise ConfigError for an output that would replace the input file."""
    for field, path in paths.items():
        if path is not None and path.resolve() == Path(source).resolve():
            raise ConfigError(field, str(path), "is the input file, which it would replace", "name another file")


def requested_schedule_text(schedule: str | None, plan: Path | None) -> str | None:
    """Return the schedule that --schedule or --plan names; a plan file by its absolute path. Only one may be given."""
    if plan is None:
        return str(Path(schedule).resolve()) if schedule and schedule.endswith(".toml") else schedule
    if schedule is not None:
        raise ConfigError("plan", str(plan), f"contradicts --schedule {schedule}", "give one of them")
    if plan.suffix != ".toml":
        raise ConfigError("plan", str(plan), "does not end in .toml", "give a file written by foretrain plan")
    return str(plan.resolve())


def split_script(arguments: Sequence[str], example: str) -> tuple[list[str], list[str]]:
    """Split the arguments at the ``--`` before the script; without one only ``--help`` may be asked for."""
    own, separator, script = list(arguments), "--" in arguments, []
    if separator:
        cut = own.index("--")
        own, script = own[:cut], own[cut + 1 :]
    elif not own:
        raise ConfigError("script", "", "is missing", f"write e.g. {example}")
    elif not {"-h", "--help"}.intersection(own):
        raise ConfigError("command line", " ".join(own), "has no '--' before the script", f"write e.g. {example}")
    return own, script


def script_of(script: Sequence[str], module: bool, example: str) -> tuple[list[str], bool]:
    """Return the script with its arguments and whether it is the name of a module; ``-m`` may stand before it."""
    if script[:1] == ["-m"]:
        script, module = script[1:], True
    if not script:
        raise ConfigError("script", "", "is missing", f"write it after '--': {example}")
    return list(script), module


def without_separator(script: Sequence[str]) -> list[str]:
    """Return the script with its arguments, but for a ``--`` between them, which torchrun does not hand on."""
    return [script[0], *script[2 if script[1:2] == ["--"] else 1 :]]


def split(text: str) -> list[str]:
    """Split ``"ddp,bytescheduler(partition=1MB, credit=4MB)"`` at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """Fidelity of the simulated network.

    Attributes:
        network: model of the network: ideal, without contention; fluid, in which flows share links; packet, with
            every packet; or auto: packet if that takes no longer than --budget, else fluid.
        transport: of packets, e.g. newreno, pias or "dctcp(payload=4096B)"; "dctcp(least_timeout=1ms)" if not given.
        queues: queues of switches, for packets, e.g. limit=300kB,mark=100kB; by default they suit the transport:
            DCTCP's mark packets and drop none.
        losses: packet loss of links: of all, e.g. 0.1%, or of the link between two nodes, e.g. leaf0:spine1=1%; 1%x8
            loses bursts of 8 packets.
        budget: longest time for which auto simulates packets on this machine, e.g. 5min; 60 s by default.
    """

    network: Literal["ideal", "fluid", "packet", "auto"] = "fluid"
    transport: Annotated[str, named("TRANSPORT")] | None = None
    queues: Annotated[str, named("QUEUES")] | None = None
    losses: Annotated[str, named("LOSSES")] | None = None
    budget: TimeText | None = None

    def read(self) -> Fidelity:
        """Return the options, validated."""
        from foretrain.network.fidelity import USUAL, Fidelity
        from foretrain.network.packet.notation import losses, queues, transport
        from foretrain.units import SECOND, parse_time

        if self.network not in ("packet", "auto"):
            for name in ("transport", "queues", "losses"):
                if (value := getattr(self, name)) is not None:
                    problem = f"has no effect with --network {self.network}"
                    raise ConfigError(name, value, problem, "add --network packet, or leave it out")
        if self.budget is not None and self.network != "auto":
            raise ConfigError(
                "budget", self.budget, "has no effect without --network auto", "add that, or leave it out"
            )
        return Fidelity(
            self.network,
            transport=USUAL if self.transport is None else transport(self.transport),
            switches=None if self.queues is None else queues(self.queues),
            losses=() if self.losses is None else losses(self.losses),
            budget=60.0 if self.budget is None else parse_time(self.budget, "budget") / SECOND,
        )


DEFAULT_FIDELITY = FidelityOptions()
"""Flows that share links."""


def with_fidelity(place: Place, largest: int, fidelity: FidelityOptions, *, shown: bool = True) -> Place:
    """Return ``place`` with its network simulated at ``fidelity``, for collectives of up to ``largest`` bytes.

    Writes the estimated effort on stderr, and with ``shown`` simulates behind a bar what schedules will ask for.
    """
    from foretrain.network import Cluster

    if fidelity == FidelityOptions():
        return place
    network_fidelity = fidelity.read()
    if isinstance(place, Cluster):
        if network_fidelity.level in ("ideal", "packet"):
            remedy = "name a topology, e.g. star:4@10Gbps, or leave it out"
            raise ConfigError(
                "network",
                network_fidelity.level,
                "does not apply to a simple cluster, whose network is a formula",
                remedy,
            )
        return place
    with patience(PREPARING):
        made, why = place.simulated(network_fidelity).decided(largest)
    if network_fidelity.level in ("packet", "auto"):
        write_status(why)
    if shown:
        with percent_bar("packets") as progress:
            made.measure(largest, progress)
    return made


def widen_piped_output() -> None:
    """Let rich print whole lines where stdout is no terminal: it would cut them at 80. Scripts must not see this."""
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "4000")


def command_line() -> str:
    """Return the command that is running, to copy from a page; empty where foretrain is called from Python."""
    own = Path(sys.argv[0]).stem in ("foretrain", "__main__") if sys.argv else False
    return shlex.join(["foretrain", *sys.argv[1:]]) if own else ""


def write_status(line: str) -> None:
    """Write a line on stderr."""
    sys.stderr.write(f"foretrain: {line}\n")
