"""T* against the closed form, Carlier's formula, and every schedule of a few bytes."""

import random
from functools import cache

import pytest
from hypothesis import given, settings

from foretrain.network import Cluster
from foretrain.simulation import bound
from foretrain.simulation.simulation import job_on
from foretrain.units import COST_SHIFT, MILLISECOND
from foretrain.workload import Gradient, Layer, Workload
from tests.scenario import EXACT, layered, one_machine, random_cluster, random_layered, random_workload, workloads


def closed_form(workload, per_byte):
    """max(Σb + Σf, max over m of r_m + S_m + q_m) in the fixed point of ``per_byte``, rounded down."""
    best, sent, after = workload.compute << COST_SHIFT, 0, workload.forward
    for layer, gradient in zip(workload.layers, workload.gradients, strict=True):
        sent += gradient.size * per_byte
        best = max(best, ((gradient.release + layer.update + after) << COST_SHIFT) + sent)
        after -= layer.forward
    return best >> COST_SHIFT


def test_it_is_the_closed_form_to_the_last_picosecond_at_any_rate():
    rng = random.Random(2)
    for _ in range(1000):
        workload, place = random_layered(rng, most=12), random_cluster(rng)
        assert bound(workload, place).time == closed_form(workload, place.cost.per_byte)


@settings(max_examples=150)
@given(workloads())
def test_it_is_carliers_formula_whatever_the_order(workload):
    job = job_on(workload, EXACT)
    best = one_machine(job.releases, [task.size for task in job.tasks], job.tails)
    assert bound(workload, EXACT).time == max(best, workload.compute)


def test_nothing_that_moves_byte_by_byte_beats_it():
    """Every schedule of a few bytes, by dynamic programming over what is left and when."""
    rng = random.Random(5)
    for _ in range(300):
        count = rng.randint(1, 3)
        layers = tuple(Layer(f"l{i}", rng.randint(1, 3), rng.randint(0, 3), rng.randint(0, 4)) for i in range(count))
        end = sum(layer.backward for layer in layers)
        gradients = tuple(
            Gradient(f"w{i}", rng.randint(1, 3), rng.randrange(count), rng.randint(0, end)) for i in range(count)
        )
        workload = Workload("tiny", 1, layers, gradients)
        tails = job_on(workload, EXACT).tails

        @cache
        def best(now, left, gradients=gradients, tails=tails):
            if not any(left):
                return 0
            choices = []
            for i, size in enumerate(left):
                if size and gradients[i].release <= now:
                    rest = (*left[:i], size - 1, *left[i + 1 :])
                    lands = now + 1 + tails[i] if size == 1 else 0
                    choices.append(max(lands, best(now + 1, rest)))
            if len(choices) < sum(map(bool, left)):
                choices.append(best(now + 1, left))  # idling may help when something is still to come
            return min(choices)

        expected = max(best(0, tuple(g.size for g in gradients)), workload.compute)
        assert bound(workload, EXACT).time == expected


def test_a_tied_weight_is_released_late_and_needed_first():
    # The embedding is used first and, tied, last: its gradient is complete only when the backward pass ends.
    layers = (Layer("embed", 10, 10), Layer("block", 100, 200), Layer("head", 10, 20))
    gradients = (Gradient("embed", 500, 0, 230), Gradient("head", 100, 2, 20))
    found = bound(Workload("tied", 1, layers, gradients), EXACT)
    assert (found.time, found.layer, found.kind) == (230 + 500 + 120, "embed", "embedding-bound")
    assert (found.release, found.communication, found.tail) == (230, 500, 120)


def test_what_binds_adds_up():
    rng = random.Random(6)
    for _ in range(1000):
        found = bound(random_workload(rng), random_cluster(rng))
        assert found.time >= found.compute
        if found.kind != "compute-bound":
            assert found.release + found.communication + found.tail == found.time
        assert found.exposed == found.time - found.compute
        assert found.communication <= found.link + 1


def test_the_layer_that_binds_is_that_of_the_formula_and_is_named_in_a_sentence():
    # r + S + q: 5 + 10 + 3 for a, 3 + 1010 + 2 for b, 1 + 1011 + 1 for c
    found = bound(layered((1, 1, 1), (2, 2, 1), (10, 1000, 1)), EXACT)
    assert (found.time, found.layer, found.kind) == (1015, "l1", "communication-bound")
    assert (found.release, found.communication, found.tail) == (3, 1010, 2)

    assert str(found).startswith("T* = 1.01 ns, communication-bound at layer 'l1' (the link cannot carry everything")
    idle = bound(layered((1,), (1000,), (1,)), EXACT)
    assert (idle.kind, idle.time) == ("compute-bound", 1002)
    assert "can hide behind the computation" in str(idle)


def test_updates_bind_even_when_the_network_is_free():
    found = bound(layered((1, 1), (1, 1), (1, 1), (500, 0)), EXACT)
    assert found.time == 2 + 1 + 500 + 2


@pytest.mark.parametrize("exchange", ["all_reduce", "ps_colocated"])
def test_twice_the_rate_halves_the_link(exchange):
    workload = layered((1,), (1,), (10**9,))
    slow = bound(workload, Cluster(4, up=1e9, down=1e9, exchange=exchange))
    fast = bound(workload, Cluster(4, up=2e9, down=2e9, exchange=exchange))
    assert slow.link == 2 * fast.link == 1500 * MILLISECOND


def test_wait_free_backpropagation_gains_at_most_the_forward_pass_but_for_the_last_layer():
    """T_WFBP ≤ T* + Σf − f_L + Σu − min u: in the last busy time of the link even its least urgent gradient is followed
    by its own update and by f_L. And so the gain is below 2 without updates."""
    rng = random.Random(7)
    for trial in range(1000):
        workload = random_layered(rng, updates=trial % 2 == 1) if trial % 3 else random_workload(rng)
        found = bound(workload, EXACT)
        updates = [layer.update for layer in workload.layers]
        slack = workload.forward - workload.layers[-1].forward + workload.update - min(updates)
        # When the backward pass and not the link ends last, only the updates at the barrier are lost.
        assert found.wfbp <= max(found.time + slack, workload.compute + workload.update)
        if not any(updates):
            assert found.wfbp < 2 * found.time


def test_decoupling_never_beats_it():
    rng = random.Random(8)
    for _ in range(500):
        workload = random_workload(rng)
        found = bound(workload, EXACT)
        assert found.dear + len(workload.gradients) >= found.time  # halves of odd picoseconds are rounded down
