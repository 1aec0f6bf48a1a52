"""One script on three clusters of 16 GPUs: the best recipe of each, and what a million tokens cost there.

python examples/search/three_clusters.py
"""

from pathlib import Path

import foretrain as ft

LAYERS = 8
SCRIPT = Path(__file__).parents[1] / "simulate/tensor_parallel.py"
SPACE = {
    "values": {"tp": [1, 2, 4, 8], "batch": [1, 2]},
    "require": ["tp <= gpus"],
    "tokens": "batch * 4096 * world // tp",  # each group of tp GPUs has a batch of its own
    "memory": {"grows": ["batch"]},
}


def main() -> None:
    words = [str(SCRIPT), "--tp={tp}", "--batch={batch}", f"--layers={LAYERS}"]
    for cluster in ("dgx-a100:2", "dgx-h100:2", "dgx-h200:2"):
        result = ft.search(words, SPACE, cluster)
        account, tokens = result.found.winner.account, result.best.tokens
        rate = tokens / account.time / result.world
        print(f"{cluster}: {result.best}; {rate:,.0f} tokens/s/GPU")
        print("".join(f"  {line}\n" for line in result.bill.lines(account, tokens)))


if __name__ == "__main__":
    main()
