"""Every schedule, order of collectives, group and compression trains the same; changed knobs change what is sent."""

import sys
import time
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretrain.comm.options import AllReduce  # noqa: E402
from foretrain.errors import ConfigError  # noqa: E402
from foretrain.plugins.torch import attach, collective_executor  # noqa: E402
from foretrain.schedule import POLICIES  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    SMALL,
    STEPS,
    Attached,
    Stock,
    assert_same,
    batch,
    branching,
    mlp,
    objective,
    plain,
    sgd,
)

SCHEDULES = [
    "fifo",
    "ddp(bucket=4KiB, first=1KiB)",
    "ddp(bucket=4KiB, first=1KiB, find_unused=1)",
    "fusion(threshold=4KiB, cycle=100us)",
    "p3(slice=1KiB)",
    "tictac",
    "tic",
    "mgwfbp",
    "dear(group=4KiB)",
    "pace(partition=1KiB, credit=2KiB)",
    SMALL,
    "prophet(partition=1KiB, credit=2KiB)",
    "largest_tail_first(partition=1KiB, credit=1KiB)",
]
ODD = [
    "bytescheduler(partition=1027B, credit=1027B)",
    "p3(slice=1501B)",
    "prophet(partition=1030B, credit=3001B)",
]
"""Cuts between the bytes of one number."""
KINDS = ["ddp(bucket=4KiB, first=1KiB)", SMALL, "dear(group=4KiB)", "prophet(partition=1KiB, credit=2KiB)", ODD[0]]
"""One of each way to send: buckets, a window, in two halves, in blocks, and cut anywhere."""
ROUNDING = 1e-5
"""Relative; with three ranks the order of additions differs from DDP's."""


def test_the_list_has_every_policy():
    assert {schedule.partition("(")[0] for schedule in SCHEDULES} == set(POLICIES)


@pytest.mark.parametrize("schedule", SCHEDULES + ODD)
@pytest.mark.smoke
def test_every_schedule_trains_the_same(ranks, schedule):
    assert_same(ranks, plain, schedule=schedule)


@pytest.mark.parametrize("schedule", KINDS)
def test_every_kind_of_schedule_copes_with_branches(ranks, schedule):
    assert_same(ranks, branching, "another each step on each rank", schedule=schedule)


@pytest.mark.parametrize("schedule", KINDS)
def test_every_kind_of_schedule_with_three_ranks(three, schedule):
    assert_same(three, plain, schedule=schedule, tolerance=ROUNDING)


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
    with mock.patch.object(collective_executor, "coalesces", return_value=False):
        return plain(side)


@pytest.mark.parametrize("schedule", ["bytescheduler(partition=4KiB, credit=8KiB, fuse=4)", "prophet"])
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_where_several_tensors_cannot_be_reduced_at_once_they_are_copied_together(ranks, schedule, compression):
    tolerance = 0.0 if compression is None else 0.05
    assert_same(ranks, copying, schedule=schedule, compression=compression, tolerance=tolerance)


def test_the_hash_of_all_orders_may_be_compared_in_every_step(ranks):
    assert_same(ranks, plain, transport=AllReduce(check_every=1))


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("schedule", ["fifo", "ddp(bucket=4KiB, first=1KiB)", SMALL, "dear(group=4KiB)"])
def test_a_replayed_order(ranks, schedule):
    assert_same(ranks, plain, schedule=schedule, transport=AllReduce("replay", check_every=1))


@pytest.mark.parametrize("how", ["never the last", "another each step on each rank", "nobody's until late"])
def test_a_replayed_order_copes_with_branches(ranks, how):
    assert_same(ranks, branching, how, True, transport=AllReduce("replay"))


@pytest.mark.smoke
def test_a_replayed_order_with_three_ranks(three):
    assert_same(three, plain, transport=AllReduce("replay"), tolerance=ROUNDING)


# ---------------------------------------------------------------- how many ranks, which ranks


