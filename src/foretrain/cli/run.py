"""``foretrain run -- train.py``: an unmodified script, scheduled; ``foretrain server``: a shard of its servers."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from foretrain.cli.arguments import (
    ARGUMENT_TYPES,
    Folder,
    JsonFile,
    ScheduleText,
    TimeText,
    check_writable,
    named,
    requested_schedule_text,
    script_of,
    split_script,
)
from foretrain.cli.parsing import check_options, options_of, parsed
from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import (
    AllReduce,
    BoundedAlgorithm,
    BoundedLoss,
    CollectiveBackend,
    Compression,
    ParameterServer,
    Timeouts,
    Transport,
    UpdateLocation,
    as_transport,
)
from foretrain.comm.ps import EVERY
from foretrain.errors import ConfigError
from foretrain.files import temporary_folder, write_json
from foretrain.launch import LaunchSettings
from foretrain.launch.child_processes import check_every
from foretrain.launch.command import check_secret, read_secret, torchrun_options
from foretrain.parent_death import end_with_parent
from foretrain.units import SECOND, parse_share, parse_time

_EXAMPLE = "foretrain run --nproc 2 -- train.py"


def _share_or_auto(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else parse_share(text)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Run a training script by a schedule: foretrain run --nproc 2 -- train.py ARGUMENTS

    Starts an unmodified script through torchrun with a scheduled DistributedDataParallel in the place of PyTorch's. A
    model that cannot be taken over trains with PyTorch's own, and rank 0 says why. A script of Keras, JAX, MXNet or
    NumPy makes a foretrain.Session, which finds all it needs, also where PyTorch is not installed. Every other option
    before the -- is torchrun's (--nnodes, --rdzv-endpoint, --max-restarts, ...; torchrun --help lists them). The exit
    status is the script's.

    Attributes:
        schedule: a policy with its knobs, e.g. "bytescheduler(partition=1MB)"; foretrain catalog lists them. Or auto:
            the best on what is measured, or plain DDP's where nothing is to be won.
        plan: a plan file that foretrain plan wrote, instead of a schedule.
        nproc: processes on this node, or auto, cpu or gpu; torchrun's --nproc-per-node.
        compression: type as which gradients are sent, instead of the one that the script's communication hook asks for.
        timeout: a rank that sends nothing for so long counts as lost, and the job ends.
        patience: the job ends where all ranks answer and no gradient moves for so long.
        secret_file: for several nodes, a file with the job's secret, the same on each; by default ranks agree on one.
        backend: what sums gradients without servers: gloo or nccl, as the script's process group, or ring, foretrain's
            own over TCP; by default the process group's.
        tolerance: sum gradients over UDP, where each rank's contribution may lose this share, e.g. 0.01; what is lost
            counts as zero. auto raises it while training goes on as without losses. For networks that lose packets; see
            foretrain tolerance.
        over: with --tolerance, who sums what: transpose, each rank one block; ring; halving_doubling; or ps, a
            server beside rank 0.
        transport: bounded loss with any of its arguments, in the place of --tolerance and --over, e.g.
            "bounded(tolerance=0.01, ending=early_close, hadamard=true)" or "bounded(over=ps, updates=servers)";
            arguments that are left out have the defaults of foretrain.BoundedLoss.
        servers: exchange gradients over a parameter server: how many servers to start on this node, or where they are,
            e.g. "10.0.0.5:5555,10.0.0.6:5555" (see foretrain server).
        server_restarts: how often servers that this command has started and that die are started again, all together.
        snapshot_dir: where servers that this command starts save parameters and optimizers' state, if optimizers run on
            them; by default a folder that is removed when the command ends.
        snapshot_every: rounds between two snapshots; ranks keep the gradients of as many.
        updates: where optimizers run with --servers: workers, each on its own copy, or servers, which give back
            parameters instead of sums.
        consistency: "bsp": a step is that of all ranks. "async": each rank's gradients are an update of their own, on
            the servers. "ssp(3)": the same, but nobody goes more than 3 steps ahead of the slowest.
        elastic: this node's ranks go on without other nodes that are lost; needs foretrain server --elastic.
        tune: search on, as the job runs, for the knobs that the schedule leaves open; the next run begins with them.
        advise: leave the script's DistributedDataParallel as it is, observe some steps, and say which bucket sizes and
            options would make it faster.
        json: write how each model's training went, or with --advise the advice's numbers, on the node of rank 0; where
            this is stdout, what the script prints goes to stderr.
        quiet: say neither which schedule was chosen nor how it went; only errors, warnings and advice.
        module: the script is a module's name, as with python -m.
    """

    schedule: ScheduleText | None = None
    plan: Path | None = None
    nproc: Annotated[str, named("N|auto|cpu|gpu")] | None = None
    compression: Compression | None = None
    timeout: TimeText = "60s"
    patience: TimeText = "30min"
    secret_file: Path | None = None
    backend: CollectiveBackend | None = None
    tolerance: Annotated[float | Literal["auto"], named("SHARE|auto", _share_or_auto)] | None = None
    over: BoundedAlgorithm | None = None
    transport: Annotated[str | None, tyro.conf.arg(metavar="BOUNDED(...)")] = None
    servers: Annotated[str, named("K|HOST:PORT,...")] | None = None
    server_restarts: int = 3
    snapshot_dir: Folder | None = None
    snapshot_every: int = EVERY
    updates: UpdateLocation | None = None
    consistency: Annotated[str, named("bsp|async|ssp(S)")] = "bsp"
    elastic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    tune: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    advise: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    json: JsonFile = None
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"]), tyro.conf.FlagCreatePairsOff] = False


