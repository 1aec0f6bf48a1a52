"""Build the wheel, with its native code compiled; ``make wheel`` calls it.

    python tools/wheel.py dist .venv .matrix/torch2.15.0-py3.13

In it are the ring of all-reduces and, for some environments, the simulated GPU for their PyTorch and the kernels of the
network simulation for their numba and Python. With others than theirs both are compiled on first use, which takes half
a minute. An extension is 1.3 MB, a set of kernels 0.9 MB. Kernels are kept in ``build/kernels`` for the next wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build/kernels"
KERNELS = """
import numba
from foretrain.network.deployment_notation import equipped
equipped("dgx-h100:2", None)
print(numba.__version__)
"""
"""What calls the kernels that a first forecast needs."""


def main() -> None:
    """Compile, build, and print what was built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path, help="of the wheel")
    parser.add_argument("environments", nargs="+", type=Path, help="virtual environments with foretrain and PyTorch")
    given = parser.parse_args()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("the simulated GPU is compiled on Linux, x86-64; elsewhere `pip wheel .` builds the wheel without it")
    with tempfile.TemporaryDirectory() as scratch:
        device, kernels = Path(scratch, "device"), Path(scratch, "kernels")
        device.mkdir()
        ring = "import sys; from foretrain.comm.collectives.runners import build; build(sys.argv[1])"
        subprocess.run([given.environments[0] / "bin/python", "-c", ring, f"{scratch}/ring.so"], check=True)
        for environment in given.environments:
            print(f"the simulated GPU for the PyTorch of {environment}, some 20 s unless it is compiled", flush=True)
            command = [str(environment / "bin/python"), "-m", "foretrain.live.device.native_build", str(device)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            compile_kernels(environment, kernels)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(given.folder)]
        subprocess.run([*build, str(ROOT)], check=True, env=os.environ | {"FORETRAIN_PREBUILT": scratch})
        carried = sorted(path.name for path in device.iterdir())
        carried += sorted(path.name for path in kernels.iterdir())
    wheel = max(given.folder.glob("foretrain-*.whl"), key=lambda path: path.stat().st_mtime)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, for {', '.join(carried)}")


def compile_kernels(environment: Path, folder: Path) -> None:
    """Compile the kernels with an environment's numba, for any x86-64 processor, into a folder of its version."""
    print(f"the kernels of the network simulation for the numba of {environment}", flush=True)
    sources = b"".join(path.read_bytes() for path in sorted(ROOT.glob("src/foretrain/network/**/*.py")))
    kept = KEPT / environment.name / hashlib.sha256(sources).hexdigest()[:16]
    told = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(kept)}
    command = [environment / "bin/python", "-c", KERNELS]
    version = subprocess.run(command, check=True, env=told, text=True, stdout=subprocess.PIPE).stdout.strip()
    for file in kept.glob("*/*.nb?"):  # in a folder named after the package and its path
        home = folder / f"numba{version}" / file.parent.name.rpartition("_")[0]
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, home)


if __name__ == "__main__":
    main()
