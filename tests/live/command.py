"""Runs ``foretrain simulate`` in a process of its own, as a user does."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.live import forked

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Ended:
    """How a command ended: ``numbers`` are what --json has written, empty where nothing was."""

    status: int
    out: str
    err: str
    numbers: dict[str, Any]

    @property
    def lines(self) -> list[Any]:
        """What the script has printed as JSON."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


def command(cluster: str, *script: object, options: Sequence[object] = ()) -> list[str]:
    """The command line; a script of `SCRIPTS` is known by its name."""
    name, *arguments = map(str, script)
    path = str(SCRIPTS / name) if (SCRIPTS / name).exists() else name
    return [
        *(sys.executable, "-m", "foretrain", "simulate", "--cluster", cluster),
        *(*map(str, options), "--", path, *arguments),
    ]


def simulate(
    cluster: str,
    *script: object,
    options: Sequence[object] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Runs it to its end; with an ``environment`` of its own in an interpreter of its own, else in a warm one."""
    with tempfile.TemporaryDirectory() as scratch:
        numbers = Path(scratch, "numbers.json")
        line = command(cluster, *script, options=[*options, "--json", numbers])
        if environment is None:
            ended = warm.run(forked.simulate, line[line.index("simulate") + 1 :], folder)
        else:
            ended = subprocess.run(
                line,
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"COLUMNS": "200"} | dict(environment),
                cwd=folder,
            )
        found = json.loads(numbers.read_text()) if numbers.exists() else {}
    return Ended(ended.returncode, ended.stdout, ended.stderr, found)
