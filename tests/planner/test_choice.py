"""The planner against everything that it may choose from. Simulations are deterministic, and so are these numbers."""

import dataclasses
import re

import pytest

from foretrain.errors import ConfigError
from foretrain.network import cluster
from foretrain.planner import GainUncertainty, choose, engines, tune
from foretrain.planner.backends import compressed, engine_of
from foretrain.planner.candidate_search import ENOUGH, Setting
from foretrain.planner.choice import NONE, uncertainty
from foretrain.schedule import IDEAL, POLICIES
from foretrain.simulation import bound, simulate
from foretrain.units import SECOND
from foretrain.workload import zoo
from tests.scenario import layered

WHERE = "4x1xV100@7Gbps"


def exhaustive(workload, place, policies, evaluations=60):
    """The iteration time of each policy at its best."""
    times = {}
    for name in policies:
        best = tune(workload, place, name, evaluations=evaluations)
        times[name] = simulate(workload, place, best, trace=False).iteration_time
    return times


@pytest.mark.parametrize(
    ("model", "where"),
    [("resnet50", "4x1xV100@1Gbps"), ("vgg16", "4x1xV100@10Gbps"), ("gpt2", "4x1xV100@10Gbps")],
)
def test_the_choice_is_as_good_as_the_best_of_all(model, where):
    workload = zoo(model)
    choice = choose(workload, where)
    # Those that neither T* nor their own bound rules out, but for the slow ones to search.
    times = exhaustive(workload, cluster(where), ("ddp", "dear", "p3", "bytescheduler", "tic", "mgwfbp"))
    assert choice.time <= 1.02 * min(times.values())
    assert choice.time <= 1.01 * times["ddp"]


@pytest.mark.parametrize("where", ["4x1xV100@10Gbps,ps=4", "4x1xV100@10Gbps,ps=colocated"])
def test_over_a_parameter_server_it_is_near_the_optimum(where):
    workload = zoo("resnet50")
    choice = choose(workload, where)
    assert choice.time <= 1.02 * bound(workload, where).time


def test_what_is_chosen_takes_as_long_as_it_says():
    workload = zoo("resnet50")
    choice = choose(workload, WHERE)
    assert simulate(workload, WHERE, choice.schedule, trace=False).iteration_time == choice.time
    assert choice.chosen is choice.best
    assert choice.gain == choice.baseline.time / choice.time - 1
    assert choice.gain > choice.uncertainty > 0
    assert {one.schedule.name for one in choice.candidates} == set(POLICIES) - {IDEAL}


def test_what_is_skipped_could_not_have_won():
    workload = zoo("vgg16")
    choice = choose(workload, "4x1xV100@10Gbps")
    skipped = [one.schedule.name for one in choice.candidates if one.time is None]
    assert skipped
    assert all(one.why_not.startswith("cannot win") for one in choice.candidates if one.time is None)
    times = exhaustive(workload, cluster("4x1xV100@10Gbps"), skipped, evaluations=8)
    assert min(times.values()) >= choice.best.time * (1 - ENOUGH)


@pytest.mark.parametrize("workload", [zoo("resnet50"), zoo("vgg16")], ids=lambda one: one.name)
def test_where_nothing_is_to_be_won_it_is_plain_ddp(workload):
    choice = choose(workload, "4x1xV100@100Gbps" if workload.name == "resnet50" else WHERE.replace("7G", "500M"))
    assert choice.falls_back
    assert choice.schedule.name == "ddp"
    assert choice.gain == 0
    assert choice.lines[0].startswith("auto: plain DDP")
    assert choice.lines[1].startswith("auto: because")
    assert "no schedule can gain more than" in choice.lines[1]


def test_where_operations_cost_more_than_what_they_carry_it_says_that_nothing_else_is_faster():
    small = layered([10**9] * 8, [10**9] * 8, [1000] * 8)
    choice = choose(small, "2 workers @ 5Gbps,overhead=2ms")
    assert choice.best is choice.baseline
    assert re.search(r"of [1-9]\d* others that were simulated none is faster", choice.lines[1])


def test_a_gain_that_is_less_than_its_uncertainty_is_no_gain():
    workload = zoo("resnet50")
    sure, unsure = (choose(workload, WHERE, doubt=GainUncertainty(forecast=share)) for share in (0.0, 0.5))
    assert not sure.falls_back
    assert unsure.falls_back
    assert unsure.best.schedule == sure.best.schedule
    assert unsure.uncertainty > sure.gain


