"""What a network is to carry: flows over links, with dependencies, in columns. What the kernels run.

A flow is a persistent channel over one path that sends ``size`` bytes in each of its ``steps``; see
`foretrain.collective.plan` for the rule of dependencies, which is the same here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The links of each flow, in the order in which bytes cross them.

    Attributes:
        first: int32 (flows + 1,), compressed sparse rows over ``links``.
        links: int32 (hops,).
    """

    first: NDArray[np.int32]
    links: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.first) - 1

    def of(self, flow: int) -> NDArray[np.int32]:
        """The links of one flow."""
        return self.links[self.first[flow] : self.first[flow + 1]]

    def gather(self, flows: NDArray[np.integer]) -> Paths:
        """The paths of ``flows``, which may repeat."""
        lengths = np.diff(self.first)[flows]
        first = np.zeros(len(flows) + 1, np.int32)
        np.cumsum(lengths, out=first[1:])
        inside = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
        return Paths(first, self.links[np.repeat(self.first[flows], lengths) + inside])

    @classmethod
    def stacked(cls, several: Sequence[Paths]) -> Paths:
        """All of them, those of the first before those of the second; there is at least one."""
        hops = np.cumsum([0, *(len(paths.links) for paths in several)])
        first = np.concatenate([[0], *(paths.first[1:] + hops[i] for i, paths in enumerate(several))])
        return cls(first.astype(np.int32), np.concatenate([paths.links for paths in several]))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Flows in columns; column lengths are (flows,) unless said.

    Attributes:
        paths: the links of each flow; an empty path costs its latency alone.
        size: bytes of one step, float64, not negative.
        steps: int32, at least 1.
        latency: ps before the bytes of each step begin to arrive, float64: propagation and software.
        release: ps at which a flow may start at the earliest, float64.
        weight: share of a bottleneck in relation to others, float64, positive.
        priority: int32; flows of a lower number take all they can before higher ones get anything.
        first: int32 (flows + 1,), compressed sparse rows over ``after``.
        after: int32 (dependencies,), a flow waited for.
        lag: int32 (dependencies,), how far it must be ahead.
        others: more paths of each flow, which its packets take in turn with ``paths``; a fluid knows the one alone.
    """

    paths: Paths
    size: NDArray[np.float64]
    steps: NDArray[np.int32]
    latency: NDArray[np.float64]
    release: NDArray[np.float64]
    weight: NDArray[np.float64]
    priority: NDArray[np.int32]
    first: NDArray[np.int32]
    after: NDArray[np.int32]
    lag: NDArray[np.int32]
    others: tuple[Paths, ...] = ()

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def of(
        cls,
        paths: Paths,
        size: NDArray[np.float64],
        *,
        steps: NDArray[np.int32] | None = None,
        latency: NDArray[np.float64] | None = None,
        release: NDArray[np.float64] | None = None,
        weight: NDArray[np.float64] | None = None,
        priority: NDArray[np.int32] | None = None,
        first: NDArray[np.int32] | None = None,
        after: NDArray[np.int32] | None = None,
        lag: NDArray[np.int32] | None = None,
        others: tuple[Paths, ...] = (),
    ) -> Program:
        """A program with defaults: one step each, no latency, no dependencies, all alike. Checked."""
        count = len(paths)
        none = np.zeros(0, np.int32)
        made = cls(
            paths=paths,
            size=np.asarray(size, np.float64),
            steps=np.ones(count, np.int32) if steps is None else steps,
            latency=np.zeros(count) if latency is None else latency,
            release=np.zeros(count) if release is None else release,
            weight=np.ones(count) if weight is None else weight,
            priority=np.zeros(count, np.int32) if priority is None else priority,
            first=np.zeros(count + 1, np.int32) if first is None else first,
            after=none if after is None else after,
            lag=none if lag is None else lag,
            others=others,
        )
        made.check()
        return made

    def check(self) -> None:
        """ConfigError, naming the column and the flow, where a value is impossible."""
        count = len(self)
        for paths in self.others:
            if len(paths) != count:
                raise ConfigError("program.others", len(paths), "is not one path per flow", f"give {count}")
        for name in ("steps", "latency", "release", "weight", "priority"):
            if len(getattr(self, name)) != count:
                raise ConfigError(f"program.{name}", len(getattr(self, name)), "is not one per flow", f"give {count}")
        for name, wrong, problem in (
            ("size", ~(np.isfinite(self.size) & (self.size >= 0)), "is not a size in bytes"),
            ("steps", self.steps < 1, "is below 1"),
            ("latency", ~(np.isfinite(self.latency) & (self.latency >= 0)), "is not a time"),
            ("release", ~(np.isfinite(self.release) & (self.release >= 0)), "is not a time"),
            ("weight", ~(np.isfinite(self.weight) & (self.weight > 0)), "is not a positive weight"),
        ):
            if wrong.any():
                flow = int(np.flatnonzero(wrong)[0])
                raise ConfigError(
                    f"program.{name}[{flow}]", getattr(self, name)[flow].item(), problem, "give a finite number"
                )
        if len(self.after) and not 0 <= self.after.min() <= self.after.max() < count:
            raise ConfigError("program.after", int(self.after.max()), "is no flow", f"flows are 0 to {count - 1}")


def joined(programs: list[Program]) -> Program:
    """Programs that run at the same time, independent of each other."""
    starts = np.cumsum([0, *map(len, programs)])
    waits = np.cumsum([0, *(len(p.after) for p in programs)])

    def column(name: str) -> NDArray:
        return np.concatenate([getattr(p, name) for p in programs])

    return Program(
        paths=Paths.stacked([p.paths for p in programs]),
        # Whose flows have fewer ways takes them more often.
        others=tuple(
            Paths.stacked([(p.paths, *p.others)[way % (1 + len(p.others))] for p in programs])
            for way in range(1, 1 + max(len(p.others) for p in programs))
        ),
        first=np.concatenate([[0], *(p.first[1:] + waits[i] for i, p in enumerate(programs))]).astype(np.int32),
        after=np.concatenate([p.after + starts[i] for i, p in enumerate(programs)]).astype(np.int32),
        **{name: column(name) for name in ("size", "steps", "latency", "release", "weight", "priority", "lag")},
    )
