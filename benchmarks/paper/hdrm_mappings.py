"""Flows on the busiest link of a BiGraph: HDRM, and the best mapping of plain halving-doubling by exhaustive search.

python benchmarks/paper/hdrm_mappings.py
"""

from __future__ import annotations

import numpy as np

from foretrain.collective import build, contention, hdrm_mapping

FABRICS = (
    (4, 2, 5), (4, 2, 6), (4, 2, 7), (4, 4, 7), (6, 2, 12), (6, 3, 9), (6, 3, 10), (6, 3, 11), (8, 2, 12), (8, 1, 6),
    (4, 3, 12), (2, 6, 12),
)  # fmt: skip
"""Switches, hosts of each, ranks."""


def main() -> None:
    """Print one line for each fabric."""
    for switches, hosts, ranks in FABRICS:
        plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts, balanced=False)
        ours = max(contention(plan, hdrm_mapping(switches, hosts, ranks)), default=0)
        best = least_contention(switches, hosts, ranks)
        print(f"{switches} × {hosts}, {ranks} ranks: {'none is direct' if best is None else best}; hdrm {ours}")


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """The rounds of halving-doubling as (sender, receiver); the way back has the same links in the other direction."""
    plan = build("halving_doubling", "reduce_scatter", ranks)
    rows = np.stack([plan.source, plan.target], axis=1).reshape(-1, ranks, 2)
    return [[tuple(pair) for pair in row.tolist()] for row in rows]


def least_contention(switches: int, hosts: int, ranks: int) -> int | None:
    """The least of all mappings of plain halving-doubling, by exhaustive search; None where none is direct.

    Every exchange has to stay inside a switch or cross one link.
    """
    rounds = rounds_of(ranks)
    return next((most for most in range(hosts + 1) if _mappable(switches, hosts, ranks, rounds, most)), None)


def _mappable(switches: int, hosts: int, ranks: int, rounds: list[list[tuple[int, int]]], limit: int) -> bool:
    half = switches // 2
    seat: list[int] = []
    load: dict[tuple[int, int, int], int] = {}
    # What becomes known when the later of two ranks is seated.
    known = [[(t, a, b) for t, row in enumerate(rounds) for a, b in row if max(a, b) == rank] for rank in range(ranks)]

    def fits(rank: int) -> bool:
        if rank == ranks:
            return True
        used = set(seat)
        fresh: set[int] = set()
        for switch in range(switches):
            part = switch // half
            if switch not in used:
                # Empty switches of a part are alike, and so are the parts themselves at first.
                if part in fresh or (part == 1 and not used):
                    continue
                fresh.add(part)
            if seat.count(switch) == hosts:
                continue
            seat.append(switch)
            added, good = [], True
            for step, a, b in known[rank]:
                if seat[a] != seat[b]:
                    key = (step, seat[a], seat[b])
                    if seat[a] // half == seat[b] // half or load.get(key, 0) == limit:
                        good = False
                        break
                    load[key] = load.get(key, 0) + 1
                    added.append(key)
            if good and fits(rank + 1):
                return True
            for key in added:
                load[key] -= 1
            seat.pop()
        return False

    return fits(0)


if __name__ == "__main__":
    main()
