"""Make the environment of MXNet beside that of this Python, once, and print its interpreter.

MXNet's last release, 1.9.1, needs a NumPy of its time, which the rest of foretrain does not get along with, and Python
3.11. Processes that call this at once wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from environment import as_uv, pip

ROOT = Path(__file__).parents[1]
HERE = Path(sys.prefix) / "mxnet"


def main() -> None:
    """Make the environment if it is not there; end with a message where its packages are not to be had."""
    if sys.version_info >= (3, 12):
        sys.exit("MXNet 1.9.1 needs NumPy 1.23, which needs Python 3.11")
    # Requirements that bind the packages of this Python must not bind those.
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    with open(HERE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (HERE / ".ready").exists():
            if problem := _make(environment):
                sys.exit(f"MXNet 1.9.1 cannot be installed here: {problem}")
            (HERE / ".ready").touch()
    sys.stdout.write(f"{HERE / 'bin' / 'python'}\n")


def _make(environment: Mapping[str, str]) -> str:
    """Make the environment, by uv where this Python has it and it knows pip's settings; return what went wrong."""
    here, python, wanted = Path(sys.executable), HERE / "bin" / "python", f"--editable={ROOT}[mxnet]"
    options = {"capture_output": True, "text": True, "check": False}
    listed = subprocess.run(pip(here, "config", "list"), env=environment, **options)
    settings = as_uv(listed.stdout) if here.with_name("uv").exists() else None
    flags, own = settings or ([], {})
    asked = [*flags, "--quiet", "--index-strategy", "unsafe-best-match", "--python", str(python)]
    by_uv = [str(here.with_name("uv")), "pip", "install", *asked, wanted]
    for command in (
        [sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if settings else []), str(HERE)],
        by_uv if settings else pip(python, "install", "--quiet", wanted),
    ):
        made = subprocess.run(command, env={**environment, **own}, **options)
        if made.returncode:
            return made.stderr.strip().splitlines()[-1]
    return ""


if __name__ == "__main__":
    main()
