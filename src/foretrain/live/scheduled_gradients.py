"""Gradients exchanged by a policy of `foretrain.schedule` instead of the script's own collectives.

A rank announces what it has to exchange (``TASKS``), and from then on tells only that another round begins and which
gradients are there. What is there on all members goes to one engine per group, as on the real runtime's coordinator
(`foretrain.comm.coordinator.coordinator`); what its policy starts crosses the simulated network as a collective, one
after the other as on one communicator, each after θ, the cluster's ``overhead``.

    READY on all members ──▶ policy ──▶ Start(chunk) ── θ ──▶ traffic ──▶ Done ──▶ task landed: its event happens

The policy is made as in the real runtime (`foretrain.comm.runtime_plan`) from what all members of the group
have observed: the slowest member counts, and knobs that were left open are searched by simulating the observed step on
the network whose cost is known.

What makes a round begin, and a task ready, waits like every start for the end of the instant; see Note [Starts of one
instant] in `foretrain.live.network_traffic`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from foretrain.comm.observation import workload_of
from foretrain.engine import Decision, Engine
from foretrain.errors import Disagreement
from foretrain.live.collectives import CommGroup, RankHandle, who
from foretrain.live.event_log import BEGIN, READY, LogRecord, ModelAnnouncement
from foretrain.live.folding import Folding
from foretrain.live.network_traffic import CommLaunches, NetworkTraffic, Order, PendingComm
from foretrain.live.streams import StreamEvent, late
from foretrain.planner import tune
from foretrain.planner.candidate_search import cluster_of
from foretrain.schedule import Bound, CostModel, Job, ScheduledPolicy, Spec, bound, spec
from foretrain.tasks import Chunk, Ready, StepBegin
from foretrain.units import Time
from foretrain.workload.step import Workload

_KEPT: Final = 100_000
"""Decisions that an exchange remembers."""
_LAST: Final = 1 << 40
"""Rank in the order of a policy's own timers: they fire after what ranks bring at the same instant."""


class GradientSchedules:
    """Exchanges of all ranks, by the ranks that sum gradients."""

    def __init__(self, starts: CommLaunches, traffic: NetworkTraffic, folding: Folding) -> None:
        self._starts, self._traffic, self._folding = starts, traffic, folding
        self._known: dict[tuple[tuple[int, ...], int], ModelSchedule] = {}
        self._joined: dict[tuple[tuple[int, ...], int], int] = {}

    def join(self, handle: RankHandle, entry: LogRecord) -> Member:
        """Join ``handle`` to an exchange: the k-th that a rank announces among the same ranks is that of the others."""
        announced = ModelAnnouncement.decode(entry.payload)
        count = self._joined[announced.ranks, handle.rank] = self._joined.get((announced.ranks, handle.rank), 0) + 1
        schedule = self._known.get((announced.ranks, count))
        if schedule is None:
            group = CommGroup(announced.ranks, 0, self._folding)
            schedule = self._known[announced.ranks, count] = ModelSchedule(self._starts, self._traffic, group)
        return schedule.join(handle, entry.stream, announced)

    def __iter__(self) -> Iterator[ModelSchedule]:
        return iter(self._known.values())

    def waiting(self) -> list[str]:
        """Return which ranks wait for what: one line for each task that has not completed."""
        return [line for schedule in self for line in schedule.waiting()]


class Member:
    """Member of an exchange: one rank, and the sums that it waits for.

    Attributes:
        handle: the rank.
        lane: the stream on which communication is shown.
        sum_events: per task, the events of its rounds that have not landed, the oldest first.
    """

    def __init__(self, handle: RankHandle, lane: int, schedule: ModelSchedule, tasks: int) -> None:
        self.handle, self.lane = handle, lane
        self.sum_events: list[deque[StreamEvent]] = [deque() for _ in range(tasks)]
        self._schedule = schedule
        self._rounds = 0

    def take(self, entry: LogRecord) -> tuple[StreamEvent, StreamEvent | None]:
        """Return the events that the stream reaches a BEGIN or READY, and that a READY's task has landed."""
        here, landed = StreamEvent(), None
        if entry.kind == BEGIN:
            self._rounds += 1
            barrier = self._schedule.barrier(self._rounds - 1, None)
        else:
            assert entry.kind == READY
            barrier = self._schedule.barrier(self._rounds - 1, entry.extra)
            landed = StreamEvent()
            self.sum_events[entry.extra].append(landed)
        barrier.orders.append(self.handle.order())
        here.then(lambda: barrier.arrive(self.handle, here.time or 0))
        return here, landed


