"""What tells when the link has changed, under any policy."""

import pytest

from foretrain.engine import Engine
from foretrain.schedule import CostModel, Job, spec
from foretrain.schedule.monitor import Gauge
from foretrain.tasks import Ready, StepBegin
from foretrain.units import COST_SHIFT, MILLISECOND
from foretrain.workload import Gradient, Layer, Workload

COST = CostModel(overhead=0, per_byte=1000 << COST_SHIFT)  # 1 GB/s
SCHEDULED = "bytescheduler(partition=1MB,credit=4MB)"


class Link:
    """A world whose link carries one chunk after the other, ``slowness`` times as slowly as the model says."""

    def __init__(self):
        self.time, self.slowness, self.busy, self.coming = 0, 1.0, 0, []

    def now(self):
        return self.time

    def call_at(self, when, call):
        raise AssertionError("no policy here waits")

    def start(self, chunk, done):
        self.busy = max(self.busy, self.time) + round(COST.time(chunk.size) * self.slowness)
        self.coming.append((self.busy, chunk, done))

    def run(self):
        while self.coming:
            self.time, chunk, done = self.coming.pop(0)
            done(chunk)


class Training:
    """Steps whose gradients are all ready at once, with a gauge that listens."""

    def __init__(self, plan):
        gradients = tuple(Gradient(f"t{k}", 4_000_000, 0, 0) for k in range(8))
        job = Job.of(Workload("even", 1, (Layer("l", 1, 1),), gradients), COST)
        self.link, self.gauge, self.steps = Link(), Gauge(COST), 0
        self.engine = Engine(self.gauge.watch(spec(plan).build(job)), self.link, job.tasks)
        self.tasks = range(len(gradients))

    def step(self, slowness):
        """One of them over a link that is so slow."""
        self.link.slowness = slowness
        self.engine.post(StepBegin(self.steps))
        for task in self.tasks:
            self.engine.post(Ready(task))
        self.link.run()
        self.link.time += MILLISECOND
        self.steps += 1

    def told(self, slownesses):
        """What the gauge says after each of these steps."""
        found = []
        for slowness in slownesses:
            self.step(slowness)
            found.append(self.gauge.taken())
        return found


@pytest.mark.parametrize("plan", ["fifo", SCHEDULED, "largest_tail_first"])
@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_a_lasting_change_is_told_once(plan, slower):
    told = Training(plan).told([1.3] * 12 + [1.3 * slower] * 12)
    assert [each for each in told if each is not None] == [pytest.approx(slower, rel=0.01)]
    assert told.index(next(filter(None, told))) <= 12 + 5


def test_what_varies_is_no_change():
    assert set(Training(SCHEDULED).told([1 + 0.1 * (k % 3) for k in range(60)])) == {None}


def test_changes_that_nobody_took_add_up():
    training = Training(SCHEDULED)
    for slowness in [1.0] * 3 + [2.0] * 6 + [4.0] * 6:
        training.step(slowness)
    assert training.gauge.taken() == pytest.approx(4, rel=0.01)
    assert training.gauge.taken() is None
