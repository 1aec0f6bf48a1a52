"""Exchange of one rank, made from the plan that all have agreed on; its knobs may be searched while it runs.

    rank 0's training thread: time of an iteration ──▶ Tuner ──▶ other knobs ──▶ Exchange.retune

With all-reduce rank 0 decides for all ranks, from one step on. With a parameter server each rank has an engine of its
own: all ask rank 0 every few rounds, at the same round, so that all run the knobs that are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrain.comm.collectives.executor import CollectiveExecutor
from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.coordinator.client import CoordinatorClient
from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.comm.coordinator.link import Link
from foretrain.comm.coordinator.protocol import TunableExchange, pack_spec, unpack_spec
from foretrain.comm.options import AttachOptions
from foretrain.comm.rendezvous import secret_for_servers
from foretrain.comm.runtime_plan import RuntimePlan
from foretrain.engine import Decision
from foretrain.network import Cluster
from foretrain.planner.online import Tuner
from foretrain.planner.search import IterationTimes
from foretrain.schedule import CostModel, Spec
from foretrain.schedule.monitor import Gauge

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links
    from foretrain.comm.ps.client.exchange import ServedExchange, StagedGradients

_SMALL = 4 << 10
"""Bytes of ready gradients that are worth a message of their own: a norm or a bias has fewer."""
ASK_EVERY = 4
"""Rounds; asking costs two broadcasts of a few bytes."""


class TunedExchange:
    """Wrapper of ``exchange`` whose knobs ``tuner`` searches; a `TunableExchange`.

    Args:
        exchange: runs the policy.
        tuner: of rank 0; None on the others.
        share: broadcasts rank 0's bytes, where each rank has an engine of its own; None where only rank 0 has one.
        held: called with the chosen knobs and the times of iterations with them when a search has ended.
        gauge: detects that the link has changed.
    """

    def __init__(
        self,
        exchange: TunableExchange,
        tuner: Tuner | None,
        share: Callable[[bytes], bytes] | None = None,
        held: Callable[[Spec, IterationTimes], None] = lambda spec, sample: None,
        gauge: Gauge | None = None,
    ) -> None:
        self._exchange, self._share, self._held = exchange, share, held
        self._gauge = gauge
        self.tuner = tuner
        self._began: float | None = None
        self._wanted: Spec | None = tuner.spec if tuner is not None else None
        """Decision of rank 0 that the others do not know yet."""
        self._rounds = 0
        self._kept = tuner.holds if tuner is not None else None
        self._stopped = False

    @property
    def spec(self) -> Spec | None:
        """Return the policy and knobs in force."""
        return self._exchange.spec

    @property
    def log(self) -> Sequence[Decision]:
        """Return the latest decisions."""
        return self._exchange.log

    def retune(self, spec: Spec) -> None:
        """Run ``spec`` from the next step on, and end the search."""
        self._stopped = True
        self._exchange.retune(spec)

    def open(self, step: int, again: bool) -> None:
        """Announce a round. One that adds to the last sums belongs to the same iteration."""
        if not again:
            if self.tuner is not None and not self._stopped:
                self._measure(self.tuner)
            if self._share is not None and self._rounds % ASK_EVERY == 0:
                self._ask(self._share)
            self._rounds += 1
        self._exchange.open(step, again)

    def _measure(self, tuner: Tuner) -> None:
        now = time.perf_counter()
        began, self._began = self._began, now
        if began is None or (self._share is not None and self._wanted is not None):
            return  # the last decision is not in force yet
        slower = self._gauge.taken() if self._gauge is not None else None
        wanted = tuner.iterated(now - began) if slower is None else tuner.relinked(slower)
        if wanted is not None and self._share is None:
            self._exchange.retune(wanted)
        else:
            self._wanted = wanted
        if tuner.holds is not self._kept:
            self._kept = tuner.holds
            if self._kept is not None:
                self._held(tuner.spec, self._kept)
        # A new search simulates here, which is no part of the next iteration.
        self._began = time.perf_counter()

    def _ask(self, share: Callable[[bytes], bytes]) -> None:
        wanted, self._wanted = (None if self._stopped else self._wanted), None
        text = share(b"" if wanted is None else pack_spec(wanted))
        if text and not self._stopped:  # knobs that were set by hand stay
            self._exchange.retune(unpack_spec(text))

    def ready(self, task: int, used: bool) -> None:
        """Allow ``task`` to be sent."""
        self._exchange.ready(task, used)

    def flush(self) -> None:
        """Report ready tasks that wait for a larger one."""
        self._exchange.flush()

    def close(self, reason: str | None = None) -> None:
        """End the exchange."""
        self._exchange.close(reason)


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """Context of all runtime parts of one rank.

    Attributes:
        control: agreements among the ranks.
        options: attach's arguments.
        origin: ns of the monotonic clock that count as 0.
        failed: called with the error that ends the job.
        check: raises the error that has ended the job, if any.
    """

    control: ControlPlane
    options: AttachOptions
    origin: int
    failed: Callable[[BaseException], None]
    check: Callable[[], None]


def coordinated_exchange(
    context: RuntimeContext, plan: RuntimePlan, executor: CollectiveExecutor[Any], links: Mapping[int, Link]
) -> TunableExchange:
    """Return this rank's end of an exchange by collectives: the coordinator on rank 0, else its client.

    Args:
        context: of all parts.
        plan: what all ranks have agreed on.
        executor: issues the collectives.
        links: to the coordinator, or from it to all.
    """
    options, job = context.options, plan.job
    small = min(_SMALL, job.cost.breakeven)
    if context.control.rank:
        return CoordinatorClient(
            *(job.tasks, small, plan.schedule, executor, links[0]),
            peer_timeout=options.peer_timeout,
            check_every=options.check_every,
            failed=context.failed,
        )
    gauge = Gauge(job.cost) if plan.tuner else None
    coordinator = Coordinator(
        *(job, plan.schedule, executor, links),
        peer_timeout=options.peer_timeout,
        stall_timeout=options.stall_timeout,
        check_every=options.check_every,
        failed=context.failed,
        origin=context.origin,
        small=small,
        gauge=gauge,
    )
    return tuned(coordinator, plan, gauge)


def established_servers(control: ControlPlane, options: AttachOptions, job: str) -> Links:
    """Return this worker's connections to all servers of ``job``. Collective.

    Raises:
        ConfigError: on all ranks, if there is no common secret.
        ForetrainError: a server cannot be reached.
    """
    from foretrain.comm.ps.client.connection import Links

    links = Links(options.servers, secret_for_servers(control), job, control.rank)
    try:
        links.establish(options.peer_timeout)
    except BaseException:
        links.close()
        raise
    return links


def measured_servers(
    links: Links,
    control: ControlPlane,
    options: AttachOptions,
    job: str,
    epoch: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[CostModel, Cluster]:
    """Return the measured cost of a push-and-pull, and the servers as a cluster for the simulator, the same on all
    workers: that of the slowest link. Collective.

    Args:
        links: to every server.
        control: agreements among the workers.
        options: attach's arguments.
        job: its name on the servers.
        epoch: declarations of this worker before this one.
        check: raises the error that has ended the job, if any.
    """
    from foretrain.comm.ps.client.probing import PushProbe, beside, served_cluster

    probe = PushProbe(links, control.ranks, job, epoch, options.peer_timeout)
    measured = probe.cost()

    def hear() -> None:
        check()
        probe.hear()

    # Wait until all have measured: a restarted server asks every worker again.
    costs = control.checking(hear).gather([measured.per_byte, measured.overhead, measured.latency])
    per_byte, overhead, latency = max(costs)
    slowest = CostModel(overhead, per_byte, latency)
    shared = beside(options.servers, control.ranks)
    return slowest, served_cluster(slowest, control.ranks, len(options.servers), beside=shared)


def served_exchange(
    context: RuntimeContext,
    plan: RuntimePlan,
    staging: StagedGradients,
    links: Links,
    epoch: int,
    landed: Callable[[int, bool], None],
    hyperparameters: Callable[[], bytes] = bytes,
) -> tuple[ServedExchange, TunableExchange]:
    """Return this rank's exchange over parameter servers, and the same with its knobs searched where that is asked.

    Args:
        context: of all parts.
        plan: what all ranks have agreed on.
        staging: the gradients as bytes.
        links: to every shard.
        epoch: declarations of this worker before this one.
        landed: called with a task, when its sum has arrived, and whether any worker had a gradient.
        hyperparameters: returns the encoded hyperparameters of the round that begins, if servers run optimizers.
    """
    from foretrain.comm.ps.client.exchange import ServedExchange

    options = context.options
    gauge = Gauge(plan.job.cost) if plan.tuner else None
    served = ServedExchange(
        *(plan.job, plan.schedule, staging, links),
        epoch=epoch,
        landed=landed,
        failed=context.failed,
        peer_timeout=options.peer_timeout,
        stall_timeout=options.stall_timeout,
        origin=context.origin,
        keep=options.trace,
        hyperparameters=hyperparameters,
        gauge=gauge,
    )
    return served, tuned(served, plan, gauge, context.control.share) if options.tune else served


def tuned(
    exchange: TunableExchange, plan: RuntimePlan, gauge: Gauge | None, share: Callable[[bytes], bytes] | None = None
) -> TunableExchange:
    """Return ``exchange`` with the online tuner of this rank, or of the rank that ``share`` gets knobs from, if any."""
    if plan.tuner is None and share is None:
        return exchange
    keep = plan.saved.keep if plan.saved is not None else lambda spec, sample: None
    return TunedExchange(exchange, plan.tuner, share, keep, gauge)
