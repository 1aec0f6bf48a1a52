import dataclasses

import numpy as np
import pytest

from foretrain.collective import Draft, Plan, PlanError, build, verify
from foretrain.collective.verification import expect, play
from foretrain.errors import StallError
from tests.collective.plans import plans


def without(plan: Plan, dependency: int) -> Plan:
    first = plan.first.copy()
    first[plan.waiter[dependency] + 1 :] -= 1
    return dataclasses.replace(
        plan, first=first, after=np.delete(plan.after, dependency), lag=np.delete(plan.lag, dependency)
    )


def is_needed(plan: Plan, dependency: int) -> bool:
    try:
        verify(without(plan, dependency))
    except (PlanError, StallError):
        return True
    return False


PACED = {"pairwise", "binomial", "hdrm"}
"""What waits for more than data, so that its rounds do not overlap."""


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_no_dependency_can_be_dropped(ranks):
    for name, plan in plans(ranks):
        if plan.name not in PACED and plan.name != "hierarchical":
            assert all(is_needed(plan, one) for one in range(len(plan.after))), name


@pytest.mark.parametrize("ranks", [6, 7, 8, 9, 10, 12, 16])
@pytest.mark.parametrize("name", ["halving_doubling", "circulant"])
def test_hardly_any_dependency_of_an_exchange_can_be_dropped(name, ranks):
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        plan = build(name, operation, ranks)
        own = np.flatnonzero(plan.source[plan.waiter] == ranks // 3)  # all ranks are alike
        redundant = sum(not is_needed(plan, one) for one in own.tolist())
        # With circles of odd sizes a chain through several ranks may imply one that is listed.
        assert redundant <= (0 if ranks & (ranks - 1) == 0 else 2)


@pytest.mark.parametrize(
    ("inner", "outer", "most"),
    [("ring", "ring", 0), ("ring", "halving_doubling", 0), ("circulant", "ring", 6), ("circulant", "circulant", 18)],
)
def test_stages_wait_for_hardly_more_than_they_need(inner, outer, most):
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        plan = build("hierarchical", operation, 6, local=3, inner=inner, outer=outer)
        needed = [is_needed(plan, one) for one in range(len(plan.after))]
        assert needed.count(False) <= most


@pytest.mark.parametrize("ranks", [4, 6, 7])
def test_dropping_a_needed_dependency_can_be_seen_in_the_data(ranks):
    # The random orders alone, without the analysis of hazards, find most of it.
    for name in ("ring", "halving_doubling"):
        plan = build(name, "all_reduce", ranks)
        seen = 0
        for one in range(len(plan.after)):
            broken = without(plan, one)
            for seed in range(40):
                try:
                    expect(broken, play(broken, seed=seed))
                except PlanError:
                    seen += 1
                    break
        assert seen >= 0.7 * len(plan.after)


def test_a_transfer_of_the_wrong_block_is_caught():
    for _, plan in plans(5):
        for transfer in range(0, plan.transfers, 3):
            partial = plan.modulus[transfer] > plan.count[transfer] * plan.steps[transfer]
            if partial and plan.operation != "all_to_all":
                head = plan.head.copy()
                head[transfer] = (head[transfer] + 1) % plan.modulus[transfer]
                with pytest.raises(PlanError):
                    verify(dataclasses.replace(plan, head=head))


def test_a_transfer_to_the_wrong_rank_is_caught():
    for _, plan in plans(5):
        for transfer in range(0, plan.transfers, 3):
            target = plan.target.copy()
            target[transfer] = plan.source[transfer]
            with pytest.raises(PlanError):
                verify(dataclasses.replace(plan, target=target))


def test_what_adds_must_not_overwrite():
    for _, plan in plans(5):
        for transfer in np.flatnonzero(plan.adds)[::3]:
            adds = plan.adds.copy()
            adds[transfer] = 0
            if plan.target[transfer] < plan.ranks:
                with pytest.raises(PlanError):
                    verify(dataclasses.replace(plan, adds=adds))


def test_a_missing_part_is_named():
    draft = Draft("mine", "all_reduce", 3, 1)
    up = draft.transfer(1, 0, 0, adds=1)
    for rank in (1, 2):
        draft.transfer(0, rank, 0, after=[up])
    with pytest.raises(PlanError, match="rank 0 ends with block 0 without the part of 2"):
        verify(draft.plan())


def test_a_part_that_counts_twice_is_named():
    draft = Draft("mine", "all_reduce", 2, 1)
    up = draft.transfer(1, 0, 0, adds=1)
    again = draft.transfer(1, 0, 0, adds=1, after=[up])
    draft.transfer(0, 1, 0, after=[again])
    with pytest.raises(PlanError, match="rank 0 ends with block 0 with the part of 1 too often"):
        verify(draft.plan())


def test_what_was_never_defined_is_named():
    draft = Draft("mine", "broadcast", 3, 1, owner=[0])
    draft.transfer(2, 1, 0)
    with pytest.raises(PlanError, match="rank 1 ends with block 0 never defined"):
        verify(draft.plan())


def test_two_writes_in_no_order_race():
    draft = Draft("mine", "all_reduce", 2, 1)
    draft.transfer(1, 0, 0, adds=1)
    draft.transfer(0, 1, 0)
    with pytest.raises(PlanError, match="does not wait for step 0 of transfer"):
        verify(draft.plan())


def test_a_deadlock_lists_who_waits_for_whom():
    draft = Draft("mine", "all_reduce", 2, 1)
    draft.transfer(0, 1, 0, adds=1, after=[1])
    draft.transfer(1, 0, 0, adds=1, after=[0])
    with pytest.raises(StallError, match=r"transfer 0 \(0 -> 1\) at step 0 of 1 waits for transfer 1 \(1 -> 0\)"):
        verify(draft.plan())


def test_a_lag_that_is_too_small_is_caught():
    plan = build("ring", "broadcast", 4)
    with pytest.raises(PlanError, match="reads block"):
        verify(dataclasses.replace(plan, lag=np.zeros_like(plan.lag)))
    plan = build("ring", "all_reduce", 4)
    with pytest.raises(StallError):
        verify(dataclasses.replace(plan, lag=np.ones_like(plan.lag)))
