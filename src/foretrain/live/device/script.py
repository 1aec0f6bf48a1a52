"""Script of a rank: run as by Python itself, with its threads and exit handlers."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGPIPE
from types import FrameType

import torch
from torch.distributed import DistBackendError

from foretrain.launch.launchers import with_local_rank
from foretrain.launch.worker import run_as_main
from foretrain.live.device.process_groups import explain_store_timeout
from foretrain.live.device.settings import RankSettings

LIBRARY = os.path.dirname(torch.__file__) + os.sep
"""Begin of the names of PyTorch's own files."""
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE))) + os.sep
_OURS = (_HERE, os.path.abspath(run_as_main.__code__.co_filename), "<frozen runpy>")
_BATCH_NORM = os.path.join(LIBRARY, "nn/modules/_functions.py")
_NUMBERED = re.compile(r"\b(GPU |cuda:|rank )\d+")
"""Numbers that differ between ranks that fail alike."""


class Enough(BaseException):
    """The steps that were asked for are done. Not an Exception, which a script may catch."""


class Replaced(BaseException):
    """Another process runs the script in place of this one."""


class SimulationEnded(Exception):
    """The executor has ended the simulation for another reason than this rank."""


def run(settings: RankSettings, rank: int) -> tuple[int, BaseException | None]:
    """Run the script with its threads and exit handlers; return the exit status, and the error if it failed.

    Raises:
        SimulationEnded: the executor has ended the simulation.
    """
    status, threads, failure = 0, True, None
    owner = os.getpid()
    try:
        arguments = with_local_rank(settings.script[1:], os.environ["LOCAL_RANK"])
        run_as_main(settings.script[0], arguments, module=settings.module)
    except Enough:
        threads = False  # they may wait for an end of the script that never comes
    except Replaced:
        raise SimulationEnded from None
    except SystemExit as error:
        status = _exit_status(error)
        if status:
            _print_position(error, rank, f"left with exit status {status}")
    except BrokenPipeError:
        status = 128 + SIGPIPE  # the reader of the output, e.g. head, has closed it
    except DistBackendError as error:
        _print_position(error, rank, "stood")
        raise SimulationEnded from None
    except BaseException as error:
        if settings.folded:
            explain_store_timeout(error)
        where = f"rank {rank}" if os.getpid() == owner else f"a process that rank {rank} forked"
        _print_failure(error, settings, where)
        status, failure = 1, error
    _end(threads)
    if os.getpid() != owner:
        os._exit(status)  # The script's own fork has come to the script's end, and is no rank.
    return status, failure


def _exit_status(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code & 0xFF
    if error.code is None:
        return 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _end(threads: bool) -> None:
    """End as the interpreter does after a script; with ``threads``, wait for those that the script started."""
    if threads:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()


def _print_failure(error: BaseException, settings: RankSettings, where: str) -> None:
    """Print the traceback on stderr, in one piece; once, where several ranks fail alike."""
    trace = traceback.TracebackException.from_exception(error)
    _remove_own_frames(trace)
    text = "".join(trace.format())
    if first_to_say(text, settings):
        sys.stderr.write(f"foretrain: the script failed on {where}:\n{text}")
    else:
        sys.stderr.write(f"foretrain: the script failed on {where} as well\n")


def first_to_say(text: str, settings: RankSettings) -> bool:
    """Return whether no other rank has printed ``text``, ignoring rank and GPU numbers; True if unknown."""
    alike = _NUMBERED.sub(r"\1", text)
    mark = Path(f"{settings.store}.{hashlib.sha256(alike.encode()).hexdigest()[:16]}")
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _remove_own_frames(trace: traceback.TracebackException | None) -> None:
    """Remove the frames below the script and those of the simulated GPU."""
    if trace is None:
        return
    kept = [frame for frame in trace.stack if not frame.filename.startswith(_OURS)]
    trace.stack = traceback.StackSummary.from_list(kept)
    _remove_own_frames(trace.__cause__)
    _remove_own_frames(trace.__context__)


def _print_position(error: BaseException, rank: int, did: str) -> None:
    """Print the line of the script at which a rank waited when the simulation ended, or called for its end."""
    stack = traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        if not frame.filename.startswith((LIBRARY, _PACKAGE, *_OURS)):
            sys.stderr.write(f"foretrain: rank {rank} {did} at {frame.filename}:{frame.lineno}: {frame.line}\n")
            return


def script_line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither PyTorch's nor ours; ``"?"`` and 0 without one.

    Nor of the module that starts programs.
    """
    for frame in _frames():
        if not frame.f_code.co_filename.startswith((LIBRARY, subprocess.__file__, *_OURS)):
            return frame.f_code.co_filename, frame.f_lineno
    return "?", 0


def in_batch_norm() -> bool:
    """Return whether the innermost frame that is not ours is one of PyTorch's ``SyncBatchNorm``."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(_OURS):
            return frame.f_code.co_filename == _BATCH_NORM
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame:
        yield frame
        frame = frame.f_back
