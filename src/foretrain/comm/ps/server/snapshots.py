"""Snapshots on disk of stateful shards, whose state workers cannot restore.

Every few rounds the state is copied, and a thread writes the copy while the shard serves on. The first is written
before any push, as workers do not keep the initial state either. A file is complete or absent, and replaces the one
before: workers keep, and after a restart resend, only the pushes that are not in it.

A file: magic and version, sizes of the header and of each array, the header (msgpack, never pickle), raw arrays, and
BLAKE2b over all of it.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from foretrain.comm.ps.placement import Declaration
from foretrain.errors import ConfigError, ForetrainError
from foretrain.files import write_atomically

logger = logging.getLogger("foretrain.comm.ps")

_MAGIC: Final = b"foretrain shard\0"
_VERSION: Final = 2
_HEAD: Final = struct.Struct("<16sIQ")
"""Magic, version, bytes of the header."""
_DIGEST: Final = 32
_ARRAY: Final = 1
"""msgpack's extension code of an array: dtype, shape and place among the arrays."""
_TRIES: Final = 4
"""Consecutive snapshots that may fail, or be late."""


@runtime_checkable
class Stateful(Protocol):
    """Interface of shards whose state is more than the pushes of a round.

    Every push counts once, by worker, round and part, also one that a restored state holds already.
    """

    @property
    def done(self) -> Sequence[int]:
        """Return by worker the number of its rounds that are complete in all parts."""
        ...

    @property
    def living(self) -> Collection[int]:
        """Return the workers that are not lost."""
        ...

    @property
    def left(self) -> Collection[int]:
        """Return the workers that have closed and push no more."""
        ...

    @property
    def begun(self) -> bool:
        """Return whether the complete initial state has arrived."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the argument of `restore`: dictionaries and lists of numbers, text, bytes and numpy arrays, which may
        be the shard's own: they are copied before it continues.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, ``done`` included; pushes to earlier rounds are answered from it."""


class Damaged(ForetrainError):
    """A snapshot that is incomplete or corrupt."""


