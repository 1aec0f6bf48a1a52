"""What simulating one scenario gives, in seconds, bytes and bytes per second."""

from __future__ import annotations

import msgspec


class ScenarioResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbers of one scenario; all but ``id`` and ``error`` are at their defaults where it could not be simulated.

    Attributes:
        id: the scenario's.
        error: why it could not be simulated; empty where it was.
        gpus: of the whole job.
        device: the GPU of a model of the zoo; empty for a recorded workload, whose times are its own.
        exchange: ``all_reduce``, ``ps`` or ``ps_colocated`` of a simple cluster; of a topology the collective that all
            gradients together would take.
        bandwidth: what all hosts of a simple cluster can send together, bytes/s; 0 for a topology.
        schedule: as it ran: with the knobs that were found where it was tuned.
        knobs: all knobs, defaults included, in bytes, seconds or as they are.
        iteration_time: from one backward pass to the next.
        samples_per_second: of the whole job.
        optimum: T*.
        gap: T/T* − 1.
        kind: what binds T*.
        layer: the layer that binds it.
        compute: Σb + Σf.
        communication: the link's time if it never idled.
        exposed: T − Σb − Σf.
        idle: share of the iteration in which the GPU does nothing.
        operations: started in one step.
        baseline: the schedule, with its knobs, that ``speedup`` is counted from.
        baseline_time: its iteration time.
        speedup: baseline_time / iteration_time.
    """

    id: str
    error: str = ""
    gpus: int = 0
    device: str = ""
    exchange: str = ""
    bandwidth: float = 0.0
    schedule: str = ""
    knobs: dict[str, float] = {}
    iteration_time: float = 0.0
    samples_per_second: float = 0.0
    optimum: float = 0.0
    gap: float = 0.0
    kind: str = ""
    layer: str = ""
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    operations: float = 0.0
    baseline: str = ""
    baseline_time: float = 0.0
    speedup: float = 0.0
