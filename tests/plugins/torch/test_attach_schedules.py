"""Schedules, orders of collectives, groups and compression train the same; changed knobs change what is sent."""

import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.options import AllReduce, BoundedLoss
from foretrain.errors import ConfigError
from foretrain.plugins.torch import attach, process_group_executor
from foretrain.plugins.torch.gradient_buffer import BufferSlice, Rounding
from foretrain.schedule import POLICIES
from tests.plugins.torch.models import (
    EACH,
    SMALL,
    STEPS,
    Attached,
    assert_same,
    branching,
    loop,
    pair,
    plain,
    same_as_ddp,
    steps,
)

ODD = "bytescheduler(partition=1027B, credit=1027B)"
"""Cuts between the bytes of one number."""
KINDS = [
    "ddp(bucket=4KiB, first=1KiB)",
    "fusion(threshold=4KiB, cycle=100us)",
    SMALL,
    "dear(group=4KiB)",
    "prophet(partition=1KiB, credit=2KiB)",
    ODD,
]
"""One of each way to send: buckets, by a timer, a window, in two halves, in blocks, and cut anywhere."""
ROUNDING = 1e-5
"""Relative; with three ranks the order of additions differs from DDP's."""


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.smoke
def test_every_kind_of_schedule_trains_the_same(ranks, schedule):
    assert_same(ranks, branching, EACH, schedule=schedule)


@pytest.mark.parametrize("schedule", ["dear(group=4KiB)", ODD])
def test_three_ranks(three, schedule):
    assert_same(three, plain, schedule=schedule, tolerance=ROUNDING)


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("schedule", [SMALL, "dear(group=4KiB)"])
def test_a_ring_in_place_of_the_process_group(ranks, schedule, compression):
    tolerance = 0.05 if compression else 0.0
    options = {"schedule": schedule, "compression": compression, "transport": AllReduce(backend="ring")}
    assert_same(ranks, branching, EACH, tolerance=tolerance, **options)


def test_over_udp_in_place_of_the_process_group(ranks):
    assert_same(ranks, branching, EACH, schedule="dear(group=4KiB)", transport=BoundedLoss(0.0))


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 3), nn.Linear(3, 5))


def test_chunks_smaller_than_a_number(ranks):
    seen = assert_same(ranks, plain, tiny, schedule="largest_tail_first(partition=3B, credit=3B)")
    assert max(seen[0].sizes[0]) == 3


@pytest.mark.parametrize("schedule", ["bytescheduler", "prophet", "dear"])
def test_knobs_left_open_are_set_by_simulation(ranks, schedule):
    assert_same(ranks, plain, schedule=schedule)


def copying(side):
    with mock.patch.object(process_group_executor, "coalesces", return_value=False):
        yield from plain(side)


@pytest.mark.parametrize(("compression", "tolerance"), [(None, 0.0), ("bf16", 0.05)])
def test_where_several_tensors_cannot_be_reduced_at_once_they_are_copied_together(ranks, compression, tolerance):
    schedule = "bytescheduler(partition=4KiB, credit=8KiB, fuse=4)"
    assert_same(ranks, copying, schedule=schedule, compression=compression, tolerance=tolerance)


# ---------------------------------------------------------------- order


def test_commands_may_be_compared_in_every_step(ranks):
    assert_same(ranks, plain, transport=AllReduce(check_every=1))


@pytest.mark.parametrize("schedule", ["fifo", SMALL, "dear(group=4KiB)"])
def test_a_replayed_order(ranks, schedule):
    assert_same(ranks, plain, schedule=schedule, transport=AllReduce("replay", check_every=1))


@pytest.mark.parametrize("how", [EACH, "nobody's until late"])
def test_a_replayed_order_copes_with_branches(ranks, how):
    assert_same(ranks, branching, how, True, transport=AllReduce("replay"))


@pytest.mark.smoke
def test_a_replayed_order_with_three_ranks(three):
    assert_same(three, plain, transport=AllReduce("replay"), tolerance=ROUNDING)


# ---------------------------------------------------------------- ranks and groups