class Snapshots:
    """Snapshot files of one shard of one job. Owns a thread while a snapshot is written.

    Args:
        folder: made if it is absent; several shards and jobs may share it.
        every: rounds between two snapshots.
        epoch: number of earlier declarations.

    Attributes:
        saved: by worker, its rounds in the newest file; empty before the first.
        left: workers that had closed by then.
        failed: number of snapshots that could not be written since the newest file.

    Raises:
        ConfigError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, every: int, declaration: Declaration, epoch: int, shard: int, shards: int) -> None:
        self._folder = folder / f"{declaration.job or 'job'}-shard-{shard}-of-{shards}"
        self._every = every
        self._whose = {"declaration": declaration.encode().decode(), "epoch": epoch, "shard": shard, "shards": shards}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for partial in self._folder.glob(".*.tmp"):
                partial.unlink()  # of a server that was killed while it wrote
        except OSError as error:
            what = f"cannot be made ({error.strerror})"
            raise ConfigError("snapshot-dir", str(self._folder), what, "name another") from None
        self._thread: threading.Thread | None = None
        self._begun = 0
        """Rounds of an average worker in the last snapshot that was begun."""
        self.saved: Sequence[int] = ()
        self.left: Collection[int] = ()
        self.failed = 0

    def late(self, shard: Stateful) -> bool:
        """Return whether several snapshots are overdue since the last written one."""
        saved = sum(self.saved[worker] for worker in shard.living) if self.saved else 0
        return _mean(shard) - saved // max(len(shard.living), 1) > _TRIES * self._every

    def remove(self) -> None:
        """Delete the snapshots of a job that is over."""
        self.close()
        self._unlink(self._files())
        with suppress(OSError):
            self._folder.rmdir()

    def restore(self, shard: Stateful) -> None:
        """Restore ``shard`` from the newest complete snapshot of this job; leave it as it is if there is none."""
        for path in self._files():
            try:
                header = read(path)
                if (found := {key: header.get(key) for key in self._whose}) != self._whose:
                    raise Damaged(f"is of another job or shard: {_difference(found, self._whose)}")
            except (OSError, Damaged) as error:
                logger.warning("snapshot %s is passed over: %s", path, error)
                continue
            shard.restore(header["state"])
            self.saved, self.left, self._begun = [*shard.done], [*shard.left], _mean(shard)
            logger.warning("goes on after round %d, from %s", self._begun - 1, path)
            return

    def save(self, shard: Stateful) -> None:
        """Write the state, and return when it is written."""
        self.close()
        self._begun = _mean(shard)
        self._write([*shard.done], [*shard.left], shard.state())

    def offer(self, shard: Stateful, *, now: bool = False) -> bool:
        """Copy the state if a snapshot is due, or ``now``, for another thread to write; return whether it did."""
        due = now or _mean(shard) // self._every > self._begun // self._every
        if not due or (self._thread is not None and self._thread.is_alive()):
            return False  # while one is being written none is begun, and when it is the next is as good
        self._begun = _mean(shard)
        told = ([*shard.done], [*shard.left], copied(shard.state()))
        self._thread = threading.Thread(target=self._write, args=told, name="foretrain-snapshot")
        self._thread.start()
        return True

    def close(self) -> None:
        """Wait until the last snapshot is written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, done: Sequence[int], left: Collection[int], state: dict[str, Any]) -> None:
        # The sum over workers: under asynchronous updates their average may be that of the file before.
        path = self._folder / f"after-{sum(done):012d}-rounds.shard"
        try:
            write_atomically(path, packed({**self._whose, "state": state}))
        except ConfigError as error:
            self.failed += 1
            logger.error("no snapshot after round %d: %s", max(done) - 1, error)
            return
        self.saved, self.left, self.failed = done, left, 0
        self._unlink(old for old in self._files() if old != path)

    def _unlink(self, paths: Iterable[Path]) -> None:
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("snapshots that nobody needs stay in %s: %s", self._folder, error)

    def _files(self) -> list[Path]:
        """Return the files, the newest first."""
        return sorted(self._folder.glob("*.shard"), reverse=True)


class WorkerProgress(NamedTuple):
    """Rounds of one worker: ``done`` are complete; pushes of the first ``saved`` need not be kept.

    ``closed``: a restarted server would know that it has closed, so that it may leave.
    """

    done: int
    saved: int
    closed: bool


class SnapshotPolicy:
    """Stateful shard with its snapshots.

    Args:
        kept: the shard; continues from its job's last snapshot, if there is one.
        snapshots: None where its state is lost with its server.
    """

    def __init__(self, kept: Stateful, snapshots: Snapshots | None) -> None:
        self.kept, self._snapshots = kept, snapshots
        self._wanted = self._tried = self._told_late = self._given_up = False
        self._failed = 0
        if snapshots is not None:
            snapshots.restore(kept)
        self._told = self._progress()

    def begin(self) -> None:
        """Save the initial state once it is complete; return when it is written."""
        if self._snapshots is not None and self.kept.begun and not self._snapshots.saved:
            self._snapshots.save(self.kept)

    def want(self) -> None:
        """Take a snapshot soon: a worker leaves, and cannot resend its pushes."""
        self._wanted = self._snapshots is not None

    def news(self) -> Mapping[int, WorkerProgress]:
        """Return the progress of the workers for which it has changed. Call after every push, and periodically."""
        snapshots = None if self._given_up else self._snapshots
        if snapshots is not None:
            if snapshots.failed > self._failed and self._tried:
                self._wanted = True  # the requested snapshot was not written
            self._failed = snapshots.failed
            if snapshots.offer(self.kept, now=self._wanted):
                self._wanted, self._tried = False, self._wanted
        self._judge()
        found = self._progress()
        before, self._told = self._told, found
        return {worker: now for worker, now in enumerate(found) if now != before[worker]}

    def _judge(self) -> None:
        """Stop snapshots if none can be written: workers keep their pushes until there is one."""
        snapshots = self._snapshots
        if snapshots is None or self._given_up:
            return
        if snapshots.failed >= _TRIES:
            logger.error("no more snapshots are tried, as %d could not be written: this server must not die", _TRIES)
            self._given_up = True
        elif not snapshots.late(self.kept):
            self._told_late = False
        elif not self._told_late:
            self._told_late = True
            logger.warning(
                "snapshots are written slower than rounds pass, and workers keep what is in none: write "
                "them to a faster disk, or train without updates on servers"
            )

    def of(self, worker: int) -> WorkerProgress:
        """Return the progress of ``worker``."""
        return self._told[worker]

    def _progress(self) -> Sequence[WorkerProgress]:
        done, snapshots = self.kept.done, None if self._given_up else self._snapshots
        saved = done if snapshots is None else snapshots.saved or [0] * len(done)
        left = self.kept.left if snapshots is None else snapshots.left
        return [WorkerProgress(*each, worker in left) for worker, each in enumerate(zip(done, saved, strict=True))]

    def close(self) -> None:
        """Wait until the last snapshot is written."""
        if self._snapshots is not None:
            self._snapshots.close()

    def end(self) -> None:
        """Delete the snapshots of a job that is over."""
        if self._snapshots is not None:
            self._snapshots.remove()
        self._snapshots = None