class ModelSchedule:
    """Exchange of one model: its tasks, its policy, and the members of its group.

    Attributes:
        group: among whom gradients are summed.
        plan: policy and what it was made from; None until all members have announced the exchange.
        begins: when each round began on all members, ps.
        names: of the tasks.
    """

    def __init__(self, starts: CommLaunches, traffic: NetworkTraffic, group: CommGroup) -> None:
        self.group = group
        self.plan: SchedulePlan | None = None
        self.begins: list[Time] = []
        self._starts, self._world, self._traffic = starts, starts.world, traffic
        self.names: tuple[str, ...] = ()
        self._announced: dict[int, ModelAnnouncement] = {}
        self._members: dict[int, Member] = {}
        self._barriers: dict[tuple[int, int | None], RoundBarrier] = {}
        self._engine: Engine | None = None
        self._queue: deque[tuple[Chunk, Callable[[Chunk], None]]] = deque()
        self._waking = 0

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return the latest decisions of the policy."""
        return self._engine.log if self._engine else ()

    @property
    def settled(self) -> bool:
        """Return whether a step was made in which the policy's decisions are those of all steps to come."""
        return self.plan is not None and len(self.begins) > self.plan.policy.warmup + 1

    @property
    def members(self) -> list[Member]:
        """Return the live members, in the group's order."""
        return [self._members[rank] for rank in self.group.live]

    def join(self, handle: RankHandle, lane: int, announced: ModelAnnouncement) -> Member:
        """Add a live member; make the policy when all have announced the exchange."""
        member = self._members[handle.rank] = Member(handle, lane, self, len(announced.names))
        self._announced[handle.rank], self.names = announced, announced.names
        self._check(handle.rank)
        if len(self._members) == len(self.group.live):
            self._make()
        return member

    def barrier(self, step: int, task: int | None) -> RoundBarrier:
        """Return the barrier of round ``step``, or of a task of it."""
        found = self._barriers.get((step, task))
        if found is None:
            found = self._barriers[step, task] = RoundBarrier(self, step, task)
        return found

    def arrived(self, barrier: RoundBarrier, latest: Time) -> None:
        """Begin the round or task of ``barrier`` at ``latest``, when all members have arrived."""
        del self._barriers[barrier.step, barrier.task]
        self._starts.at(latest, PendingComm(min(barrier.orders), None, barrier.begin))

    def post(self, step: int, task: int | None) -> None:
        """Post to the policy that a round has begun, or that a task of it is ready."""
        assert self._engine is not None
        if task is not None:
            self._engine.post(Ready(task))
            return
        self.begins.append(self.now())
        if self.plan is not None and step == self.plan.policy.warmup + 1:
            for member in self.members:
                member.handle.rank_trace.settled()
        self._engine.post(StepBegin(step))

    def waiting(self) -> list[str]:
        """Return a line for each task that has not completed, and for the ranks that are missing."""
        lines = list(self._engine.waiting()) if self._engine else []
        lacking = [rank for rank in self.group.live if rank not in self._members]
        if lacking:
            lines.append(f"the exchange of {self.group} has not begun on {who(lacking)}")
        return lines + [text for barrier in self._barriers.values() if (text := barrier.waiting())]

    # ── the engine's world ──

    def now(self) -> Time:
        """Return the virtual time."""
        return self._world.now()

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Run ``call`` at ``when``, behind what ranks bring at that instant."""
        self._waking += 1
        self._starts.at(max(when, self.now()), PendingComm((_LAST + self.group.live[0], self._waking), None, call))

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Send ``chunk`` behind all that were started before."""
        self._queue.append((chunk, done))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        now, chunk = self.now(), self._queue[0][0]
        for member in self.members:
            member.handle.rank_trace.reached(self, now)
            member.handle.rank_trace.began(self, now)
            member.handle.sm_shares.of(member.lane).communication(1)
        self.call_at(now + self._traffic.overhead(), partial(self._send, chunk))

    def _send(self, chunk: Chunk) -> None:
        self._traffic.collective(chunk.op, chunk.size, self.group.members, None, self._end)

    def _end(self) -> None:
        chunk, done = self._queue.popleft()
        now, name = self.now(), self._name(chunk)
        for member in self.members:
            member.handle.sm_shares.of(member.lane).communication(-1)
            # No host launches it: the policy does.
            member.handle.rank_trace.ended(self, now, member.lane, name, chunk.size, self.group.members, launch=0)
        if self._queue:
            self._begin()
        done(chunk)

    def _landed(self, task: int) -> None:
        for member in self.members:
            member.sum_events[task].popleft().happen(self.now())

    def _name(self, chunk: Chunk) -> str:
        assert self.plan is not None
        first, more = self.plan.job.tasks[chunk.pieces[0].task].name, len(chunk.pieces) - 1
        return f"{chunk.op} {first} +{more}" if more else f"{chunk.op} {first}"

    def _make(self) -> None:
        announced = [self._announced[rank] for rank in self.group.live]
        self.plan = plan_schedule(announced, self._traffic.cost(self.group.members))
        self._engine = Engine(self.plan.policy, self, self.plan.job.tasks, self._landed, deque(maxlen=_KEPT))

    def _check(self, rank: int) -> None:
        mine, first = self._announced[rank], next(iter(self._announced.values()))
        if (mine.schedule, mine.names, mine.sizes) != (first.schedule, first.names, first.sizes):
            raise Disagreement(
                f"{self.group} exchanges the gradients of {first.model}, but rank {rank} has other parameters than "
                f"rank {next(iter(self._announced))}; make the same model on all ranks"
            )


