"""One policy in two worlds: simulated and on a real clock with real threads, ByteScheduler decides the same."""

import threading
import time

from foretrain.engine import World
from foretrain.network import cluster
from foretrain.plugins.torch import WallWorld
from foretrain.schedule import spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Chunk
from foretrain.units import to_seconds
from foretrain.workload import Gradient, Layer, Workload

MS = 10**9  # picoseconds
PLACE = cluster("4x1xV100@1Gbps")
# Times far apart, so that a busy machine's late wake-ups change no order.
WORKLOAD = Workload(
    "three layers",
    batch=1,
    layers=tuple(Layer(f"layer{i}", forward=20 * MS, backward=40 * MS) for i in range(3)),
    gradients=tuple(Gradient(f"layer{i}.weight", 6_000_000, i, release=40 * (3 - i) * MS) for i in range(3)),
)
JOB = job_on(WORKLOAD, PLACE)


def replay(world: World, finished: threading.Event) -> TrainingLoop:
    policy = spec("bytescheduler(partition=2MB, credit=2MB)").build(JOB)
    return TrainingLoop(WORKLOAD, JOB, policy, world, steps=2, finished=finished.set)


def sent(run: TrainingLoop) -> list[tuple[int, Chunk]]:
    return [(decision.step, decision.chunk) for decision in run.log]


def main() -> None:
    virtual_world = VirtualWorld(Pipes(PLACE.routes()))
    virtual = replay(virtual_world, threading.Event())
    virtual.begin()
    virtual_world.run()

    began, finished = time.perf_counter(), threading.Event()
    with WallWorld(PLACE.routes()["all_reduce"][0]) as wall_world:
        wall = replay(wall_world, finished)
        wall_world.call_at(0, wall.begin)  # callbacks run on the world's own thread
        wall_world.run_until(finished, timeout=30)

    same = sum(a == b for a, b in zip(sent(virtual), sent(wall), strict=False))
    print(f"{same} of {len(virtual.log)} decisions are the same in both worlds (a busy machine may be late for one)")
    print(f"virtual: {to_seconds(virtual.begins[-1]):.3f} s of training; wall: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
