"""What every benchmark shares: options, interleaved timing, the machine's description, the RESULT line."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any


def options(
    description: str,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
    *,
    full: str = "everything (the default where --quick is not given)",
) -> argparse.Namespace:
    """--quick, --full and --json FILE; ``more`` adds a benchmark's own, ``full`` is the help of --full. From here on
    SIGTERM ends it as Ctrl-C does, so that labs and processes end with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 s, if no time is named above")
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    if more is not None:
        more(parser)
    return parser.parse_args()


def interleaved(cases: Mapping[str, Callable[[], Any]], samples: int = 15, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each case: round after round over all cases, so that drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + samples):
        for name, case in cases.items():
            gc.collect()
            began = time.perf_counter()
            case()
            if turn >= warmup:
                times[name].append(time.perf_counter() - began)
    return times


def spread(values: list[float]) -> str:
    """Median and the middle half of the values."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return f"{median(ordered):.4g} [{ordered[quarter]:.4g}, {ordered[-1 - quarter]:.4g}]"


def child(code: str, **environment: str) -> dict[str, float]:
    """What a Python process of its own prints last, as JSON."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise SystemExit(made.stderr)
    return json.loads(made.stdout.splitlines()[-1])


def machine() -> dict[str, str | int]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    here = Path(__file__).parent
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def written(record: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and one for each of the details where they are a list: what a diff shows well."""
    parts = []
    for key, value in record.items():
        shown = json.dumps(value)
        if key == "details" and isinstance(value, list):
            shown = "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
        elif key == "details":
            shown = json.dumps(value, indent=2)
        parts.append(f"{json.dumps(key)}: {shown}")
    return "{" + ",\n".join(parts) + "}\n"


def finish(
    arguments: argparse.Namespace,
    name: str,
    values: Mapping[str, float],
    details: Any = None,
    *,
    seed: int | None = None,
) -> None:
    """Writes the JSON where asked for and prints the RESULT line, the last one.

    ``seed`` is that of everything random; None where nothing is: what is measured varies all the same.
    """
    if arguments.json:
        record = {"name": name, "machine": machine(), "seed": seed, "values": dict(values), "details": details}
        arguments.json.write_text(written(record))
    print(f"\n{machine()}")
    print(f"RESULT name={name} " + " ".join(f"{key}={value:.6g}" for key, value in values.items()))