class RoundBarrier:
    """Barrier of a round, or of a task of it, among the members of a group."""

    def __init__(self, schedule: ModelSchedule, step: int, task: int | None) -> None:
        self.step, self.task = step, task
        self._schedule = schedule
        self.orders: list[Order] = []
        self._arrivals: dict[RankHandle, Time] = {}

    def arrive(self, handle: RankHandle, time: Time) -> None:
        """Note that the stream of ``handle`` arrives at ``time``."""
        now = self._schedule.now()
        if time < now:
            raise late(handle.rank, "a round" if self.task is None else "a task", time, now)
        self._arrivals[handle] = time
        if len(self._arrivals) == len(self._schedule.group.live):
            self._schedule.arrived(self, max(self._arrivals.values()))

    def waiting(self) -> str:
        """Describe which ranks have arrived and which have not; empty if none has."""
        lacking = [rank for rank in self._schedule.group.live if rank not in {handle.rank for handle in self._arrivals}]
        if not self._arrivals or not lacking:
            return ""
        here = sorted(handle.rank for handle in self._arrivals)
        what = "began" if self.task is None else f"made task {self._schedule.names[self.task]!r} ready in"
        return f"{who(here)} {what} round {self.step} of {self._schedule.group}, {who(lacking)} did not"

    def begin(self) -> None:
        """Account for the members' waits, and post to the policy."""
        now = self._schedule.now()
        for handle, came in self._arrivals.items():
            if self.task is not None:
                handle.rank_trace.waited(came, now)
        self._schedule.post(self.step, self.task)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Policy for the exchange of a model's gradients, and the step it was made for.

    Attributes:
        workload: the step of the slowest member, as it was observed.
        job: the scheduler's view of it on the simulated network.
        schedule: the policy with its knobs.
        policy: the same, running.
        bound: T* of that step on that network.
    """

    workload: Workload
    job: Job
    schedule: Spec
    policy: ScheduledPolicy
    bound: Bound


def plan_schedule(announced: Sequence[ModelAnnouncement], cost: CostModel) -> SchedulePlan:
    """Return the plan for the slowest of the members, on a network where an all-reduce costs ``cost``."""
    slowest = max(announced, key=lambda one: one.seen.compute)
    place = f"{len(slowest.ranks)} simulated ranks"
    workload = workload_of(slowest.seen, slowest.names, slowest.sizes, slowest.model, place)
    job = Job.of(workload, cost)
    wanted = spec(slowest.schedule)
    if len(slowest.ranks) > 1 and cost.per_byte:
        wanted = tune(workload, cluster_of(cost, len(slowest.ranks)), wanted, careful=True)
    return SchedulePlan(workload, job, wanted, wanted.build(job), bound(workload, job))
