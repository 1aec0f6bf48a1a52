"""Runtime of one rank for gradients in buffers on the host: connections, and the exchange that a plan asks for.

first steps    first in, first out                               `HostRuntime.begin`
all others     by the plan that all ranks have agreed on         `HostRuntime.schedule`
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.buffers import NUMPY_TYPES, HostGradients, HostRounding, HostStaging
from foretrain.comm.collectives.executor import Collectives, HostExecutor, series
from foretrain.comm.control_plane import LinkControl
from foretrain.comm.coordinator.protocol import TunableExchange
from foretrain.comm.exchange import (
    RuntimeContext,
    coordinated_exchange,
    established_servers,
    measured_servers,
    served_exchange,
)
from foretrain.comm.observation import StepProfile, workload_of
from foretrain.comm.options import BoundedLoss
from foretrain.comm.ps.placement import Dtype
from foretrain.comm.rendezvous import connect_collectives, connect_ranks
from foretrain.comm.runtime_plan import RuntimePlan, runtime_plan
from foretrain.errors import ConfigError
from foretrain.network import Cluster
from foretrain.network.shards import part_limit
from foretrain.schedule import CostModel, Job, Spec
from foretrain.units import NANOSECOND

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links
    from foretrain.comm.ps.client.exchange import ServedExchange

_WAIT = 0.5
"""Seconds between two looks whether the job has failed."""


class TasksInFlight:
    """Counts, by task, of gradients that were handed over and of sums that came back. Any thread may call it.

    Args:
        count: of tasks.
        check: raises the error that has ended the job, if any.
    """

    def __init__(self, count: int, check: Callable[[], None]) -> None:
        self._check, self._changed = check, threading.Condition()
        self._expected, self._came = [0] * count, [0] * count

    def expect(self, task: int) -> None:
        """Note that a gradient of ``task`` is handed over."""
        self._expected[task] += 1

    def note(self, task: int) -> None:
        """Note that a sum of ``task`` has come."""
        with self._changed:
            self._came[task] += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let all who wait look whether the job has failed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, task: int) -> None:
        """Wait for the sum of ``task``, if it was handed over; raise what ``check`` does."""
        with self._changed:
            while self._came[task] < self._expected[task]:
                self._check()
                self._changed.wait(_WAIT)

    def first_missing(self) -> int | None:
        """Return the first task whose sum has not come; None if there is none."""
        pairs = zip(self._expected, self._came, strict=True)
        return next((task for task, (expected, came) in enumerate(pairs) if came < expected), None)


class HostRuntime:
    """Owner of all connections for gradients, and of the exchange that runs on them.

    Args:
        context: of all parts.
        control: agreements among the ranks, whose `series` this implements.
        towards: the address of rank 0; this rank listens on the way to it.
        tensors: elements and type of each, by name, in the order of tasks; with compression they are sent as another.
        landed: called with a task, when its sum has arrived, and whether any rank had a gradient.
        reliable: tasks of which a transport with bounded loss loses nothing.

    Attributes:
        gradients: the flat buffers.
        executor: of the chunks.
        exchange: takes ready tasks.
        ledger: of what may be lost, under `BoundedLoss`.
        rounds: begun with this exchange.
    """

    gradients: HostGradients
    executor: HostExecutor | ServedExchange
    exchange: TunableExchange
    ledger: Ledger | None = None

    def __init__(
        self,
        context: RuntimeContext,
        control: LinkControl,
        towards: tuple[str, int],
        tensors: Mapping[str, tuple[int, Dtype]],
        landed: Callable[[int, bool], None],
        reliable: Collection[int] = (),
    ) -> None:
        self._context, self._control, self._towards, self._landed = context, control, towards, landed
        self._reliable = reliable
        self._counts = [count for count, _ in tensors.values()]
        self._dtypes: list[Dtype] = [dtype for _, dtype in tensors.values()]
        self._rounding: HostRounding | None = None
        if (compression := context.options.compression) is not None:
            self._rounding = HostRounding(self._counts, self._dtypes, compression)
            self._dtypes = self._rounding.wire
        sent = zip(tensors, self._counts, self._dtypes, strict=True)
        self._sizes = {name: count * np.dtype(NUMPY_TYPES[dtype]).itemsize for name, count, dtype in sent}
        self._collectives: Collectives | None = None
        self._servers: Links | None = None
        self._job, self._epoch = "", 0
        """The job's name on the servers, and the number of its declarations there."""
        self.rounds = 0

    def begin(self) -> None:
        """Connect, and exchange gradients in the order in which they are ready. Collective."""
        if self._context.options.server is not None:
            self._job = self._control.share(secrets.token_hex(8).encode()).decode()
        else:
            options, transport = self._context.options, self._context.options.transport
            self._collectives = connect_collectives(
                self._control,
                transport,
                options.interface,
                options.peer_timeout,
                self._towards,
            )
            self._control.timed = partial(series, self._control, self._collectives)
        self._start(_first_plan(self._sizes))

    def schedule(self, profile: StepProfile, *, ordered: bool) -> RuntimePlan:
        """Measure the network, plan, and exchange gradients by that plan from now on. Collective; nothing is in flight.

        Args:
            profile: of this rank's steps.
            ordered: whether tasks are numbered in the order of their first use.
        """
        self._stop(None)
        measure = None
        if self._context.options.server is not None:
            self._establish()
            measure = self._measure
        profile = _in_order(profile) if ordered else profile
        plan = runtime_plan(self._control, profile, self._sizes, "session", "CPU", self._context.options, measure)
        self._start(plan)
        return plan

    def write(self, task: int, values: NDArray[Any], share: float) -> None:
        """Write ``values`` × ``share``, a gradient, to its place, as it is sent."""
        if self._rounding is not None and self._rounding.rounds(task):
            values, share = self._rounding.round(task, values, share), 1.0
        self.gradients.write(task, values, share)

    def read(self, task: int) -> NDArray[Any]:
        """Return the sum of ``task`` in its own type, flat and read-only; its memory, where nothing was rounded."""
        view = self.gradients.views[task].view()
        if self._rounding is not None and self._rounding.rounds(task):
            view = self._rounding.restored(task, view)
        view.flags.writeable = False
        return view

    def close(self, reason: str | None = None) -> None:
        """End all threads and connections; a ``reason`` tells other ranks that work was given up."""
        self._stop(reason, returns=False)
        self.abort()

    def abort(self) -> None:
        """End the collectives in flight, whose peers may never answer."""
        if self._collectives is not None:
            self._collectives.close()

    def _start(self, plan: RuntimePlan) -> None:
        context, order, self.rounds = self._context, plan.profile.order, 0
        if context.options.server is not None:
            servers = self._servers or self._establish()
            ranks = self._control.ranks
            limit = part_limit(plan.schedule.settings, len(servers.connections))
            staging = HostStaging(self._counts, self._dtypes, order, plan.job.tasks, ranks, self._job, limit)
            self.gradients = staging
            self.executor, self.exchange = served_exchange(context, plan, staging, servers, self._epoch, self._landed)
            self._epoch += 1
            return
        interface, transport, links = context.options.interface, context.options.transport, {}
        if self._control.ranks > 1:
            links = connect_ranks(self._control, interface, self._towards, lossy=isinstance(transport, BoundedLoss))
        if links is None:
            raise ConfigError("interface", interface, "cannot be reached by all ranks", "name another")
        assert self._collectives is not None
        self.gradients, tasks = HostGradients(self._counts, self._dtypes, order), plan.job.tasks
        ranks = self._control.ranks
        self.ledger = Ledger.of(
            *(transport, self.gradients, plan.job, plan.schedule, ranks),
            observed=plan.bound is None,
            reliable=self._reliable,
        )
        self.executor = HostExecutor(
            *(self.gradients, self._collectives, tasks, self._landed, context.failed, context.options.trace),
            ledger=self.ledger,
        )
        self.exchange = coordinated_exchange(context, plan, self.executor, links)

    def _stop(self, reason: str | None, *, returns: bool = True) -> None:
        """End the present exchange; ``returns`` tells servers that the job declares its tensors once more."""
        if self._servers is not None:
            self._servers.returns = returns
            self._servers = None
        if hasattr(self, "exchange"):
            self.exchange.close(reason)
            self.executor.close()

    def _establish(self) -> Links:
        self._servers = established_servers(self._control, self._context.options, self._job)
        return self._servers

    def _measure(self) -> tuple[CostModel, Cluster]:
        assert self._servers is not None
        self._epoch += 1
        return measured_servers(self._servers, self._control, self._context.options, self._job, self._epoch - 1)


def _first_plan(sizes: Mapping[str, int]) -> RuntimePlan:
    """Return the plan of the steps that are observed: first in, first out."""
    count = len(sizes)
    none = [0] * count
    profile = StepProfile(list(range(count)), none, 0, none, 0, 0, [1] * count, 1)
    workload = workload_of(profile, list(sizes), list(sizes.values()), "session", "CPU")
    cost = CostModel(NANOSECOND, 1)
    return RuntimePlan(profile, workload, cost, None, Job.of(workload, cost), Spec("fifo"), None)


def _in_order(profile: StepProfile) -> StepProfile:
    """Return ``profile`` for tasks that are used in the order of their numbers: later ones are used no earlier."""
    times = dict(zip(profile.order, profile.uses, strict=True))
    uses = list(accumulate((times[task] for task in range(len(times))), max))
    return msgspec.structs.replace(profile, order=list(range(len(times))), uses=uses)
