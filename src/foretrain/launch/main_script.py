"""Runs a user's script in this process as Python itself would: as ``__main__``, with its own tracebacks."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType


def run_as_main(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Runs a script, or with ``module`` a module by its dotted name; what it raises is raised again."""
    sys.argv = [script, *arguments]
    if module:
        # The current folder leads sys.path already: this process was started with -m too.
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def told_as_its_own(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints ``error`` without the frames that led to the script, which are not the user's."""
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, runpy.__file__, "<frozen runpy>")
