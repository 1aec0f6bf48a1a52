"""Launch of a script through torchrun, with one `foretrain.launch.worker` for each rank; without PyTorch, plainly."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from foretrain.comm.coordinator.handshake import SECRET, SECRET_SIZE
from foretrain.comm.options import SCHEDULE, SERVERS, TRANSPORT, AllReduce, BoundedLoss, ParameterServer
from foretrain.comm.ps import EVERY
from foretrain.comm.rendezvous import ADDRESS, free_port
from foretrain.errors import ConfigError
from foretrain.files import temporary_folder
from foretrain.launch import LaunchSettings
from foretrain.launch.child_processes import Nodes, Servers, ServerSpec, nodes_of, run_ranks
from foretrain.torch_version import torch_version

_WORKER = "foretrain.launch.worker"


def launch(
    script: Sequence[str],
    settings: LaunchSettings,
    *,
    torchrun: Sequence[str] = (),
    module: bool = False,
    secret_file: Path | None = None,
    servers: str | None = None,
    server_restarts: int = 3,
    snapshots: Path | None = None,
    every: int = EVERY,
) -> int:
    """Run a script on every rank and return its exit status, that of the first rank that failed.

    Args:
        script: the script, or with ``module`` the module, and its arguments; not empty.
        settings: of every rank.
        torchrun: torchrun's own options.
        module: whether ``script`` is a module, as after ``python -m``.
        secret_file: holds the job's secret, the same on every node.
        servers: the number of servers to start on this node, or the addresses of servers, if ``settings.transport`` is
            a parameter server; else None.
        server_restarts: how often servers that were started here and die are restarted.
        snapshots: folder for these servers' state if optimizers run on them; None takes a temporary one.
        every: rounds between two snapshots.

    Raises:
        ConfigError: an argument is wrong; nothing was started.
        PeerLost: a server died after the last restart; all ranks have stopped.
    """
    from foretrain.planner import requested_schedule  # it loads the simulator, which --help does not need

    requested_schedule(settings.schedule)
    updating = isinstance(settings.transport, ParameterServer) and settings.transport.updates == "servers"
    _check_settings(settings, updating, servers, snapshots)
    _check_script(script, module)
    # Servers that were started elsewhere have a secret already.
    elsewhere = servers is not None and not servers.isdigit()
    secret = None if secret_file is None else read_secret(secret_file)
    os.environ[SCHEDULE] = settings.schedule
    bounded = str(settings.transport) if isinstance(settings.transport, BoundedLoss) else None
    os.environ[TRANSPORT] = bounded or ("ps" if isinstance(settings.transport, ParameterServer) else "all_reduce")
    if find_spec("torch") is None:
        command = [sys.executable, "-m", _WORKER, *["--quiet"] * settings.quiet, *["-m"] * module, *script]
        return _launch_plainly(command, nodes_of(torchrun), settings, secret, servers, server_restarts)
    torch_version("foretrain run")  # its ranks say whether it was tested
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [*torchrun, "--module", _WORKER, *settings.arguments(), *["-m"] * module, *script]
    job = _job(arguments, given=" ".join(torchrun))
    if secret is not None:
        os.environ[SECRET] = secret
    elif run.parse_min_max_nnodes(job.nnodes)[1] == 1 and not elsewhere:
        os.environ[SECRET] = secrets.token_hex(SECRET_SIZE)
    if job.nnodes in ("1", "1:1"):
        if isinstance(settings.transport, BoundedLoss):
            settings.transport.check_ranks(run.determine_local_world_size(job.nproc_per_node))
        os.environ.setdefault(ADDRESS, f"127.0.0.1:{free_port()}")
    # A restarted job would read the addresses of dead ranks from the store of its last run (pytorch#135712): with stock
    # DDP on gloo every second restart failed.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cleanup = ExitStack()
    started = by_signal = None
    if elsewhere:
        os.environ[SERVERS] = servers or ""
    elif servers is not None:
        if job.nnodes not in ("1", "1:1"):
            _check_nodes(job.nnodes, servers)
        workers = run.determine_local_world_size(job.nproc_per_node)
        if updating and server_restarts and snapshots is None:
            snapshots = cleanup.enter_context(temporary_folder("foretrain-snapshots-"))
        spec = ServerSpec(
            int(servers), workers, float(settings.timeouts.peer), server_restarts, updating, snapshots, every
        )
        # torchrun stops its ranks on SIGTERM.
        started = cleanup.enter_context(Servers(spec, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        os.environ[SERVERS] = ",".join(started.addresses)
    try:
        if job.log_dir is None and job.redirects == job.tee == "0":
            # torchrun's default folder would stay behind, empty.
            job.log_dir = str(cleanup.enter_context(temporary_folder("foretrain-run-")))
        # With one node and no rendezvous, torchrun takes a free port, as with --standalone.
        run.run(job)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        sys.stderr.write(f"foretrain: rank {rank} (process {failure.pid}) {how} first; what it wrote says why\n")
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        by_signal = error.sigval
    finally:
        cleanup.close()
    if by_signal is None:
        return 0
    # torchrun leaves its keep-alive thread running, which ends with the objects of the launch. Where the interpreter
    # ends while that thread is in C++, the process aborts.
    gc.collect()
    if started is not None and started.failure is not None:
        raise started.failure
    sys.stderr.write(f"foretrain: ended by {by_signal.name}; all ranks have stopped\n")
    return 128 + by_signal


def _launch_plainly(
    command: Sequence[str],
    nodes: Nodes,
    settings: LaunchSettings,
    secret: str | None,
    servers: str | None,
    server_restarts: int,
) -> int:
    """Run ``command`` as this node's ranks without PyTorch, which exchange gradients through `foretrain.Session`."""
    # A session would not know of these; the schedule and the servers it finds in its environment.
    transport = ParameterServer() if servers is not None else AllReduce()
    if isinstance(settings.transport, BoundedLoss):
        transport = settings.transport
    plain = LaunchSettings(settings.schedule, transport=transport)
    for field in ("compression", "timeouts", "transport", "tune", "advise"):
        if (value := getattr(settings, field)) != getattr(plain, field):
            says = "leave it out" if field == "advise" else "leave it out and say it to foretrain.Session"
            remedy = f"install torch, or {says}"
            raise ConfigError(field, value, "is for DistributedDataParallel, which comes with PyTorch", remedy)
    if nodes.count > 1:
        _check_nodes(nodes.count, servers)
        if secret is None and not os.environ.get(SECRET):
            remedy = f"write --secret-file FILE, or set {SECRET}, the same on every node"
            raise ConfigError("secret-file", "", "is missing: ranks of other nodes are let in by it", remedy)
    else:
        os.environ.setdefault(ADDRESS, f"127.0.0.1:{free_port()}")
    started = None
    with ExitStack() as cleanup:
        if servers is None or servers.isdigit():
            os.environ[SECRET] = secret or os.environ.get(SECRET) or secrets.token_hex(SECRET_SIZE)
        elif secret is not None:
            os.environ[SECRET] = secret
        if servers is not None and servers.isdigit():
            spec = ServerSpec(int(servers), nodes.local, float(settings.timeouts.peer), server_restarts)
            started = cleanup.enter_context(Servers(spec, lambda: os.kill(os.getpid(), signal.SIGTERM)))
            os.environ[SERVERS] = ",".join(started.addresses)
        elif servers is not None:
            os.environ[SERVERS] = servers
        try:
            return run_ranks(command, nodes)
        except SystemExit:  # by SIGTERM
            if started is not None and started.failure is not None:
                raise started.failure from None
            raise


