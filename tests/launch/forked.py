"""``foretrain run`` in a forked process, see `tests.warm`, as are its ranks. The rest is as for users."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import warm
from tests.plugins.torch.ranks import QUIET
from tests.waiting import until


def foretrain_run(
    *words: object, folder: Path, imported: Sequence[str] = (), timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """How ``foretrain run --nproc 2`` with ``words`` ended in ``folder``.

    ``imported`` are modules that take the script long to import: the launcher does, and forks the ranks.
    """
    return warm.run(_launch, [",".join(imported), *map(str, words)], folder, timeout)


@contextmanager
def running(*words: object, folder: Path) -> Iterator[warm.Started]:
    """Such a command under way, once both ranks have written files of their numbers into ``folder``."""
    with warm.started(_launch, ["", *map(str, words)], folder) as command:
        until(lambda: command.ended() or all((folder / rank).exists() for rank in "01"))
        assert not command.ended(), command.finished()
        yield command


def _launch(told: Sequence[str]) -> None:
    from torch.distributed import run

    from foretrain.cli import main

    os.environ |= QUIET
    for name in filter(None, told[0].split(",")):
        importlib.import_module(name)
    configured = run.config_from_args

    def forking(arguments: Namespace) -> tuple[Any, Any, list[str]]:
        config, _, words = configured(arguments)
        config.start_method = "fork"
        return config, _rank, words[words.index(arguments.training_script) + 1 :]

    run.config_from_args = forking
    sys.argv = ["foretrain", "run", "--nproc", "2", *told[1:]]
    try:
        main()
    finally:
        # Another one in C++, where the interpreter ends, aborts the process.
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]


def _rank(*words: str) -> None:
    """Do what ``python -m foretrain.launch.worker`` does."""
    from foretrain.launch.worker import main

    try:
        main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