def test_one_rank_alone(alone):
    assert_same(alone, plain)
    assert_same(alone, plain, transport=AllReduce("replay"))
    assert_same(alone, branching, "another each step", True)


@pytest.mark.parametrize("how", ["another on each rank", "one on rank 1 alone", "another each step on each rank"])
def test_branches_with_three_ranks(three, how):
    assert_same(three, branching, how, True, tolerance=ROUNDING)


def some(side, members):
    """Only ``members`` train; the others have nothing to do with it."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        yield from plain(side, process_group=group)


@pytest.mark.parametrize("members", [[0, 1], [1, 2], [2]], ids=str)
def test_a_group_of_some_ranks(job, members):
    assert_same(job(3), some, members)


def test_groups_that_overlap(job):
    """Rank 1 is in more groups than rank 2 when these two meet."""
    ranks = job(3)
    assert_same(ranks, some, [0, 1])
    assert_same(ranks, some, [1, 2], timeout=20)


def besides(side):
    """The script's own collectives, between the backward pass and step(), and right after step()."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        dist.barrier()
        optimizer.zero_grad()
        yield total


def test_collectives_of_the_script_itself(ranks):
    assert_same(ranks, besides)


# ---------------------------------------------------------------- knobs under way


def retuned(side, callers):
    """In step 5 ``callers`` ask for slices of twice the size."""
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS + 4):
        if step == 5 and dist.get_rank() in callers:
            for handle in getattr(side, "handles", ()):
                handle.set("slice", "2KiB")
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("callers", [(0,), (0, 1)], ids=str)
def test_a_knob_changes_what_is_sent_from_one_step_to_the_next(ranks, callers):
    seen = assert_same(ranks, retuned, callers, schedule="p3(slice=1KiB)")
    sizes = [size for size in seen[0].sizes[0] if size > 128]  # a bias has 128 bytes
    change = sizes.index(2048)
    assert change > 0
    assert change % 16 == 0  # four pieces of each of four weights: whole steps
    assert set(sizes[:change]) == {1024}
    assert set(sizes[change:]) == {2048}
    assert {schedule for rank in seen for schedule in rank.schedules} == {"p3(slice=2KiB)"}


def set_two():
    """The knobs in force after two were set before the same step, and after one more later on."""
    model = mlp()
    optimizer = sgd(model)
    told = []
    with attach(model, optimizer, SMALL, warmup=1) as attached:
        for step in range(9):
            asked = {3: [("partition", "3KiB"), ("credit", "5KiB")], 6: [("partition", 2048)]}
            for knob, value in asked.get(step, []):
                attached.set(knob, value)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            attached.synchronize()
            told.append(dict(attached.schedule.settings) if attached.schedule else {})
    return [(one.get("partition"), one.get("credit")) for one in told]


def test_knobs_that_are_set_together_are_in_force_together(ranks):
    for told in ranks(set_two):
        assert told[4] == (3072, 5120)
        assert told[-1] == (2048, 5120)


def refused_knobs(order):
    model = mlp()
    optimizer = sgd(model)
    told = []
    with attach(model, optimizer, SMALL, warmup=1, transport=AllReduce(order)) as attached:
        for step in range(3):
            for knob, value in [("partition", "2KiB")] if step == 0 else [("slice", "2KiB"), ("partition", "2")]:
                with pytest.raises(ConfigError) as caught:
                    attached.set(knob, value)
                told.append(str(caught.value))
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return told


def test_knobs_that_cannot_be_set(ranks):
    for told in ranks(refused_knobs, "coordinator"):
        assert "cannot change yet" in told[0]
        assert "slice" in told[-2]
        assert "'2' is not a size" in told[-1]
    for told in ranks(refused_knobs, "replay"):
        assert "replayed" in told[-1]


# ---------------------------------------------------------------- compression