def _check_nodes(nodes: int | str, servers: str | None) -> None:
    """Refuse servers that one of several nodes would start for itself."""
    if servers is not None and servers.isdigit():
        remedy = "start `foretrain server` on hosts that all nodes reach, and write --servers HOST:PORT,..."
        raise ConfigError("servers", servers, f"would be on the loopback device of one of {nodes} nodes", remedy)


def _check_settings(settings: LaunchSettings, updating: bool, servers: str | None, snapshots: Path | None) -> None:
    if snapshots is not None and not (updating and servers is not None and servers.isdigit()):
        remedy = "write --servers K --updates servers, too, or give it to each `foretrain server`"
        raise ConfigError("snapshot-dir", str(snapshots), "is of no use to what this command starts", remedy)
    if not isinstance(settings.transport, ParameterServer):
        return
    if settings.tune and (settings.transport.asynchronous or settings.transport.elastic):
        remedy = "write neither --elastic nor another --consistency than bsp"
        raise ConfigError("tune", True, "measures what all ranks do together", remedy)
    if settings.transport.elastic and servers is not None and servers.isdigit():
        raise ConfigError(
            "elastic",
            servers,
            "would end with any rank of this node, as torchrun ends all when one does",
            "start `foretrain server --elastic`, and on each node `foretrain run --elastic --servers HOST:PORT,...`",
        )


