"""What a live simulation costs: CPU time of a rank's step, time of an iteration however many GPUs, memory, the start.

Llama 3 8B, sequence 4,096, bf16, AdamW, gradient clipping, on simulated H200s (live_script.py):
    plain, ddp, fsdp2   CPU seconds that one live rank spends on a step, everything included, and what of its memory is
                        its own; the baseline is PyTorch's own way of running a model without data, FakeTensorMode
    folded              seconds per iteration of FSDP2 on 1,024 and 16,384 GPUs of which one is live
    live128             seconds per iteration of DistributedDataParallel with 128 ranks, all live
    start               seconds from the command to the first forecast of a small script, device compiled
Steps are measured in the order in which they come, after two to warm up. Targets: plain 40 ms, ddp 45 ms, fsdp2 120 ms;
1,024 folded 1 s, 16,384 folded 10 s; 128 live 5 s; 60 MiB private; start 15 s.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import finish, options, spread

from foretrain.live.rank_trace import StepBreakdown
from foretrain.live.refold import Live, ProgressCallbacks
from foretrain.live.simulate import simulate
from foretrain.network.deployment_notation import deployment

HERE = Path(__file__).parent
SCRIPT = str(HERE / "live_script.py")
WARMUP = 2
LINE = re.compile(r"rank (\d+) cpu (\S+) private (\d+)")


def run(cluster: str, arguments: Sequence[str], live: Live = "auto") -> tuple[list[float], list[int], list[float]]:
    """CPU seconds and private bytes of each step of all live ranks after the warm-up, and seconds between steps."""
    times: dict[int, list[float]] = {}

    def stepped(rank: int, step: StepBreakdown) -> None:
        times.setdefault(step.number, []).append(time.perf_counter())

    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        try:
            where = deployment(cluster).carried_by("nccl")
            simulate([SCRIPT, *arguments], where, live=live, watch=ProgressCallbacks(stepped=stepped))
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        said.seek(0)
        found = LINE.findall(said.read().decode())
    by_rank: dict[str, list[tuple[float, int]]] = {}
    for rank, cpu, private in found:
        by_rank.setdefault(rank, []).append((float(cpu), int(private)))
    steady = [one for ones in by_rank.values() for one in ones[WARMUP:]]
    # A step is over when its last rank has made it.
    ends = [max(times[number]) for number in sorted(times)]
    gaps = [after - before for before, after in itertools.pairwise(ends)][WARMUP - 1 :]
    return [cpu for cpu, _ in steady], [private for _, private in steady], gaps


def fake_tensor_mode(steps: int) -> float:
    """CPU seconds of a step of the same model in PyTorch's FakeTensorMode, forward, backward and optimizer."""
    code = (
        "import sys, time, torch; sys.path.insert(0, sys.argv[1])\n"
        "from torch._subclasses import FakeTensorMode\n"
        "import live_script, torch.nn.functional as f\n"
        "torch.set_num_threads(1)\n"
        "with FakeTensorMode(), torch.device('cpu'):\n"
        "    torch.set_default_dtype(torch.bfloat16)\n"
        "    model = live_script.Llama(); optimizer = torch.optim.AdamW(model.parameters())\n"
        "    for _ in range(int(sys.argv[2])):\n"
        "        began = time.process_time()\n"
        "        tokens = torch.randint(0, live_script.WORDS, (1, 4097))\n"
        "        logits = model(tokens[:, :-1])\n"
        "        f.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()\n"
        "        optimizer.step(); optimizer.zero_grad()\n"
        "        print(time.process_time() - began)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE), str(steps)], capture_output=True, text=True, check=True
    )
    return statistics.median(map(float, done.stdout.split()[1:]))


def start() -> float:
    """Seconds of the whole command on the smallest example."""
    example = HERE.parent / "examples/simulate/cnn_ddp.py"
    begin = time.perf_counter()
    command = [sys.executable, "-m", "foretrain", "simulate", "--cluster", "dgx-h100:1", "--steps", "3", "--"]
    subprocess.run([*command, str(example)], check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measures, prints, and writes JSON if asked."""
    arguments = options(__doc__)
    steps = 17 if not arguments.quick else 7
    results: dict[str, float] = {}
    details: dict[str, list[float]] = {}
    for mode in ("plain", "ddp", "fsdp2"):
        cpu, private, _ = run("dgx-h200:16", [mode, "--steps", str(steps)])
        details[mode] = cpu
        key = "llama8b_cpu_ms" if mode == "plain" else f"{mode}_cpu_ms"
        results[key] = statistics.median(cpu) * 1e3
        results["private_mib"] = max(results.get("private_mib", 0), statistics.median(private) / 2**20)
        print(
            f"{mode:8s} CPU of a step {spread([one * 1e3 for one in cpu])} ms, private {max(private) / 2**20:.0f} MiB"
        )
    baseline = fake_tensor_mode(3)
    results["fake_tensor_ratio"] = baseline * 1e3 / results["llama8b_cpu_ms"]
    print(f"FakeTensorMode {baseline * 1e3:.0f} ms: {results['fake_tensor_ratio']:.0f} times as much as plain")
    for servers in (128,) if arguments.quick else (128, 2048):
        gpus = servers * 8
        _, _, gaps = run(f"dgx-h200:{servers}", ["fsdp2", "--steps", str(steps)])
        details[f"folded{gpus}"] = gaps
        results[f"folded{gpus}_s"] = statistics.median(gaps)
        print(f"folded   {gpus:,} GPUs, FSDP2: {spread(gaps)} s per iteration")
    if not arguments.quick:
        _, private, gaps = run("dgx-h200:16", ["ddp", "--steps", "5"], live="all")
        details["live128"] = gaps
        results["live128_s"] = statistics.median(gaps)
        print(
            f"128 live ranks, DDP: {spread(gaps)} s per iteration, private {statistics.median(private) / 2**20:.0f} MiB"
        )
    results["start_s"] = min(start() for _ in range(2))
    print(f"command to forecast of a small script: {results['start_s']:.1f} s")
    finish(arguments, "live", results, details)


if __name__ == "__main__":
    main()
