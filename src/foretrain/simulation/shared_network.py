"""Jobs that share a network: each with its own workload, ranks and schedule, all flows in one simulated network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.errors import ConfigError
from foretrain.network.deployment import Deployment
from foretrain.network.program import Program, ProgramHandle
from foretrain.schedule import Spec, spec
from foretrain.schedule import bound as bound_of
from foretrain.simulation.links import LANE
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import Run, job_on, label_of
from foretrain.simulation.world import ARRIVAL, TIMER, ChunkCarrier, VirtualWorld
from foretrain.tasks import Chunk
from foretrain.trace import Span, Timeline
from foretrain.units import Time
from foretrain.workload.step import Workload


@dataclass(frozen=True, slots=True)
class Tenant:
    """Job on a shared network.

    Attributes:
        workload: one worker's step.
        where: its ranks, collective and routing, on the topology that all share.
        schedule: a policy or its notation.
        offset: when it begins, ps.
    """

    workload: Workload
    where: Deployment
    schedule: str | Spec = "bytescheduler"
    offset: Time = 0


def together(
    tenants: Sequence[Tenant],
    *,
    steps: int = 4,
    trace: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Run, ...]:
    """Return a run of each of ``tenants``, all simulated at once until each has made ``steps`` steps after its warm-up.

    The network is simulated as closely as the first tenant's fidelity says. ``progress`` is told how many steps are
    made, of how many.

    The iteration time is the mean over a job's last ``steps`` steps before the slowest job had made its own, since jobs
    that meet in the network need not have a steady state of one step. ``Run.bound`` is of the job alone.

    Raises:
        ConfigError: jobs are on different topologies, share a rank, or there are none.
        StallError: a schedule leaves bytes unsent.
    """
    _check(tenants, steps)
    world = VirtualWorld()
    network = _Shared(world, tenants[0].where)
    running = [_Running(tenant, network, world, trace) for tenant in tenants]

    def stop_when_all_have() -> None:
        if progress is not None:
            every = [steps + one.warmup for one in running]
            made = [min(one.made + one.warmup, most) for one, most in zip(running, every, strict=True)]
            progress(sum(made), sum(every))
        if all(one.made >= steps for one in running):
            world.stop()

    for one in running:
        one.launch(stop_when_all_have)
    world.run()
    for one in running:
        one.replay.raise_if_stalled(one.warmup + steps)
    return tuple(one.run(steps) for one in running)


class _Running:
    """Tenant in the world: its training loop and its stream of collectives."""

    def __init__(self, tenant: Tenant, network: _Shared, world: VirtualWorld, trace: bool) -> None:
        self.plan = spec(tenant.schedule)
        self.workload = tenant.workload.slowed(tenant.where.slowdown)
        self.where = tenant.where
        self._offset = tenant.offset
        self._world = world
        self.job = job_on(self.workload, tenant.where)
        policy = self.plan.build(self.job)
        self.warmup, self.barrier = policy.warmup, policy.barrier
        self.timeline = Timeline() if trace else None
        stream = _Stream(network, tenant.where, self.timeline, lambda chunk: label_of(chunk, self.job, self.replay))
        self.replay = TrainingLoop(self.workload, self.job, policy, _Through(world, stream), 1 << 40, self.timeline)

    @property
    def made(self) -> int:
        """Steps complete after the warm-up."""
        return len(self.replay.begins) - 1 - self.warmup

    def launch(self, began: Callable[[], None]) -> None:
        """Begin at the tenant's offset; ``began`` is called at every step."""
        self.replay.on_begin = began
        self._world.call_at(self._offset, self.replay.begin)

    def run(self, steps: int) -> Run:
        """Return the tenant's run."""
        begins = tuple(self.replay.begins)
        return Run(
            workload=self.workload,
            cluster=self.where,
            schedule=self.plan,
            barrier=self.barrier,
            iteration_time=round((begins[-1] - begins[-1 - steps]) / steps),
            bound=bound_of(self.workload, self.job),
            begins=begins,
            log=self.replay.log,
            timeline=self.timeline or Timeline(),
        )


