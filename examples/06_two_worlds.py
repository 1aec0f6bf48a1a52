"""One policy in two worlds: ByteScheduler decides the same in the simulator and in the coordinator of a real job."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.network import cluster
from foretrain.schedule import spec
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from foretrain.units import to_seconds
from foretrain.workload import Gradient, Layer, Workload

MS, STEPS, PLACE = 10**9, 2, cluster("4x1xV100@1Gbps")  # times are in picoseconds
LAYERS = tuple(Layer(f"layer{i}", forward=20 * MS, backward=40 * MS) for i in range(3))
GRADIENTS = tuple(Gradient(f"layer{i}.weight", 6_000_000, i, release=40 * (3 - i) * MS) for i in range(3))
WORKLOAD = Workload("three layers", batch=1, layers=LAYERS, gradients=GRADIENTS)
JOB, POLICY = job_on(WORKLOAD, PLACE), "bytescheduler(partition=2MB, credit=2MB)"


class PacedLink:
    """Sends one chunk at a time, in real time; a real job issues collectives instead."""

    def __init__(self):
        self.sequence, self.digest, self._pipe = 0, b"", ThreadPoolExecutor(1)
        self.arrived = [threading.Semaphore(0) for _ in JOB.tasks]  # one permit per megabyte

    def start(self, order, done):
        self.sequence += 1
        self._pipe.submit(self._carry, order, done)

    def last(self):
        return f"last sequence {self.sequence - 1}"

    def _carry(self, order, done):
        time.sleep(to_seconds(PLACE.routes()["all_reduce"][0].occupancy(order.chunk.size)))
        for piece in order.chunk.pieces:
            self.arrived[piece.task].release(piece.size // 1_000_000)
        done(order)


link, began = PacedLink(), time.perf_counter_ns()
timeouts = {"peer_timeout": 30, "stall_timeout": 30, "check_every": 0}
real = Coordinator(JOB, spec(POLICY), link, {}, **timeouts, failed=print, origin=began)
for step in range(STEPS):
    real.open(step, False)
    for task in reversed(range(3)):
        time.sleep(to_seconds(LAYERS[task].backward))
        real.ready(task, True)
    for layer, arrived in zip(LAYERS, link.arrived, strict=True):
        [arrived.acquire() for _ in range(6)]
        time.sleep(to_seconds(layer.forward))
real.close()

virtual = simulate(WORKLOAD, PLACE, POLICY).log
same = sum((a.step, a.chunk) == (b.step, b.chunk) for a, b in zip(virtual, real.log, strict=False))
print(f"{same} of {len(virtual)} decisions are the same in both worlds (a busy machine may be late for one)")
