"""Networks and programs for the tests of packets."""

import numpy as np

from foretrain.network.fabrics.clos import leaf_spine, star
from foretrain.network.packet import Packets
from foretrain.network.program import Program
from foretrain.network.routing import Ecmp

RATE = 12.5e9
"""Bytes/s: 80 ps a byte."""
BYTE = 80
LATENCY = 500_000
PAYLOAD, HEADER, REPLY = 1000, 24, 64
SIZES = {"payload": PAYLOAD, "header": HEADER, "reply": REPLY}
WIRE = PAYLOAD + HEADER
SENDING = WIRE * BYTE


def hosts(count, **options):
    return star(count, RATE, latency=LATENCY, **options)


def fabric(leaves=3, each=4, spines=4):
    return leaf_spine(leaves, each, RATE, spines=spines, latency=LATENCY)


def flows(topology, pairs, size, seed=0, **columns):
    """A program of one flow for each pair of ranks."""
    sources, targets = (topology.ranks[np.array(side, np.int64)] for side in zip(*pairs, strict=True))
    paths = Ecmp(topology, seed=seed).paths(sources, targets, np.arange(len(pairs), dtype=np.int32))
    return Program.of(paths, np.broadcast_to(np.asarray(size, np.float64), len(pairs)).copy(), **columns)


def both(topology, program, others=(), important=None, **options):
    """What windows find; what events find is the same, to the ps."""
    kernels = ("windows", "events")
    found = [Packets(topology, kernel=kernel, **options) for kernel in kernels]
    found = [one.run(program, others=others, important=important) for one in found]
    for name in ("begun", "finish", "sent", "repeated", "timeouts", "counts"):
        np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name), name)
    for name in ("hops", "data_hops", "made", "arrived", "drops", "cuts", "losses", "pauses", "end", "under_way"):
        assert getattr(found[0], name) == getattr(found[1], name), name
    for one, other in zip(found[0].came, found[1].came, strict=True):
        np.testing.assert_array_equal(one, other)
    return found[0]
