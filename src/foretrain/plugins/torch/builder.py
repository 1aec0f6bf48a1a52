"""Builder of the runtime that exchanges gradients in the scheduling phase.

GradientDispatcher (training thread) ──▶ exchange ──▶ executor ──▶ DeferredOptimizer ──▶ readers of parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.coordinator.client import CoordinatorClient
from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.comm.coordinator.link import Link
from foretrain.comm.coordinator.protocol import TunableExchange
from foretrain.comm.options import AllReduce, AttachOptions
from foretrain.comm.tuned_exchange import TunedExchange
from foretrain.network.switch_cluster import MESSAGE
from foretrain.plugins.torch.collective_executor import CollectiveExecutor
from foretrain.plugins.torch.control_group import ControlGroup
from foretrain.plugins.torch.deferred_optimizer import DeferredOptimizer, step_subset
from foretrain.plugins.torch.gradient_buffer import Rounding, wire_dtype
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher
from foretrain.plugins.torch.runtime_plan import RuntimePlan, replayed_order
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.plugins.torch.streams import streams
from foretrain.schedule.monitor import Gauge

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links
    from foretrain.plugins.torch.ps.exchange import ServedExchange
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer

_SMALL = 4 << 10
"""Bytes of ready gradients that are worth a message of their own: a norm or a bias has fewer."""


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """Context of all runtime parts of one rank.

    Attributes:
        group: for gradients alone.
        control: for everything else.
        device: of the model.
        options: attach's arguments.
        origin: ns of the monotonic clock that count as 0.
        failed: called with the error that ends the job.
        check: raises the error that has ended the job, if any.
    """

    group: dist.ProcessGroup
    control: ControlGroup
    device: torch.device
    options: AttachOptions
    origin: int
    failed: Callable[[BaseException], None]
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """Parts of a scheduled job on one rank; ``remote`` if optimizers run on servers."""

    scheduled: GradientDispatcher
    exchange: TunableExchange
    executor: CollectiveExecutor | ServedExchange
    updates: DeferredOptimizer
    remote: RemoteOptimizer | None = None

    def close(self, reason: str | None = None) -> None:
        """Stop all threads; a ``reason`` tells other ranks that work was given up."""
        self.scheduled.close()
        self.exchange.close(reason)
        self.executor.close()
        self.updates.close()


def assemble(
    context: RuntimeContext,
    parameters: Sequence[nn.Parameter],
    plan: RuntimePlan,
    links: Mapping[int, Link] | None,
) -> RuntimeParts:
    """Start the runtime for all-reduce. Collective.

    Args:
        context: of all parts.
        parameters: indexed by task.
        plan: what all ranks have agreed on.
        links: to the coordinator, or from it to all; None replays a fixed order.
    """
    options, control = context.options, context.control
    check_every = options.transport.check_every if isinstance(options.transport, AllReduce) else 0
    gradients, job, schedule, profile = plan.gradients, plan.job, plan.schedule, plan.profile
    device_streams = streams(context.device, len(parameters))
    gauge = Gauge(job.cost) if plan.tuner else None
    dtype = wire_dtype(options.compression)
    rounding = Rounding(gradients.flat, dtype) if dtype else None
    # Until all parts are built: closes those that have started if another cannot start.
    with ExitStack() as started:
        for link in (links or {}).values():
            started.callback(link.close)
        updates = DeferredOptimizer(
            parameters, gradients.views, job.tasks, device_streams, context.failed, context.check, options.trace
        )
        started.callback(updates.close)
        make_executor = partial(
            CollectiveExecutor,
            *(gradients, job.tasks, context.group, device_streams, rounding),
            failed=context.failed,
            keep=options.trace,
        )
        exchange: TunableExchange
        if links is None:
            exchange = replayed = StaticOrder(
                replayed_order(schedule, plan.workload, job.cost, control.ranks),
                job.tasks,
                context.group,
                context.device if control.enqueues else torch.device("cpu"),
                device_streams,
                updates.landed,
                context.failed,
                check_every,
                options.stall_timeout,
            )
            # Replay learns only at the end of a step which tasks no rank used, so it forwards landings itself.
            executor = make_executor(landed=replayed.landed)
            started.callback(executor.close)
            replayed.start(executor)
        else:
            executor = make_executor(landed=updates.landed)
            started.callback(executor.close)
            if control.rank == 0:
                exchange = Coordinator(
                    job,
                    schedule,
                    executor,
                    links,
                    peer_timeout=options.peer_timeout,
                    stall_timeout=options.stall_timeout,
                    check_every=check_every,
                    failed=context.failed,
                    origin=context.origin,
                    gauge=gauge,
                )
            else:
                exchange = CoordinatorClient(
                    job.tasks,
                    min(_SMALL, job.cost.breakeven),
                    schedule,
                    executor,
                    links[0],
                    peer_timeout=options.peer_timeout,
                    check_every=check_every,
                    failed=context.failed,
                )
        started.callback(exchange.close, "its schedule could not begin")
        exchange = _tuned(exchange, plan, gauge)
        scheduled = GradientDispatcher(
            parameters, gradients, profile.fires, profile.passes, exchange, updates, device_streams, control.ranks
        )
        started.pop_all()
    return RuntimeParts(scheduled, exchange, executor, updates)


def assemble_served(
    context: RuntimeContext,
    parameters: Sequence[nn.Parameter],
    plan: RuntimePlan,
    links: Links,
    name: str,
    epoch: int,
    remote: RemoteOptimizer | None = None,
) -> RuntimeParts:
    """Start the runtime for a parameter server. Collective.

    Args:
        context: of all parts.
        parameters: indexed by task.
        plan: what all ranks have agreed on.
        links: to every shard.
        name: of the job on the servers.
        epoch: declarations of the job before this one.
        remote: the optimizers, if servers run them; None runs them here.
    """
    from foretrain.plugins.torch.ps.exchange import ServedExchange
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteDispatcher, part_limit
    from foretrain.plugins.torch.ps.staging import Staging

    options, job, profile, ranks = context.options, plan.job, plan.profile, context.control.ranks
    device_streams = streams(context.device, len(parameters))
    gauge = Gauge(job.cost) if plan.tuner else None
    with ExitStack() as started:
        started.callback(links.close)
        staging = Staging(
            plan.gradients,
            job.tasks,
            wire_dtype(options.compression),
            ranks,
            name,
            part_limit(plan.schedule) if remote else MESSAGE,
            remote.optimized if remote else None,
        )
        updates = DeferredOptimizer(
            *(parameters, plan.gradients.views, job.tasks, device_streams, context.failed, context.check),
            keep=options.trace,
            apply=remote.adopt if remote else step_subset,
        )
        started.callback(updates.close)
        served = ServedExchange(
            job,
            plan.schedule,
            staging,
            device_streams,
            links,
            epoch=epoch,
            landed=updates.landed,
            failed=context.failed,
            peer_timeout=options.peer_timeout,
            stall_timeout=options.stall_timeout,
            origin=context.origin,
            keep=options.trace,
            hyperparameters=remote.hyperparameters if remote else bytes,
            gauge=gauge,
        )
        started.callback(served.close, "its schedule could not begin")
        exchange: TunableExchange = served
        if options.tune:
            exchange = _tuned(served, plan, gauge, context.control.share)
        passes = remote.passes if remote else profile.passes
        common = (parameters, plan.gradients, profile.fires, passes, exchange, updates, device_streams)
        if remote is not None:
            remote.begin(served, plan.gradients.views, context.check, seeds=context.control.rank == 0)
            # All ranks wait until the servers have the initial state.
            context.control.all_true(True)
            remote.forget()
            scheduled = RemoteDispatcher(remote, *common, 1 if options.asynchronous else ranks)
        else:
            scheduled = GradientDispatcher(*common, ranks)
        started.pop_all()
    return RuntimeParts(scheduled, exchange, served, updates, remote)


def _tuned(
    exchange: TunableExchange, plan: RuntimePlan, gauge: Gauge | None, share: Callable[[bytes], bytes] | None = None
) -> TunableExchange:
    """Return ``exchange`` with the online tuner of this rank, or of the rank that ``share`` gets knobs from, if any."""
    if plan.tuner is None and share is None:
        return exchange
    keep = plan.saved.keep if plan.saved is not None else lambda spec, sample: None
    return TunedExchange(exchange, plan.tuner, share, keep, gauge)
