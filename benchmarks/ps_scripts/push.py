"""One worker of ps.py: pushes messages of 1 MiB through the servers and says how fast that went.

    push.py RATE SERIES

RATE is that of the servers' links together, bytes/s; it only sets how many messages a series has. One line of JSON from
every rank for every series: seconds per message, and the shares of a core that this worker and, on rank 0, all servers
together took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from foretrain.comm.ps.client.connection import Links
from foretrain.comm.ps.client.probing import PushProbe
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.lab.servers import PIDS
from foretrain.launch.command import SECRET, SERVERS

SIZE = 1 << 20
JOB = "throughput"
DEPTH = 4
LEAST, SECONDS = 64, 1.5
"""Messages and, about, seconds of a series: the first and the last cross one direction alone, and must be few."""


def busy(pid: int) -> float:
    """Seconds of a core that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Connects, warms up, and measures."""
    rate, series = float(sys.argv[1]), int(sys.argv[2])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    places = [each.rpartition(":") for each in os.environ[SERVERS].split(",")]
    secret = bytes.fromhex(os.environ[SECRET])
    links = Links([(host, int(port)) for host, _, port in places], secret, JOB, rank)
    links.establish(30)
    probe = PushProbe(links, workers, JOB, 0, stall_timeout=60)
    probe.series(SIZE, 4 * DEPTH, DEPTH)
    count = max(LEAST, round(SECONDS * rate / (workers * SIZE)))
    servers = [int(pid) for pid in os.environ[PIDS].split(",")] if not rank else []
    for _ in range(series):
        before, own = sum(map(busy, servers)), time.process_time()
        each = probe.series(SIZE, count, DEPTH) / 1e9
        took = each * count
        told = {"seconds": each, "worker": (time.process_time() - own) / took}
        told["servers"] = (sum(map(busy, servers)) - before) / took
        print(json.dumps(told), flush=True)
    for connection in links.connections:
        connection.send(Header(FrameKind.BYE))
    links.close(2)


if __name__ == "__main__":
    main()
