"""Forecasts of the steps of ranks, and failures for want of memory."""

import json
import math
from dataclasses import replace

import pytest

from foretrain.device import preset
from foretrain.live.event_log import COST, MEMORY, STREAM
from foretrain.live.forecast import Forecast, forecast_of
from foretrain.live.rank_processes import OutOfMemory, check_memory
from foretrain.units import MILLISECOND
from tests.live.player import play

FLOPS = 1e12
"""Of one batch."""


def training(*batches: int) -> Forecast:
    """Of a rank whose steps compute so many batches, 10 ms each; all but one of a step evaluate."""

    def program(rank):
        for step, count in enumerate(batches, 1):
            rank.run(0, count * 10 * MILLISECOND)
            rank.step(step, rank.record(0))
            cost = {
                "kernels": count,
                "flops": count * FLOPS,
                "recomputed": 0,
                "times": [count * 10 * MILLISECOND, 0, 0, 0],
                "spread": count,
                "by_name": {"aten::mm": count * 10 * MILLISECOND},
                "updates": {},
                "unknown": ["odd"] if count > 1 else [],
                "unused": [],
            }
            rank.note(COST, a=step, payload=json.dumps(cost).encode())
            yield rank.ask(STREAM)

    rank_traces = play(program).trace.rank_traces
    h100 = preset("H100")
    return forecast_of(rank_traces, {0: 1}, cluster="H100", device=h100, world=1, classes=(), wall=1.0)


def test_work_and_time_are_of_the_same_step() -> None:
    alike = training(1, 1, 1, 1, 1)
    for batches in ((1, 1, 1, 1, 5), (9, 3, 1, 1, 5), (1, 1, 1, 5, 1, 1)):
        found = training(*batches)
        assert found.iteration_time == alike.iteration_time == 10 * MILLISECOND
        assert found.flops == alike.flops == FLOPS / 10e-3
        assert found.mfu == alike.mfu
        first = found.first
        assert (first.kernels, first.spread, first.times[0]) == (1, 1, 10 * MILLISECOND)
        assert first.by_name == {"aten::mm": 10 * MILLISECOND}


def test_the_last_step_tells_of_all_unknown_operators() -> None:
    assert training(1, 1, 1, 2).unknown == ("odd",)


def test_the_interval_is_that_of_the_stack_and_of_the_runs_own_uncertainty() -> None:
    found = replace(training(1, 1), stack_range=0.3)
    low, high = found.interval

    assert low < found.iteration_time < high
    assert math.log(high / found.iteration_time) == pytest.approx(0.3, rel=1e-3)
    assert math.log(found.iteration_time / low) == pytest.approx(0.3, rel=1e-3)
    rank = replace(found.first, spread=found.iteration_time // 5)
    assert math.log(replace(found, ranks=(rank,)).interval[1] / found.iteration_time) == pytest.approx(0.5, rel=1e-3)


SAID = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of which more is said."


def failing(failure):
    def program(rank):
        rank.run(1, 10)
        rank.step(1, rank.record(1))
        yield rank.ask(STREAM, stream=1)
        breakdown = {"parameters": 3 << 30, "gradients": 0, "activations": 70 << 30}
        told = {"allocated": 73 << 30, "reserved": 75 << 30, "retries": 1, "breakdown": breakdown}
        rank.note(MEMORY, payload=json.dumps({**told, "out_of_memory": failure}).encode())
        yield rank.frame()

    return program


def test_running_out_of_memory_names_the_ranks_the_request_and_where_the_rest_went():
    trace = play(failing(None), failing(SAID), failing(SAID)).trace
    with pytest.raises(
        OutOfMemory, match=r"rank 1 ran out of memory in step 2, as did rank 2: .* 1\.50 GiB when"
    ) as error:
        check_memory(trace)
    assert error.value.ranks == (1, 2)
    assert error.value.tried == "1.50 GiB"
    assert "75.00 GiB were reserved" in str(error.value)
    assert "70.00 GiB for activations, 3.00 GiB for parameters." in str(error.value)
    check_memory(play(failing(None)).trace)  # that had enough
