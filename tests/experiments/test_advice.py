import re

import pytest

from foretrain.experiments import compare
from foretrain.schedule import IDEAL
from foretrain.workload import zoo
from tests.scenario import layered

MS = 10**9
FREE = "latency=0s,overhead=0s"


def workload(megabytes, update=0):
    """10 layers of 1 ms forward and 2 ms backward."""
    return layered([MS] * 10, [2 * MS] * 10, [megabytes * 10**6] * 10, [update] * 10)


def advice(of, place):
    return compare(of, place, ["fifo", "bytescheduler", "largest_tail_first"], trace=False).advice


@pytest.mark.parametrize(
    ("megabytes", "place", "words"),
    [
        (1, "4 workers @ 1000Gbps", "^Not worth it, keep DDP: its best is within .*the GPU decides.*only faster"),
        # 10 × 2 MB at 10 Gb/s around a ring of 4 take 24 ms; DDP hides them behind 20 of 30 ms of computation.
        (2, "4 workers @ 10Gbps", r"^Worth it: \w+ makes an iteration 1\.\d\d ± 0\.\d\d× as fast as DDP.* 0\.80×"),
        (20, "4 workers @ 10Gbps", r"the link decides \(communication takes 8\.00× as long"),
        (20, "4 workers @ 10Gbps", r"; 20\.0 Gbps links would bring the optimum from"),
        (20, "8 workers @ 10Gbps,ps=1", "all-reduce instead of parameter servers would bring the optimum from"),
        (20, "2x8xV100@100Gbps,local=1GB/s", r"; 16\.0 Gbps inside each host would bring the optimum from"),
        # 2·7/8 of every byte cross the bus and 2·1/2 the link: both are equally slow.
        (20, "2x8xV100@8Gbps,local=1.75GB/s", "; sending gradients in half the bits would bring the optimum"),
    ],
)
def test_advice_names_what_decides_and_what_would_help(megabytes, place, words):
    found = advice(workload(megabytes), f"{place},{FREE}")
    assert found.worth_it == (found.gain >= 1.03)
    assert re.search(words, found.text)


def test_the_ideal_is_recommended_only_where_nothing_else_was_asked_for():
    place = f"4 workers @ 10Gbps,{FREE}"
    both = compare(workload(5), place, [IDEAL, "fifo"], trace=False)
    assert both.runs[0].iteration_time < both.runs[1].iteration_time
    assert both.best is both.runs[1]
    assert both.advice.gain == both.speedup(both.runs[1])
    alone = compare(workload(5), place, [IDEAL], trace=False)
    assert alone.best is alone.runs[0]


def test_a_gradient_that_comes_last_and_is_needed_first_decides():
    last = layered([MS] * 4, [2 * MS] * 4, [40 * 10**6, 10**5, 10**5, 10**5])
    found = advice(last, f"4 workers @ 10Gbps,{FREE}")
    assert "layer 'l0' decides" in found.text
    assert "what comes last is needed first" in found.text


def test_of_one_schedule_beside_ddp_only_that_one_is_judged():
    found = compare(zoo("resnet50"), "4x1xV100@7Gbps", ["ddp", "fifo"], tuned=False, trace=False).advice
    assert not found.worth_it
    assert re.match(r"fifo (gains|does not beat).*: not worth it; another schedule could gain up to \d", found.text)
    assert "; beyond that, only faster computation would help" in found.text


def test_a_gain_that_is_the_optimizers_is_said_to_be():
    found = advice(workload(1, update=2 * MS), f"4 workers @ 1000Gbps,{FREE}")
    assert re.search(r"; \d+% of the gain is from updating parameters beside the computation", found.text)
    assert not found.worth_it  # by communication alone there is nothing to gain
    assert found.gain > 1.5


@pytest.mark.parametrize("megabytes", [1, 2, 5, 20])
@pytest.mark.parametrize("place", ["4 workers @ 10Gbps", "4 workers @ 10Gbps,ps=2", "2x4xV100@25Gbps,ps=colocated"])
def test_the_gain_is_never_more_than_any_schedule_could(megabytes, place):
    found = compare(workload(megabytes), place, ["bytescheduler", "dear"], trace=False)
    assert found.advice.gain <= found.baseline.iteration_time / found.bound.time
    assert found.advice.worth_it == (found.advice.gain >= 1.03)
    assert found.advice.text.endswith(".")
    assert found.advice.text.startswith("Worth it" if found.advice.worth_it else "Not worth it")


def test_what_all_comes_last_is_no_embedding():
    whole = layered([MS] * 4, [0, 0, 0, 8 * MS], [10**7] * 4)
    assert "the link decides" in advice(whole, f"4 workers @ 10Gbps,{FREE}").text


def test_latency_decides_where_it_does():
    found = advice(zoo("resnet50"), "4x1xV100@100Gbps,latency=50ms")
    assert "latency and the cost per operation decide" in found.text
    assert "faster computation" not in found.text


def test_one_worker_with_servers_gets_advice_too():
    assert advice(zoo("alexnet"), "1xV100@10Gbps,ps=1").text