def run(options: tyro.conf.OmitArgPrefixes[RunOptions]) -> None:
    """Run a training script, as it is, by a schedule."""
    _start(options, (), ())


def run_command(arguments: Sequence[str]) -> None:
    """Run the command with the arguments after ``foretrain run``; exit with the script's status.

    Options that are not foretrain's are torchrun's, so they are parsed apart from those of the other commands.
    """
    own, script = split_script(arguments, _EXAMPLE)
    parse = partial(tyro.cli, RunOptions, prog="foretrain run", return_unknown_args=True, registry=ARGUMENT_TYPES)

    def call(words: Sequence[str]) -> tuple[RunOptions, list[str]]:
        return parse(args=words)

    options, torchrun = parsed(call, own, torchrun_options)
    if torchrun and (others := torchrun_options()):
        check_options(torchrun, options_of(call, ()), others)
    _start(options, torchrun, script)


def _transport(options: RunOptions) -> Transport:
    if options.servers is not None:
        for field in ("backend", "tolerance", "over", "transport"):
            if (given := getattr(options, field)) is not None:
                raise ConfigError(field, given, "is for all-reduce", "leave --servers out, or this")
        return ParameterServer(None, options.updates, options.consistency, options.elastic)
    for field, value, used in (
        ("consistency", options.consistency, options.consistency != "bsp"),
        ("updates", options.updates, options.updates == "servers"),
        ("elastic", True, options.elastic),
    ):
        if used:
            raise ConfigError(field, value, "is of no use to all-reduce", "write --servers, too")
    if options.transport is not None:
        return _bounded(options, options.transport)
    if options.tolerance is not None:
        if options.backend is not None:
            raise ConfigError("backend", options.backend, "sums over TCP", "leave --tolerance out, or this")
        return BoundedLoss(options.tolerance, options.over or "transpose")
    if options.over is not None:
        raise ConfigError("over", options.over, "is of no use without bounded loss", "write --tolerance, too")
    if options.backend == "mpi":
        remedy = "start the script with mpirun, and attach with transport=AllReduce(backend='mpi')"
        raise ConfigError("backend", "mpi", "needs ranks that mpirun has started", remedy)
    return AllReduce(backend=options.backend)


def _bounded(options: RunOptions, text: str) -> BoundedLoss:
    """Return the transport that ``text`` writes; ConfigError for another, and beside options that say the same."""
    for field in ("backend", "tolerance", "over"):
        if (given := getattr(options, field)) is not None:
            raise ConfigError(field, given, "is said by --transport, too", "leave one of them out")
    found = as_transport(text)
    if not isinstance(found, BoundedLoss):
        remedy = "write e.g. 'bounded(tolerance=0.01)'; --servers and --backend choose the others"
        raise ConfigError("transport", text, "is not bounded loss", remedy)
    return found


def _wait(field: str, text: str) -> float:
    """Return seconds."""
    time = parse_time(text, field)
    if time <= 0:
        raise ConfigError(field, text, "is no time to wait", "write e.g. 60s")
    return time / SECOND


