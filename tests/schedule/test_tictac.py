"""TicTac's orders: by hand, and against another reading of the rule on any graph."""

import random

import pytest

from foretrain.schedule.tictac import chain, tac, tic
from foretrain.simulation import simulate
from foretrain.simulation.simulation import job_on
from tests.scenario import EXACT, by_step, layered, random_cluster, random_workload

INFINITY = float("inf")


def needs(*transfers):
    return sum(1 << transfer for transfer in transfers)


def properties(transfers, computations, outstanding):
    """M, P and M+ of every outstanding transfer, read off the definitions with sets."""
    waiting = [(time, {r for r in outstanding if mask >> r & 1}) for time, mask in computations]
    alone = {r: sum(time for time, waits in waiting if waits == {r}) for r in outstanding}
    together = {
        r: min(
            (sum(transfers[x] for x in waits) for _, waits in waiting if r in waits and len(waits) > 1),
            default=INFINITY,
        )
        for r in outstanding
    }
    return {r: (transfers[r], alone[r], together[r]) for r in outstanding}


def before(a, b):
    """Whether a transfer of M, P and M+ as in ``a`` goes before ``b``; None where the rule does not say."""
    (m_a, p_a, together_a), (m_b, p_b, together_b) = a, b
    left, right = min(p_b, m_a), min(p_a, m_b)
    if left != right:
        return left < right
    return None if together_a == together_b else together_a < together_b


def brute(transfers, computations):
    """The order in which each is the one that no other outstanding transfer goes before, found one after the other.

    The rule is not transitive, so the candidates are compared in a fixed order and the winner stays.
    """
    outstanding, order = set(range(len(transfers))), []
    while outstanding:
        known = properties(transfers, computations, outstanding)
        best = min(outstanding)
        for r in sorted(outstanding):
            if before(known[r], known[best]):
                best = r
        order.append(best)
        outstanding.remove(best)
    return tuple(order)


def random_graph(rng, most=7):
    count = rng.randint(1, most)
    transfers = [rng.randint(1, 20) for _ in range(count)]
    computations = [
        (rng.randint(0, 20), rng.randrange(1, 1 << count) & (rng.randrange(1 << count) | 1))
        for _ in range(rng.randint(0, 2 * most))
    ]
    return transfers, computations


@pytest.mark.parametrize(
    ("transfers", "computations", "expected"),
    [
        # Figure 1 of the paper: op1 needs recv1, op2 needs op1 and recv2.
        pytest.param((5, 5), [(9, needs(0)), (9, needs(0, 1))], (0, 1), id="chain"),
        # Johnson's rule on two jobs: min(P_b, M_a) < min(P_a, M_b).
        pytest.param((3, 5), [(6, needs(0)), (2, needs(1))], (0, 1), id="short transfer, long computation"),
        pytest.param((4, 1), [(5, needs(0)), (1, needs(1))], (0, 1), id="min(1, 4) against min(5, 1): M+ ties too"),
        # Nothing is enabled by one alone: {1, 2} take 3 together, {0, 1} take 5.
        pytest.param((4, 1, 2), [(1, needs(0, 1)), (3, needs(1, 2))], (1, 2, 0), id="smallest set first"),
        # A diamond: both inputs of the join, then the side branch, although that is short.
        pytest.param((2, 2, 1), [(9, needs(0, 1)), (1, needs(0, 1, 2))], (0, 1, 2), id="diamond"),
    ],
)
def test_tac_by_hand(transfers, computations, expected):
    assert tac(transfers, computations) == expected


def test_tac_is_the_rule_on_any_graph():
    rng = random.Random(1)
    for _ in range(4000):
        transfers, computations = random_graph(rng)
        assert tac(transfers, computations) == brute(transfers, computations)


@pytest.mark.parametrize(
    ("count", "computations", "expected"),
    [
        pytest.param(3, [(1, needs(0)), (1, needs(0, 1)), (1, needs(0, 1, 2))], (0, 1, 2), id="chain"),
        pytest.param(4, [(1, needs(0, 1, 2)), (1, needs(2, 3))], (2, 3, 0, 1), id="smallest set first"),
        pytest.param(3, [(1, needs(1, 2)), (1, needs(0, 1, 2))], (1, 2, 0), id="what nothing small needs is last"),
    ],
)
def test_tic_by_hand(count, computations, expected):
    assert tic(count, computations) == expected


def test_tic_sorts_by_the_number_of_transfers_in_the_smallest_set_of_more_than_one():
    rng = random.Random(5)
    for _ in range(1000):
        transfers, computations = random_graph(rng)
        count = len(transfers)
        known = properties([1] * count, [(0, mask) for _, mask in computations], set(range(count)))
        together = [known[r][2] for r in tic(count, computations)]
        assert together == sorted(together)


def test_both_are_forward_order_on_a_chain_of_one_gradient_a_layer():
    rng = random.Random(7)
    for _ in range(200):
        count = rng.randint(1, 9)
        times = [[rng.randint(1, 99) for _ in range(count)] for _ in range(3)]
        job = job_on(layered(*times), EXACT)
        order = tuple(range(count))
        assert tic(count, chain(job)) == tac([task.size for task in job.tasks], chain(job)) == order


def test_the_chain_is_cumulative():
    job = job_on(layered((3, 4, 5), (1, 1, 1), (1, 1, 1)), EXACT)
    assert chain(job) == [(3, 0b001), (4, 0b011), (5, 0b111)]


@pytest.mark.parametrize("name", ["tictac", "tic"])
def test_parameters_are_pulled_in_that_order_when_all_are_pushed(name):
    rng = random.Random(name)
    for _ in range(150):
        workload, place = random_workload(rng), random_cluster(rng)
        job = job_on(workload, place)
        times = [job.cost.time(task.size) for task in job.tasks]
        order = tac(times, chain(job)) if name == "tictac" else tic(len(times), chain(job))
        for chunks in by_step(simulate(workload, place, name, trace=False).log).values():
            pushes, pulls = chunks[: len(times)], chunks[len(times) :]
            assert {chunk.op for chunk in pushes} == {"reduce_scatter"}
            assert {chunk.op for chunk in pulls} == {"all_gather"}
            released = [job.releases[chunk.pieces[0].task] for chunk in pushes]
            assert released == sorted(released)
            assert tuple(chunk.pieces[0].task for chunk in pulls) == order