class _Through:
    """The common world with the carrier of one job."""

    def __init__(self, world: VirtualWorld, carrier: ChunkCarrier) -> None:
        self._world, self._carrier = world, carrier
        self.now, self.call_at = world.now, world.call_at

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Hand ``chunk`` to this job's stream."""
        self._carrier.carry(chunk, self._world, done)


class _Stream:
    """Collectives of one job: one at a time in the network, after θ each."""

    def __init__(
        self, network: _Shared, where: Deployment, timeline: Timeline | None, label: Callable[[Chunk], tuple[str, int]]
    ) -> None:
        self._network, self._where, self._timeline, self._label = network, where, timeline, label
        self._waiting: deque[tuple[Chunk, Callable[[Chunk], None], tuple[str, int]]] = deque()
        self._busy = False

    def carry(self, chunk: Chunk, world: VirtualWorld, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` behind all that were started before."""
        self._waiting.append((chunk, done, self._label(chunk)))
        if not self._busy:
            self._next(world)

    def _next(self, world: VirtualWorld) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            return
        chunk, done, label = self._waiting.popleft()
        start = world.now()

        def landed() -> None:
            if self._timeline is not None:
                self._timeline.add(Span(LANE, "communication", *label, start, world.now(), chunk.size))
            self._next(world)
            done(chunk)

        program = self._where.program(chunk.op, chunk.size, start + self._where.overhead)
        self._network.send(program, landed)


class _Shared:
    """Network that all jobs share, advanced with the time of the world."""

    def __init__(self, world: VirtualWorld, where: Deployment) -> None:
        self._world = world
        self._carrier = where.carrier()
        self._landed: dict[ProgramHandle, Callable[[], None]] = {}
        self._asked = 0

    def send(self, program: Program, landed: Callable[[], None]) -> None:
        """Start ``program`` now; call ``landed`` when all of it has arrived."""
        self._pass()  # what arrives at this very moment does so before
        self._landed[self._carrier.add(program)] = landed
        self._arm()

    def _pass(self) -> None:
        """Advance the network to the present, and schedule the callbacks of programs that have completed."""
        for handle in self._carrier.advance(self._world.now()):
            self._world.schedule(self._world.now(), TIMER, self._landed.pop(handle))

    def _arm(self) -> None:
        """Schedule `_arrive` for the next completion; an earlier change makes it void."""
        self._asked += 1
        when = self._carrier.next_completion()
        if when is not None:
            self._world.schedule(when, ARRIVAL, self._arrive, self._asked)

    def _arrive(self, asked: int) -> None:
        if asked != self._asked:
            return  # a later `send` changed the next completion
        self._pass()
        self._arm()


def _check(tenants: Sequence[Tenant], steps: int) -> None:
    if not tenants:
        raise ConfigError("tenants", [], "is empty", "give at least one job")
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError("steps", steps, "is not a number of steps to measure", "simulate at least 1")
    first = tenants[0].where
    owner: dict[int, int] = {}
    for index, tenant in enumerate(tenants):
        same = tenant.where.topology.name == first.topology.name
        if not (same and np.array_equal(first.capacity, tenant.where.capacity)):
            raise ConfigError(
                f"tenants[{index}].where", str(tenant.where), "is another network than the first job's", "use one"
            )
        for rank in tenant.where.members:
            if rank in owner:
                raise ConfigError(
                    f"tenants[{index}].ranks", rank, f"is a rank that job {owner[rank]} has", "give each its own"
                )
            owner[rank] = index


def alone(tenant: Tenant, *, steps: int = 4, progress: Callable[[int, int], None] | None = None) -> Run:
    """Simulate the job alone on the network, in the same way."""
    return together([tenant], steps=steps, trace=False, progress=progress)[0]
