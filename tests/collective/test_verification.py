import dataclasses
import itertools
import re

import numpy as np
import pytest

from foretrain.collective import Draft, Plan, PlanError, build, verify
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


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_exchanges_and_stages_wait_for_hardly_more_than_they_need(operation):
    for name, ranks in itertools.product(("halving_doubling", "circulant"), (6, 7, 8, 9, 10, 12, 16)):
        plan = build(name, operation, ranks)
        own = np.flatnonzero(plan.source[plan.waiter] == ranks // 3)  # all ranks are alike
        redundant = sum(not is_needed(plan, one) for one in own.tolist())
        # With circles of odd sizes a chain through several ranks may imply one that is listed.
        assert redundant <= (0 if ranks & (ranks - 1) == 0 else 2)
    stages = {("ring", "ring"): 0, ("ring", "halving_doubling"): 0, ("circulant", "ring"): 6, ("circulant",) * 2: 18}
    for (inner, outer), most in stages.items():
        plan = build("hierarchical", operation, 6, local=3, inner=inner, outer=outer)
        assert [is_needed(plan, one) for one in range(len(plan.after))].count(False) <= most


def refused(plan: Plan, **columns: np.ndarray) -> None:
    with pytest.raises(PlanError):
        verify(dataclasses.replace(plan, **columns))


def test_a_transfer_of_a_wrong_block_to_a_wrong_rank_or_without_adding_is_caught():
    for _, plan in plans(5):
        for transfer in range(0, plan.transfers, 3):
            one = np.arange(plan.transfers) == transfer
            refused(plan, target=np.where(one, plan.source, plan.target))
            partial = plan.modulus[transfer] > plan.count[transfer] * plan.steps[transfer]
            if partial and plan.operation != "all_to_all":
                refused(plan, head=np.where(one, (plan.head + 1) % plan.modulus, plan.head))
        for transfer in np.flatnonzero(plan.adds)[::3]:
            if plan.target[transfer] < plan.ranks:
                refused(plan, adds=np.where(np.arange(plan.transfers) == transfer, 0, plan.adds))


@pytest.mark.parametrize(
    ("operation", "ranks", "transfers", "message"),
    [
        ("all_reduce", 3, ["1 0 +", "0 1 <0", "0 2 <0"], "rank 0 ends with block 0 without the part of 2"),
        ("all_reduce", 2, ["1 0 +", "1 0 +<0", "0 1 <1"], "rank 0 ends with block 0 with the part of 1 too often"),
        ("broadcast", 3, ["2 1 "], "rank 1 ends with block 0 never defined"),
        ("all_reduce", 2, ["1 0 +", "0 1 "], "does not wait for step 0 of transfer"),
        ("all_reduce", 2, ["0 1 +<1", "1 0 +<0"], "transfer 0 (0 -> 1) at step 0 of 1 waits for transfer 1 (1 -> 0)"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(operation, ranks, transfers, message):
    """Transfers from one rank to another: ``+`` adds, ``<0`` waits for transfer 0."""
    draft = Draft("mine", operation, ranks, 1, owner=[0] if operation == "broadcast" else ())
    for transfer in transfers:
        source, target, how = transfer.split(" ")
        _, _, after = how.partition("<")
        draft.transfer(int(source), int(target), 0, adds=int("+" in how), after=[int(after)] if after else [])
    with pytest.raises((PlanError, StallError), match=re.escape(message)):
        verify(draft.plan())


def test_a_lag_that_is_too_small_is_caught():
    plan = build("ring", "broadcast", 4)
    with pytest.raises(PlanError, match="reads block"):
        verify(dataclasses.replace(plan, lag=np.zeros_like(plan.lag)))
    plan = build("ring", "all_reduce", 4)
    with pytest.raises(StallError):
        verify(dataclasses.replace(plan, lag=np.ones_like(plan.lag)))
