"""Sums outside of the ranks: parameter servers, to which workers push and from which they pull, and switches."""

from __future__ import annotations

from functools import partial

import numpy as np

from foretrain.collective.plan import Draft, Operation, Plan, assembled


def parameter_server(
    operation: Operation, ranks: int, *, servers: int = 1, colocated: bool = False, chunks: int = 1
) -> Plan:
    """Exchange over k servers, each with a k-th of the data (Li et al., OSDI'14): N·k transfers there and as many back.

    Args:
        operation: all_reduce (push and pull), reduce_scatter (push; the sums end on the servers) or all_gather (pull;
            the servers have the data).
        ranks: N, the workers.
        servers: k. They are helpers or, if co-located, the ranks 0 to k − 1.
        colocated: whether servers are on ranks, whose own part then need not travel.
        chunks: how many pieces a server's share is cut into; a pull begins when the first one has its sum.
    """
    places = np.arange(servers) + (0 if colocated else ranks)
    worker, server = np.repeat(np.arange(ranks), servers), np.tile(np.arange(servers), ranks)
    remote = worker != places[server]
    worker, server = worker[remote], server[remote]
    pushes = 0 if operation == "all_gather" else len(worker)
    pulls = 0 if operation == "reduce_scatter" else len(worker)
    waiter, after = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if pushes and pulls:
        # A pull from a server waits for all pushes to it; there are as many to each server.
        by_server = np.argsort(server, kind="stable").reshape(servers, -1)
        waiter = np.repeat(pushes + np.arange(pulls), by_server.shape[1])
        after = by_server[server].reshape(-1)
    return assembled(
        "parameter_server",
        operation,
        ranks,
        servers * chunks,
        np.concatenate([worker[:pushes], places[server[:pulls]]]),
        np.concatenate([places[server[:pushes]], worker[:pulls]]),
        0,
        waiter=waiter,
        after=after,
        lag=1,
        helpers=0 if colocated else servers,
        owner=() if operation == "all_reduce" else np.repeat(places, chunks),
        steps=chunks,
        base=np.concatenate([server[:pushes], server[:pulls]]) * chunks,
        stride=1,
        modulus=chunks,
        adds=np.repeat([chunks, 0], [pushes, pulls]),
    )


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
