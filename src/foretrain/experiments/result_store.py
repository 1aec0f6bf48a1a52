"""Results of scenarios, and the folder that stores them: files are only ever added, each written in one step.

A kill at any moment leaves whole entries, so what was written is never lost and what is in them is never simulated
again. A lock keeps two commands out of one folder; the system lets go of it however a process ends.

Results are in seconds, bytes and bytes per second.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import msgspec

import foretrain
from foretrain.errors import ConfigError
from foretrain.files import write_atomically


class ScenarioResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one scenario; all but ``id`` and ``error`` are at their defaults where it could not be simulated.

    Attributes:
        id: the scenario's.
        error: why it could not be simulated; empty where it was.
        gpus: of the whole job.
        device: the GPU of a model of the zoo; empty for a recorded workload, whose times are its own.
        exchange: ``all_reduce``, ``ps`` or ``ps_colocated`` of a simple cluster; of a topology the collective that all
            gradients together would take.
        bandwidth: what all hosts of a simple cluster can send together, bytes/s; 0 for a topology.
        schedule: as it ran: with the knobs that were found where it was tuned.
        knobs: all knobs, defaults included, in bytes, seconds or as they are.
        iteration_time: from one backward pass to the next.
        samples_per_second: of the whole job.
        optimum: T*.
        gap: T/T* − 1.
        kind: what binds T*.
        layer: the layer that binds it.
        compute: Σb + Σf.
        communication: the link's time if it never idled.
        exposed: T − Σb − Σf.
        idle: share of the iteration in which the GPU does nothing.
        operations: started in one step.
        baseline: the schedule, with its knobs, that ``speedup`` is counted from.
        baseline_time: its iteration time.
        speedup: baseline_time / iteration_time.
    """

    id: str
    error: str = ""
    gpus: int = 0
    device: str = ""
    exchange: str = ""
    bandwidth: float = 0.0
    schedule: str = ""
    knobs: dict[str, float] = {}
    iteration_time: float = 0.0
    samples_per_second: float = 0.0
    optimum: float = 0.0
    gap: float = 0.0
    kind: str = ""
    layer: str = ""
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    operations: float = 0.0
    baseline: str = ""
    baseline_time: float = 0.0
    speedup: float = 0.0


class Result(Protocol):
    """Result that a store can keep: a struct of msgspec with an identity."""

    @property
    def id(self) -> str:
        """Return what tells it from all others."""
        ...


R = TypeVar("R", bound=Result)


class StoredResults(msgspec.Struct, frozen=True):
    """Entry of the store: results, as JSON, and the version of foretrain that found them."""

    version: str
    results: list[msgspec.Raw]


class ResultStore(Generic[R]):
    """Result store of one folder, locked by this process. A context manager.

    Args:
        folder: made where it is not there.
        kind: what the results are.

    Attributes:
        found: by id, all results of this version of foretrain that are in the folder.
        stale: how many are there of other versions; they count for nothing.

    Raises ConfigError when another process has the folder, or when an entry cannot be read.
    """

    def __init__(self, folder: Path, kind: type[R]) -> None:
        self._folder, self._kind = folder, kind
        self.found: dict[str, R] = {}
        self.stale = 0
        try:
            folder.mkdir(exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            problem = f"cannot be used ({error.strerror or error})"
            raise ConfigError("results", str(folder), problem, "name a folder you may write to") from error

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            remedy = "wait for it, or name another folder"
            raise ConfigError("results", str(self._folder), "is in use by another command", remedy) from None
        try:
            self._read()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _read(self) -> None:
        for path in self._folder.glob(".*.tmp"):
            path.unlink()  # half an entry, of a process that was killed while it wrote
        decoder, of_result = msgspec.json.Decoder(StoredResults), msgspec.json.Decoder(self._kind)
        for path in sorted(self._folder.glob("*.json")):
            try:
                entry = decoder.decode(path.read_bytes())
                if entry.version == foretrain.__version__:
                    self.found |= {result.id: result for result in map(of_result.decode, entry.results)}
                else:
                    self.stale += len(entry.results)
            except (msgspec.MsgspecError, OSError) as error:
                raise ConfigError("results", str(path), f"cannot be read ({error})", "delete that file") from None

    def add(self, results: Iterable[R]) -> None:
        """Write an entry with ``results``, and add them to `found`."""
        new = list(results)
        if not new:
            return
        entry = StoredResults(foretrain.__version__, [msgspec.Raw(msgspec.json.encode(result)) for result in new])
        data = msgspec.json.encode(entry)
        # Named by its content: who was interrupted after the write and writes again adds nothing.
        write_atomically(self._folder / f"{hashlib.blake2b(data, digest_size=8).hexdigest()}.json", data)
        self.found |= {result.id: result for result in new}