# ---------------------------------------------------------------- uncertainty


def test_uncertainty_is_that_of_two_forecasts_where_the_profile_is_certain():
    workload = zoo("vgg16")
    setting = Setting(workload, cluster("4x1xV100@10Gbps"))
    slow, fast = setting.baseline(), setting.first("mgwfbp")  # both with a barrier
    error = GainUncertainty(forecast=0.01, rate=0, overhead=0, latency=0, compute=0)
    gain = slow.time / fast.time
    assert uncertainty(slow, fast, (error, error)) == pytest.approx(gain * 0.01 * 2**0.5)
    assert uncertainty(slow, fast, (NONE, NONE)) == 0


def test_room_for_updates_beside_the_computation_is_uncertain():
    setting = Setting(zoo("resnet50"), cluster(WHERE))
    slow, fast = setting.baseline(), setting.first("prophet")
    update = setting.workload.update
    expected = slow.time / fast.time - slow.time / (fast.time + update)
    assert uncertainty(slow, fast, (NONE, NONE)) == pytest.approx(expected)


@pytest.mark.parametrize("field", ["rate", "overhead", "latency", "compute"])
def test_every_part_of_the_profile_counts(field):
    setting = Setting(zoo("resnet50"), cluster("4x1xV100@7Gbps,latency=200us"))
    slow, fast = setting.baseline(), setting.first("bytescheduler")
    doubtful = dataclasses.replace(NONE, **{field: 0.3})
    assert uncertainty(slow, fast, (doubtful, doubtful)) > uncertainty(slow, fast, (NONE, NONE))


# ---------------------------------------------------------------- engines and compression


def test_engines_are_those_that_the_hosts_can_have():
    def names(where):
        return [engine_of(place) for place in engines(cluster(where))]

    assert names("4x1xV100@10Gbps") == ["all_reduce", "ps_colocated"]
    assert names("4x1xV100@10Gbps,ps=colocated") == ["all_reduce", "ps_colocated"]
    assert names("4x1xV100@10Gbps,ps=2") == ["all_reduce", "ps_colocated", "ps"]
    assert names("1x1xV100@10Gbps,ps=2") == ["ps"]


def test_servers_of_their_own_win_where_there_are_as_many_as_workers():
    choice = choose(zoo("vgg16"), engines(cluster("4x1xV100@10Gbps,ps=4")))
    assert engine_of(choice.chosen.place) == "ps"
    assert engine_of(choice.baseline.place) == "all_reduce"
    assert choice.gain > 0.4


def test_compression_is_chosen_only_if_allowed_and_told_otherwise():
    workload = zoo("vgg16")
    strict, free = choose(workload, "4x1xV100@10Gbps"), choose(workload, "4x1xV100@10Gbps", allow=["bf16"])
    assert strict.chosen.compression is None
    assert strict.compressing is not None
    assert "compression='fp16'" in strict.lines[1]
    assert free.chosen.compression == "bf16"
    assert free.baseline.compression is None
    assert free.compressing is None
    assert free.time <= 1.02 * strict.compressing.time < 0.6 * strict.time


def test_compression_halves_bytes_and_costs_42_bytes_of_memory_traffic_a_value():
    workload, bandwidth = zoo("resnet50"), 1e9
    sent = compressed(workload, "fp16", bandwidth)
    assert sent.size == workload.size // 2
    values = workload.size // 4
    assert sent.backward - workload.backward == pytest.approx(36 * values / bandwidth * SECOND, rel=1e-6)
    assert sent.forward - workload.forward == pytest.approx(6 * values / bandwidth * SECOND, rel=1e-6)
    late = [after.release - before.release for before, after in zip(workload.gradients, sent.gradients, strict=True)]
    assert max(late) == sent.backward - workload.backward  # the first layer's
    assert all(time > 0 for time in late)
    assert compressed(workload, None, bandwidth) is workload


def test_gradients_of_half_precision_are_not_halved_again():
    assert choose(zoo("gpt2", device="A100", precision="bf16"), "4x1xA100@1Gbps").compressing is None


def test_wrong_questions_name_the_remedy():
    with pytest.raises(ConfigError, match=r"known: bf16, fp16"):
        choose(zoo("alexnet"), WHERE, allow=["fp8"])
    with pytest.raises(ConfigError, match="name a cluster"):
        choose(zoo("alexnet"), [])
