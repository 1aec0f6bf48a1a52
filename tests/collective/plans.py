"""Every algorithm with every operation, and options worth trying, for a number of ranks."""

from collections.abc import Iterator
from functools import partial

from foretrain.collective import Plan, build
from foretrain.collective.aggregators import in_network, parameter_server
from foretrain.collective.ring import ring

HALVES = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = [*range(2, 13), 15, 16, 17, 24, 32, 33, 48]


def plans(ranks: int) -> Iterator[tuple[str, Plan]]:
    """Name and plan; sizes of options shrink where there are many ranks."""
    small = ranks <= 12

    def made(name, operation, **options):
        told = ", ".join(f"{key}={value}" for key, value in options.items())
        return f"{name} {operation} {told}", build(name, operation, ranks, **options)

    for operation in HALVES:
        yield made("ring", operation)
        yield made("ring", operation, channels=2)
        yield made("ring", operation, bidirectional=True)
        yield made("ring", operation, orders=[[(rank * step) % ranks for rank in range(ranks)] for step in (1, -1)])
        yield made("halving_doubling", operation, first="near")
        yield made("halving_doubling", operation, first="far")
        yield made("circulant", operation)
        yield made("parameter_server", operation, chunks=2)
        yield made("parameter_server", operation, servers=3)
        yield made("parameter_server", operation, servers=ranks if small else 3, colocated=True)
        yield made("in_network", operation, chunks=3 if small else 1)
        yield made("in_network", operation, chunks=2 if small else 1, radix=5)
        yield made("hdrm", operation, switches=4, hosts=-(-ranks // 4))
        yield made("hdrm", operation, switches=2 * (1 + ranks // 6), hosts=4)
        stages = [("ring", "ring"), ("halving_doubling", "circulant"), ("in_network", "in_network")]
        for local in (2, ranks // 2) if small else (8,):
            if local > 1 and ranks > local and ranks % local == 0:
                for inner, outer in stages[: 3 if small else 2]:
                    yield made("hierarchical", operation, local=local, inner=inner, outer=outer)
    yield made("double_tree", "all_reduce", chunks=4 if small else 2)
    for root in {0, ranks // 2, ranks - 1}:
        for name in ("double_tree", "ring"):
            yield made(name, "broadcast", root=root, chunks=3)
        yield made("ring", "broadcast", root=root, bidirectional=True, chunks=2)
        yield made("flat", "broadcast", root=root)
        yield made("binomial", "broadcast", root=root)
    yield made("direct", "all_to_all")
    yield made("pairwise", "all_to_all")


STAGES = [
    partial(ring, bidirectional=True),
    partial(ring, channels=2),
    partial(parameter_server, colocated=True, servers=2),
    partial(in_network, chunks=2),
]
"""What hierarchical plans can be made of besides names."""
