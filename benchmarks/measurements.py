"""Published measurements of collectives: reads the compact table beside it, or the long one it was distilled from.

The compact table has one line a measurement: source, gpu, operation, ranks, size in bytes (as in `Plan.size`), the
algorithm where it is known, seconds, the library, and the bytes/s between servers where there are several. Lines that
begin with # say where the numbers are from.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import cast

from foretrain.collective.nccl import GPUS, Algorithm, Choice, bus_factor, choose
from foretrain.collective.plan import Operation
from foretrain.units import MICROSECOND, SECOND, Time

COMPACT = Path(__file__).parent / "data" / "collectives.csv"
ATTRIBUTION = """\
# Measured times of NCCL collectives, 1 row a measurement; see benchmarks/measurements.py for the columns.
# coll-aiconfigurator: NVIDIA aiconfigurator 0.8.0, systems/data/*/nccl/*/nccl_perf.txt, Apache-2.0. Its sizes count
#   elements of two bytes and are bytes here.
# coll-h200, coll-b200, coll-b200-aws: Stas Bekman, Machine Learning Engineering Open Book, network/README.md at
#   744d01e18b, CC BY-SA 4.0: https://github.com/stas00/ml-engineering. Times are derived from its bus bandwidths.
"""
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

OVERHEAD: Time = 20 * MICROSECOND
"""What timing each call from PyTorch adds (coll-b200-aws); fitted with Blackwell's curves."""

EFA_LATENCY: Time = 78 * MICROSECOND
"""A hop over Amazon's EFA beyond NCCL's constants; fitted on the 32-rank rows of coll-b200-aws."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row; see the top of the file."""

    source: str
    gpu: str
    operation: Operation
    ranks: int
    size: int
    algorithm: str
    seconds: float
    library: str
    inter_rate: float

    @property
    def system(self) -> str:
        """Whose numbers on what: rows of one system are comparable."""
        return f"{self.gpu} {self.source.removeprefix('coll-')}"

    @property
    def large(self) -> bool:
        """1 MiB or more."""
        return self.size >= 2**20

    def forecast(self, overhead: Time = OVERHEAD, efa_latency: Time = EFA_LATENCY) -> Choice:
        """What the model says; a ring only where the measurement says so, as NVLS had been switched off."""
        return choose(
            self.operation,
            self.size,
            self.ranks,
            self.gpu,
            inter_rate=self.inter_rate or None,
            network_latency=efa_latency if self.inter_rate else 0,
            overhead=overhead if self.library.startswith("torch") else 0,
            algorithm="ring" if self.algorithm == "ring" else None,
        )

    def error(self) -> float:
        """Relative, of the time."""
        return self.forecast().time / (self.seconds * SECOND) - 1


def read(path: Path) -> list[Measurement]:
    """All rows that are collectives on a known GPU, and whose network is known where they need one."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    if rows and "seconds" in rows[0]:
        return [_compact(row) for row in rows]
    found = [one for row in rows for one in _long(row)]
    print(f"{path.name}: {len(rows)} rows, {len(found)} measurements of collectives")
    return found


def write(path: Path, measurements: list[Measurement]) -> None:
    """The compact table."""
    with path.open("w", newline="") as file:
        file.write(ATTRIBUTION)
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(Measurement)])
        table.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(one)] for one in measurements)


def _compact(row: dict[str, str]) -> Measurement:
    return Measurement(
        row["source"],
        row["gpu"],
        cast(Operation, row["operation"]),
        int(row["ranks"]),
        int(row["size"]),
        row["algorithm"],
        float(row["seconds"]),
        row["library"],
        float(row["inter_rate"]),
    )


def _long(row: dict[str, str]) -> Iterator[Measurement]:
    gpu = re.match(r"[A-Za-z]+\d+S?", row["gpu"])
    size = re.search(r"(\d+)(B|KiB|MiB|GiB)\b", row["model"])
    if row["kind"] != "collective" or gpu is None or gpu[0] not in GPUS or size is None:
        return
    operation = cast(Operation, row["model"].split()[0].replace("alltoall", "all_to_all"))
    known: Algorithm | str = next((a.lower() for a in ("NVLS", "Ring") if a in row["model"]), "")
    ranks, amount = int(row["n_gpus"]), int(size[1]) * _UNITS[size[2]]
    between = re.search(r"([\d.]+)GB/s per GPU", row["interconnect"])
    rate = float(between[1]) * 1e9 if between else 0.0
    if ranks > GPUS[gpu[0]].server and not rate:
        return
    rates = re.findall(r"(busbw|NVLS off) ([\d.]+)", row["other_metric"])
    times = {known: float(row["iter_time_s"])} if row["iter_time_s"] else {}
    if not times:
        moved = amount * bus_factor(operation, ranks) / 1e9
        # In this order, so that what was measured with NVLS off does not hide the same with NVLS allowed.
        times = {"ring" if name == "NVLS off" else known: moved / float(value) for name, value in reversed(rates)}
    for algorithm, seconds in times.items():
        yield Measurement(row["family"], gpu[0], operation, ranks, amount, algorithm, seconds, row["framework"], rate)
