"""What several commands ask for: a workload and a cluster."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from foretrain.device import Precision
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from foretrain.network import Place
    from foretrain.workload import Workload


PREPARING = "preparing the network (on first use its simulator is compiled, which takes some 10 s)"
"""Why it takes so long."""


@dataclass(frozen=True, slots=True)
class WorkloadOnCluster:
    """A workload on a cluster.

    Attributes:
        workload: a model of the zoo (foretrain catalog lists them) or a recorded workload's .toml file.
        cluster: e.g. 4x8xV100@100Gbps, "4 workers @ 1Gbps", 4x1xV100@10Gbps,ps=2, dgx-h100:16, a topology such as
            bigraph:8x4@100Gbps,collective=hdrm, or a .toml or .graphml file.
        batch: samples per GPU; models of the zoo only.
        precision: of computation and gradients; models of the zoo only.
        throughput: samples/s that one GPU reaches alone, if measured; models of the zoo only.
    """

    workload: Annotated[str, tyro.conf.Positional]
    cluster: str
    batch: int | None = None
    precision: Precision | None = None
    throughput: float | None = None

    def read(self) -> tuple[Workload, Place]:
        """Both, validated."""
        from foretrain.network import cluster
        from foretrain.network.notation import DEFAULT_DEVICE
        from foretrain.workload import load, zoo

        with patience(PREPARING):
            place = cluster(self.cluster)
        if self.workload.endswith(".toml") or Path(self.workload).is_file():
            for field in ("batch", "precision", "throughput"):
                if (value := getattr(self, field)) is not None:
                    raise ConfigError(field, value, "does not apply to a recorded workload", "leave it out")
            # Its times are from where it was recorded, whatever GPU the cluster names.
            return load(self.workload), dataclasses.replace(place, device=None)
        work = zoo(
            self.workload,
            batch=self.batch,
            device=place.device or DEFAULT_DEVICE,
            precision=self.precision,
            throughput=self.throughput,
        )
        return work, place


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Says ``what`` takes so long, on stderr, if the block does not end within two seconds."""
    late = threading.Timer(2.0, lambda: sys.stderr.write(f"foretrain: {what}\n"))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def check_writable(**paths: Path | None) -> None:
    """ConfigError for an output that cannot be written, before any work is done."""
    seen: dict[Path, str] = {}
    for field, path in paths.items():
        if path is None:
            continue
        if (other := seen.setdefault(path.resolve(), field)) != field:
            raise ConfigError(field, str(path), f"is what {other} is written to", "name another file")
        if not path.resolve().parent.is_dir():
            raise ConfigError(field, str(path), "is in a folder that does not exist", "make the folder first")
        if path.is_dir():
            raise ConfigError(field, str(path), "is a folder", "name a file")


def check_apart(source: str | Path, **paths: Path | None) -> None:
    """ConfigError for an output that would replace the file that is read."""
    for field, path in paths.items():
        if path is not None and path.resolve() == Path(source).resolve():
            raise ConfigError(field, str(path), "is the file that is read", "name another")


def asked(schedule: str | None, plan: Path | None) -> str | None:
    """The schedule that two options name, one of which may be given; a plan file by its whole path."""
    if plan is None:
        return str(Path(schedule).resolve()) if schedule and schedule.endswith(".toml") else schedule
    if schedule is not None:
        raise ConfigError("plan", str(plan), f"contradicts --schedule {schedule}", "give one of them")
    if plan.suffix != ".toml":
        raise ConfigError("plan", str(plan), "does not end in .toml", "give a file that foretrain tune wrote")
    return str(plan.resolve())


def split(text: str) -> list[str]:
    """Splits ``"ddp,bytescheduler(partition=1MB, credit=4MB)"`` at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
