"""One policy in two worlds: ByteScheduler decides the same in the simulator and in the coordinator of a real job."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from foretrain.comm.commands import CollectiveCommand
from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.network import cluster
from foretrain.schedule import spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import job_on
from foretrain.units import to_seconds
from foretrain.workload import Gradient, Layer, Workload

MS = 10**9  # picoseconds
PLACE = cluster("4x1xV100@1Gbps")
HOP = PLACE.routes()["all_reduce"][0]
# Times far apart, so that a busy machine's late wake-ups change no order.
WORKLOAD = Workload(
    "three layers",
    batch=1,
    layers=tuple(Layer(f"layer{i}", forward=20 * MS, backward=40 * MS) for i in range(3)),
    gradients=tuple(Gradient(f"layer{i}.weight", 6_000_000, i, release=40 * (3 - i) * MS) for i in range(3)),
)
JOB, POLICY, STEPS = job_on(WORKLOAD, PLACE), spec("bytescheduler(partition=2MB, credit=2MB)"), 2


class PacedLink:
    """Sends one chunk at a time, in real time; a real job issues collectives instead."""

    def __init__(self) -> None:
        self.sequence, self.digest, self._pipe = 0, b"", ThreadPoolExecutor(1)
        self.arrived = [threading.Semaphore(0) for _ in JOB.tasks]  # one permit per megabyte

    def start(self, order: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        self.sequence += 1
        self._pipe.submit(self._carry, order, done)

    def last(self) -> str:
        return f"last sequence {self.sequence - 1}"

    def _carry(self, order: CollectiveCommand, done: Callable[[CollectiveCommand], None]) -> None:
        time.sleep(to_seconds(HOP.occupancy(order.chunk.size)))
        for piece in order.chunk.pieces:
            self.arrived[piece.task].release(piece.size // 1_000_000)
        done(order)


def train(coordinator: Coordinator, link: PacedLink) -> None:
    for step in range(STEPS):
        coordinator.open(step, False)
        for task in reversed(range(3)):
            time.sleep(to_seconds(WORKLOAD.layers[task].backward))
            coordinator.ready(task, True)
        for layer, arrived in zip(WORKLOAD.layers, link.arrived, strict=True):
            for _ in range(6):
                arrived.acquire()
            time.sleep(to_seconds(layer.forward))


def main() -> None:
    world = VirtualWorld(Pipes(PLACE.routes()))
    virtual = TrainingLoop(WORKLOAD, JOB, POLICY.build(JOB), world, STEPS)
    virtual.begin()
    world.run()

    began, link = time.perf_counter(), PacedLink()
    coordinator = Coordinator(
        JOB,
        POLICY,
        link,
        {},
        peer_timeout=30,
        stall_timeout=30,
        check_every=0,
        failed=print,
        origin=time.perf_counter_ns(),
    )
    train(coordinator, link)
    coordinator.close()

    pairs = zip(virtual.log, coordinator.log, strict=False)
    same = sum((a.step, a.chunk) == (b.step, b.chunk) for a, b in pairs)
    print(f"{same} of {len(virtual.log)} decisions are the same in both worlds (a busy machine may be late for one)")
    print(f"virtual: {to_seconds(virtual.begins[-1]):.3f} s of training; real: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