def _check_script(script: Sequence[str], module: bool) -> None:
    name, path = script[0], Path(script[0])
    if module:
        if PathFinder.find_spec(name.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise ConfigError("module", name, "is not found", "run from the folder that has it, or install it")
    elif not path.is_file() and not (path / "__main__.py").is_file():
        remedy = f"there is none at {path.absolute()}; for a module, write -m before its name"
        raise ConfigError("script", name, "is no file", remedy)


def read_secret(path: Path) -> str:
    """Return the secret in ``path``, as hexadecimal digits."""
    remedy = f"make one with: openssl rand -hex {SECRET_SIZE} > {path}; chmod 600 {path}; and copy it to every node"
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError("secret-file", str(path), f"cannot be read ({error.strerror})", remedy) from None
    except ValueError:
        raise ConfigError("secret-file", str(path), "holds no hexadecimal digits", remedy) from None
    check_secret(text, "secret-file", str(path), remedy)
    if path.stat().st_mode & 0o077:
        raise ConfigError("secret-file", str(path), "can be read by other users", f"chmod 600 {path}")
    return text


def check_secret(text: str, field: str, value: str, remedy: str) -> None:
    """Raise ConfigError if ``text`` is no secret in hexadecimal digits; ``value`` names its source."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(field, value, "holds no hexadecimal digits", remedy) from None
    if len(found) < SECRET_SIZE:
        raise ConfigError(field, value, f"holds {len(found)} bytes, fewer than {SECRET_SIZE}", remedy)


def torchrun_options() -> set[str]:
    """Return the long options of torchrun; none without PyTorch."""
    if find_spec("torch") is None:
        return set()
    from torch.distributed import run

    return {name for name in run.get_args_parser()._option_string_actions if name.startswith("--") and "_" not in name}


def _job(arguments: Sequence[str], given: str) -> Namespace:
    """Return ``arguments`` as torchrun parses them; ConfigError, naming the options ``given``, if it refuses them."""
    from torch.distributed import run

    def refuse(message: str) -> NoReturn:
        raise ConfigError("options", given, f"is refused by torchrun ({message})", "torchrun --help lists its options")

    parser = run.get_args_parser()
    parser.error = refuse
    job = parser.parse_args(arguments)
    if job.training_script != _WORKER:
        refuse(f"it takes {job.training_script!r} for the script")
    for option in ("no_python", "run_path"):
        if getattr(job, option):
            name = f"--{option.replace('_', '-')}"
            raise ConfigError("options", name, "leaves nothing to take over", f"leave it out, or use torchrun {name}")
    try:
        run.determine_local_world_size(job.nproc_per_node)
        run.parse_min_max_nnodes(job.nnodes)
    except (ValueError, RuntimeError) as error:
        refuse(str(error))
    return job
