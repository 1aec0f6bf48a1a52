"""The script in a rank: run as Python itself would, up to what is left to the interpreter's end."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
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

from foretrain.launch.worker import run_as_main
from foretrain.live.device.process_groups import explain_store_timeout
from foretrain.live.device.settings import RankSettings

_LIBRARY = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE))) + os.sep
_OURS = (_HERE, os.path.abspath(run_as_main.__code__.co_filename), "<frozen runpy>")
_NUMBERED = re.compile(r"\b(GPU |cuda:|rank )\d+")
"""What differs between ranks that fail alike."""


class Enough(BaseException):
    """The steps that were asked for are done. Not an Exception, which a script may catch."""


class SimulationEnded(Exception):
    """The simulation is over for another reason than this rank; nobody listens to it any more."""


def run(settings: RankSettings, rank: int) -> tuple[int, BaseException | None]:
    """Run the script and what it has left to the interpreter's end; return the exit status, and why it failed.

    Raises:
        SimulationEnded: the executor has ended the simulation.
    """
    status, threads, failure = 0, True, None
    try:
        run_as_main(settings.script[0], settings.script[1:], module=settings.module)
    except Enough:
        threads = False  # they may wait for an end of the script that never comes
    except SystemExit as error:
        status = _exit_status(error)
    except BrokenPipeError:
        status = 128 + SIGPIPE  # who reads what the script prints, e.g. head, has seen enough
    except DistBackendError as error:
        _tell_place(error, rank)
        raise SimulationEnded from None
    except BaseException as error:
        if settings.folded:
            explain_store_timeout(error)
        _tell(error, settings, rank)
        status, failure = 1, error
    _end(threads)
    return status, failure


def _exit_status(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code & 0xFF
    if error.code is None:
        return 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _end(threads: bool) -> None:
    """End as the interpreter does after a script; ``threads`` if those that the script has started are awaited."""
    if threads:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()


def _tell(error: BaseException, settings: RankSettings, rank: int) -> None:
    """Print the traceback on stderr, in one piece; once, where several ranks fail alike."""
    told = traceback.TracebackException.from_exception(error)
    _without_ours(told)
    text = "".join(told.format())
    if first_to_say(text, settings):
        sys.stderr.write(f"foretrain: the script failed on rank {rank}:\n{text}")
    else:
        sys.stderr.write(f"foretrain: the script failed on rank {rank} as well\n")


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


def _without_ours(told: traceback.TracebackException | None) -> None:
    """Take out the frames that led to the script, and those of the simulated GPU that it called."""
    if told is None:
        return
    kept = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
    told.stack = traceback.StackSummary.from_list(kept)
    _without_ours(told.__cause__)
    _without_ours(told.__context__)


def _tell_place(error: BaseException, rank: int) -> None:
    """Print where a rank stood when the simulation ended: which line calls what the others do not."""
    stack = traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        if not frame.filename.startswith((_LIBRARY, _PACKAGE, *_OURS)):
            sys.stderr.write(f"foretrain: rank {rank} stood at {frame.filename}:{frame.lineno}: {frame.line}\n")
            return


def script_frame() -> FrameType | None:
    """Return the innermost frame that is neither PyTorch's nor ours."""
    return next((frame for frame in _frames() if not frame.f_code.co_filename.startswith((_LIBRARY, *_OURS))), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame:
        yield frame
        frame = frame.f_back
