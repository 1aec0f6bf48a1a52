"""Reduction in the network: switches add up what ranks send, and send every rank the sum."""

from __future__ import annotations

from functools import partial

from foretrain.collective.plan import Draft, Operation, Plan


def in_network(operation: Operation, ranks: int, *, radix: int | None = None, chunks: int = 8) -> Plan:
    """Reduce in one switch (NVLS, SwitchML), or in a tree of two levels (SHARP; Graham et al. 2016).

    A rank sends S and receives S, half of what a ring needs; the depth is two steps, or four, and the pipeline's.
    Switches are helpers and are taken to have memory for all data; SwitchML's window of slots is not modelled. A
    multicast is one transfer per receiver, which is the same where the receivers have links of their own.

    Args:
        operation: all_reduce; reduce_scatter, where the switch returns to each rank its own part only, or all_gather.
        ranks: N.
        radix: ranks below one leaf switch; helper 0 is then the upper switch and the leaves follow. None: one switch.
        chunks: pieces that the data, or each rank's part of it, is cut into.
    """
    leaf = 0 if radix is None else 1
    above = [ranks + leaf * (1 + rank // (radix or ranks)) for rank in range(ranks)]
    leaves = sorted(set(above)) if leaf else []
    draft = Draft("in_network", operation, ranks, chunks, helpers=1 + len(leaves))
    if operation != "all_reduce":
        draft.blocks, draft.owner = ranks * chunks, [block // chunks for block in range(ranks * chunks)]
        (_scatter if operation == "reduce_scatter" else _gather)(draft, above, leaves, chunks)
        return draft.plan()
    piped = partial(draft.transfer, block=0, steps=chunks, stride=1)
    ups = [piped(rank, above[rank], adds=chunks) for rank in range(ranks)]
    full = {at: [(ups[rank], 1) for rank in range(ranks) if above[rank] == at] for at in leaves or [ranks]}
    if leaves:
        tops = [(piped(at, ranks, adds=chunks, after=full[at]), 1) for at in leaves]
        full = {at: [(piped(ranks, at, after=tops), 1)] for at in leaves}
    for rank in range(ranks):
        piped(above[rank], rank, after=full[above[rank]])
    return draft.plan()


def _scatter(draft: Draft, above: list[int], leaves: list[int], chunks: int) -> None:
    """Send everything up, and only each rank's own part down."""
    ranks = draft.ranks
    up = partial(draft.transfer, block=0, steps=draft.blocks, stride=1, adds=draft.blocks)
    ups = [up(rank, above[rank]) for rank in range(ranks)]
    full = {at: [ups[rank] for rank in range(ranks) if above[rank] == at] for at in leaves or [ranks]}
    tops = [up(at, ranks, after=[(one, 1) for one in full[at]]) for at in leaves]
    for rank in range(ranks):
        part = partial(draft.transfer, block=0, steps=chunks, stride=1, base=rank * chunks, modulus=chunks)
        # Step s of a part's way down needs step rank·chunks + s of the way up.
        ready = [(one, rank * chunks + 1) for one in tops or full[ranks]]
        if leaves:
            ready = [(part(ranks, above[rank], after=ready), 1)]
        part(above[rank], rank, after=ready)


def _gather(draft: Draft, above: list[int], leaves: list[int], chunks: int) -> None:
    """Send each rank's own part up, and all others' down."""
    for rank in range(draft.ranks):
        part = partial(draft.transfer, block=0, steps=chunks, stride=1, base=rank * chunks, modulus=chunks)
        came = {above[rank]: [(part(rank, above[rank]), 1)]}
        if leaves:
            top = [(part(above[rank], draft.ranks, after=came[above[rank]]), 1)]
            for at in leaves:
                if at != above[rank]:
                    came[at] = [(part(draft.ranks, at, after=top), 1)]
        for other in range(draft.ranks):
            if other != rank:
                part(above[other], other, after=came[above[other]])
