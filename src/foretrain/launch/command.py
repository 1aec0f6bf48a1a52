"""Starts a script through torchrun, one `foretrain.launch.worker` for each rank."""

from __future__ import annotations

import dataclasses
import os
import secrets
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from foretrain.errors import ConfigError, ForetrainError
from foretrain.launch import Settings
from foretrain.schedule.policies import spec
from foretrain.workload.torch_version import require_torch

SECRET = "FORETRAIN_SECRET"
"""The environment variable that hands a job's secret to its ranks."""
SERVERS = "FORETRAIN_SERVERS"
"""The one that tells them where the servers are."""
_MOST_SERVERS = 64
_FAREWELL = 5.0
"""Seconds that a server has to end."""
_SECRET_BYTES = 32
_WORKER = "foretrain.launch.worker"


def launch(
    script: Sequence[str],
    settings: Settings,
    *,
    torchrun: Sequence[str] = (),
    module: bool = False,
    secret_file: Path | None = None,
    servers: str | None = None,
) -> int:
    """Runs a script on every rank and returns its exit status, that of the first rank that failed.

    Args:
        script: the script, or with ``module`` the module, and its arguments; not empty.
        settings: what every rank is told.
        torchrun: torchrun's own options.
        module: whether the script is named as ``python -m`` would.
        secret_file: holds the job's secret, the same on every node.
        servers: of a parameter server: how many to start on this node, or where they are; None all-reduces.

    Raises:
        ConfigError: before anything is started, for whatever can be known to be wrong by then.
    """
    spec(settings.schedule)
    _check_script(script, module)
    settings = dataclasses.replace(settings, served=servers is not None)
    # Servers that somebody else has started have their secret from there.
    elsewhere = servers is not None and not servers.isdigit()
    secret = None if secret_file is None else read_secret(secret_file)
    require_torch("foretrain run")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [*torchrun, "--module", _WORKER, *settings.arguments(), *["-m"] * module, *script]
    job = _job(arguments, given=" ".join(torchrun))
    if secret is not None:
        os.environ[SECRET] = secret
    elif run.parse_min_max_nnodes(job.nnodes)[1] == 1 and not elsewhere:
        os.environ[SECRET] = secrets.token_hex(_SECRET_BYTES)
    # A job that is started again over the store of the one before reads the addresses of ranks that are gone
    # (pytorch#135712): with stock DDP on gloo every second restart failed.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    started = ExitStack()
    if elsewhere:
        os.environ[SERVERS] = servers or ""
    elif servers is not None:
        workers = run.determine_local_world_size(job.nproc_per_node)
        started.enter_context(_servers(int(servers), workers, job.nnodes, settings.timeout))
    try:
        # With one node and no rendezvous named it takes a free port of its own, as with --standalone.
        run.run(job)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        sys.stderr.write(f"foretrain: rank {rank} (process {failure.pid}) {how} first; what it wrote says why\n")
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        sys.stderr.write(f"foretrain: ended by {error.sigval.name}; all ranks have stopped\n")
        return 128 + error.sigval
    finally:
        started.close()
    return 0


@contextmanager
def _servers(count: int, workers: int, nodes: str, timeout: float) -> Iterator[None]:
    """Servers on the loopback device of this node for ``workers``; they end with the block, and with this process."""
    if nodes not in ("1", "1:1"):
        remedy = "start them with `foretrain server` on hosts that all nodes reach, and write --servers HOST:PORT,..."
        raise ConfigError("servers", count, f"would be on the loopback device of one of {nodes} nodes", remedy)
    if not 1 <= count <= _MOST_SERVERS:
        raise ConfigError("servers", count, "is no number of servers to start", f"write 1 to {_MOST_SERVERS}")
    command = [sys.executable, "-m", "foretrain", "server", "--address", "127.0.0.1:0", "--workers", str(workers)]
    command += ["--shards", str(count), "--timeout", f"{timeout}s", "--with-parent"]
    with ExitStack() as running:
        made = [
            running.enter_context(_ending(subprocess.Popen([*command, "--shard", str(shard)], stdout=subprocess.PIPE)))
            for shard in range(count)
        ]
        addresses = []
        for shard, process in enumerate(made):
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            if not line:
                raise ForetrainError(f"server {shard} has ended with {process.wait()}; what it wrote says why")
            addresses.append(line.split()[-1])
        os.environ[SERVERS] = ",".join(addresses)
        yield


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """``process``, which is asked to end with the block, and killed if it does not."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _check_script(script: Sequence[str], module: bool) -> None:
    name, path = script[0], Path(script[0])
    if module:
        if PathFinder.find_spec(name.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise ConfigError("module", name, "is not found", "run from the folder that has it, or install it")
    elif not path.is_file() and not (path / "__main__.py").is_file():
        remedy = f"there is none at {path.absolute()}; for a module, write -m before its name"
        raise ConfigError("script", name, "is no file", remedy)


def read_secret(path: Path) -> str:
    """The secret in ``path``, as hexadecimal digits."""
    remedy = f"make one with: openssl rand -hex {_SECRET_BYTES} > {path}; chmod 600 {path}; and copy it to every node"
    try:
        text = path.read_text(encoding="ascii").strip()
        found = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError("secret-file", str(path), f"cannot be read ({error.strerror})", remedy) from None
    except ValueError:
        raise ConfigError("secret-file", str(path), "holds no hexadecimal digits", remedy) from None
    if len(found) < _SECRET_BYTES:
        raise ConfigError("secret-file", str(path), f"holds {len(found)} bytes, fewer than {_SECRET_BYTES}", remedy)
    if path.stat().st_mode & 0o077:
        raise ConfigError("secret-file", str(path), "can be read by other users", f"chmod 600 {path}")
    return text


def _job(arguments: Sequence[str], given: str) -> Namespace:
    """What torchrun makes of ``arguments``; ConfigError, naming those ``given`` to us, where it would trip on them."""
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
