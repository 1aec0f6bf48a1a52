"""Make the environment of MXNet beside that of this Python, once, and print its interpreter.

MXNet's last release, 1.9.1, needs a NumPy of its time, which the rest of foretrain does not get along with, and Python
3.11. Processes that call this at once wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

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
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(HERE)],
                [str(HERE / "bin/pip"), "install", "--quiet", f"--editable={ROOT}[mxnet]"],
            ):
                made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                if made.returncode:
                    sys.exit(f"MXNet 1.9.1 cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
            (HERE / ".ready").touch()
    sys.stdout.write(f"{HERE / 'bin' / 'python'}\n")


if __name__ == "__main__":
    main()
