"""Prophet (ICPP'21): blocks in the release of gradients, and the gain over priority-based strategies.

Published: up to 40 % over priority-based strategies (P3, ByteScheduler) on Amazon EC2, MXNet on a parameter server,
links shaped to 1–10 Gb/s; traces of ResNet-50 with 157 gradients in 12 blocks and ResNet-152 with 463 gradients.

Assumed here: 3 workers with one M60 each and one dedicated server, batch 64, latency 50 µs one way and θ 50 µs. P3 and
ByteScheduler run with their published defaults, as in the paper, and once more tuned, which the paper does not do.
Prophet runs as published (cut=0, fuse=0) and as improved here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from measure import finish, options

from foretrain.planner import tune
from foretrain.schedule import Spec
from foretrain.schedule.monitor import blocks
from foretrain.simulation import bound, simulate
from foretrain.workload import zoo

MODELS = ("resnet50", "resnet152", "inception_v3", "vgg19")
RATES = ("1Gbps", "2Gbps", "3Gbps", "4.5Gbps", "6Gbps", "10Gbps")
OPTIONS = ",ps=1,latency=50us,overhead=50us"
PUBLISHED_GAIN = 0.40
PUBLISHED_BLOCKS = {"resnet50": (157, 12), "resnet152": (463, None)}
HEADER = ("model", "rate", "T* ms", "vs P3", "vs ByteScheduler", "vs both tuned", "gap as published", "gap improved")
COLUMNS = "{:14s}{:>8s}{:>10s}{:>9s}{:>18s}{:>15s}{:>18s}{:>14s}"
WHY = """
Why they differ. P3 here sends a slice when the server has acknowledged the one before, so that a busy link idles for a
round trip and θ after each; a sender that only waits until a slice has left would lose less. Against ByteScheduler's
defaults the gain is their 16 MB credit, which lets less urgent bytes queue in front where communication and computation
balance. Once both are tuned, the theory leaves little: a priority schedule with a fine partition is within (W + δ)κ + θ
per partition of T*, and predictable blocks can only remove that. As published, Prophet loses a few per cent where the
link is the bottleneck, since what does not fit an interval idles; cutting it mends that.
"""


def scenario(model: str, rate: str) -> tuple[float, ...]:
    """T* in ms; the published Prophet's gain over P3, ByteScheduler and the better of both tuned; both gaps to T*."""
    work, place = zoo(model, batch=64, device="M60"), f"3x1xM60@{rate}{OPTIONS}"

    def time(plan: str | Spec, tuned: bool = False) -> int:
        return simulate(work, place, tune(work, place, plan) if tuned else plan, trace=False).iteration_time

    published = time(Spec("prophet", {"cut": 0, "fuse": 0.0}), tuned=True)
    improved = time("prophet", tuned=True)
    strongest = min(time("p3", tuned=True), time("bytescheduler", tuned=True))
    best = bound(work, place).time
    gains = (time(other) / published - 1 for other in ("p3", "bytescheduler"))
    return (best / 1e9, *gains, strongest / published - 1, published / best - 1, improved / best - 1)


def main() -> None:
    """Prints paper, ours, ratio."""
    arguments = options(__doc__ or "")
    print(__doc__)
    for model, (gradients, count) in PUBLISHED_BLOCKS.items():
        work = zoo(model, batch=64, device="M60")
        ours = len(blocks([g.release for g in work.gradients]))
        ratio = f", ratio {ours / count:.2f}" if count else ""
        counts = f"gradients paper {gradients}, ours {len(work.gradients)}"
        print(f"{model}: {counts}; blocks paper {count or 'unknown'}, ours {ours}{ratio}")
    print("\nGain of Prophet as published, and gaps to the optimum\n" + COLUMNS.format(*HEADER))
    rows = []
    for model in MODELS:
        for rate in RATES:
            row = scenario(model, rate)
            rows.append((model, rate, *row))
            print(COLUMNS.format(model, rate, f"{row[0]:.1f}", *(f"{value:.1%}" for value in row[1:])))
    over_p3, over_bytescheduler = max(row[3] for row in rows), max(row[4] for row in rows)
    print(
        f"\nlargest gain over a priority-based strategy: paper {PUBLISHED_GAIN:.0%}; "
        f"ours over P3 {over_p3:.0%}, ratio {over_p3 / PUBLISHED_GAIN:.2f}; "
        f"over ByteScheduler's defaults {over_bytescheduler:.0%}, ratio {over_bytescheduler / PUBLISHED_GAIN:.2f}"
    )
    print(WHY)
    values = {
        "gain_vs_p3_max": over_p3,
        "gain_vs_bytescheduler_max": over_bytescheduler,
        "gain_vs_tuned_max": max(row[5] for row in rows),
        "published_gap_median": median(row[6] for row in rows),
        "improved_gap_median": median(row[7] for row in rows),
    }
    finish(arguments, "paper_prophet", values, rows)


if __name__ == "__main__":
    main()