def _mean(shard: Stateful) -> int:
    """Return the whole rounds of an average living worker."""
    return sum(shard.done[worker] for worker in shard.living) // max(len(shard.living), 1)


def copied(value: Any) -> Any:
    """Return ``value`` with every array in it copied."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def packed(content: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a file with ``content``."""
    arrays: list[memoryview] = []

    def pack(value: Any) -> msgspec.msgpack.Ext:
        dtype, raw = _raw(value)
        arrays.append(raw)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((dtype, list(value.shape), len(arrays) - 1)))

    body = msgspec.msgpack.encode(content, enc_hook=pack)
    header = msgspec.msgpack.encode([[len(array) for array in arrays], body])
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for piece in (_HEAD.pack(_MAGIC, _VERSION, len(header)), header, *arrays):
        digest.update(piece)
        yield piece
    yield digest.digest()


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file that `packed` made.

    Raises:
        Damaged: the file is no snapshot, of another version, or corrupt.
        OSError: it cannot be read.
    """
    whole = memoryview(path.read_bytes())
    if len(whole) < _HEAD.size + _DIGEST or bytes(whole[: len(_MAGIC)]) != _MAGIC:
        raise Damaged("is no snapshot")
    _, version, size = _HEAD.unpack_from(whole)
    if version != _VERSION:
        raise Damaged(f"has version {version}, and {_VERSION} is read here")
    content = whole[:-_DIGEST]
    if hashlib.blake2b(content, digest_size=_DIGEST).digest() != whole[-_DIGEST:]:
        raise Damaged("is damaged: its checksum is another")
    sizes, body = msgspec.msgpack.decode(content[_HEAD.size : _HEAD.size + size])
    starts = [_HEAD.size + size]
    for each in sizes:
        starts.append(starts[-1] + each)

    def unpack(code: int, data: memoryview) -> Any:
        dtype, shape, place = msgspec.msgpack.decode(data)
        return np.frombuffer(bytearray(content[starts[place] : starts[place + 1]]), dtype).reshape(shape)

    return msgspec.msgpack.decode(body, ext_hook=unpack)


def _raw(value: Any) -> tuple[str, memoryview]:
    """Return dtype and bytes of an array."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} in a shard's state is neither plain nor an array")
    return str(value.dtype), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return a text on the fields that differ; declarations are too long to quote."""
    return ", ".join(
        key if key == "declaration" else f"{key} {found[key]} against {wanted[key]}"
        for key in wanted
        if found[key] != wanted[key]
    )
