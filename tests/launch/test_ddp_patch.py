"""The DDP patch schedules the models that it can; the others train as with PyTorch's own."""

from __future__ import annotations

import re

import pytest

from foretrain.comm.options import Timeouts
from foretrain.launch import LaunchSettings
from tests.launch import jobs

USUAL = LaunchSettings()

STOCK = r"^foretrain: (\w+) runs with PyTorch's own DistributedDataParallel: (.*)$"


def compared(ranks, script, settings=USUAL, refuse=None):
    """What every rank did when taken over, once it is sure that all trained to the same bits as without."""
    told = []
    for alone, taken in ranks(jobs.both, script, settings, refuse):
        assert taken.parameters == alone.parameters
        told.append(taken)
    assert told[1].said == ""
    return told


@pytest.mark.parametrize(
    ("script", "optimizers", "shared"),
    [
        (jobs.plain, [["SGD"]], [jobs.STEPS - 1]),  # before the first step by the look before training
        (jobs.accumulating, [["AdamW"]], [0]),
        (jobs.static, [["SGD"]], [jobs.STEPS]),
        (jobs.adversaries, [["SGD"], ["SGD"]], [0, 0]),
        (jobs.replaced_optimizer, [["SGD"]], [jobs.STEPS]),
        (jobs.copies, [["SGD"], ["SGD"]], [jobs.STEPS, jobs.STEPS]),
    ],
)
def test_taken_over(ranks, script, optimizers, shared):
    for told in compared(ranks, script, LaunchSettings("p3", timeouts=Timeouts(7.0))):
        assert [each["optimizers"] for each in told.attached] == optimizers
        assert [each["shared"] for each in told.attached] == shared
        for each in told.attached:
            assert (each["schedule"], each["timeouts"], each["compression"]) == ("p3", Timeouts(7.0), None)
        assert all(events[-1] == "close" and events.count("close") == 1 for events in told.events)


def test_flushed_before_the_process_group_goes(ranks):
    for before, calls in ranks(jobs.destroying):
        assert before == []
        assert calls == [["close"]]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (jobs.own_hook, "the communication hook summing needs PyTorch's reducer"),
        (jobs.no_optimizer, "no optimizer held its parameters when training began"),
        (jobs.one_rank_objects, r"no optimizer held its parameters when training began \(rank 1\)"),
        (jobs.uneven, r"join\(\) needs PyTorch's reducer"),
        (jobs.reducer_used, "the script uses PyTorch's reducer"),
        (jobs.zero, r"two optimizers hold the same parameter \(ZeroRedundancyOptimizer and SGD\)"),
        (jobs.sparse, "it has sparse gradients"),
    ],
)
def test_not_taken_over(ranks, script, reason):
    told = compared(ranks, script)
    assert [each.attached for each in told] == [[], []]
    said = told[0].said.splitlines()
    assert re.fullmatch(reason, re.match(STOCK, said[0])[2])
    assert len(said) == 2
    if script is not jobs.uneven:
        assert re.fullmatch(
            r"foretrain: \w+ with PyTorch's own DistributedDataParallel: 8 steps, median .* ms", said[1]
        )


def test_one_optimizer_for_two_models(ranks):
    told = compared(ranks, jobs.one_for_two)
    assert told[0].attached == []
    assert told[0].said.count("its optimizer also holds parameters of another DistributedDataParallel (Linear)") == 2
    assert len(told[0].said.splitlines()) == 4


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (jobs.late_optimizer, "SGD was made, or given parameters, after training began"),
        (jobs.given_later, "SGD was made, or given parameters, after training began"),
        (jobs.uneven_later, r"join\(\) needs PyTorch's reducer"),
    ],
)
def test_taken_over_for_a_while(ranks, script, reason):
    told = compared(ranks, script)
    for each in told:
        assert len(each.attached) == 1
        assert each.events[0][-1] == "close"
        assert each.events[0].count("close") == 1
    first, last = told[0].said.splitlines()
    assert re.fullmatch(reason, re.match(STOCK, first)[2])
    assert "with PyTorch's own" in last


def test_refused_by_the_runtime(ranks):
    told = compared(ranks, jobs.static, refuse="is too odd")
    assert re.match(STOCK, told[0].said.splitlines()[0])[2] == "model: 'this one' is too odd; take another"


@pytest.mark.parametrize(
    ("settings", "compression"),
    [(USUAL, "fp16"), (LaunchSettings(compression="bf16"), "bf16")],
    ids=["hook", "asked for"],
)
def test_compression(ranks, settings, compression):
    for told in ranks(jobs.taken, jobs.fp16, settings):
        assert [each["compression"] for each in told.attached] == [compression]


