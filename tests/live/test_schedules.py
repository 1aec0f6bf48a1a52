"""Unmodified scripts under policies, from the command's own entry to the forecast. Times are virtual, and so exact."""

import pytest

pytest.importorskip("torch")

from foretrain.errors import ConfigError
from foretrain.live.simulate import plan_differences, recommended_schedule, simulate
from foretrain.network.deployment_notation import deployment
from foretrain.planner import choose, saved
from foretrain.planner.candidate_search import cluster_of
from foretrain.schedule.script import of_step
from foretrain.simulation import simulate as replay
from foretrain.workload import zoo
from tests.live import forked

# Sending takes about as long as computing.
WHERE = deployment("star:4@16Gbps,device=A100,collective=nccl")
POLICY = "bytescheduler(partition=4MB, credit=8MB, fuse=1)"
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048, bias=False), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if "twice" in sys.argv:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
if "compress" in sys.argv:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    model.register_comm_hook(None, bf16_compress_hook)
x = torch.randn(8192, 2048, device="cuda")
for step in range(8):
    passes = 2 if "accumulate" in sys.argv else 1
    for k in range(passes):
        model.require_backward_grad_sync = k == passes - 1
        model(x).sum().backward()
    if "clip" in sys.argv:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none="zeros" not in sys.argv)
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Runs the script once for each way to run it."""
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    done = {}

    def run(schedule, *arguments, live="auto"):
        key = schedule, arguments, live
        if key not in done:
            done[key] = forked.simulated([str(path), *arguments], WHERE, schedule=schedule, live=live)
        return done[key]

    return run


@pytest.mark.smoke
def test_priority_gains_what_it_should(simulated):
    stock, done = simulated(None), simulated(POLICY)
    (exchange,) = done.trace.schedules
    best = exchange.plan.bound.time
    assert stock.forecast.iteration_time > 1.1 * done.forecast.iteration_time
    # Communication under way slows computing, which T* of the watched steps does not know.
    assert best <= done.forecast.iteration_time < 1.2 * best
    assert not done.forecast.warnings


@pytest.mark.parametrize("schedule", ["ddp(bucket=25MiB)", "tictac"])
def test_it_decides_as_the_replay_of_what_it_watched(simulated, schedule):
    done = simulated(schedule)
    (exchange,) = done.trace.schedules
    again = replay(exchange.plan.workload, WHERE, exchange.plan.schedule, steps=3)
    assert of_step(exchange.log, len(exchange.begins) - 1) == of_step(again.log, len(again.begins) - 2)
    assert done.forecast.iteration_time == pytest.approx(again.iteration_time, rel=0.1)  # communication slows computing
    if schedule.startswith("ddp"):
        # As PyTorch: θ of five operations comes on top, and copies out of buckets are left out.
        assert done.forecast.iteration_time == pytest.approx(simulated(None).forecast.iteration_time, rel=0.005)


def test_one_rank_stands_for_all(simulated):
    folded, everyone = simulated(POLICY), simulated(POLICY, live="all")
    assert len(everyone.forecast.ranks) == 4
    for rank in everyone.forecast.ranks:
        assert rank.steps == folded.forecast.first.steps


def test_clipping_waits_for_all_gradients(simulated):
    crossing, clipped, barrier = simulated(POLICY), simulated(POLICY, "clip"), simulated("fifo")
    assert clipped.forecast.iteration_time > 1.1 * crossing.forecast.iteration_time
    (warning,) = clipped.forecast.warnings
    assert "waits for all gradients" in warning
    assert clipped.forecast.iteration_time == pytest.approx(barrier.forecast.iteration_time, rel=0.1)


def test_accumulated_gradients_are_sent_once(simulated):
    done = simulated(POLICY, "accumulate")
    (exchange,) = done.trace.schedules
    sent = sum(chunk.size for chunk in of_step(exchange.log, 2))
    assert sent == 8 * 2048 * 2048 * 4
    assert len(exchange.begins) == 6
    # T* is of both passes.
    assert exchange.plan.bound.time <= done.forecast.iteration_time < 1.2 * exchange.plan.bound.time


def test_compression_of_the_script_is_the_schedules_and_gradients_may_be_set_to_zero(simulated):
    plain, done, zeros = simulated(POLICY), simulated(POLICY, "compress"), simulated(POLICY, "zeros")
    (exchange,) = done.trace.schedules
    assert sum(chunk.size for chunk in of_step(exchange.log, 2)) == 8 * 2048 * 2048 * 2
    assert done.forecast.iteration_time < plain.forecast.iteration_time
    assert zeros.forecast.iteration_time == pytest.approx(plain.forecast.iteration_time, rel=0.05)


def test_what_cannot_be_scheduled_runs_as_it_is_and_says_so(simulated):
    stock, done = simulated(None, "twice"), simulated(POLICY, "twice")
    (warning,) = done.forecast.warnings
    assert "two optimizers hold the same parameter" in warning
    assert not list(done.trace.schedules)
    assert done.forecast.iteration_time == stock.forecast.iteration_time


def test_an_unknown_policy_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="unknown"):
        simulate([__file__], WHERE, schedule="bogus")


def test_the_planner_chooses_for_the_steps_that_were_watched(simulated):
    watched = simulated("ddp(bucket=25MiB)")
    choice = recommended_schedule(watched, "A100")
    assert choice is not None
    assert not choice.falls_back
    done = simulated(str(choice.schedule))
    assert done.forecast.iteration_time < 0.9 * watched.forecast.iteration_time
    assert recommended_schedule(simulated(None), "A100") is None


def test_a_plan_that_was_made_for_something_else_is_known(simulated):
    done = simulated(POLICY)
    (exchange,) = done.trace.schedules
    plan = exchange.plan
    assert not plan_differences(done, saved(choose(plan.workload, cluster_of(plan.job.cost, 4))))
    assert len(plan_differences(done, saved(choose(zoo("resnet50"), "2x1xV100@1Gbps")))) >= 4
