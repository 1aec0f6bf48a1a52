"""Where the CPU time of a message goes: ps.py's workers and server under perf and py-spy.

    breakdown.py SECONDS

perf samples all threads of all three processes for so long, the kernel with its callers; then py-spy the first worker,
whose Python it tells apart by function. Prints shares in per cent. Needs root, perf and py-spy.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from foretrain.lab.servers import PIDS
from foretrain.launch.child_processes import ServerProcess, end_servers, server_command
from foretrain.launch.command import SECRET, SERVERS

WORKERS, CHUNK = 2, 64 << 10
STEPS = 100_000
"""More than there is time for: the workers are ended."""
PYTHON = (
    ("copy for resending", r"\S*fill \("),
    ("policy", r"foretrain/(schedule|engine)"),
    ("push log", r"ps/client/push_log"),
    ("what is in flight", r"ps/client/inflight"),
    ("messages to and from C++", r"ps/(wire|client/connection|frames)"),
    ("loop", r"ps/client/exchange|comm/event_loop"),
)
"""By the innermost function that one of these patterns finds."""
KERNEL = (
    ("kernel: send, and receive on the other side of loopback", r"sendmsg|sock_write"),
    ("kernel: receive", r"recvmsg|sock_read"),
    ("kernel: waits and wake-ups", r"futex|poll|eventfd|ksys_(read|write)|schedule"),
    ("kernel: other", r""),
)
"""By any caller."""


def sampled(seconds: float, pids: list[int], folder: Path) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield process and stack (symbol and file, innermost first) of each sample of perf."""
    file = folder / "perf.data"
    which = ",".join(map(str, pids))
    record = ["perf", "record", "-q", "-F", "1999", "-e", "cpu-clock", "-g", "-p", which, "-o", str(file)]
    subprocess.run([*record, "--", "sleep", str(seconds)], check=True)
    script = ["perf", "script", "-i", str(file), "-F", "pid,tid,ip,sym,dso"]
    told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    for block in told.strip().split("\n\n"):
        head, *lines = block.splitlines()
        process = int(head.strip().partition("/")[0])
        frames = (re.match(r"\s*[0-9a-f]+ (.*) \((.*)\)$", line) for line in lines)
        yield process, [(frame[1], frame[2]) for frame in frames if frame]


def place(stack: list[tuple[str, str]]) -> str:
    """Return what a sample belongs to."""
    symbol, file = stack[0]
    if "kernel" in file or file.startswith("["):
        names = " ".join(name for name, where in stack if "kernel" in where or where.startswith("["))
        return next(what for what, pattern in KERNEL if re.search(pattern, names))
    if "collectives-" in file or "_runners" in file:
        if re.search(r"[Gg]mac|ghash|clmul|aes", symbol):
            return "tags"
        return "sums" if re.search(r"total_|add_up|widen|round_", symbol) else "C++: the rest"
    if "libc" in file or "ld-linux" in file:
        return "copies" if re.search(r"mem(cpy|move|set)", symbol) else "libc"
    return "Python"


def functions(seconds: float, pid: int, folder: Path) -> Counter[str]:
    """Return samples of py-spy, by what they are in, of the thread that has Python's lock, so that no wait counts."""
    file = folder / "py-spy.txt"
    record = ["py-spy", "record", "--gil", "-p", str(pid), "-d", str(round(seconds)), "-r", "500", "-f", "raw"]
    subprocess.run([*record, "-o", str(file)], check=True, capture_output=True)
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")[::-1]
        what = next((what for frame in frames for what, pattern in PYTHON if re.search(pattern, frame)), "other")
        found[what] += int(count)
    return found


def show(title: str, counts: Counter[str]) -> None:
    """A line for each share."""
    total = sum(counts.values())
    print(f"{title} ({total} samples):")
    for what, count in counts.most_common():
        print(f"  {count / total:6.1%}  {what}")


def main() -> None:
    """Starts a server and workers, and profiles them."""
    seconds = float(sys.argv[1])
    environment = os.environ | {SECRET: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    server = ServerProcess(server_command("127.0.0.1:0", WORKERS, 0, 1, 60), env=environment)
    workers: list[subprocess.Popen[str]] = []
    try:
        environment |= {SERVERS: server.address() or "", PIDS: str(server.pid), "WORLD_SIZE": str(WORKERS)}
        script = str(Path(__file__).with_name("messages.py"))
        for rank in range(WORKERS):
            command, own = [sys.executable, script, str(CHUNK), str(STEPS)], environment | {"RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
        assert workers[0].stdout is not None
        json.loads(workers[0].stdout.readline())  # it is warm
        with tempfile.TemporaryDirectory() as name:
            folder, pids = Path(name), [server.pid, *(worker.pid for worker in workers)]
            by_end = {"server": Counter[str](), "workers": Counter[str]()}
            for process, stack in sampled(seconds, pids, folder):
                if stack:
                    by_end["server" if process == server.pid else "workers"][place(stack)] += 1
            for title, counts in by_end.items():
                show(title, counts)
            show("Python of a worker", functions(seconds, workers[0].pid, folder))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        end_servers([server])


if __name__ == "__main__":
    main()
