"""A parameter server: workers push their gradients to servers, which add them up, and pull the sums."""

from __future__ import annotations

import numpy as np

from foretrain.collective.plan import Operation, Plan, assembled


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
