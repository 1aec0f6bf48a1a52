"""What runs once steps are scheduled, put together from what was observed.

Scheduled (training thread) ──▶ Exchange ──▶ Carrier ──▶ Updates ──▶ whoever needs a parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

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
from foretrain.planner.knob_space import IterationTimes
from foretrain.plugins.torch.collective_executor import CollectiveExecutor, CommRecord
from foretrain.plugins.torch.control_group import ControlGroup
from foretrain.plugins.torch.deferred_optimizer import DeferredOptimizer, step_subset
from foretrain.plugins.torch.gradient_buffer import Rounding, wire_dtype
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher
from foretrain.plugins.torch.runtime_plan import RuntimePlan, replayed_order
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.plugins.torch.streams import enqueues, streams
from foretrain.schedule import Spec
from foretrain.schedule.monitor import Gauge

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer

_SMALL = 4 << 10
"""Bytes of ready gradients that are worth a message at any time: a norm or a bias has fewer."""


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What all parts share.

    Attributes:
        group: for gradients, and nothing else.
        sideband: for everything else.
        device: of the model.
        options: attach's arguments.
        origin: ns of the monotonic clock that count as 0.
        failed: told what ended the job.
        check: raises what has ended the job, if anything has.
    """

    group: dist.ProcessGroup
    sideband: ControlGroup
    device: torch.device
    options: AttachOptions
    origin: int
    failed: Callable[[BaseException], None]
    check: Callable[[], None]


class Carrying(Protocol):
    """What carries chunks: collectives, or a parameter server."""

    records: list[CommRecord]

    def last(self) -> str:
        """What has been under way longest, or what was last, for messages."""
        ...

    def close(self) -> None:
        """Ends."""
        ...


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """The parts of a scheduled job on one rank."""

    scheduled: GradientDispatcher
    exchange: TunableExchange
    carrier: Carrying
    updates: DeferredOptimizer
    remote: RemoteOptimizer | None = None
    """Optimizers that run on servers."""

    def close(self, reason: str | None = None) -> None:
        """Ends all threads; ``reason`` where work is given up, for the other ranks."""
        self.scheduled.close()
        self.exchange.close(reason)
        self.carrier.close()
        self.updates.close()


def assemble(
    around: RuntimeContext,
    parameters: Sequence[nn.Parameter],
    found: RuntimePlan,
    links: Mapping[int, Link] | None,
) -> RuntimeParts:
    """Starts everything, on all ranks alike.

    Args:
        around: what all parts share.
        parameters: indexed by task.
        found: what they have agreed on.
        links: to the coordinator, or from it to all; None replays.
    """
    options, sideband = around.options, around.sideband
    check_every = options.transport.check_every if isinstance(options.transport, AllReduce) else 0
    gradients, job, schedule, seen = found.gradients, found.job, found.schedule, found.seen
    device_streams = streams(around.device, len(parameters))
    gauge = _gauge(found)
    dtype = wire_dtype(options.compression)
    rounding = Rounding(gradients.flat, dtype) if dtype else None
    # Until all of it stands: what has begun ends if the rest cannot begin.
    with ExitStack() as begun:
        for link in (links or {}).values():
            begun.callback(link.close)
        updates = DeferredOptimizer(
            parameters, gradients.views, job.tasks, device_streams, around.failed, around.check, options.trace
        )
        begun.callback(updates.close)
        carry = partial(
            CollectiveExecutor,
            gradients,
            job.tasks,
            around.group,
            device_streams,
            rounding,
            failed=around.failed,
            keep=options.trace,
        )
        exchange: TunableExchange
        if links is None:
            order = replayed_order(schedule, found.workload, job.cost, sideband.ranks)
            device = around.device if enqueues(around.group, around.device) else torch.device("cpu")
            exchange = replayer = StaticOrder(
                order,
                job.tasks,
                around.group,
                device,
                device_streams,
                updates.landed,
                around.failed,
                check_every,
                options.stall_timeout,
            )
            # Replay learns only at the end of a step which tasks nobody used, and so passes landings on itself.
            carrier = carry(landed=replayer.landed)
            begun.callback(carrier.close)
            replayer.start(carrier)
        else:
            carrier = carry(landed=updates.landed)
            begun.callback(carrier.close)
            if sideband.rank == 0:
                exchange = Coordinator(
                    job,
                    schedule,
                    carrier,
                    links,
                    peer_timeout=options.peer_timeout,
                    stall_timeout=options.stall_timeout,
                    check_every=check_every,
                    failed=around.failed,
                    origin=around.origin,
                    gauge=gauge,
                )
            else:
                exchange = CoordinatorClient(
                    job.tasks,
                    min(_SMALL, job.cost.breakeven),
                    schedule,
                    carrier,
                    links[0],
                    peer_timeout=options.peer_timeout,
                    check_every=check_every,
                    failed=around.failed,
                )
        begun.callback(exchange.close, "its schedule could not begin")
        exchange = _tuned(exchange, found, gauge)
        scheduled = GradientDispatcher(
            parameters, gradients, seen.fires, seen.passes, exchange, updates, device_streams, sideband.ranks
        )
        begun.pop_all()
    return RuntimeParts(scheduled, exchange, carrier, updates)


