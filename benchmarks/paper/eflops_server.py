"""EFLOPS (a): k GPUs behind one NIC and root complex against a NIC beside each GPU, while input data is copied.

Input data is background traffic in the same fluid simulation: storage → root complex → memory, and memory → root
complex → GPU. So that it asks for no more than its GPUs consume, each of its flows crosses one more link, of its own,
that is as fast as what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Plan, build
from foretrain.network.fabrics.clos import star
from foretrain.network.fluid import Fluid
from foretrain.network.program import Paths, Program, place
from foretrain.network.routing import Shortest
from foretrain.network.servers import PCIeTree
from foretrain.network.servers.pcie import STORAGE, eflops, eflops_baseline
from foretrain.network.topology.graph import Topology
from foretrain.units import MICROSECOND, SECOND
from foretrain.workload import zoo

GPUS = range(1, 9)
SERVERS = 16
BATCH = 64
STEP = 2 * MICROSECOND
GRADIENT = zoo("resnet50", batch=BATCH, device="V100").size
FLOAT32, UINT8 = 224 * 224 * 3 * 4, 224 * 224 * 3
"""Bytes of an image as it is copied to a GPU, prepared by the host or by the GPU."""
JPEG = 110_000
"""Bytes of an image of ImageNet as it is stored, on average: 138 GB of 1.28 million."""
SMALL_PACKETS = (64 / (64 + 24)) / (256 / (256 + 24))
"""What PCIe keeps for gradients that cross a root complex in packets of 64 bytes, as Intel's CPUs of the time cut them
(NCCL, ``INTEL_P2P_OVERHEAD`` in src/graph/topo.h), where other traffic has 256."""
ENDLESS = 1e15
WHY = """
What decides. k GPUs behind one NIC give k×, whatever the GPUs are, so 8 give 8.0×. More comes only from input that
fills what PCIe has beyond the NIC, 1.9 GB/s, on the way from root complex to GPUs: 8 GPUs must take more than 0.24 GB/s
each. In fp32 they do not; in mixed precision they do if the host prepares images as float32, and 11.3× is reached. It
is not if images are copied as bytes. Where the CPU cuts what GPUs send each other into packets of 64 bytes, 7 GPUs
are enough. Detours through memory cost nothing while memory has 128 GB/s; copies at full speed slow both systems alike,
since a GPU has but one PCIe link. All of this needs a collective that asks every GPU's flow to leave the server at
once: a ring that visits server after server, and hierarchical rings, ask the NIC for one flow, or for a shard of each.
"""


def images_per_second(precision: str) -> float:
    """What one V100 trains, if nothing holds it up."""
    return BATCH * SECOND / zoo("resnet50", batch=BATCH, device="V100", precision=precision).compute


@dataclass(frozen=True, slots=True)
class Input:
    """What is copied to each GPU while gradients are exchanged, and how.

    Attributes:
        name: for tables.
        copied: bytes/s to a GPU; infinite for as fast as it goes.
        read: bytes/s from storage for a GPU.
        amount: bytes, after which copying is over.
        packets: part of PCIe that is left to gradients at a root complex.
        staged: whether gradients that leave or enter a server cross its memory, for want of GPUDirect.
    """

    name: str
    copied: float = 0.0
    read: float = 0.0
    amount: float = ENDLESS
    packets: float = 1.0
    staged: bool = False


_FP32, _FP16 = images_per_second("fp32"), images_per_second("fp16")
NONE = Input("no input")
FULL = Input("float32 images, fp32", _FP32 * FLOAT32, _FP32 * JPEG)
MIXED = Input("float32 images, mixed", _FP16 * FLOAT32, _FP16 * JPEG)
PACKETS = replace(MIXED, name="float32, mixed, 64 B packets", packets=SMALL_PACKETS)
INPUTS = (
    NONE,
    Input("uint8 images, mixed", _FP16 * UINT8, _FP16 * JPEG),
    FULL,
    MIXED,
    replace(MIXED, name="float32, mixed, no GPUDirect", staged=True),
    PACKETS,
    Input("a batch in one burst", np.inf, _FP16 * JPEG, amount=BATCH * FLOAT32),
    Input("copies without pause", np.inf, np.inf),
)


@dataclass(frozen=True)
class System:
    """``servers`` of one kind on a switch that does not block."""

    server: PCIeTree
    servers: int

    @cached_property
    def topology(self) -> Topology:
        return star(self.servers, server=self.server)

    @cached_property
    def gradients(self) -> Shortest:
        """Where every GPU has a NIC, the root complex is not for gradients: neighbours meet over the network too."""
        topology = self.topology
        if self.server.shared:
            return Shortest(topology)
        kinds = np.array([node.kind for node in topology.nodes])
        inner = (kinds[topology.source] == "root") | (kinds[topology.target] == "root")
        return Shortest(topology.changed(np.flatnonzero(inner), up=False))

    def time(self, program: Program, given: Input) -> float:
        """Seconds until ``program`` is over while input data is copied."""
        capacity = self.topology.capacity
        inside = np.isin(self.topology.rate, [self.server.lanes])
        # In the unit of gradients' bytes PCIe is slower, and copies, which use larger packets, are smaller.
        packets = given.packets if self.server.shared else 1.0
        capacity = np.where(inside, capacity * packets, capacity)
        if given.staged and self.server.shared:
            program = replace(program, paths=through_memory(self.topology, program.paths))
        background, limits = self._background(given, packets)
        network = Fluid(np.concatenate([capacity, limits]))
        if len(background):
            network.add(background)
        handle = network.add(program)
        while handle.end is None:
            network.advance(stop=True)
        return float(handle.finish.max()) / SECOND

    def _background(self, given: Input, packets: float) -> tuple[Program, NDArray[np.float64]]:
        """The flows of input data, and the links that limit them, numbered after the topology's."""
        topology, router = self.topology, Shortest(self.topology)
        ends, limits, sizes = [], [], []
        gpus = self.server.gpus
        for rank, gpu in enumerate(topology.ranks.tolist() if given.copied else ()):
            server, socket = rank // gpus, rank % gpus * self.server.sockets // gpus
            ends.append((topology.node(f"s{server}.memory{socket}"), gpu))
            limits.append(min(given.copied, self.server.memory) * packets)
            sizes.append(given.amount * packets)
        for server in range(self.servers if given.read else 0):
            ends.append((topology.node(f"s{server}.storage"), topology.node(f"s{server}.memory0")))
            limits.append(min(gpus * given.read, STORAGE))
            sizes.append(ENDLESS)
        pairs = np.array(ends, np.int32).reshape(-1, 2)
        routed = router.paths(pairs[:, 0].copy(), pairs[:, 1].copy(), np.zeros(len(pairs), np.int32))
        links = [[*routed.of(flow), topology.links + flow] for flow in range(len(pairs))]
        return Program.of(_paths(links), np.array(sizes)), np.array(limits)

    def exchange(self, plan: Plan, ranks: NDArray[np.int64] | None = None) -> Program:
        return place(plan, GRADIENT, self.gradients, ranks, step_latency=STEP)

    def pairs(self) -> Program:
        """Every GPU sends to its like in the next server."""
        nodes = self.topology.ranks
        paths = self.gradients.paths(nodes, np.roll(nodes, -self.server.gpus), np.zeros(len(nodes), np.int32))
        return Program.of(paths, np.full(len(nodes), float(GRADIENT)))


