"""Builder of the runtime that exchanges gradients in the scheduling phase.

GradientDispatcher (training thread) ──▶ exchange ──▶ executor ──▶ DeferredOptimizer ──▶ readers of parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.collectives.executor import Collectives
from foretrain.comm.coordinator.link import Link
from foretrain.comm.coordinator.protocol import TunableExchange
from foretrain.comm.exchange import RuntimeContext, coordinated_exchange, served_exchange
from foretrain.comm.runtime_plan import RuntimePlan, replayed_order
from foretrain.network.shards import part_limit
from foretrain.plugins.torch.deferred_optimizer import DeferredOptimizer, step_subset
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, Rounding, wire_dtype
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher
from foretrain.plugins.torch.process_group_executor import GroupOperations, HostOperations, ProcessGroupExecutor
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.plugins.torch.streams import enqueues, streams

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links
    from foretrain.comm.ps.client.exchange import ServedExchange
    from foretrain.plugins.torch.bounded.pulls import PulledOptimizer
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """Parts of a scheduled job on one rank; ``remote`` if optimizers run on servers."""

    scheduled: GradientDispatcher
    exchange: TunableExchange
    executor: ProcessGroupExecutor | ServedExchange
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
    gradients: GradientBuffer,
    plan: RuntimePlan,
    group: dist.ProcessGroup,
    links: Mapping[int, Link] | None,
    collectives: Collectives | None = None,
    ledger: Ledger | None = None,
    remote: PulledOptimizer | None = None,
) -> RuntimeParts:
    """Start the runtime for collectives. Collective.

    Args:
        context: of all parts.
        parameters: indexed by task.
        gradients: their flat buffers.
        plan: what all ranks have agreed on.
        group: for gradients alone.
        links: to the coordinator, or from it to all; None replays a fixed order.
        collectives: that sum in the group's place, if any; they stay the caller's.
        ledger: of what these may lose, if they may.
        remote: the optimizers, if a server runs them; None runs them here.
    """
    options, control, job, profile = context.options, context.control, plan.job, plan.profile
    device = parameters[0].device
    device_streams = streams(device, len(parameters))
    dtype = wire_dtype(options.compression)
    rounding = Rounding(gradients.flat, dtype) if dtype else None
    executor_class = ProcessGroupExecutor
    if remote is not None:
        from foretrain.plugins.torch.bounded.pulls import PullExecutor

        operations, executor_class = remote.operations(ledger), PullExecutor
    elif collectives is not None:
        operations = HostOperations(collectives, ledger)
    else:
        operations = GroupOperations(group, device, control.ranks)
    # Until all parts are built: closes those that have started if another cannot start.
    with ExitStack() as started:
        for link in (links or {}).values():
            started.callback(link.close)
        updates = DeferredOptimizer(
            *(parameters, gradients.views, job.tasks, device_streams, context.failed, context.check),
            keep=options.trace,
            apply=remote.adopt if remote else step_subset,
        )
        started.callback(updates.close)
        make_executor = partial(
            executor_class,
            *(gradients, job.tasks, operations, device_streams, rounding),
            failed=context.failed,
            keep=options.trace,
        )
        exchange: TunableExchange
        if links is None:
            exchange = replayed = StaticOrder(
                replayed_order(plan.schedule, plan.workload, job.cost, control.ranks),
                job.tasks,
                group,
                device if enqueues(group, device) else torch.device("cpu"),
                device_streams,
                updates.landed,
                context.failed,
                options.check_every,
                options.stall_timeout,
            )
            # Replay learns only at the end of a step which tasks no rank used, so it forwards landings itself.
            executor = make_executor(landed=replayed.landed)
            started.callback(executor.close)
            replayed.start(executor)
        else:
            executor = make_executor(landed=updates.landed)
            started.callback(executor.close)
            exchange = coordinated_exchange(context, plan, executor, links)
        started.callback(exchange.close, "its schedule could not begin")
        common = (parameters, gradients, profile.fires, remote.passes if remote else profile.passes)
        common += (exchange, updates, device_streams, control.ranks)
        if remote is None:
            scheduled = GradientDispatcher(*common)
        else:
            from foretrain.plugins.torch.ps.remote_optimizer import RemoteDispatcher

            remote.open(job.tasks, context.check, seeds=control.rank == 0)
            control.all_true(True)  # the server has the initial state
            remote.forget()
            scheduled = RemoteDispatcher(remote, *common)
        started.pop_all()
    return RuntimeParts(scheduled, exchange, executor, updates, remote)


def assemble_served(
    context: RuntimeContext,
    parameters: Sequence[nn.Parameter],
    gradients: GradientBuffer,
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
        gradients: their flat buffers.
        plan: what all ranks have agreed on.
        links: to every shard.
        name: of the job on the servers.
        epoch: declarations of the job before this one.
        remote: the optimizers, if servers run them; None runs them here.
    """
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteDispatcher, updated_part_limit
    from foretrain.plugins.torch.ps.staging import Staging

    options, job, ranks = context.options, plan.job, context.control.ranks
    device_streams = streams(parameters[0].device, len(parameters))
    with ExitStack() as started:
        started.callback(links.close)
        staging = Staging(
            gradients,
            job.tasks,
            wire_dtype(options.compression),
            ranks,
            name,
            device_streams,
            (updated_part_limit if remote else part_limit)(plan.schedule.settings, len(links.connections)),
            remote.optimized if remote else None,
        )
        updates = DeferredOptimizer(
            *(parameters, gradients.views, job.tasks, device_streams, context.failed, context.check),
            keep=options.trace,
            apply=remote.adopt if remote else step_subset,
        )
        started.callback(updates.close)
        hyperparameters = remote.hyperparameters if remote else bytes
        served, exchange = served_exchange(context, plan, staging, links, epoch, updates.landed, hyperparameters)
        started.callback(served.close, "its schedule could not begin")
        passes = remote.passes if remote else plan.profile.passes
        common = (parameters, gradients, plan.profile.fires, passes, exchange, updates, device_streams)
        if remote is not None:
            remote.begin(served, gradients.views, context.check, seeds=context.control.rank == 0)
            # All ranks wait until the servers have the initial state.
            context.control.all_true(True)
            remote.forget()
            scheduled = RemoteDispatcher(remote, *common, 1 if options.asynchronous else ranks)
        else:
            scheduled = GradientDispatcher(*common, ranks)
        started.pop_all()
    return RuntimeParts(scheduled, exchange, served, updates, remote)
