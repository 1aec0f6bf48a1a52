"""One point of a sweep, whole: what a worker needs to simulate it, and an id that its content decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from foretrain.device import Precision
from foretrain.experiments.values import Value
from foretrain.workload import Workload, zoo


@dataclass(frozen=True, slots=True)
class Source:
    """Where a workload comes from: the zoo, with what was asked of it, or a file.

    Attributes:
        name: the model's name, or that in the file.
        digest: of the file's content; empty for the zoo.
        recorded: what the file holds, so that workers need not have it.
    """

    name: str
    batch: int | None = None
    precision: Precision | None = None
    device: str | None = None
    sequence: int | None = None
    throughput: float | None = None
    digest: str = ""
    recorded: Workload | None = field(default=None, compare=False, repr=False)

    def build(self, device: str) -> Workload:
        """The workload; a model of the zoo on ``device`` unless it names its own. Raises ConfigError."""
        if self.recorded is not None:
            return self.recorded
        return zoo(
            self.name,
            batch=self.batch,
            device=self.device or device,
            precision=self.precision,
            throughput=self.throughput,
            sequence=self.sequence,
        )

    def content(self) -> dict[str, Any]:
        """What decides it: of a file what is in it, not what it is called."""
        if self.digest:
            return {"digest": self.digest}
        names = ("name", "batch", "precision", "device", "sequence", "throughput")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Where:
    """A cluster by its notation.

    Attributes:
        notation: as `foretrain.network.cluster` takes it.
        digest: of the content of the file that the notation names; empty where it names none.
        axes: what the placeholders of the notation stood for.
    """

    notation: str
    digest: str = ""
    axes: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    def content(self) -> str:
        """What decides it: of a file what is in it, not what it is called."""
        _, *options = self.notation.split(",")
        return ",".join([self.digest, *options]) if self.digest else self.notation


@dataclass(frozen=True, slots=True)
class Scenario:
    """A point of a sweep.

    Attributes:
        source: what is trained.
        where: on which cluster.
        schedule: under which policy, in its notation.
        tuned: whether the knobs that ``schedule`` leaves free are searched for their best.
        baseline: what the speed-up is counted from, in its notation; its free knobs are searched.
        jitter: spread of the layer times.
        seed: of the jitter.
    """

    source: Source
    where: Where
    schedule: str
    tuned: bool
    baseline: str
    jitter: float = 0.0
    seed: int = 0

    @property
    def id(self) -> str:
        """20 hexadecimal digits that depend on nothing but what is simulated: neither on order nor on names of axes."""
        content = {
            "workload": self.source.content(),
            "cluster": self.where.content(),
            "schedule": self.schedule,
            "tuned": self.tuned,
            "baseline": self.baseline,
            "jitter": self.jitter,
            "seed": self.seed,
        }
        return hashlib.blake2b(msgspec.json.encode(content, order="sorted"), digest_size=10).hexdigest()


def digest(path: Path) -> str:
    """What tells the content of the file at ``path`` from any other."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
