"""Runs a script as ``__main__``, as Python does, but none of its process groups is destroyed; see `keep_groups`."""

import os
import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])
from tests.examples.torchrun import keep_groups  # noqa: E402

keep_groups()
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # gloo's threads may still wait for the interpreter, and abort when it ends
