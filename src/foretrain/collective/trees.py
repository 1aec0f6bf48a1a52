"""Broadcasts of whole messages, flat and along a binomial tree, and two pipelined binary trees at once."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from foretrain.collective.plan import Draft, Operation, Plan, assembled


def flat(operation: Operation, ranks: int, *, root: int = 0) -> Plan:
    """Send from the root to all others at once."""
    others = np.delete(np.arange(ranks), root)
    return assembled("flat", operation, ranks, 1, np.full(ranks - 1, root), others, 0, owner=[root])


def binomial(operation: Operation, ranks: int, *, root: int = 0) -> Plan:
    """Send along a binomial tree: in each of ⌈log2 N⌉ rounds every holder serves one more rank (Thakur et al. 2005).

    A rank sends one message after the other. The data does not need that, but else the root would divide its link
    among log2 N messages and the tree would win nothing.
    """
    draft = Draft("binomial", operation, ranks, 1, owner=[root])
    has: dict[int, int | None] = {0: None}
    apart = 1 << (ranks - 1).bit_length()
    while apart > 1:
        apart //= 2
        for node, latest in list(has.items()):
            if node + apart < ranks:
                source, target = (node + root) % ranks, (node + apart + root) % ranks
                sent = draft.transfer(source, target, 0, after=() if latest is None else (latest,))
                has[node] = has[node + apart] = sent
    return draft.plan()


def double_tree(operation: Operation, ranks: int, *, chunks: int = 8, root: int = 0) -> Plan:
    """Exchange along two binary trees (Sanders, Speck and Träff, *Two-tree algorithms*, 2009), those of NCCL (since
    2.4).

    A rank has at most two children in both trees together: inner nodes of one are leaves of the other, but for one rank
    with one child in each if N is odd. Each tree carries half, so a rank sends 2S at most and receives 2S at most,
    whatever N. Chunks follow each other up and, from the root, down again.

    Args:
        operation: all_reduce, or broadcast, in which ``root`` feeds both trees of the others.
        ranks: N, at least 2.
        chunks: how many pieces each half is cut into; the depth in steps is about 2 log2 N + chunks.
        root: where a broadcast begins.
    """
    owner = [root] * (2 * chunks) if operation == "broadcast" else ()
    draft = Draft("double_tree", operation, ranks, 2 * chunks, owner=owner)
    if operation == "broadcast":
        members = np.delete(np.arange(ranks), root)
    else:
        members = np.arange(ranks)
    for half, parents in enumerate(two_trees(len(members))):
        base = half * chunks
        piped = partial(draft.transfer, block=0, steps=chunks, stride=1, base=base, modulus=chunks, channel=half)
        arrives: dict[int, list[tuple[int, int]]] = {node: [] for node in range(len(members))}
        if operation == "all_reduce":
            for node in _leaves_first(parents):
                parent = int(parents[node])
                if parent >= 0:
                    up = piped(node, parent, adds=chunks, after=arrives[node])
                    arrives[parent].append((up, 1))
        else:
            top = int(np.flatnonzero(parents < 0)[0])
            arrives[top] = [(piped(root, int(members[top])), 1)]
        for node in _leaves_first(parents)[::-1]:
            parent = int(parents[node])
            if parent >= 0:
                source, target = int(members[parent]), int(members[node])
                arrives[node] = [(piped(source, target, after=arrives[parent]), 1)]
    return draft.plan()


def two_trees(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the parent of each node in both trees, -1 for the root.

    The first is a binary tree in order: nodes with k trailing zero bits are k levels above the leaves, and 0 is the
    root. The second is its mirror image if the size is even, else the first one shifted by one, so that inner nodes
    become leaves.
    """
    nodes = np.arange(size)
    lowest = nodes & -nodes
    above = (nodes ^ lowest) | (lowest << 1)
    first = np.where(above < size, above, nodes ^ lowest)
    first[0] = -1
    if size % 2 == 0:
        second = first[::-1]
        second = np.where(second < 0, -1, size - 1 - second)
    else:
        second = np.roll(first, 1)
        second = np.where(second < 0, -1, (second + 1) % size)
    return first, second


def _leaves_first(parents: NDArray[np.int64]) -> list[int]:
    """Return the nodes in an order in which children come before their parent."""
    depth = np.zeros(len(parents), np.int64)
    above = parents.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    return np.argsort(-depth, kind="stable").tolist()
