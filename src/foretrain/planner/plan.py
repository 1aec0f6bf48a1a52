"""A plan to keep: what was chosen, what it was expected to bring, and what it was chosen for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foretrain.network import Cluster, Exchange, Place
from foretrain.planner.backends import engine_of
from foretrain.planner.choice import Recommendation
from foretrain.schedule import POLICIES, CostModel, Spec
from foretrain.units import Time, format_size, format_time
from foretrain.workload.step import Workload

_CLOSE = 0.1
"""Measured times that differ by less are the same."""
_TIMES = 2.0
"""Costs of an operation that differ by less than this factor are."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for, by what decides about schedules.

    Attributes:
        workload: its name, for people.
        cluster: its description, for people.
        tensors: gradients.
        size: their bytes on the wire.
        compute: Σb + Σf.
        ranks: N of the exchange: hosts, or the ranks of a topology.
        exchange: how long all gradients take on the link alone.
        overhead: θ.
    """

    workload: str
    cluster: str
    tensors: int
    size: int
    compute: Time
    ranks: int
    exchange: Time
    overhead: Time

    def differences(self, here: Fingerprint) -> Iterator[str]:
        """What is not as it was, one text each; names of workloads and clusters do not count."""
        if here.tensors != self.tensors:
            yield f"{here.tensors} gradients, planned for {self.tensors}"
        if here.size != self.size:
            yield f"{format_size(here.size)} of gradients on the wire, planned for {format_size(self.size)}"
        if here.ranks != self.ranks:
            yield f"{here.ranks} ranks exchange them, planned for {self.ranks}"
        if not _near(here.compute, self.compute, 1 + _CLOSE):
            yield f"a step computes for {format_time(here.compute)}, planned for {format_time(self.compute)}"
        if not _near(here.exchange, self.exchange, 1 + _CLOSE):
            yield f"gradients take {format_time(here.exchange)} on the link, planned for {format_time(self.exchange)}"
        if not _near(here.overhead, self.overhead, _TIMES):
            yield f"an operation costs {format_time(here.overhead)}, planned for {format_time(self.overhead)}"


def fingerprint(workload: Workload, place: Place | None, cost: CostModel, ranks: int) -> Fingerprint:
    """Of what is trained, with its bytes on the wire, on a network of ``cost``; ``place`` may not be known."""
    return Fingerprint(
        workload=f"{workload.name}, batch {workload.batch}",
        cluster="" if place is None else str(place),
        tensors=len(workload.gradients),
        size=workload.size,
        compute=workload.compute,
        ranks=ranks,
        exchange=cost.time(workload.size),
        overhead=cost.overhead,
    )


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What was chosen, as a plan file has it.

    Attributes:
        schedule: the policy with its knobs.
        engine: how gradients become sums.
        servers: of their own, with the engine "ps".
        compression: None, "fp16" or "bf16".
        time: of an iteration, expected.
        baseline: of DDP at its best, expected.
        uncertainty: one standard deviation of the gain.
        made_for: the workload and the cluster.
    """

    schedule: Spec
    engine: Exchange
    servers: int
    compression: str | None
    time: Time
    baseline: Time
    uncertainty: float
    made_for: Fingerprint

    @property
    def gain(self) -> float:
        """Expected, over DDP at its best."""
        return self.baseline / self.time - 1

    def differences(
        self, here: Fingerprint, served: bool | None = None, compression: str | None = None
    ) -> tuple[str, ...]:
        """What is not as it was planned, one text each.

        Args:
            here: of what is to run.
            served: whether over a parameter server; None does not compare.
            compression: what gradients are sent as.
        """
        found = list(self.made_for.differences(here))
        if served is not None and served != (self.engine != "all_reduce"):
            how = "a parameter server" if served else "all-reduce"
            found.insert(0, f"gradients go by {how}, planned for {self.engine}")
        if compression != self.compression:
            planned = self.compression or "no compression"
            found.insert(0, f"gradients are sent as {compression or 'they are'}, planned for {planned}")
        return tuple(found)


def saved(choice: Recommendation) -> SavedPlan:
    """``choice`` to keep."""
    chosen, place = choice.chosen, choice.chosen.place
    ranks = place.workers if isinstance(place, Cluster) else place.total_gpus
    assert choice.baseline.time is not None
    return SavedPlan(
        schedule=_spelled_out(chosen.schedule),
        engine=engine_of(place),
        servers=place.servers if isinstance(place, Cluster) else 0,
        compression=chosen.compression,
        time=choice.time,
        baseline=choice.baseline.time,
        uncertainty=choice.uncertainty,
        made_for=fingerprint(chosen.workload, place, place.cost, ranks),
    )


def _spelled_out(plan: Spec) -> Spec:
    """``plan`` with every knob that a search may have left at its default, so that it stays what it is."""
    tuned = {knob.name: plan.settings[knob.name] for knob in POLICIES[plan.name].knobs if knob.tunable}
    return Spec(plan.name, {**tuned, **plan.knobs})


def _near(one: Time, other: Time, factor: float) -> bool:
    low, high = sorted((max(1, one), max(1, other)))
    return high <= low * factor
