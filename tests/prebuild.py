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

_ROUTING = (
    "from foretrain.network.routing import router\n"
    "from tests.network.routing.networks import all_pairs, leaf_spine\n"
    "for policy in ('ecmp', 'adaptive'):\n"
    "    router(leaf_spine(), policy).paths(*all_pairs(leaf_spine()))"
)
_FLOAT16 = "import foretrain.comm.ps.server.float16"
_COLLECTIVES = "from foretrain.comm.collectives import runners; runners.runner()"
_BOUNDED = (
    "import foretrain.comm.bounded.congestion, numpy; from foretrain.comm.bounded.optireduce import transform\n"
    "for kind in ('float32', 'float64'): transform(numpy.zeros(3, kind), 1, False)"
)
_NETWORK = (
    "from foretrain.simulation import simulate; from foretrain.workload import zoo;"
    "simulate(zoo('alexnet'), '4x1xV100@10Gbps,ps=2', 'p3', trace=False);"
    "simulate(zoo('alexnet'), 'star:4@10Gbps', 'ddp', trace=False);"
    "from foretrain.network.deployment_notation import deployment; deployment('dgx-h100:2');"
    "from tests.network.fluid.test_edges import Fluid, np, outcomes; outcomes();"
    "Fluid(np.ones(1), bins=8).utilisation()"
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

    def run(name: str, *arguments: str) -> Callable[[], None]:
        def job() -> None:
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            say(f"{name}: compiled")

        return job

    # The later ones import what the first ones compile; the longest of each come first.
    first = [
        lambda: _device(say),
        run("routing kernels", "-c", _ROUTING),
        lambda: _allocator(say),
        run("bounded loss", "-c", _BOUNDED),
        run("float16 kernels", "-c", _FLOAT16),
        run("collectives", "-c", _COLLECTIVES),
    ]
    # pytest compiles tests with their assertions taken apart: else each of its workers would, for ten seconds.
    then = [
        run("fluid network kernels", "-c", _NETWORK),
        run("packet network kernels", "-c", _PACKETS),
        run("tests", "-m", "pytest", "--collect-only"),
    ]
    say("compiling the simulated device and the kernels of the simulators, once; this takes a minute or two")
    with ThreadPoolExecutor(2) as pool:
        for jobs in (first, then):
            for done in [pool.submit(job) for job in jobs]:
                done.result()
    say("everything is compiled")


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