def through_memory(topology: Topology, paths: Paths) -> Paths:
    """``paths`` that go to the memory and back wherever they pass from a NIC to a root complex or back."""
    kind = [node.kind for node in topology.nodes]
    found = []
    for flow in range(len(paths)):
        links: list[int] = []
        for link in paths.of(flow).tolist():
            source, target = int(topology.source[link]), int(topology.target[link])
            root = source if kind[source] == "root" else target
            detour: list[int] = []
            if {kind[source], kind[target]} == {"root", "nic"}:
                memory = topology.nodes[root].name.replace("root", "memory")
                name = topology.nodes[root].name
                detour = [int(topology.between(a, b)[0]) for a, b in ((name, memory), (memory, name))]
            links += [*detour, link] if root == source else [link, *detour]
        found.append(links)
    return _paths(found)


def _paths(links: list[list[int]]) -> Paths:
    first = np.cumsum([0, *map(len, links)]).astype(np.int32)
    return Paths(first, np.array([one for path in links for one in path], np.int32))


def algorithms(gpus: int, servers: int) -> Iterator[tuple[str, Plan, NDArray[np.int64] | None]]:
    """The all-reduces that are compared: name, plan, and which rank of the topology each of its ranks is."""
    ranks = gpus * servers
    shuffled = np.random.default_rng(0).permutation(ranks)
    yield "ring, servers in order", build("ring", "all_reduce", ranks), None
    yield "ring, any order", build("ring", "all_reduce", ranks), shuffled
    yield "halving-doubling, near first", build("halving_doubling", "all_reduce", ranks), None
    yield "halving-doubling, far first", build("halving_doubling", "all_reduce", ranks, first="far"), None
    yield "hierarchical, rings", build("hierarchical", "all_reduce", ranks, local=gpus), None


def systems(gpus: int, servers: int = SERVERS) -> tuple[System, System]:
    """The baseline and EFLOPS."""
    return System(eflops_baseline(gpus), servers), System(eflops(gpus), servers)


@dataclass(frozen=True, slots=True)
class Row:
    """How k GPUs do under one input.

    Attributes:
        input: its name.
        gpus: k.
        baseline, beside: bytes/s of one GPU's flow to another server, in the baseline and in EFLOPS.
        all_reduce: time of the all-reduce in the baseline over that in EFLOPS.
    """

    input: str
    gpus: int
    baseline: float
    beside: float
    all_reduce: float

    @property
    def gain(self) -> float:
        return self.beside / self.baseline


def row(given: Input, gpus: int) -> Row:
    """Both systems of ``gpus`` a server under one input; the all-reduce is halving-doubling, far partners first."""
    shared, beside = systems(gpus)
    rates = [GRADIENT / system.time(system.pairs(), given) for system in (shared, beside)]
    plan = build("halving_doubling", "all_reduce", gpus * SERVERS, first="far")
    times = [system.time(system.exchange(plan), given) for system in (shared, beside)]
    return Row(given.name, gpus, *rates, times[0] / times[1])


def by_algorithm(given: Input, gpus: int = 8) -> dict[str, tuple[float, float]]:
    """Seconds of each all-reduce in the baseline and in EFLOPS."""
    pair = systems(gpus)
    return {
        name: tuple(system.time(system.exchange(plan, order), given) for system in pair)
        for name, plan, order in algorithms(gpus, SERVERS)
    }
