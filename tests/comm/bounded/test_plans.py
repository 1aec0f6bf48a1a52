"""Plans of the bounded transport: executed here by an oracle that delivers everything at once."""

import numpy as np
import pytest

from foretrain.comm.bounded import Loss
from foretrain.comm.bounded.collectives import BoundedWork
from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.bounded.plans import encode, of_hop, scratch, stages
from foretrain.comm.buffers import HostGradients
from foretrain.comm.options import AllReduce, BoundedLoss
from foretrain.schedule import CostModel, Job, spec
from foretrain.tasks import Task

OVER = {"transpose": (2, 3, 4, 5, 8), "ring": (2, 3, 4, 5, 8), "halving_doubling": (2, 4, 8), "ps": (2, 3, 4, 5)}
CASES = [(over, ranks, count) for over, many in OVER.items() for ranks in many for count in (1, 7, 40, 100_000)]


def executed(operation, over, ranks, count, values):
    """The values of all ranks after the plans, stage by stage."""
    values = [*values, np.zeros(count)][: ranks + (over == "ps")]  # the last one is a server's
    plans = [stages(operation, over, rank, ranks, count, 4, 0.0) for rank in range(len(values))]
    memory = [np.zeros(scratch(plan) // 4) for plan in plans]
    assert len({len(plan) for plan in plans}) == 1
    for number in range(len(plans[0])):
        packets = {}
        for rank, plan in enumerate(plans):
            for send in plan[number].sends:
                at = send.offset // 4
                packets[rank, send.to] = values[rank][at : at + send.size // 4].copy()
        for rank, plan in enumerate(plans):
            for receive in plan[number].receives:
                target = memory[rank] if receive.scratch else values[rank]
                at = receive.target // 4
                target[at : at + receive.size // 4] = packets.pop((receive.source, rank))
            for sum_ in plan[number].sums:
                into, from_ = (
                    memory[rank] if is_scratch else values[rank]
                    for is_scratch in (sum_.into_scratch, sum_.from_scratch)
                )
                size = sum_.size // 4
                into[sum_.into // 4 : sum_.into // 4 + size] += from_[sum_.from_ // 4 : sum_.from_ // 4 + size]
        assert not packets  # what one sends another expects
    return values


@pytest.mark.parametrize(("over", "ranks", "count"), CASES)
def test_plans_sum(over, ranks, count):
    values = [np.random.default_rng(rank).integers(0, 100, count).astype(float) for rank in range(ranks)]
    total = np.sum(values, 0)
    for found in executed("all_reduce", over, ranks, count, values):
        np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize("count", [40, 100_000])
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("over", ["transpose", "ps"])
def test_sums_have_the_bits_of_a_ring(over, ranks, count):
    draws = [np.random.default_rng(rank).standard_normal(count) for rank in range(ranks)]
    found, ring = (
        executed("all_reduce", each, ranks, count, [draw.copy() for draw in draws]) for each in (over, "ring")
    )
    np.testing.assert_array_equal(found[0], ring[0])


@pytest.mark.parametrize(("over", "ranks"), [(over, ranks) for over, many in OVER.items() for ranks in many])
def test_a_sum_is_scattered_and_gathered(over, ranks):
    values = [np.random.default_rng(rank).integers(0, 100, 40 * ranks).astype(float) for rank in range(ranks)]
    total = np.sum(values, 0)
    executed("reduce_scatter", over, ranks, 40 * ranks, values)
    for rank, found in enumerate(values):
        np.testing.assert_array_equal(found[40 * rank : 40 * (rank + 1)], total[40 * rank : 40 * (rank + 1)])
    for found in executed("all_gather", over, ranks, 40 * ranks, values)[:ranks]:
        np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize(("over", "ranks"), [(over, ranks) for over, many in OVER.items() for ranks in many])
def test_nothing_is_sent_that_is_changed_before_it_must_have_come(over, ranks):
    for rank in range(ranks + (over == "ps")):
        plan = stages("all_reduce", over, rank, ranks, 100_000, 4, 0.0)
        for number, stage in enumerate(plan):
            sent = [(send.offset, send.offset + send.size) for send in stage.sends]
            changed = [(s.into, s.into + s.size) for s in stage.sums if not s.into_scratch]
            assert not any(first < end and start < behind for first, behind in sent for start, end in changed), number


@pytest.mark.parametrize(("over", "ranks"), [("transpose", 4), ("ring", 4), ("halving_doubling", 8)])
def test_what_hops_may_lose_adds_up_to_the_tolerance(over, ranks):
    plan, hops = stages("all_reduce", over, 1, ranks, 1_000_000, 4, 0.12), {"transpose": 1, "ring": 3}.get(over, 3)
    receives = [receive for stage in plan for receive in stage.receives]
    for receive in receives:
        lost = (receive.size - receive.need) / receive.size
        assert lost == pytest.approx(0.12 / hops if receive.scratch else 0.0, abs=1e-5)
    assert of_hop(over, 0.12, ranks) == 0.12 / hops
    assert all(send.reliable for stage in plan[len(plan) // 2 :] for send in stage.sends)


def test_a_plan_is_numbers():
    plan = stages("all_reduce", "ring", 0, 2, 3, 4, 0.0)
    forth = [1, 1, 1, 1, 4, 8, 1, 0, 1, 1, 0, 0, 4, 4, 0, 0, 0, 1, 0, 4]
    assert encode(plan) == [*forth, 1, 1, 0, 1, 0, 4, 1, 0, 1, 0, 4, 4, 8, 8, 0]


TASKS = tuple(Task(k, f"layer{k}", size, k) for k, size in enumerate((400, 4000, 8, 2000)))


def job(tasks=TASKS):
    """A job whose tasks are used in their order, and computed in no time."""
    nothing = (0,) * len(tasks)
    return Job(tasks, tuple(range(len(tasks))), nothing, nothing, nothing, 0, CostModel(1, 1))


def ledger(schedule="p3", **options):
    layout = HostGradients([100, 1000, 2, 500], ["float32"] * 4, [0, 1, 2, 3])
    return layout, Ledger.of(BoundedLoss(**options), layout, job(), spec(schedule), 2)


def test_small_tensors_and_the_first_steps_are_reliable_and_back_layers_important():
    layout, made = ledger(reliable_steps=1, reliable_bytes=400)
    whole = layout.runs([])
    whole = [layout.place(0)._replace(end=1602)]
    first, second = made.hint("all_reduce", whole), made.hint("all_reduce", whole)
    assert (first.tolerance, second.tolerance) == (0.0, 0.01)
    assert second.vital.tolist() == [[0, 400], [4400, 4408]]
    assert second.important.tolist() == [[4400, 4408], [4408, 6408]]
    assert (first.slot, first.urgency) == (0, 0.0)
    assert made.hint("all_reduce", [layout.place(3)]).urgency == 0.75
    assert Ledger.of(AllReduce(), layout, job(), spec("p3"), 2) is None


@pytest.mark.parametrize(
    ("schedule", "operation", "urgencies"),
    [
        ("p3", "all_reduce", [0.0, 0.25, 0.5, 0.75]),
        ("prophet", "update", [0.0, 0.25, 0.5, 0.75]),
        ("fifo", "all_reduce", [0.0] * 4),
        ("fifo", "update", [0.0] * 4),
        ("dear", "reduce_scatter", [0.0] * 4),
        ("dear", "all_gather", [0.0, 0.25, 0.5, 0.75]),
        ("tictac", "update", [0.0, 0.25, 0.5, 0.75]),
    ],
)
def test_an_operation_is_as_urgent_as_the_policy_has_it(schedule, operation, urgencies):
    layout, made = ledger(schedule)
    assert [made.hint(operation, [layout.place(task)]).urgency for task in range(4)] == urgencies
    both = made.hint(operation, [layout.place(0), layout.place(3)])
    assert (both.urgency, both.slot) == (urgencies[0], 4)


def test_what_is_gathered_is_counted_once():
    layout, made = ledger("dear", reliable_steps=0)
    place = [layout.place(1)]
    sums, gathered = made.hint("reduce_scatter", place), made.hint("all_gather", place)
    assert made.sent == 4000
    assert (sums.tolerance, gathered.tolerance) == (0.01, 0.0)
    assert sums.slot != gathered.slot


def test_losses_are_booked_to_tensors_and_ranks():
    layout, made = ledger()
    work = BoundedWork("all_reduce", np.zeros(600, np.float32))
    work.finish([Loss(380, 100, 1), Loss(1000, 8, 0)], None)
    slices = [layout.place(0), layout.place(3)]  # 400 bytes, then 2000
    made.hint("all_reduce", slices)
    assert made.line() == "nothing was lost as far as this rank knows"
    made.note(slices, work)
    assert made.lost.tolist() == [[0, 20], [0, 0], [0, 0], [8, 80]]
    assert [(entry.task, entry.source, entry.size) for entry in made.entries] == [(0, 1, 20), (3, 1, 80), (3, 0, 8)]
    assert made.by_tensor() == {"layer0": [0, 20], "layer3": [8, 80]}
    lost = "4.50% of the gradients' bytes were lost as far as this rank knows"
    assert made.line() == f"{lost}, most of layer3, layer0, 93% from rank 1"
    made.sent = 10_000_000
    assert made.line().startswith("less than 0.01% of the gradients' bytes were lost")


def lossy(made, layout, task, size, source=1):
    """Book an operation on ``task`` of which ``source`` lost ``size`` bytes."""
    work = BoundedWork("all_reduce", np.zeros(TASKS[task].size // 4, np.float32))
    work.finish([Loss(0, size, source)], None)
    made.hint("all_reduce", [layout.place(task)])
    made.note([layout.place(task)], work)


def test_tensors_that_must_arrive_do_whatever_their_size():
    layout = HostGradients([100, 1000, 2, 500], ["float32"] * 4, [0, 1, 2, 3])
    made = Ledger.of(BoundedLoss(reliable_bytes=8), layout, job(), spec("p3"), 2, reliable={1})
    assert made.hint("all_reduce", [layout.place(0)._replace(end=1602)]).vital.tolist() == [[400, 4400], [4400, 4408]]


def test_parameters_that_kept_their_value_are_booked_to_tensors_and_to_the_ranks_that_lost_them():
    made = [
        Ledger.of(BoundedLoss(over="ps", updates="servers"), layout := ledger()[0], job(), spec("p3"), 2, rank=rank)
        for rank in range(2)
    ]
    works = [BoundedWork("update", np.zeros(600, np.float32)) for _ in made]
    slices = [layout.place(0), layout.place(3)._replace(start=1202)]  # 400 bytes, then the last 1600
    works[0].finish([Loss(380, 100, 1), Loss(400, 200, 2)], None)
    works[1].finish([Loss(0, 40, 2)], None)
    hints = [each.hint("update", slices) for each in made]
    assert hints[0].tensors.tolist() == [[0, 0, 100], [3, 100, 500]]
    assert [each.note(slices, work) for each, work in zip(made, works, strict=True)] == [{3}, {0}]
    assert made[0].lost.sum() == 100
    assert made[0].entries[-1][1:] == (3, 2, 200)
    lost = "2.50% of the gradients' bytes were lost as far as this rank knows, most of layer3, layer0, 100% from rank 1"
    kept = "10.00% of the pulled parameters' kept their previous value, most of layer3, 100% on rank 0"
    assert made[0].line() == f"{lost}; {kept}"
    rows = [each.totals() for each in made]
    for each in made:
        each.gathered(rows)
        assert each.kept.tolist() == [[0, 40], [0, 0], [0, 0], [200, 0]]
        kept = "; 6.00% of the pulled parameters' kept their previous value, most of layer3, layer0, 83% on rank 0"
        assert each.line().endswith(kept)


@pytest.mark.parametrize(("over", "own"), [("transpose", "10.00%"), ("ps", "5.00%")])
def test_shares_are_of_what_all_ranks_have_sent_to_whoever_sums(over, own):
    """A server has the contributions of both ranks, a rank half of each."""
    (layout, made), (_, other) = ledger(over=over), ledger(over=over)
    lossy(made, layout, 0, 40)
    known = "as far as this rank knows, most of layer0, 100% from rank 1"
    assert made.line() == f"{own} of the gradients' bytes were lost {known}"
    lossy(other, layout, 0, 0)
    made.gathered(None)
    assert "as far as this rank knows" in made.line()
    rows = made.totals(), other.totals()
    for each in (made, other):
        each.gathered(rows)
        assert each.line() == "5.00% of the gradients' bytes were lost, most of layer0, 100% from rank 1"
        assert each.by_tensor() == {"layer0": [0, 40]}


def test_a_ledger_goes_on_where_the_job_s_last_one_ended():
    layout, past = ledger(tolerance="auto", reliable_steps=1)
    for _ in range(20):
        for task in range(4):
            lossy(past, layout, task, 4)
    past.guard.alarms.append("step 3")
    assert past.step == 20

    tasks = (Task(0, "layer3", 2000, 0), Task(1, "layer4", 40, 1))
    layout = HostGradients([500, 10], ["float32"] * 2, [0, 1])
    made = Ledger.of(BoundedLoss("auto", reliable_steps=1), layout, job(tasks), spec("p3"), 2, past=past)
    assert made.names == ["layer3", "layer4", "layer0", "layer1", "layer2"]
    assert made.lost.tolist() == [[0, 80], [0, 0], [0, 80], [0, 80], [0, 80]]
    assert (made.step, made.sent, made.guard) == (20, past.sent, past.guard)
    assert {made.hint("all_reduce", [layout.place(0)._replace(end=510)]).tolerance for _ in range(16)} == {0.0}
    assert made.step == 36
    assert "1 times back to zero, last at step 3" in made.line()

    fixed = Ledger.of(BoundedLoss(0.1, reliable_steps=1), layout, job(tasks), spec("p3"), 2, past=past)
    assert fixed.hint("all_reduce", [layout.place(0)]).tolerance == 0.1


@pytest.mark.parametrize(
    ("end", "then"), [(Ledger.observe_loss, [("loss", 3.0), ("loss", -1.0)]), (Ledger.watch_loss, [("loss", 3.0)])]
)
def test_losses_of_backward_passes_are_watched_until_a_script_shows_its_own_or_one_is_not_positive(
    end, then, monkeypatch
):
    shown = []
    _, made = ledger(tolerance="auto")
    monkeypatch.setattr(made.guard, "observe", lambda step, name, value: shown.append((name, value)))
    made.watch_loss(3.0)
    end(made, -1.0)
    made.watch_loss(2.0)
    assert shown == then
