"""Read a file, write one so that a reader finds the old text or the new one; standard output; temporary folders."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import msgspec

from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Codes of the system's errors where a disk, or the user's share of it, is full."""


def write_atomically(path: str | os.PathLike[str], data: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write ``data`` (text as UTF-8; or piece by piece) to ``path`` in one step, and nothing on failure or Ctrl-C.

    A symbolic link is followed and stays a link. What is no regular file (a pipe, ``/dev/stdout``) cannot be
    replaced and is written straight. Raises ConfigError when the system refuses, from the system's error, which names
    ``path``.
    """
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(b"".join(pieces))
        else:
            _replace(target, pieces)
    except OSError as error:
        error.filename = os.fspath(path)
        problem = f"cannot be written ({error.strerror or error})"
        remedy = "free some space" if error.errno in NO_ROOM else "choose a file in a folder you may write to"
        raise ConfigError("path", os.fspath(path), problem, remedy) from error


def read_text(path: str | os.PathLike[str], field: str, remedy: str) -> str:
    """Return the text of a UTF-8 file; ConfigError with ``field`` and ``remedy`` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(field, os.fspath(path), f"cannot be read ({why})", remedy) from None


STDOUT = Path("-")
"""The name that means stdout, for JSON."""
_stdout = 1


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write ``value`` to ``path``, or to stdout for `STDOUT`, as indented JSON; see `write_atomically`."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    if Path(path) == STDOUT:
        with os.fdopen(os.dup(_stdout), "wb") as stream:
            stream.write(text + b"\n")
    else:
        write_atomically(path, text)


@contextmanager
def json_alone_on_stdout(*, quiet: bool = False) -> Iterator[None]:
    """Send to stderr what the block and its processes write to stdout, but for what `write_json` writes there.

    With ``quiet`` nobody gets it.
    """
    global _stdout
    sys.stdout.flush()
    _stdout = os.dup(1)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    else:
        os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(_stdout, 1)
        os.close(_stdout)
        _stdout = 1


def stdout_console(*, markup: bool = True) -> Console:
    """Return a console that prints on stdout; tables do not end lines with blanks where that is no terminal."""
    from rich.console import Console

    file = None if sys.stdout.isatty() else cast("IO[str]", _WithoutPadding())
    return Console(file=file, highlight=False, markup=markup)


class _WithoutPadding(io.TextIOBase):
    """Stdout without blanks before the ends of lines."""

    encoding = ""

    def __init__(self) -> None:
        self.encoding = sys.stdout.encoding  # what it cannot write is drawn in ASCII

    def write(self, text: str, /) -> int:
        sys.stdout.write(re.sub(" +(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, removed at the end; remove before it those of this ``prefix`` whose owners were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    with ExitStack() as lock:
        with suppress(OSError):  # a file system without locks, where nobody can remove what is left
            lock.enter_context(_locked(made))
        folder = made.rename(made.with_name(made.name[1:]))  # locked before others find it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases however its owner ends; OSError if another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, pieces: Iterable[bytes | memoryview]) -> None:
    # In the same folder, because a rename is atomic only within one file system. Not tempfile.mkstemp: its files are
    # private (0600) and would stay so, whereas 0o666 leaves the permissions to the user's umask.
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    mode = target.stat().st_mode & 0o777 if target.is_file() else None
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, target)
        _sync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Make the new name survive a loss of power, where the file system can sync folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
