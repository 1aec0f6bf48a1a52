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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foretrain.errors import ForetrainError
from foretrain.lab.kernel import LabError
from foretrain.lab.launch import PATIENCE, guarded
from foretrain.lab.network import Lab
from foretrain.lab.processes import uninterrupted
from foretrain.launch.command import SERVERS

PIDS = "FORETRAIN_LAB_SERVERS"
"""The environment variable that tells workers the servers' processes, whose links they read."""
_TAIL = 12


@dataclass(frozen=True, slots=True)
class Served:
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
        """What workers have to be told besides the secret."""
        return {SERVERS: ",".join(self.addresses), PIDS: ",".join(map(str, self.pids))}


@contextmanager
def serving(lab: Lab, hosts: Sequence[int], workers: int, *, silence: float = 60.0) -> Iterator[Served]:
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
    with tempfile.TemporaryDirectory(prefix="foretrain-lab-") as folder:
        key = Path(folder) / "key"
        key.touch(mode=0o600)
        key.write_text(secret)
        common = ["--workers", str(workers), "--shards", str(len(hosts)), "--timeout", f"{silence:g}s"]
        try:
            for shard, host in enumerate(hosts):
                command = [sys.executable, "-m", "foretrain", "server", "--address", f"{lab.host(host).address}:0"]
                command += [*common, "--shard", str(shard), "--secret-file", str(key), "--with-parent"]
                with uninterrupted():
                    started.append(_Server(lab, host, command, Path(folder) / f"server-{shard}"))
            yield Served(tuple(each.address() for each in started), tuple(each.pid for each in started), secret)
        except ForetrainError as error:
            if ended := [each for each in started if each.ended]:
                raise LabError(ended[0].story()) from error
            raise
        finally:
            with uninterrupted():
                for each in started:
                    each.stop()
                for each in started:
                    each.close()


class _Server:
    """A started server, and what it writes."""

    def __init__(self, lab: Lab, host: int, command: Sequence[str], notes: Path) -> None:
        self._where, self._notes = lab.host(host).namespace, notes
        with notes.open("wb") as file:
            self._process = subprocess.Popen(
                lab.command(host, guarded(command)),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

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
        lines = self._notes.read_text(errors="replace").splitlines()[-_TAIL:]
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
