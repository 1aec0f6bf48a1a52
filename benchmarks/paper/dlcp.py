"""DLCP (arXiv 2008.08445): bounded loss against DCTCP and pFabric, P3 and ByteScheduler, on packets. Simulated.

Published, ns-3, 144 hosts, 100 Gb/s: average and tail flow completion times 43.1 % and 91.8 % below DCTCP's, 35.5 % and
88.6 % below pFabric's. Testbed of 10 V100: training up to 84.3 % faster than the best of P3 and ByteScheduler on TCP
with a parameter server, 11 % with rings.

Assumed here, since the paper's settings are not all known to us. Network: nine leaves with sixteen hosts each, sixteen
spines, no oversubscription, links of 100 Gb/s that take 500 ns, ECMP. Jobs: eight workers (and one server) at random
places, one iteration with batch 32 on V100. Completion times: four jobs, one of each model, every tensor a flow of its
own that is released as backward computation releases it; those of pushes count; gains are means over models. Ports: 800
packets, equal parts for each class where there are eight; K of 65 (DCTCP) and of a bandwidth-delay product, 41 (DLCP);
hosts mark what would wait for 50 µs. DCTCP's least timeout is 200 µs; in variants 10 ms, and 1 s as RFC 6298 has it,
over ports of 100 packets. pFabric: windows of 61 packets, ports of 82. DLCP: p = 10 %, front layers in high classes,
its AIMD; all packets of back layers are important, half of the others (in rings half of all), and those of messages
that may lose no full packet; which half is decided as the transport does, by the mean magnitude of a packet's gradients
against the median of the round before, recorded here from a small CNN on digits. Steps with a parameter server: one
switch, 100 Gb/s; fifo sends whole tensors or messages of 4 MB, whichever is better, DLCP messages of 4 MB, P3 and
ByteScheduler what the project's policies decide at each worker; for models of more than 200 MB P3's slices are of 1 MB.
Rings: the same four jobs, DistributedDataParallel's buckets of 25 MiB one after the other, as NCCL reduces them, and
the optimizer waits for all; each hop may lose p/7.

--quick: one job of ResNet-50 each. --jobs 4 fills the network. --plots DIR writes all figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from dlcp_network import SEED
from dlcp_report import CONSOLE, completion_part, ring_part, table, training_part, variants_part
from measure import finish, options

PAPER = {
    "fct_avg_vs_dctcp": 0.431,
    "fct_tail_vs_dctcp": 0.918,
    "fct_avg_vs_pfabric": 0.355,
    "fct_tail_vs_pfabric": 0.886,
    "speedup_ps": 0.843,
    "speedup_ring": 0.11,
}


TESTBED = {"speedup_ps": "parameter server", "speedup_ring": "rings"}
"""What the paper measured on ten V100."""
MEASURED = Path(__file__).parent.parent / "data" / "bounded_lab.json"
"""What bounded.py --full has measured in the lab, as docs/bounded.md has it."""
LAB = {
    "median_vs_best_tcp": "lab, TCP not marked: median step, incast of 40 %, three bands, 1 % lost",
    "tta_vs_best_tcp": "lab, the same: digits to 94 %",
    "clean_vs_tcp": "lab, the same: median step, nothing lost and nobody else",
}
"""Rows of what bounded.py measures, two hosts at 300 Mb/s over TCP's time."""

PARTS = {"completion": completion_part, "training": training_part, "ring": ring_part, "variants": variants_part}


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write every figure there")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="of each model, 1 to 4")
    parser.add_argument(
        "--lab",
        type=Path,
        metavar="FILE",
        default=MEASURED,
        help="what `benchmarks/bounded.py --full --json FILE` has measured in the lab",
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone")


def testbed_rows(values: dict[str, float], lab: Path) -> list[tuple[str, str, str, str]]:
    """Return the rows of the paper's testbed: its numbers, the simulation's, and what the lab has measured."""
    rows = [
        (title, f"up to {PAPER[name]:.1%}", f"up to {values[name]:.1%}", f"{values[name] / PAPER[name]:.2f}")
        for name, title in TESTBED.items()
        if name in values
    ]
    measured = json.loads(lab.read_text())["values"]
    # bounded.py --quick trains nothing, and so has no time to accuracy.
    found = {title: measured.get(name, math.nan) - 1 for name, title in LAB.items()}
    return rows + [(title, "", f"{gain:.1%}", "") for title, gain in found.items() if not math.isnan(gain)]


def main() -> None:
    """Prints paper, ours, ratio."""
    arguments = options(__doc__ or "", _more)
    CONSOLE.print(__doc__)
    values: dict[str, float] = {}
    details = {}
    for name in arguments.only or PARTS:
        found, details[name], charts = PARTS[name](arguments.quick, arguments.jobs)
        values |= found
        for chart in charts if arguments.plots else ():
            chart.write(arguments.plots)
    for name, paper in ((name, paper) for name, paper in PAPER.items() if name in values):
        CONSOLE.print(f"{name:24s}paper {paper:6.1%}, ours {values[name]:6.1%}, ratio {values[name] / paper:.2f}")
    columns = ("", "paper, 10 V100", "ours", "ratio")
    table("training faster than the best over TCP", columns, testbed_rows(values, arguments.lab))
    finish(arguments, "dlcp", values, details, seed=SEED)


if __name__ == "__main__":
    main()