def assemble_served(
    around: RuntimeContext,
    parameters: Sequence[nn.Parameter],
    found: RuntimePlan,
    links: Links,
    name: str,
    epoch: int,
    remote: RemoteOptimizer | None = None,
) -> RuntimeParts:
    """The same over a parameter server; see `assemble`.

    Args:
        around: what all parts share.
        parameters: indexed by task.
        found: what all ranks have agreed on.
        links: to every shard.
        name: by which they know the job.
        epoch: declarations of it before this one.
        remote: the optimizers where servers run them; None runs them here.
    """
    from foretrain.plugins.torch.ps.exchange import ServedExchange
    from foretrain.plugins.torch.ps.remote_optimizer import RemoteDispatcher, part_limit
    from foretrain.plugins.torch.ps.staging import Staging

    options, job, seen, ranks = around.options, found.job, found.seen, around.sideband.ranks
    device_streams = streams(around.device, len(parameters))
    gauge = _gauge(found)
    with ExitStack() as begun:
        begun.callback(links.close)
        staging = Staging(
            found.gradients,
            job.tasks,
            wire_dtype(options.compression),
            ranks,
            name,
            part_limit(found.schedule) if remote else MESSAGE,
            remote.optimized if remote else None,
        )
        updates = DeferredOptimizer(
            parameters,
            found.gradients.views,
            job.tasks,
            device_streams,
            around.failed,
            around.check,
            options.trace,
            remote.adopt if remote else step_subset,
        )
        begun.callback(updates.close)
        served = ServedExchange(
            job,
            found.schedule,
            staging,
            device_streams,
            links,
            epoch=epoch,
            landed=updates.landed,
            failed=around.failed,
            peer_timeout=options.peer_timeout,
            stall_timeout=options.stall_timeout,
            origin=around.origin,
            keep=options.trace,
            rules=remote.rules if remote else bytes,
            gauge=gauge,
        )
        begun.callback(served.close, "its schedule could not begin")
        exchange: TunableExchange = served
        if options.tune:
            exchange = _tuned(served, found, gauge, around.sideband.share)
        passes = remote.passes if remote else seen.passes
        common = (parameters, found.gradients, seen.fires, passes, exchange, updates, device_streams)
        if remote is not None:
            remote.begin(served, found.gradients.views, around.check, seeds=around.sideband.rank == 0)
            # Nobody pushes before the servers know what to update.
            around.sideband.all_true(True)
            remote.forget()
            scheduled = RemoteDispatcher(*common, 1 if options.asynchronous else ranks, remote)
        else:
            scheduled = GradientDispatcher(*common, ranks)
        begun.pop_all()
    return RuntimeParts(scheduled, exchange, served, updates, remote)


def _gauge(found: RuntimePlan) -> Gauge | None:
    """Listens on the rank that searches for knobs."""
    return None if found.tuner is None else Gauge(found.job.cost)


def _tuned(
    exchange: TunableExchange, found: RuntimePlan, gauge: Gauge | None, share: Callable[[bytes], bytes] | None = None
) -> TunableExchange:
    """``exchange`` with the search for its knobs, where there is one here or on the rank that ``share`` asks."""
    if found.tuner is None and share is None:
        return exchange

    def keep(spec: Spec, sample: IterationTimes) -> None:
        if found.saved is not None:
            found.saved.keep(spec, sample)

    return TunedExchange(exchange, found.tuner, share, keep, gauge)
