"""Each knob, changed while a job runs, changes what is sent.

ByteScheduler's own tuner wrote its partition size to a field that nobody reads.
"""

import random

import pytest

from foretrain.network import cluster
from foretrain.schedule import POLICIES, Spec
from foretrain.simulation.world import ARRIVAL
from foretrain.tasks import StepBegin
from foretrain.workload import zoo
from tests.scenario import by_step, replay

KNOBS = [(name, knob) for name, one in POLICIES.items() for knob in one.knobs if knob.tunable or knob.noisy]
WORK = zoo("resnet50", device="V100")
CHANGE, STEPS = 5, 10
"""The step from which on a knob is another: Prophet has watched three, and watches three again."""


class Retuned:
    """Runs ``before``, and from step `CHANGE` on ``after``: built anew when the step begins, as in a real job."""

    def __init__(self, job, before, after):
        self._job, self._after, self._policy = job, after, before.build(job)
        self.barrier, self.warmup = self._policy.barrier, self._policy.warmup

    def handle(self, event, now):
        if type(event) is StepBegin and event.step == CHANGE:
            self._policy = self._after.build(self._job)
        return self._policy.handle(event, now)


class Late:
    """A network that tells of each chunk up to 1 ms late, each time by another time, though in order."""

    def __init__(self, carrier):
        self._carrier, self._source, self._last = carrier, random.Random(0), 0

    def carry(self, chunk, world, done):
        def arrived(chunk):
            self._last = max(self._last, world.now() + self._source.randrange(1_000_000_000))
            world.schedule(self._last, ARRIVAL, done, chunk)

        self._carrier.carry(chunk, world, arrived)


def sent(place, before, after, noisy):
    """The chunks of each step, in order; what is ``noisy`` about steady times is about times that vary."""
    over = Late if noisy else lambda carrier: carrier
    _, run, _ = replay(WORK, place, lambda job: Retuned(job, before, after), STEPS, over)
    return by_step(run.log)


@pytest.mark.parametrize("where", ["8xV100@3Gbps", "8xV100@3Gbps,ps=4"], ids=["all-reduce", "ps"])
@pytest.mark.parametrize(("name", "knob"), KNOBS, ids=lambda each: getattr(each, "name", each))
def test_each_knob_that_changes_while_a_job_runs_changes_what_is_sent(name, knob, where):
    # Chunks of 10 kB would be ten thousand a step.
    least = knob.grid[0] if knob.grid else max(knob.default // 16, 160_000)
    most = knob.grid[-1] if knob.grid else knob.default * 16
    # A planned order has neither a window nor noise.
    others = {"planned": 0} if name == "prophet" and knob.name in ("credit", "quantile") else {}
    before, after = (Spec(name, {knob.name: knob.check(value), **others}) for value in (least, most))
    place = cluster(where)
    kept, changed = (sent(place, before, one, knob.noisy) for one in (before, after))
    assert [kept[step] == changed[step] for step in range(CHANGE)] == [True] * CHANGE
    assert [step for step in range(CHANGE, STEPS) if kept[step] != changed[step]]
    for step in range(CHANGE, STEPS):  # and everything is sent none the less
        assert len({chunk.op for chunk in changed[step]}) == len({chunk.op for chunk in kept[step]})
        assert sum(chunk.size for chunk in changed[step]) == sum(chunk.size for chunk in kept[step])
