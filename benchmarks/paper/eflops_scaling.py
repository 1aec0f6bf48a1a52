"""EFLOPS (c): how ResNet-50 scales on EFLOPS and on baseline servers under a fat tree.

EFLOPS is a BiGraph in which every host is a GPU with its NIC: PCIe between the two is faster than the NIC even while
input is copied, and the root complex is not on the way. In the baseline, input takes its share of the way from the root
complex to the GPUs. The time of a collective is the fluid simulation's; when it is sent, a schedule decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from eflops_server import BATCH, FLOAT32, STEP, images_per_second

from foretrain.collective import hdrm_mapping
from foretrain.network.deployment import Deployment
from foretrain.network.fabrics.clos import bigraph, leaf_spine
from foretrain.network.servers.pcie import eflops_baseline
from foretrain.network.switch_cluster import Hop
from foretrain.network.topology.graph import Topology
from foretrain.schedule import Job, bound, spec
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.units import Time
from foretrain.workload import Workload, zoo

RATE = 12.5e9
IN_SERVER = 8
BIGRAPHS = {
    8: (4, 2),
    16: (8, 2),
    32: (8, 4),
    64: (16, 4),
    128: (16, 8),
    256: (32, 8),
    512: (32, 16),
    10_000: (200, 50),
}
"""Of so many GPUs: switches, and hosts at each. 10,000 fill 200 switches of 150 ports evenly."""
SMALLEST = (142, 71)
"""The BiGraph of smallest switches that holds 10,000."""
FAT_TREES = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2), 16: (4, 4), 32: (8, 4), 64: (8, 8), 1_250: (50, 25)}
"""Of so many servers: leaves, and servers at each, under as many spines."""
SCHEDULES = {
    "ddp": ("ddp", "ddp(bucket=50MB)", "ddp(bucket=200MB)"),
    "bytescheduler": tuple(
        f"bytescheduler(partition={size}MB, credit={4 * size}MB, fuse={fuse})"
        for size in (4, 16, 64, 256)
        for fuse in (0, 4, 16, 64)
    ),
}
"""Each with the knobs of which the best is taken."""
WHY = """
What decides. ResNet-50 has 0.5 MB of gradients for a millisecond of V100 computation in fp32, so anything scales to
hundreds of GPUs once it overlaps. What separates the systems is 2(P − 1) rounds of a ring against 2 log2 P, and in
mixed precision, where 3.4 times less computation hides communication, that PCIe is shared with input. What EFLOPS loses
in DDP is the last bucket, which nothing hides, and the update.
"""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Efficiency of one system: throughput over that of as many GPUs that neither exchange nor update anything.

    Attributes:
        gpus: how many.
        exchange: seconds of one all-reduce of all gradients.
        optimum: at T*, which no schedule beats.
        ddp, bytescheduler: under these schedules with the best of some knobs.
    """

    gpus: int
    exchange: float
    optimum: float
    ddp: float
    bytescheduler: float


def model(precision: str) -> Workload:
    return zoo("resnet50", batch=BATCH, device="V100", precision=precision)


@cache
def eflops_system(gpus: int, shape: tuple[int, int] | None = None) -> Deployment:
    switches, hosts = shape or BIGRAPHS[gpus]
    ranks = np.sort(hdrm_mapping(switches, hosts, gpus).host)
    return Deployment(bigraph(switches, hosts, RATE), "hdrm", ranks=tuple(ranks.tolist()), step=STEP)


def baseline_system(gpus: int, precision: str, *, collective: str = "ring", seed: int | None = None) -> Deployment:
    """Servers in order, or with a ``seed`` in any: GPUs of a server stay together."""
    servers = gpus // IN_SERVER
    topology = leaf_spine(*FAT_TREES[servers], server=eflops_baseline(IN_SERVER))
    order = np.arange(servers) if seed is None else np.random.default_rng(seed).permutation(servers)
    ranks = (order[:, None] * IN_SERVER + np.arange(IN_SERVER)).reshape(-1)
    shared = with_input(topology, images_per_second(precision) * FLOAT32)
    return Deployment(shared, collective, ranks=tuple(ranks.tolist()), step=STEP, seed=seed or 0)


def with_input(topology: Topology, rate: float) -> Topology:
    """``topology`` in which every GPU takes ``rate`` from its server's memory as background traffic."""
    kind = np.array([node.kind for node in topology.nodes])
    into = {
        "gpu": np.flatnonzero((kind[topology.source] == "pcie") & (kind[topology.target] == "gpu")),
        "pcie": np.flatnonzero((kind[topology.source] == "root") & (kind[topology.target] == "pcie")),
    }
    shared = topology.changed(into["gpu"], background=rate)
    return shared.changed(into["pcie"], background=rate * IN_SERVER)


def scaling(gpus: int, systems: Sequence[Deployment], precision: str) -> Scaling:
    """Of one kind of system; of several, which differ in their seed, the mean."""
    workload = model(precision)
    rows = [_efficiencies(workload, system) for system in systems]
    return Scaling(gpus, *(sum(column) / len(column) for column in zip(*rows, strict=True)))


def _efficiencies(workload: Workload, system: Deployment) -> tuple[float, ...]:
    job = Job.of(workload, system.cost)
    best = [min(_period(workload, job, text) for text in texts) for texts in SCHEDULES.values()]
    exchange = system.duration("all_reduce", workload.size) / 1e12
    return exchange, *(workload.compute / time for time in (bound(workload, job).time, *best))


def _period(workload: Workload, job: Job, schedule: str) -> Time:
    """ps from one backward pass to the next, in steady state, all operations in one first-in-first-out pipe."""
    policy = spec(schedule).build(job)
    wire = Hop("wire", job.cost.per_byte, job.cost.overhead)
    world = VirtualWorld(Pipes({"all_reduce": (wire,)}))
    replay = TrainingLoop(workload, job, policy, world, policy.warmup + 2)
    replay.begin()
    world.run()
    replay.raise_if_stalled()
    return replay.begins[-1] - replay.begins[-2]
