"""Servers of a job on hosts of a lab, for the length of a block.

    with serving(lab, [2, 3], workers=2) as served:
        launch(lab, command, ranks=2, secret=served.secret, environment=served.environment)

Like ranks they lead sessions of their own, end with the block, whatever ends it, and die with the thread that started
them; see Note [No orphan].
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from foretrain.comm.options import SERVERS
from foretrain.errors import ForetrainError
from foretrain.lab.host import on_core, uninterrupted
from foretrain.lab.iproute import LabError
from foretrain.lab.launch import END_TIMEOUT, guarded
from foretrain.lab.network import Lab
from foretrain.launch.child_processes import ServerProcess, end_servers, server_command

PIDS = "FORETRAIN_LAB_SERVERS"
"""Environment variable that tells workers the servers' processes, whose links they read."""
_QUOTED_LINES = 12
_EXIT_TIMEOUT = 1.0
"""Seconds for a server to exit after its workers have noticed its end."""


@dataclass(frozen=True, slots=True)
class LabServers:
    """Servers that listen: addresses by shard, processes, and the job's secret."""

    addresses: tuple[str, ...]
    pids: tuple[int, ...]
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of workers, without the secret."""
        return {SERVERS: ",".join(self.addresses), PIDS: ",".join(map(str, self.pids))}


@contextmanager
def serving(
    lab: Lab, hosts: Sequence[int], workers: int, *, silence: float = 60.0, cores: int | None = None
) -> Iterator[LabServers]:
    """Run a shard of a parameter server on each of ``hosts``, by index, for the length of the block.

    Args:
        lab: of the hosts.
        hosts: the same one may have several.
        workers: of the job.
        silence: seconds after which a silent worker counts as lost.
        cores: how many of this thread's cores the hosts use, each host one, in turn; None leaves all to all.

    Raises:
        LabError: a server does not start, or has ended before the block did; quotes its last lines.
    """
    secret = secrets.token_hex(32)
    servers: list[ServerProcess] = []
    with ExitStack() as stack:
        key = stack.enter_context(_file_of(secret))
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in hosts]
        try:
            for shard, host in enumerate(hosts):
                command = server_command(f"{lab.host(host).address}:0", workers, shard, len(hosts), silence)
                command += ["--secret-file", f"/proc/self/fd/{key}"]
                with uninterrupted(), on_core(host, cores):
                    servers.append(_started(lab.command(host, guarded(command)), errors[shard], key))
            addresses = tuple(filter(None, (server.address() for server in servers)))
            if len(addresses) < len(servers):
                raise LabError("a server has ended before it listened")
            yield LabServers(addresses, tuple(server.pid for server in servers), secret)
        except ForetrainError as error:
            deadline = time.monotonic() + _EXIT_TIMEOUT
            for server, host, log in zip(servers, hosts, errors, strict=False):
                with suppress(subprocess.TimeoutExpired):
                    status = server.wait(max(0.0, deadline - time.monotonic()))
                    raise LabError(_report(lab.host(host).namespace, status, log)) from error
            raise
        finally:
            with uninterrupted():
                end_servers(servers, END_TIMEOUT)


@contextmanager
def _file_of(secret: str) -> Iterator[int]:
    """Yield the descriptor of a file without a name, so that none is left behind, whatever ends this process."""
    # Not the environment: a process with the secret in its environment counts as a rank's, and ends with the ranks.
    key = os.memfd_create("secret")
    try:
        os.fchmod(key, 0o600)
        os.write(key, secret.encode())
        yield key
    finally:
        os.close(key)


def _started(command: Sequence[str], errors: IO[bytes], key: int) -> ServerProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return ServerProcess(
        command, env=environment, stdin=subprocess.DEVNULL, stderr=errors, pass_fds=(key,), start_new_session=True
    )


def _report(namespace: str, status: int, log: IO[bytes]) -> str:
    """Return how a server has ended, with its last lines."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-_QUOTED_LINES:]
    return "\n  | ".join([f"the server on {namespace} has ended with {status}", *lines])
