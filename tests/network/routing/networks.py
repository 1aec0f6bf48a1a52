"""Small networks for the tests of routing, and what to ask of paths in them."""

import random

import numpy as np

from foretrain.network.topology.graph import Builder, Topology

RATE, LATENCY = 12.5e9, 500_000


def leaf_spine(leaves=4, spines=4, hosts=4, *, bundle=True, cables=1) -> Topology:
    """Hosts on leaves, each leaf with ``cables`` to each spine."""
    build = Builder(f"leaf_spine({leaves}, {spines}, {hosts})")
    ends = [build.node(f"h{i}", "host") for i in range(leaves * hosts)]
    lower = [build.node(f"leaf{i}", "switch", tier=1) for i in range(leaves)]
    upper = [build.node(f"spine{i}", "switch", tier=2, bundle="spine" if bundle else "") for i in range(spines)]
    for i, end in enumerate(ends):
        build.cable(end, lower[i // hosts], rate=RATE, latency=LATENCY)
    for leaf in lower:
        for spine in upper * cables:
            build.cable(leaf, spine, rate=RATE, latency=LATENCY)
    return build.topology(ends)


def fat_tree(k=4, *, bundle=True) -> Topology:
    """k pods of k/2 edge and k/2 aggregation switches, (k/2)**2 cores, k**3/4 hosts (Al-Fares et al., SIGCOMM'08)."""
    half = k // 2
    build = Builder(f"fat_tree(k={k})")
    ends = [build.node(f"h{i}", "host") for i in range(k * half * half)]
    edges = [build.node(f"edge{i}", "switch", tier=1) for i in range(k * half)]
    pods = [f"pod{i // half}" if bundle else "" for i in range(k * half)]
    aggregation = [build.node(f"agg{i}", "switch", tier=2, bundle=pods[i]) for i in range(k * half)]
    cores = [build.node(f"core{i}", "switch", tier=3, bundle="core" if bundle else "") for i in range(half * half)]
    for i, end in enumerate(ends):
        build.cable(end, edges[i // half], rate=RATE, latency=LATENCY)
    for pod in range(k):
        for i in range(half):
            for j in range(half):
                build.cable(edges[pod * half + i], aggregation[pod * half + j], rate=RATE, latency=LATENCY)
                build.cable(aggregation[pod * half + i], cores[i * half + j], rate=RATE, latency=LATENCY)
    return build.topology(ends)


def server(gpus=4) -> Topology:
    """Two servers: GPUs at one NVSwitch, and each at a PCIe switch with a NIC cabled to the switch of its rail."""
    build = Builder(f"servers({gpus})")
    ranks = []
    rails = [build.node(f"rail{i}", "switch", tier=3) for i in range(gpus)]
    for number in range(2):
        nvswitch = build.node(f"s{number}.nvswitch", "nvswitch", server=number, tier=1)
        root = build.node(f"s{number}.root", "root", server=number, tier=2)
        for i in range(gpus):
            gpu = build.node(f"s{number}.gpu{i}", "gpu", server=number)
            pcie = build.node(f"s{number}.pcie{i}", "pcie", server=number, tier=1)
            nic = build.node(f"s{number}.nic{i}", "nic", server=number, tier=2)
            build.cable(gpu, nvswitch, rate=300e9, latency=LATENCY)
            build.cable(gpu, pcie, rate=32e9, latency=LATENCY)
            build.cable(pcie, nic, rate=32e9, latency=LATENCY)
            build.cable(pcie, root, rate=32e9, latency=LATENCY, metric=2)
            build.cable(nic, rails[i], rate=RATE, latency=LATENCY)
            ranks.append(gpu)
    return build.topology(ranks)


def random_network(seed: int, *, metrics: int = 1) -> Topology:
    """Connected switches with chords and parallel links, hosts with one or two links, and metrics up to ``metrics``."""
    draw = random.Random(seed)
    build = Builder(f"random({seed})")
    switches = [build.node(f"s{i}", "switch", tier=1) for i in range(draw.randint(1, 8))]
    for i, switch in enumerate(switches[1:], 1):
        build.cable(switch, draw.choice(switches[:i]), rate=RATE, latency=LATENCY, metric=draw.randint(1, metrics))
    for _ in range(draw.randint(0, 10) if len(switches) > 1 else 0):
        a, b = draw.sample(switches, 2)
        for _ in range(draw.randint(1, 2)):
            build.cable(a, b, rate=RATE, latency=LATENCY, metric=draw.randint(1, metrics))
    hosts = [build.node(f"h{i}", "host", forwards=draw.random() < 0.2) for i in range(draw.randint(2, 8))]
    for i, host in enumerate(hosts):
        for _ in range(draw.choice((1, 1, 2))):
            build.cable(host, draw.choice(switches), rate=RATE, latency=LATENCY, metric=draw.randint(1, metrics))
        if i and draw.random() < 0.2:
            build.cable(host, draw.choice(hosts[:i]), rate=RATE, latency=LATENCY, metric=draw.randint(1, metrics))
    return build.topology(hosts)


def all_pairs(topology: Topology, connections: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, targets and connections of an all-to-all."""
    ranks = topology.ranks
    source, target, connection = np.meshgrid(ranks, ranks, np.arange(connections, dtype=np.int32), indexing="ij")
    apart = source != target
    return source[apart], target[apart], connection[apart]


def check_paths(topology, paths, sources, targets) -> None:
    """Paths lead from source to target over links that are up and, in between, nodes that forward."""
    assert len(paths) == len(sources)
    for flow, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        at = source
        for link in paths.of(flow).tolist():
            assert topology.source[link] == at
            assert at == source or topology.nodes[at].forwards
            assert topology.up[link]
            at = topology.target[link]
        assert at == target