def _start(options: RunOptions, torchrun: Sequence[str], script: Sequence[str]) -> None:
    script, module = script_of(script, options.module, _EXAMPLE)
    if options.server_restarts < 0:
        raise ConfigError("server-restarts", options.server_restarts, "is no number of times", "write 0 or more")
    check_every(options.snapshot_every)
    if options.advise and (options.servers is not None or options.schedule or options.plan or options.tune):
        remedy = "leave out --schedule, --plan, --servers and --tune"
        raise ConfigError("advise", True, "observes PyTorch's own DistributedDataParallel", remedy)
    check_writable(json=options.json)
    timeouts = Timeouts(_wait("timeout", options.timeout), _wait("patience", options.patience))
    from foretrain.launch.command import launch

    processes = ["--nproc-per-node", options.nproc] if options.nproc else []
    settings = LaunchSettings(
        requested_schedule_text(options.schedule, options.plan) or LaunchSettings().schedule,
        options.compression,
        _transport(options),
        timeouts,
        options.tune,
        options.advise,
        options.quiet,
    )
    with _numbers_file(settings, options.json) as settings:
        status = launch(
            script,
            settings,
            torchrun=[*processes, *torchrun],
            module=module,
            secret_file=options.secret_file,
            servers=options.servers,
            server_restarts=options.server_restarts,
            snapshots=options.snapshot_dir,
            every=options.snapshot_every,
        )
    if status:
        sys.exit(status)


@contextmanager
def _numbers_file(settings: LaunchSettings, path: Path | None) -> Iterator[LaunchSettings]:
    """Yield settings by which rank 0 writes a file; at the end write its numbers to ``path``, if that is given."""
    if path is None:
        yield settings
        return
    with temporary_folder("foretrain-run-") as folder:
        told = folder / "numbers.json"
        yield replace(settings, numbers=told)
        if told.exists():  # on other nodes than rank 0's there is none
            write_json(path, json.loads(told.read_text("utf-8")))


def server(
    address: Annotated[str, named("HOST:PORT")],
    workers: int,
    shard: int = 0,
    shards: int = 1,
    secret_file: Path | None = None,
    timeout: TimeText = "60s",
    elastic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    snapshot_dir: Folder | None = None,
    snapshot_every: int = EVERY,
    updates: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    with_parent: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Serve as one shard of a parameter server, until interrupted.

    Its job is started with foretrain run --servers HOST:PORT,..., or attaches with transport="ps". Prints where it
    listens; what it turns away is logged to stderr.

    Args:
        address: where to listen: an address of this host and a port, e.g. 10.0.0.5:5555; port 0 takes a free one.
        workers: how many ranks train.
        shard: number of this server.
        shards: how many servers there are.
        secret_file: a file with the job's secret, the same for all; by default what FORETRAIN_SECRET says.
        timeout: how long a worker may be silent before it counts as lost.
        elastic: the others go on without a worker that is lost, instead of ending.
        snapshot_dir: where parameters and optimizers' state are written, if they are here; started anew, a server goes
            on from there.
        snapshot_every: rounds between two snapshots; workers keep the gradients of as many.
        updates: load PyTorch at once, for a job whose optimizers run here, and not only when it begins.
        with_parent: end when the process that started it does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError("address", address, "is no address and port", "write e.g. 10.0.0.5:5555")
    if not 0 <= shard < shards:
        raise ConfigError("shard", shard, f"is none of {shards} servers", f"write 0 to {shards - 1}")
    secret = read_secret(secret_file) if secret_file is not None else os.environ.get(SECRET, "")
    remedy = "make one with: openssl rand -hex 32 > FILE; chmod 600 FILE; and copy it to every node"
    if not secret:
        raise ConfigError("secret-file", "", "is missing: nobody is let in without a secret", remedy)
    check_secret(secret, SECRET, "(hidden)", remedy)
    check_every(snapshot_every)
    peer_timeout = parse_time(timeout, "timeout") / SECOND
    if peer_timeout <= 0:
        raise ConfigError("timeout", timeout, "is no time to wait", "write e.g. 60s")
    from foretrain.comm.ps.server.job import ServerConfig
    from foretrain.comm.ps.server.service import Service
    from foretrain.plugins.torch.ps.server import make_optimizer_shard, prepare

    logging.basicConfig(stream=sys.stderr, format="foretrain server: %(message)s", level=logging.INFO)
    if with_parent:
        end_with_parent()
    if updates:
        prepare()
    terms = ServerConfig(
        *(workers, shard, shards, peer_timeout, elastic),
        snapshots=snapshot_dir,
        every=snapshot_every,
        optimizer_shard=make_optimizer_shard,
    )
    with Service(host, bytes.fromhex(secret), terms, int(port)) as service:
        found, number = service.address
        sys.stdout.write(f"server {shard} of {shards} for {workers} workers listens on {found}:{number}\n")
        sys.stdout.flush()
        service.run(lives_on=True)
