"""Compile what tests would otherwise compile while they run: the simulated device and the simulators' kernels.

``make setup`` runs it once, and again when one of these sources has changed: ``python -m tests.prebuild``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_ROUTING = "import foretrain.network.routing.kernels"
_FLOAT16 = "import foretrain.comm.ps.server.float16"
_COLLECTIVES = "from foretrain.comm.collectives import runners; runners.runner()"
_CONGESTION = "import foretrain.comm.bounded.congestion"
_NETWORK = (
    "from foretrain.simulation import simulate; from foretrain.workload import zoo;"
    "simulate(zoo('alexnet'), '4x1xV100@10Gbps,ps=2', 'p3', trace=False);"
    "simulate(zoo('alexnet'), 'star:4@10Gbps', 'ddp', trace=False)"
)
_PACKETS = (
    "from tests.network.packet.test_twins import both, random_case\n"
    "for seed in (3, 11, 27):\n"
    "    network, program, others, options = random_case(seed)\n"
    "    both(network, program, others, **options)"
)


def main() -> None:
    """Compile everything, two at a time, and print how far that is."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    kernels = {
        "collectives": _COLLECTIVES,
        "congestion control": _CONGESTION,
        "routing kernels": _ROUTING,
        "float16 kernels": _FLOAT16,
        "fluid network kernels": _NETWORK,
        "packet network kernels": _PACKETS,
    }
    say("compiling the simulated device and the kernels of the simulators, once; this takes a few minutes")
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_device, say),
            pool.submit(_allocator, say),
            *(pool.submit(_run, name, code, say) for name, code in kernels.items()),
        ]
    for job in jobs:
        job.result()
    # pytest compiles tests with their assertions taken apart: else each of its workers would, for ten seconds.
    subprocess.run([sys.executable, "-m", "pytest", "--collect-only"], check=True, stdout=subprocess.DEVNULL)
    say("tests: compiled")
    say("everything is compiled")


def _run(name: str, code: str, say: Callable[[str], None]) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
    say(f"{name}: compiled")


def _device(say: Callable[[str], None]) -> None:
    from foretrain.live.device.native_build import BuildError, built

    try:
        built()
        say("simulated device: compiled")
    except BuildError as error:
        say(f"simulated device: {error}; its tests will be skipped or fail")


def _allocator(say: Callable[[str], None]) -> None:
    from tests.live.device.oracle.record import PROGRAMS, build_shell

    if shutil.which(os.environ.get("CXX", "g++")):
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        build_shell(PROGRAMS)
        say("allocator of the tests: compiled")


if __name__ == "__main__":
    main()