def test_an_adviser_leaves_training_as_it_is_and_says_which_buckets_are_best(ranks):
    for rank, (stock, told) in enumerate(ranks(jobs.both_really, jobs.longer, LaunchSettings(advise=True))):
        assert told.parameters == stock.parameters
        lines = told.said.splitlines()
        assert bool(lines) == (rank == 0)
        if rank == 0:
            assert "--advise only observes it" in lines[0]
            assert lines[1].startswith("foretrain: 10 steps of Sequential observed on 2 workers @")
            assert any("bucket_cap_mb_list=[" in line for line in lines)
            assert any("gradient_as_bucket_view=True is set already" in line for line in lines)
            assert sum("of the packets went again over TCP" in line for line in lines) == 1


def test_an_adviser_knows_the_arguments_that_a_script_gives(ranks):
    for found in ranks(jobs.bucketed):
        assert found == ["ddp", "ddp(bucket=4MiB, first=4MiB, find_unused=1)", "ddp(buckets=[1MiB, 8MiB])"]


def test_summary(ranks):
    told = ranks(jobs.taken, jobs.plain, LaunchSettings("bytescheduler(partition=2MB)"))
    assert re.fullmatch(
        r"foretrain: Sequential under bytescheduler\(partition=2MB\): 8 steps, "
        r"median .*s, forecast 1.01 ms \(.*%\), T\* 1.00 ms, gap .*%\n",
        told[0].said,
    )
    assert told[1].said == ""


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (jobs.without, "nothing was taken over: the script made no DistributedDataParallel; it ran as it is"),
        (
            jobs.sharded,
            "nothing was taken over: the script made no DistributedDataParallel, and FSDP or tensor parallelism is not "
            "scheduled; it ran as it is",
        ),
        (jobs.untrained, "nothing was taken over: no DistributedDataParallel was trained"),
    ],
)
def test_nothing_to_take_over(ranks, script, line):
    assert ranks(jobs.taken, script, USUAL)[0].said == f"foretrain: {line}\n"


def test_quiet_leaves_the_summary_out(ranks):
    assert ranks(jobs.taken, jobs.untrained, LaunchSettings(quiet=True))[0].said == ""


def test_models_that_are_gone_end_and_the_summary_stays_short(ranks):
    told = ranks(jobs.taken, jobs.many, USUAL)
    assert [each.events for each in told] == [[["close"]] * 4] * 2
    lines = told[0].said.splitlines()
    assert [line.split()[1] for line in lines] == ["Linear", "Linear", "and"]
    assert lines[2] == "foretrain: and 2 models more"


def test_models_that_are_gone_but_for_a_cycle_end_on_all_ranks_alike(ranks):
    assert ranks(jobs.collected) == [[0, 1, 2], [0, 1, 2]]


def test_after_an_exception_models_close_without_waiting(ranks):
    (said, events), _ = ranks(jobs.dropped)
    assert said.startswith("foretrain: Sequential under bytescheduler: 8 steps")
    assert events == ["dropped ZeroDivisionError"]


@pytest.mark.parametrize(
    "script",
    [
        *(jobs.plain, jobs.accumulating, jobs.adversaries, jobs.evaluating, jobs.partly, jobs.copied_later),
        *(jobs.many, jobs.late_optimizer, jobs.uneven_later),
    ],
)
@pytest.mark.smoke_case("plain")
def test_the_same_bits_by_a_real_schedule(ranks, script):
    said = []
    for alone, taken in ranks(jobs.both_really, script, USUAL):
        assert taken.parameters == alone.parameters
        said.append(taken.said)
    assert said[0]
    assert said[1] == ""


def test_a_secret_on_one_node_alone_leaves_all_ranks_with_the_stock_one(ranks):
    (alone, taken), (_, other) = ranks(jobs.both_really, jobs.secret_on_one, USUAL)
    assert taken.parameters == other.parameters == alone.parameters
    reason = re.match(STOCK, taken.said.splitlines()[0])[2]
    assert reason.startswith("FORETRAIN_SECRET: '(hidden)' is set on rank 0 and not on rank 1; give all nodes the same")


def test_fp16_by_a_real_schedule(ranks):
    for alone, taken in ranks(jobs.both_really, jobs.fp16, USUAL):
        for theirs, ours in zip(alone.parameters, taken.parameters, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3)
