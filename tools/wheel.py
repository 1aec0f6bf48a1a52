"""Build the wheel, with its native code compiled; ``make wheel`` calls it.

    python tools/wheel.py dist .venv .matrix/torch2.15.0-py3.13

The ring of all-reduces is in it, and the simulated GPU for the PyTorch of some environments. Another PyTorch or Python
than theirs compiles it on first use, which takes half a minute. An extension is 1.3 MB.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Compile, build, and print what was built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path, help="of the wheel")
    parser.add_argument("environments", nargs="+", type=Path, help="virtual environments with foretrain and PyTorch")
    given = parser.parse_args()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("the simulated GPU is compiled on Linux, x86-64; elsewhere `pip wheel .` builds the wheel without it")
    with tempfile.TemporaryDirectory() as scratch:
        device = Path(scratch, "device")
        device.mkdir()
        ring = "import sys; from foretrain.comm.collectives.runners import build; build(sys.argv[1])"
        subprocess.run([given.environments[0] / "bin/python", "-c", ring, f"{scratch}/ring.so"], check=True)
        for environment in given.environments:
            print(f"the simulated GPU for the PyTorch of {environment}, some 20 s unless it is compiled", flush=True)
            command = [str(environment / "bin/python"), "-m", "foretrain.live.device.native_build", str(device)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(given.folder)]
        subprocess.run([*build, str(ROOT)], check=True, env=os.environ | {"FORETRAIN_PREBUILT": scratch})
        carried = sorted(path.name for path in device.iterdir())
    wheel = max(given.folder.glob("foretrain-*.whl"), key=lambda path: path.stat().st_mtime)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, with the simulated GPU for {', '.join(carried)}")


if __name__ == "__main__":
    main()
