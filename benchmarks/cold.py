"""How long a new user waits for the first forecast: foretrain installed from its wheel, with nothing in any cache.

``compare`` runs in a new process each time. ``simulate`` runs where numba has compiled nothing yet (cold) and again
(warm); with ``--full`` also where the simulated GPU must be compiled, as with a PyTorch that the wheel does not know.
The wheel and its dependencies are then installed in an environment of their own, which takes a download; with
``--quick`` the wheel alone, beside the dependencies of this environment. The baselines are ``import numpy, rich, tyro``
and ``import torch`` in a new process. One sample of what compiles takes half a minute: ``--quick`` has one, ``--full``
15.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import finish, interleaved, options, spread

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/simulate/cnn_ddp.py"
SIMULATE = ("simulate", "--cluster", "dgx-h100:2", "--", str(SCRIPT))
COMPARE = ("compare", "resnet50", "--cluster", "4x1xV100@7Gbps")


class Installed:
    """The wheel, installed in ``folder``; each cold run has caches of its own."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._folder, self._runs = folder, 0
        wheels = folder / "wheels"
        self._run([sys.executable, str(ROOT / "tools/wheel.py"), str(wheels), sys.prefix])
        [wheel] = wheels.glob("*.whl")
        self._python, self._path = sys.executable, str(folder / "packages")
        pip = ["-m", "pip", "install", "--quiet"]
        if alone:
            self._run([sys.executable, str(ROOT / "tools/environment.py"), str(folder / "environment"), "report"])
            self._python, self._path = str(folder / "environment/bin/python"), ""
            self._run([self._python, *pip, "--force-reinstall", "--no-deps", str(wheel)])
        else:
            self._run([self._python, *pip, "--no-deps", "--target", self._path, str(wheel)])
        self.python("-c", "import foretrain, torch")  # what follows finds their files in memory

    def python(self, *arguments: str, cold: bool = False, compiling: bool = False) -> None:
        """Run Python, ``cold`` with empty caches, and ``compiling`` also without the wheel's simulated GPU."""
        self._runs += cold or compiling
        caches = self._folder / f"caches-{self._runs}"
        places = {"XDG_CACHE_HOME": str(caches), "NUMBA_CACHE_DIR": str(caches), "PYTHONPATH": self._path}
        # Any other compiler than the wheel's asks for another extension.
        compiler = {"CXX": "g++ -pipe"} if compiling else {}
        self._run([self._python, *arguments], places | compiler)

    def _run(self, command: list[str], more: dict[str, str] | None = None) -> None:
        done = subprocess.run(command, env=os.environ | (more or {}), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    """Print medians and the RESULT line."""
    arguments = options(__doc__ or "")
    folder = Path(tempfile.mkdtemp(prefix="foretrain-cold-"))
    try:
        began = time.perf_counter()
        installed = Installed(folder, alone=not arguments.quick)
        print(f"built and installed in {time.perf_counter() - began:.0f} s", flush=True)
        run = installed.python
        short = {
            "python": lambda: run("-c", "import numpy, rich, tyro"),
            "compare": lambda: run("-m", "foretrain", *COMPARE),
        }
        long = {
            "import torch": lambda: run("-c", "import torch"),
            "simulate, cold": lambda: run("-m", "foretrain", *SIMULATE, cold=True),
            "simulate, warm": lambda: run("-m", "foretrain", *SIMULATE),
        }
        if not arguments.quick:
            long["simulate, compiling the GPU"] = lambda: run("-m", "foretrain", *SIMULATE, compiling=True)
        times = interleaved(short, warmup=1) | interleaved(long, 1 if arguments.quick else 15, 0)
    finally:
        shutil.rmtree(folder)
    for name, values in times.items():
        print(f"{name:28s} {spread(values):>32s} s   {median(values) / median(times['python']):6.2f} × baseline")
    values = {
        "compare_s": median(times["compare"]),
        "simulate_cold_s": median(times["simulate, cold"]),
        "simulate_warm_s": median(times["simulate, warm"]),
        "compare_vs_python": median(times["compare"]) / median(times["python"]),
        "simulate_warm_vs_torch": median(times["simulate, warm"]) / median(times["import torch"]),
    }
    if not arguments.quick:
        values["simulate_compiling_s"] = median(times["simulate, compiling the GPU"])
    finish(arguments, "cold", values, times)


if __name__ == "__main__":
    main()
