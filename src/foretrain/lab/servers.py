"""The servers of a job on hosts of a lab, and the end of all of them.

    with serving(lab, [2, 3], workers=2) as served:
        launch(lab, command, ranks=2, secret=served.secret, environment=served.environment)

Like ranks they lead sessions of their own, are ended with the block, whatever ends it, and die with the thread that
started them; see Note [No orphan].
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from foretrain.comm.options import SERVERS
from foretrain.errors import ForetrainError
from foretrain.lab.host import uninterrupted
from foretrain.lab.iproute import LabError
from foretrain.lab.launch import PATIENCE, guarded
from foretrain.lab.network import Lab

PIDS = "FORETRAIN_LAB_SERVERS"
"""The environment variable that tells workers the servers' processes, whose links they read."""
_TAIL = 12
_MOMENT = 1.0
"""Seconds for a server whose end workers have seen to have ended for us, too."""


@dataclass(frozen=True, slots=True)
class LabServers:
    """Servers that listen.

    Attributes:
        addresses: of each shard, by number.
        pids: their processes.
        secret: the job's.
    """

    addresses: tuple[str, ...]
    pids: tuple[int, ...]
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of workers, without the secret."""
        return {SERVERS: ",".join(self.addresses), PIDS: ",".join(map(str, self.pids))}


@contextmanager
def serving(lab: Lab, hosts: Sequence[int], workers: int, *, silence: float = 60.0) -> Iterator[LabServers]:
    """A shard of a parameter server on each of ``hosts``, by index, for the length of the block.

    Args:
        lab: where to run.
        hosts: the same one may have several.
        workers: how many push.
        silence: seconds after which a worker that says nothing is lost.

    Raises:
        LabError: a server does not start, or has ended before the block did; quotes the last that it wrote.
    """
    secret = secrets.token_hex(32)
    started: list[_Server] = []
    common = ["--workers", str(workers), "--shards", str(len(hosts)), "--timeout", f"{silence:g}s", "--with-parent"]
    with _file_of(secret) as key:
        common += ["--secret-file", f"/proc/self/fd/{key}"]
        try:
            for shard, host in enumerate(hosts):
                command = [sys.executable, "-m", "foretrain", "server", "--address", f"{lab.host(host).address}:0"]
                with uninterrupted():
                    started.append(_Server(lab, host, [*command, *common, "--shard", str(shard)], key))
            yield LabServers(tuple(each.address() for each in started), tuple(each.pid for each in started), secret)
        except ForetrainError as error:
            until = time.monotonic() + _MOMENT
            if ended := [each for each in started if each.ends(until)]:
                raise LabError(ended[0].story()) from error
            raise
        finally:
            with uninterrupted():
                for each in started:
                    each.stop()
                for each in started:
                    each.close()


@contextmanager
def _file_of(secret: str) -> Iterator[int]:
    """The descriptor of a file without a name, so that none is left behind, whatever ends this process."""
    # Not the environment: whose environment has the secret is a rank's child, and ends with the ranks.
    key = os.memfd_create("secret")
    try:
        os.fchmod(key, 0o600)
        os.write(key, secret.encode())
        yield key
    finally:
        os.close(key)


class _Server:
    """A started server, and what it writes."""

    def __init__(self, lab: Lab, host: int, command: Sequence[str], key: int) -> None:
        self._where = lab.host(host).namespace
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115 closed in `close`
        self._process = subprocess.Popen(
            lab.command(host, guarded(command)),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._notes,
            pass_fds=(key,),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def ends(self, until: float) -> bool:
        """Whether it has ended by ``until``, of the monotonic clock: a process that is killed takes its time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        return self._process.returncode is not None

    def address(self) -> str:
        """Where it listens; returns when it does."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line:
            self._process.wait()
            raise LabError(self.story())
        return line.split()[-1]

    def story(self) -> str:
        """How it has ended, with the last that it wrote."""
        self._notes.seek(0)
        lines = self._notes.read().decode(errors="replace").splitlines()[-_TAIL:]
        told = [f"the server on {self._where} has ended with {self._process.returncode}", *lines]
        return "\n  | ".join(told)

    def stop(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._notes.close()
