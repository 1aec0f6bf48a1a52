"""How long a new user waits for the first forecast: foretrain installed from its wheel, with nothing in any cache.

``compare`` runs in a new process each time. ``simulate`` runs where numba has compiled nothing yet (cold) and again
(warm); with ``--full`` also without what the wheel carries, as with a PyTorch and a numba that it was not built for.
The wheel and its dependencies are then installed in an environment of their own, which takes a download; with
``--quick`` the wheel alone, beside the dependencies of this environment. The baselines are ``import numpy, rich, tyro``
and ``import torch`` in a new process. ``--quick`` has one sample of each simulation, ``--full`` 15. What the wheel
carries is compiled in the first run, and kept. CPU times are those of all processes that ended by themselves.
"""

from __future__ import annotations

import os
import resource
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
        self.cpu: dict[str, list[float]] = {}
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
        # What follows finds these files in memory.
        [package] = self.python("-c", "import foretrain, torch; print(*foretrain.__path__)").splitlines()
        self._bare = folder / "bare"
        shutil.copytree(package, self._bare / "foretrain", ignore=shutil.ignore_patterns("prebuilt"))

    def python(self, *arguments: str, cold: bool = False, bare: bool = False) -> str:
        """Run Python, ``cold`` with empty caches, ``bare`` without what the wheel carries; return what it prints."""
        self._runs += cold
        caches = str(self._folder / f"caches-{self._runs}")
        path = str(self._bare) if bare else self._path
        places = {"XDG_CACHE_HOME": caches, "NUMBA_CACHE_DIR": caches, "PYTHONPATH": path}
        return self._run([self._python, *arguments], places)

    def foretrain(self, name: str, *arguments: str, cold: bool = False, bare: bool = False) -> None:
        """Run a command, and note the CPU time that it took by ``name``."""
        before = _cpu_time()
        self.python("-m", "foretrain", *arguments, cold=cold, bare=bare)
        self.cpu.setdefault(name, []).append(_cpu_time() - before)

    def _run(self, command: list[str], more: dict[str, str] | None = None) -> str:
        done = subprocess.run(command, env=os.environ | (more or {}), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def _cpu_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print medians and the RESULT line."""
    arguments = options(__doc__ or "")
    folder = Path(tempfile.mkdtemp(prefix="foretrain-cold-"))
    try:
        began = time.perf_counter()
        installed = Installed(folder, alone=not arguments.quick)
        print(f"built and installed in {time.perf_counter() - began:.0f} s", flush=True)
        run, foretrain = installed.python, installed.foretrain
        short = {
            "python": lambda: run("-c", "import numpy, rich, tyro"),
            "compare": lambda: foretrain("compare", *COMPARE),
        }
        long = {
            "import torch": lambda: run("-c", "import torch"),
            "simulate, cold": lambda: foretrain("simulate, cold", *SIMULATE, cold=True),
            "simulate, warm": lambda: foretrain("simulate, warm", *SIMULATE),
        }
        if not arguments.quick:
            long["simulate, compiling"] = lambda: foretrain("simulate, compiling", *SIMULATE, cold=True, bare=True)
        times = interleaved(short, warmup=1) | interleaved(long, 1 if arguments.quick else 15, 0)
    finally:
        shutil.rmtree(folder)
    for name, values in times.items():
        cpu = f"   {median(installed.cpu[name]):.2f} s of CPU time" if name in installed.cpu else ""
        print(f"{name:20s} {spread(values):>28s} s   {median(values) / median(times['python']):6.2f} × baseline{cpu}")
    values = {
        "compare_s": median(times["compare"]),
        "simulate_cold_s": median(times["simulate, cold"]),
        "simulate_warm_s": median(times["simulate, warm"]),
        "compare_vs_python": median(times["compare"]) / median(times["python"]),
        "simulate_cold_cpu_s": median(installed.cpu["simulate, cold"]),
        "simulate_warm_cpu_s": median(installed.cpu["simulate, warm"]),
        "simulate_warm_vs_torch": median(times["simulate, warm"]) / median(times["import torch"]),
    }
    if not arguments.quick:
        values["simulate_compiling_s"] = median(times["simulate, compiling"])
    finish(arguments, "cold", values, times)


if __name__ == "__main__":
    main()
