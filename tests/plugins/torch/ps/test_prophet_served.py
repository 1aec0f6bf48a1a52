"""Prophet's promise on real traces: nothing less urgent is in the way of a gradient beyond the budget.

Real ranks train over real servers; what the policy saw and did there, with the clock of the job, is what is judged.
"""

import os
import time
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from foretrain.comm.options import ParameterServer  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from foretrain.plugins.torch.rendezvous import SECRET  # noqa: E402
from foretrain.schedule.prophet import Prophet  # noqa: E402
from foretrain.tasks import Done, Ready, StepBegin  # noqa: E402
from tests.plugins.torch.models import batch, mlp, objective  # noqa: E402
from tests.plugins.torch.ps.serving import KEY, servers  # noqa: E402

WIDTH, DEPTH, STEPS = 384, 8, 14
PARTITION, CREDIT = 64 << 10, 256 << 10
SCHEDULE = f"prophet(partition={PARTITION}B, credit={CREDIT}B, profile=3, factor=1.0)"


@dataclass
class Started:
    """One decision, and what allowed it: all that the policy knew just before and after. Times in ps."""

    now: int
    pieces: list[tuple[int, int, int]]
    under_way: int
    coming: int
    strict_from: int
    deadline: int | None
    free_before: int
    free_after: int
    ahead: int
    quantum: int


def watch(seen):
    """Has every Prophet of this process write down what it sees and does."""
    handle, send = Prophet.handle, Prophet._send

    def watched_handle(self, event, now):
        if isinstance(event, StepBegin):
            seen.append(("begin", now, self._blocks is not None))
        elif isinstance(event, Ready):
            seen.append(("ready", now, event.task))
        elif isinstance(event, Done):
            seen.append(("done", now, event.chunk.size))
        return handle(self, event, now)

    def watched_send(self, actions, now):
        for action in actions:
            before, under_way = self._monitor.free_at, self._under_way
            send(self, [action], now)
            pieces = [(self._job.tasks[p.task].first_use, p.task, p.size) for p in action.chunk.pieces]
            started = Started(
                now,
                pieces,
                under_way,
                self._coming,
                self._strict_from,
                self._deadline,
                before,
                self._monitor.free_at,
                self._ahead,
                self._quantum,
            )
            seen.append(("start", now, started))

    Prophet.handle, Prophet._send = watched_handle, watched_send
    return lambda: (setattr(Prophet, "handle", handle), setattr(Prophet, "_send", send))


def pause(module, inputs, outputs):
    """Between two layers' gradients: what makes them leave the backward pass in steps."""
    time.sleep(0.004)


def training(addresses):
    """A few steps; what this rank's policy saw and did, and the sizes of its tasks."""
    os.environ[SECRET] = KEY.hex()
    seen = []
    restore = watch(seen)
    try:
        model = mlp(DEPTH, WIDTH)
        for layer in model[::4]:
            layer.register_full_backward_hook(pause)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attach(model, optimizer, SCHEDULE, transport=ParameterServer(addresses), warmup=2) as attached:
            for step in range(STEPS):
                objective(model(batch(step, width=WIDTH))).backward()
                optimizer.step()
                optimizer.zero_grad()
            attached.gather()
            urgency = {task: place for place, task in enumerate(_order(attached))}
            sizes = [p.numel() * p.element_size() for p in model.parameters()]
        return seen, urgency, sizes
    finally:
        restore()
        del os.environ[SECRET]


def _order(attached):
    gradients = attached.workload.gradients
    return sorted(range(len(gradients)), key=lambda i: (gradients[i].layer, i))


def allowed(start):
    """Whether one of the rules permits it: it drains in time, a late block's crumbs, or the window's credit."""
    if not start.coming or start.now < start.strict_from:
        return start.under_way < CREDIT
    in_time = start.deadline is not None and start.free_after <= start.deadline + start.ahead
    size = sum(size for _, _, size in start.pieces)
    return in_time or (size <= start.quantum and start.free_before - start.ahead <= start.now)


def test_nothing_less_urgent_is_in_the_way_beyond_the_budget(ranks):
    with servers(2, 2) as (addresses, _):
        for seen, urgency, sizes in ranks(training, addresses):
            judged, left, planned = 0, {}, False
            for kind, _, what in seen:
                if kind == "begin":
                    assert not any(left.values())  # every byte of a step is started in it
                    planned = what
                elif kind == "ready":
                    left[what] = sizes[what]
                elif kind == "start" and planned:
                    judged += 1
                    for place, task, size in what.pieces:
                        waiting = [urgency[other] for other, rest in left.items() if rest]
                        assert place == urgency[task] == min(waiting)  # the most urgent of all that is there
                        left[task] -= size
                    assert allowed(what), what
                elif kind == "start":
                    for _, task, size in what.pieces:
                        left[task] -= size
            assert judged > 10 * DEPTH