def test_one_rank_alone(alone):
    assert_same(alone, branching, "nobody's until late", True)
    assert_same(alone, plain, transport=AllReduce("replay"))


def test_branches_with_three_ranks(three):
    assert_same(three, branching, EACH, True, tolerance=ROUNDING)


def some(side, members):
    """Only ``members`` train."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        yield from plain(side, process_group=group)


def test_groups_of_some_ranks_that_overlap(job):
    """Rank 1 is in more groups than rank 2 when these two meet."""
    ranks = job(3)
    for members in ([0, 1], [1, 2], [2]):
        assert_same(ranks, some, members)


@same_as_ddp()
def test_collectives_of_the_script_itself(side):
    """The script has collectives of its own, between backward() and step(), and right after step()."""

    def summed(step):
        total = torch.tensor(float(step + dist.get_rank()))
        dist.all_reduce(total)
        return total

    yield from loop(side, ready=summed, stepped=lambda step: dist.barrier())


# ---------------------------------------------------------------- knobs set in a job


def retuned(side, callers, knob, value):
    """In step 5 ``callers`` set a knob."""

    def ask(step):
        if step == 4 and dist.get_rank() in callers and isinstance(side, Attached):
            side.handles[0].set(knob, value)

    yield from loop(side, steps=STEPS + 4, cleared=ask)


@pytest.mark.parametrize("callers", [(0,), (0, 1)], ids=str)
def test_a_knob_changes_what_is_sent_from_one_step_to_the_next(ranks, callers):
    seen = assert_same(ranks, retuned, callers, "slice", "2KiB", schedule="p3(slice=1KiB)")
    sizes = [size for size in seen[0].sizes[0] if size > 128]  # a bias has 128 bytes
    change = sizes.index(2048)
    assert change > 0
    assert change % 16 == 0  # four pieces of each of four weights: whole steps
    assert set(sizes[:change]) == {1024}
    assert set(sizes[change:]) == {2048}
    assert {schedule for rank in seen for schedule in rank.schedules} == {"p3(slice=2KiB)"}


@pytest.mark.parametrize(
    ("schedule", "knob", "value"),
    [
        ("ddp(bucket=1KiB, first=1KiB)", "bucket", "1MiB"),
        ("fusion(threshold=1KiB, cycle=20ms)", "threshold", "1MiB"),
        ("bytescheduler(partition=1MiB, credit=1MiB, fuse=0.0)", "fuse", "1000.0"),
    ],
)
def test_knobs_of_buckets_and_fusion_change_what_is_sent(ranks, schedule, knob, value):
    sizes = assert_same(ranks, retuned, (0,), knob, value, schedule=schedule)[0].sizes[0]
    assert max(sizes[1:5]) <= 4096 + 128  # a weight and a bias; a policy may begin otherwise
    assert max(sizes[5:]) > 4096 + 128


def set_two():
    """The knobs in force after two were set before the same step, and after one more later on."""
    model, optimizer = pair()
    in_force = []
    with attach(model, optimizer, SMALL, warmup=1) as attached:
        for step in steps(model, optimizer, 9):
            asked = {3: [("partition", "3KiB"), ("credit", "5KiB")], 6: [("partition", 2048)]}
            for knob, value in asked.get(step, []):
                attached.set(knob, value)
            attached.synchronize()
            in_force.append(dict(attached.schedule.settings) if attached.schedule else {})
        attached.synchronize()
        in_force.append(dict(attached.schedule.settings))
    return [(one.get("partition"), one.get("credit")) for one in in_force]


def test_knobs_that_are_set_together_are_in_force_together(ranks):
    for in_force in ranks(set_two):
        assert in_force[5] == (3072, 5120)
        assert in_force[-1] == (2048, 5120)


def refused_knobs(order):
    model, optimizer = pair()
    messages = []
    with attach(model, optimizer, SMALL, warmup=1, transport=AllReduce(order)) as attached:
        for step in steps(model, optimizer, 3):
            for knob, value in [("partition", "2KiB")] if step == 0 else [("slice", "2KiB"), ("partition", "2")]:
                with pytest.raises(ConfigError) as caught:
                    attached.set(knob, value)
                messages.append(str(caught.value))
    return messages


def test_knobs_that_cannot_be_set(ranks):
    for messages in ranks(refused_knobs, "coordinator"):
        assert "cannot change yet" in messages[0]
        assert "slice" in messages[-2]
        assert "'2' is not a size" in messages[-1]
    for messages in ranks(refused_knobs, "replay"):
        assert "replayed" in messages[-1]


# ---------------------------------------------------------------- compression


def test_errors_of_rounding_are_sent_in_the_next_step():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounding = Rounding([values], torch.bfloat16)
    sent = sum(rounding.round(BufferSlice(0, 0, 1000), values).float() for _ in range(100))
    error = sent - 100 * values
    assert error.abs().max() < 2 * (values.to(torch.bfloat16) - values).abs().max()
    values[3] = torch.inf
    assert rounding.round(BufferSlice(0, 0, 1000), values)[3] == torch.inf
    values[3] = 1.0
    assert rounding.round(BufferSlice(0, 0, 1000), values)[3] == 1.0


@pytest.mark.parametrize(("kind", "tolerance"), [("fp16", 1e-3), ("bf16", 0.01)])
def test_compression_sends_half_and_stays_close(ranks, kind, tolerance):
    seen = assert_same(ranks, plain, compression=kind, schedule="p3(slice=1KiB)", tolerance=tolerance)
    assert set(seen[0].sizes[0]) == {1024, 64}  # two pieces of the 2048 bytes of a weight; a bias


@pytest.mark.smoke
def test_compressed_training_is_the_same_on_all_ranks(three):
    assert_same(three, branching, EACH, True, compression="bf16", tolerance=0.05)
    assert_same(three, plain, compression="fp16", schedule="dear(group=4KiB)", tolerance=0.01)


# ---------------------------------------------------------------- barriers


def around_a_late_gradient(schedule):
    """Per update and per forward pass of rank 0, once scheduled: how many gradients were still to come.

    In each of these steps rank 1's last gradient, that of the first layer, is held back; where ``schedule`` has no
    barrier, until rank 0 has updated something.
    """
    model, optimizer = pair()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    seen = {"update": [], "forward": []}
    barrier = POLICIES[schedule.partition("(")[0]].barrier

    def to_come(what):
        if attached.schedule is not None:
            seen[what].append(len(attached._runtime.updates.pending()))
            store.set(f"{schedule} {attached.steps} {what}", "")

    def late(gradient):
        if attached.schedule is not None and rank == 1:
            time.sleep(0.02)
            while not barrier and not store.check([f"{schedule} {attached.steps} update"]):
                time.sleep(0.001)

    def updating(*args, **options):
        if rank == 0:
            to_come("update")
        return sgd_of_torch(*args, **options)

    home = sys.modules["torch.optim.sgd"]
    sgd_of_torch = home.sgd
    model[0].weight.register_hook(late)
    with mock.patch.object(home, "sgd", updating), attach(model, optimizer, schedule, warmup=2) as attached:
        for _ in steps(model, optimizer):
            if rank == 0:
                to_come("forward")
    return seen


@pytest.mark.parametrize("schedule", ["fifo", "fusion(threshold=4KiB, cycle=100us)"])
def test_under_a_barrier_nothing_is_updated_before_everything_has_landed(ranks, schedule):
    seen = ranks(around_a_late_gradient, schedule)[0]
    assert seen["update"] == [0] * (STEPS - 2)
    assert set(seen["forward"]) == {0}


def test_without_a_barrier_landed_tasks_are_updated(ranks):
    seen = ranks(around_a_late_gradient, SMALL)[0]
    assert any(seen["update"])
    assert len(seen["update"]) > STEPS - 2


def test_whole_steps_are_drawn_as_the_simulator_draws_them(ranks):
    assert all(count == STEPS - 2 for count in ranks(drawn))


def drawn():
    model, optimizer = pair()
    with attach(model, optimizer, "fifo", warmup=2, trace=True) as attached:
        for _ in steps(model, optimizer):
            pass
        return sum((span.lane, span.kind, span.name) == ("gpu", "update", "all") for span in attached.timeline)
