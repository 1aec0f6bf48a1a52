"""Profiles of observed steps, and the knobs that are chosen from them."""

import msgspec

from foretrain.comm.observation import StepObserver, StepProfile, workload_of
from foretrain.comm.runtime_plan import decide
from foretrain.planner.candidate_search import cluster_of
from foretrain.planner.search import forecaster
from foretrain.schedule import CostModel, spec
from foretrain.units import COST_SHIFT, MICROSECOND, MILLISECOND, SECOND


class ScriptedWatch:
    """Stopwatch whose time the test sets."""

    threads, now = 1, 0

    def mark(self):
        return self.now

    def settle(self, marks):
        return [mark - marks[0] for mark in marks]


def observed(*steps):
    """Return the profile of steps of two tasks, each given as the ms of every layer."""
    watch = ScriptedWatch()
    observer = StepObserver(2, watch)
    for front, back in steps:
        observer.begin_forward()
        for task, layer in enumerate((front, back)):
            observer.use(task)
            watch.now += layer * MILLISECOND
        observer.end_forward()
        for task, layer in ((1, back), (0, front)):
            watch.now += 2 * layer * MILLISECOND
            observer.gradient(task, 0)
        observer.reduced()
        observer.end_step()
    return msgspec.structs.replace(observer.observed(), crowding=0)  # that of this machine


def test_one_disturbed_step_of_two_does_not_change_the_profile():
    calm = observed((50, 50), (3, 2), (3, 2))
    assert (calm.uses, calm.forward, calm.releases) == (
        [0, 3 * MILLISECOND],
        5 * MILLISECOND,
        [10 * MILLISECOND, 4 * MILLISECOND],
    )
    assert observed((50, 50), (40, 2), (3, 2)) == observed((50, 50), (3, 2), (3, 90)) == calm


def twelve_layers(names):
    """Return twelve equal layers that compute 40 ms, and send 1.5 MB, as long as that takes on 300 Mb/s."""
    forward = [k * 40 * MILLISECOND // 36 for k in range(13)]
    releases = [2 * forward[12 - k] for k in range(12)]
    profile = StepProfile(list(range(12)), forward[:12], forward[12], releases, releases[0], 0, [1] * 12, 1)
    return workload_of(profile, names, [125_000] * 12, "model", "here")


def test_each_tensor_whose_name_has_no_dot_is_a_layer():
    plain, dotted = ([f"layer{k}{end}" for k in range(12)] for end in ("", ".weight"))
    assert twelve_layers(plain).layers == twelve_layers(dotted).layers
    both = twelve_layers([f"layer{k // 2}.{('weight', 'bias')[k % 2]}" for k in range(12)])
    assert [gradient.layer for gradient in both.gradients] == [k // 2 for k in range(12)]


def test_open_knobs_gain_over_fifo_whatever_tensors_are_called():
    cost = CostModel(100 * MICROSECOND, round(8 / 300e6 * SECOND * 2**COST_SHIFT), 500 * MICROSECOND)
    cluster = cluster_of(cost, 2)
    for names in ([f"layer{k}" for k in range(12)], [f"layer{k}.weight" for k in range(12)]):
        workload = twelve_layers(names)
        forecast = forecaster(workload, cluster)
        for name in ("bytescheduler", "prophet"):
            chosen = decide(spec(name), workload, cluster)
            assert chosen.settings["credit"] < workload.size
            assert 1.1 * forecast(chosen) < forecast(spec("fifo")), chosen
