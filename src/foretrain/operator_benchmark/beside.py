"""Other processes that compute while operators are measured, as ranks do that share a machine's cores and memory.

``python -m foretrain.operator_benchmark.beside [OPERATORS]`` computes what the file says, or a small training step,
with one thread. It writes a line once it does, and ends when its standard input is closed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def others(count: int, operators: Path | None) -> Iterator[None]:
    """``count`` processes that compute ``operators`` for as long as the block runs."""
    command = [sys.executable, "-m", "foretrain.operator_benchmark.beside", *([str(operators)] if operators else [])]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(process)
            stack.callback(_end, process)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.stdin, process.stdout):
        assert end is not None
        end.close()
    process.wait()


def main(path: str | None) -> None:
    """Computes until standard input is closed."""
    import torch

    from foretrain.device import calls
    from foretrain.operator_benchmark.host import usual
    from foretrain.operator_benchmark.replay import Unrepeatable, replay

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    device = torch.device("cpu")
    runs = []
    for call in calls.load(path) if path else usual(device):
        try:
            runs.append(replay(call, device).run)
        except Unrepeatable:
            continue
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    sys.stdout.write("computing\n")
    sys.stdout.flush()
    with torch.no_grad():
        while not over.is_set():
            for run in runs:
                run()
            if not runs:
                over.wait()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