def weights_after(side, steps, lone):
    """SGD's weights; with ``lone`` all gradients are rank 0's and constant, so that only its own rounding matters."""
    model = mlp(1) if lone else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net = side.wrap(model, optimizer)
    for step in range(steps):
        output = net(batch(0 if lone else step % 4))
        loss = (output * batch(1)).mean() * (dist.get_rank() == 0) if lone else objective(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def forgetful(dtype):
    """DDP's hook for compression, which forgets what rounding takes; torch has it for bf16 only with NCCL."""

    def hook(_, bucket):
        rounded = (bucket.buffer() / dist.get_world_size()).to(dtype)
        future = dist.all_reduce(rounded, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return hook


def compressed(kind, steps, lone):
    """How far the weights end from those of fp32, relative to their way: ours, and DDP's with a hook; sizes sent."""
    start = torch.cat([p.detach().flatten() for p in (mlp(1) if lone else mlp()).parameters()])
    exact = weights_after(Stock(), steps, lone)
    rounds = weights_after(Stock(forgetful({"fp16": torch.float16, "bf16": torch.bfloat16}[kind])), steps, lone)
    side = Attached(compression=kind, schedule="p3(slice=1KiB)")
    ours = weights_after(side, steps, lone)
    sizes = {decision.chunk.size for decision in side.handles[0].log}
    side.close()
    return *((w - exact).norm().item() / (exact - start).norm().item() for w in (ours, rounds)), sizes


@pytest.mark.parametrize(("kind", "close"), [("fp16", 1e-4), ("bf16", 1e-3)])
def test_compression_sends_half_and_stays_close(ranks, kind, close):
    for rank, (ours, rounds, sizes) in enumerate(ranks(compressed, kind, 30, False)):
        assert 0 < ours < close
        assert 0 < rounds < close
        assert rank or sizes == {1024, 64}  # two pieces of the 2048 bytes of a weight; a bias


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_what_rounding_took_in_one_step_is_sent_in_the_next(ranks, kind):
    for ours, rounds, _ in ranks(compressed, kind, 50, True):
        assert ours < rounds / 10


@pytest.mark.smoke
def test_compressed_training_of_many_kinds_is_the_same_on_all_ranks(three):
    assert_same(three, branching, "another each step on each rank", True, compression="bf16", tolerance=0.05)
    assert_same(three, plain, compression="fp16", schedule="dear(group=4KiB)", tolerance=0.01)


# ---------------------------------------------------------------- barriers


def around_a_late_gradient(schedule):
    """Per update and per forward pass of rank 0, once scheduled: how many gradients were still to come.

    In each of these steps rank 1's last gradient, that of the first layer, is held back; where ``schedule`` has no
    barrier, until rank 0 has updated something.
    """
    model = mlp()
    optimizer = sgd(model)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    seen = {"update": [], "forward": []}
    barrier = POLICIES[schedule.partition("(")[0]].barrier

    def to_come(what):
        if attached.schedule is not None:
            seen[what].append(len(attached._machinery.updates.pending()))
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
        for _ in range(STEPS):
            model.zero_grad()
            if rank == 0:
                to_come("forward")
            objective(model(batch(0))).backward()
            optimizer.step()
    return seen


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if POLICIES[s.partition("(")[0]].barrier])
def test_under_a_barrier_nothing_is_updated_before_everything_has_landed(ranks, schedule):
    seen = ranks(around_a_late_gradient, schedule)[0]
    assert seen["update"] == [0] * (STEPS - 2)
    assert set(seen["forward"]) == {0}


def test_without_a_barrier_what_has_landed_is_updated(ranks):
    seen = ranks(around_a_late_gradient, SMALL)[0]
    assert any(seen["update"])
    assert len(seen["update"]) > STEPS - 2


def test_whole_steps_are_drawn_as_the_simulator_draws_them(ranks):
    assert all(count == STEPS - 2 for count in ranks(drawn))


def drawn():
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, "fifo", warmup=2, trace=True) as attached:
        for step in range(STEPS):
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum((span.lane, span.kind, span.name) == ("gpu", "update", "all") for span in attached.timeline)
