"""A sweep that takes a moment, and a process that runs it in small bites, so that there is much to interrupt."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.waiting import until

SWEEP = """
workloads = ["alexnet"]
schedules = [
  "ddp", "fifo",
  { notation = "bytescheduler", knobs = { partition = ["1MB", "4MB"], credit = ["4MB", "16MB"] } },
]
jitter = 0.05
seeds = 2
[[clusters]]
notation = "{hosts}x1xV100@{rate}"
axes = { hosts = [2, 4, 8], rate = { from = "1Gbps", to = "40Gbps", points = 9 } }
"""
COUNT = 27 * 2 * 6
_BITES = """
import foretrain.experiments.execution as execution
execution._BATCH, execution._FLUSH = 0.01, 0.0
from foretrain.cli import main
main()
"""


def start(file: Path, *arguments: str) -> subprocess.Popen[str]:
    """``foretrain sweep FILE`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", _BITES, "sweep", str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stored(out: Path) -> list[str]:
    """The ids in the journal of ``out``, entry by entry, as often as they are there."""
    found = []
    for path in out.with_name(f"{out.name}.journal").glob("*.json"):
        found += [result["id"] for result in json.loads(path.read_bytes())["results"]]
    return found


def wait_for(process: subprocess.Popen[str], out: Path, more: int) -> None:
    """Wait until there are ``more`` results than now, or the process has ended."""
    goal = len(stored(out)) + more
    until(lambda: len(stored(out)) >= goal or process.poll() is not None)


def commands_of(group: int) -> list[bytes]:
    """The command lines of all processes of ``group``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(stat.with_name("cmdline").read_bytes())
    return found


def gone(group: int, timeout: float = 180) -> bool:
    """Return True once no process of ``group`` is left, False if some are after ``timeout`` seconds.

    A worker looks for its parent when it has imported everything, which takes long on a busy machine.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
