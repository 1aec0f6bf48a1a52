"""What the benchmark of the fluid simulator simulates: collectives and a training job, on a three-tier fat tree.

Every host has one GPU's port of 400 Gb/s, as behind a DGX H100; ECMP routes. Nothing here is measured, so that it is
written in whole columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import WHOLE, build
from foretrain.network.fabrics.clos import fat_tree
from foretrain.network.program import Program, joined, place
from foretrain.network.routing import PortableRouter, router
from foretrain.units import MICROSECOND, SECOND

RATE = 50e9
STEP = 2 * MICROSECOND
"""Software of one step of a collective."""
TP, STAGES, MICROBATCHES = 8, 8, 16
ACTIVATIONS, GRADIENTS = 1e7, 1e8
"""Bytes between two stages of a pipeline for one microbatch, and of each GPU's gradients."""
COMPUTE = SECOND // 5000
"""A stage's computation takes up to so long, ps, at random."""
BLOCK = 4
"""GPUs that stay together where a fragmented cluster places a job."""


class Traffic(NamedTuple):
    """What to simulate.

    Attributes:
        program: the flows.
        capacity: bytes/s of each link.
    """

    program: Program
    capacity: NDArray[np.float64]


@functools.lru_cache(maxsize=1)
def fabric(hosts: int, seed: int) -> PortableRouter:
    """ECMP on the smallest fat tree of as many hosts."""
    ports = next(k for k in range(4, 1000, 2) if k**3 // 4 >= hosts)
    return router(fat_tree(ports, RATE), "ecmp", seed=seed)


def collective(name: str, ranks: int, data: float, seed: int = 0) -> Traffic:
    """An all-reduce, or all-to-all (``"direct"``, ``data`` being what each rank sends), of the first hosts."""
    plan = build(name, "all_to_all" if name == "direct" else "all_reduce", ranks)
    route = fabric(ranks, seed)
    return Traffic(place(plan, data, route, step_latency=STEP), route.topology.capacity)


def disturbed(whole: Traffic) -> Traffic:
    """The same while a trickle crosses the first flow's path: nothing of it is alone, so that no ring collapses."""
    one = whole.program.paths.gather(np.zeros(1, np.int64))
    return Traffic(joined([whole.program, Program.of(one, np.array([1e3]))]), whole.capacity)


def mix(gpus: int, *, tp: int = TP, stages: int = STAGES, microbatches: int = MICROBATCHES, seed: int = 0) -> Traffic:
    """One step of a job that is data-, tensor- and pipeline-parallel.

    Tensor parallelism stays inside servers and does not load the fabric. For each replica and tensor rank a chain of
    stages passes on microbatches; at the same time the replicas of each (stage, tensor rank) run a ring all-reduce.
    The job is placed in shuffled blocks of four GPUs, as on a fragmented cluster.
    """
    random = np.random.default_rng(seed)
    replicas = gpus // (tp * stages)
    gpu = random.permutation(np.arange(gpus).reshape(-1, BLOCK)).reshape(replicas, stages, tp)
    # Chains, indexed by replica, tensor rank, microbatch and stage; then rings, by stage, tensor rank and replica.
    shape = (replicas, tp, microbatches, stages - 1)
    chain = np.arange(np.prod(shape)).reshape(shape)
    ring = chain.size + np.arange(gpus).reshape(stages, tp, replicas)
    members = gpu.transpose(1, 2, 0)
    senders, receivers = (np.swapaxes(part, 1, 2)[:, :, None] for part in (gpu[:, :-1], gpu[:, 1:]))
    source = np.concatenate([np.broadcast_to(senders, shape).ravel(), members.ravel()])
    target = np.concatenate([np.broadcast_to(receivers, shape).ravel(), np.roll(members, -1, 2).ravel()])
    waits = (
        (chain[..., 1:], chain[..., :-1], WHOLE),
        (chain[:, :, 1:], chain[:, :, :-1], WHOLE),
        (ring, np.roll(ring, 1, 2), 0),
    )
    first, after, lag = _dependencies(len(source), waits)
    route = fabric(gpus, seed)
    nodes = route.topology.ranks
    connection = np.arange(len(source), dtype=np.int32) % 251
    program = Program.of(
        route.paths(nodes[source], nodes[target], connection),
        np.repeat([ACTIVATIONS, GRADIENTS / replicas], [chain.size, ring.size]),
        steps=np.repeat(np.array([1, 2 * (replicas - 1)], np.int32), [chain.size, ring.size]),
        latency=STEP + np.concatenate([np.ceil(COMPUTE * random.random(chain.size)), np.zeros(ring.size)]),
        first=first,
        after=after,
        lag=lag,
    )
    return Traffic(program, route.topology.capacity)


def _dependencies(
    flows: int, waits: tuple[tuple[NDArray[np.int64], NDArray[np.int64], int], ...]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Compressed sparse rows of (waiters, those waited for, lag)."""
    waiter = np.concatenate([one.ravel() for one, _, _ in waits])
    after = np.concatenate([other.ravel() for _, other, _ in waits])
    lag = np.concatenate([np.full(one.size, ahead) for one, _, ahead in waits])
    order = np.argsort(waiter, kind="stable")
    first = np.zeros(flows + 1, np.int32)
    np.cumsum(np.bincount(waiter, minlength=flows), out=first[1:])
    return first, after[order].astype(np.int32), lag[order].astype(np.int32)
