"""The closed form of goodput against a simulation of failures, and against itself where it has limits."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretrain.device import preset
from foretrain.errors import ConfigError
from foretrain.network.deployment_notation import deployment, equipped
from foretrain.recipe_search import bill
from foretrain.recipe_search.api import Goal, _objective
from foretrain.recipe_search.bill import (
    Failures,
    Stragglers,
    best_interval,
    bill_of,
    computing,
    erlang,
    goodput,
    job_mtbf,
    simulated_goodput,
    switch_power,
    young,
)
from foretrain.recipe_search.evaluation import Account, RecipeRun, RunSetting, run
from foretrain.recipe_search.space import Recipe
from tests.examples.torchrun import ROOT
from tests.live import forked
from tests.live.command import _require_device

HOUR = 3600.0


@pytest.mark.parametrize("mtbf", [2 * HOUR, 12 * HOUR])
@pytest.mark.parametrize("checkpoint", [10.0, 120.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_closed_form_is_within_one_percent_of_the_simulation(mtbf: float, checkpoint: float, factor: float) -> None:
    failures = Failures(mtbf, checkpoint, restart=300.0)
    interval = factor * young(failures)
    simulated = simulated_goodput(failures, interval, work=20_000 * interval)
    assert goodput(failures, interval) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("written", [0.0, 40.0])
@pytest.mark.parametrize("slow", [None, Stragglers(3 * HOUR, 0.5 * HOUR, 0.5), Stragglers(600.0, 120.0, 0.5)])
def test_counting_equal_checkpoints_at_once_gives_what_one_by_one_gives(
    written: float, slow: Stragglers | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = Failures(2 * HOUR, 5.0, 300.0, written=written, stragglers=slow, slowdown=1.4 if slow else 1.0)
    at_once = simulated_goodput(failures, 50.0, work=1000 * HOUR)
    monkeypatch.setattr(bill._Speeds, "at", lambda _, time: (time, 1.0))  # the speed may change at any time
    assert at_once == pytest.approx(simulated_goodput(failures, 50.0, work=1000 * HOUR), rel=1e-9)


def test_rare_failures_with_many_checkpoints_between_them_are_simulated_too() -> None:
    account = msgspec.structs.replace(ACCOUNT, state=1e6)
    bill = bill_of("H100", 8, None, Failures(4000 * HOUR, 0.0, 300.0, rate=2e9))
    numbers = bill.failure_numbers(account)
    assert numbers is not None
    assert numbers["simulated_goodput"] == pytest.approx(numbers["goodput"], rel=0.01)
    assert any("in a simulation of failures" in line for line in bill.lines(account, 1.0))


def test_it_is_said_where_failures_are_too_rare_to_be_simulated_among_slow_gpus() -> None:
    slow = Stragglers(600.0, 60.0, 0.7)
    bill = bill_of("H100", 8, None, Failures(4000 * HOUR, 0.0, 300.0, rate=2e9, stragglers=slow))
    numbers = bill.failure_numbers(ACCOUNT)
    assert numbers is not None
    assert numbers["simulated_goodput"] is None
    assert any("too rare to be simulated" in line for line in bill.lines(ACCOUNT, 1.0))


def test_the_best_interval_beats_its_neighbours_and_is_near_youngs_where_failures_are_rare() -> None:
    failures = Failures(100 * HOUR, 30.0, 600.0)
    best = best_interval(failures)
    assert best == pytest.approx(young(failures), rel=0.02)
    for factor in (0.8, 1.25):
        assert goodput(failures, factor * best) < goodput(failures, best)


def test_a_job_that_never_fails_only_pays_for_its_checkpoints() -> None:
    failures = Failures(math.inf, 10.0, 300.0)
    assert goodput(failures, 90.0) == pytest.approx(0.9)
    assert best_interval(failures) == math.inf


def test_rates_of_failures_add_up() -> None:
    where = deployment("dgx-h100:8")  # 64 GPUs, 64 cables to the switches of the rails, 64 from there to the spines
    assert job_mtbf(where, {"gpu": 64 * HOUR}) == pytest.approx(HOUR)
    assert job_mtbf(where, {"gpu": 64 * HOUR, "server": 8 * HOUR, "link": 64 * HOUR}) == pytest.approx(HOUR / 4)
    assert job_mtbf(where, {"gpu": math.inf}) == math.inf


@pytest.mark.parametrize("cluster", ["dgx-h100:1", "H100"])
def test_a_job_in_one_server_uses_no_cables_outside(cluster: str) -> None:
    where = equipped(cluster)[0]
    assert job_mtbf(where, {"server": HOUR, "link": HOUR}) == pytest.approx(HOUR)
    assert job_mtbf(where, {"link": HOUR}) == math.inf


def test_a_spare_saves_the_repair() -> None:
    without = Failures(2 * HOUR, 30.0, 300.0, repair=HOUR)
    assert erlang(0.5, 1) == pytest.approx(0.5 / 1.5)
    assert erlang(0.5, 2) == pytest.approx(0.125 / 1.625)
    for spares in (0, 1, 3):
        failures = Failures(2 * HOUR, 30.0, 300.0, repair=HOUR, spares=spares)
        assert goodput(failures, 900.0) >= goodput(without, 900.0)
        simulated = simulated_goodput(failures, 900.0, work=2e7)
        assert goodput(failures, 900.0) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(("repair", "spares"), [(0.0, 0), (24 * HOUR, 2)])
@pytest.mark.parametrize("slow", [(6 * HOUR, HOUR, 1.4), (24 * HOUR, 12 * HOUR, 1.25), (2 * HOUR, 300.0, 2.0)])
def test_stragglers_slow_the_job_as_in_the_simulation(
    slow: tuple[float, float, float], repair: float, spares: int
) -> None:
    every, lasts, slowdown = slow
    stragglers = Stragglers(every, lasts, 0.5)
    failures = Failures(12 * HOUR, 30.0, 300.0, repair, spares, stragglers=stragglers, slowdown=slowdown)
    interval = best_interval(failures)
    closed = goodput(failures, interval)
    assert closed == pytest.approx(simulated_goodput(failures, interval, 10_000 * failures.mtbf), rel=0.01)
    without = goodput(Failures(12 * HOUR, 30.0, 300.0, repair, spares), interval)
    share = 1 - math.exp(-lasts / every)
    assert closed == pytest.approx(without * (1 - share + share / slowdown), rel=0.01)


def test_a_slow_gpu_stretches_the_computation_of_a_step_alone() -> None:
    failures = Failures(HOUR, 0.0, 300.0, rate=2e9, stragglers=Stragglers(10 * HOUR, HOUR, 0.75))
    during = failures.during(ACCOUNT)  # computes for 6 of 10 s
    assert during.slowdown == pytest.approx(1 + 0.6 / 3)
    assert during.checkpoint == 2.0
    bill = bill_of("H100", 8, 3.6, failures)
    assert bill.useful(ACCOUNT) < bill_of("H100", 8, 3.6, Failures(HOUR, 0.0, 300.0, rate=2e9)).useful(ACCOUNT)
    text = "".join(bill.lines(ACCOUNT, 1e6))
    assert "a GPU is slow in 9.5% of the time, in which a step takes at most 1.20 times as long" in text


PARALLEL = """
import os
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layers = [layer for _ in range(4) for layer in (nn.Linear(8192, 8192), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8192, 8192, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_with_a_slow_gpu_takes_as_long_as_it_is_simulated(tmp_path: Path) -> None:
    _require_device()
    script = tmp_path / "train.py"
    script.write_text(PARALLEL)
    runs = [
        RecipeRun(RunSetting("dgx-h100:1,ranks=0-1", faults=faults), (str(script),), 3)
        for faults in ((), ("gpu:s0.gpu1=70%",))
    ]
    fast, slow = (each.account for each in forked.call(lambda: [run(each) for each in runs]))
    assert fast is not None
    assert slow is not None
    slowdown = Failures(HOUR, 30.0, 300.0, stragglers=Stragglers(HOUR, HOUR, 0.7)).during(fast).slowdown
    assert 1.2 < slowdown == pytest.approx(slow.time / fast.time, rel=0.03)


ACCOUNT = Account(
    time=10.0, compute=6.0, exposed=2.0, waiting=1.0, idle=1.0, spread=0.1, kernels={}, repeated=0.0, flops=1.0,
    reserved=1.0, state=4e9, carried=0.1, launches=1.0,
)  # fmt: skip


BEHIND = msgspec.structs.replace(ACCOUNT, saved=4e9, copies=0.5)
"""With checkpoints that the script writes in the background."""


def test_a_price_and_the_energy_of_a_step_are_those_of_its_gpus() -> None:
    bill = bill_of("H100", 8, 3.6)
    assert bill.money(ACCOUNT) == pytest.approx(8 * 3.6 * 10 / 3600)
    assert bill.joules(ACCOUNT) == pytest.approx(8 * 1275 * (0.76 * 6 + 0.45 * 2 + 0.25 * 2))
    assert "kWh" in "".join(bill.lines(ACCOUNT, 1e6))


def test_spares_and_switches_take_energy() -> None:
    step = 0.76 * 6 + 0.45 * 2 + 0.25 * 2
    never = Failures(math.inf, 30.0, 300.0, repair=HOUR, spares=2)
    bill = bill_of("H100", 16, 2.0, never, gpus_per_server=8, switches=5000.0)
    assert bill.joules(ACCOUNT) == pytest.approx(1275 * (16 * step + 16 * 0.25 * 10) + 5000 * 10)
    assert "(switches' 5.0, spares and failures included)" in "".join(bill.lines(ACCOUNT, 1e6))


def test_switches_draw_by_the_rates_of_their_ports() -> None:
    power = switch_power(deployment("dgx-h100:8"))  # 3 x 64 ports of 400 Gbps
    assert power == pytest.approx(3 * 64 * 1720 / 64, rel=0.01)
    assert switch_power(deployment("dgx-h100:8,ranks=0-31")) == pytest.approx(power / 2)
    assert switch_power(deployment("dgx-h100:1")) == 0


@pytest.mark.parametrize("mtbf", [HOUR, 6 * HOUR])
@pytest.mark.parametrize(("repair", "spares"), [(0.0, 0), (HOUR, 1)])
def test_the_time_that_computes_is_that_of_a_simulation_of_failures(mtbf: float, repair: float, spares: int) -> None:
    failures = Failures(mtbf, 30.0, 600.0, repair, spares)
    interval = best_interval(failures)
    draw = random.Random(3)
    now = busy = 0.0
    broken: list[float] = []
    while now < 5000 * mtbf:  # from one failure to the next, restarts that fail among them
        until = draw.expovariate(1 / mtbf)
        for _ in range(int(max(until - failures.restart, 0.0) // (interval + failures.checkpoint))):
            busy += interval
        busy += min(max(until - failures.restart, 0.0) % (interval + failures.checkpoint), interval)
        now += until
        broken = [*(time for time in broken if time > now), now + repair]
        now = now if len(broken) <= spares else broken[0]
    assert computing(failures, interval) == pytest.approx(busy / now, rel=0.01)


def test_failures_take_energy_to_compute_again_and_to_stand_by() -> None:
    failures = Failures(HOUR, 30.0, 300.0)
    bill, plain = bill_of("H100", 8, 2.0, failures), bill_of("H100", 8, 2.0).joules(ACCOUNT)
    busy = computing(failures, best_interval(failures))
    time = 10 / bill.useful(ACCOUNT)
    assert plain is not None
    expected = time * (busy * plain / 10 + (1 - busy) * 8 * 1275 * 0.25)
    assert plain < expected == pytest.approx(bill.joules(ACCOUNT))


@pytest.mark.parametrize("mtbf", [2 * HOUR, 12 * HOUR])
@pytest.mark.parametrize(("copies", "written"), [(2.0, 60.0), (10.0, 300.0)])
def test_checkpoints_in_the_background_are_as_in_the_simulation(mtbf: float, copies: float, written: float) -> None:
    failures = Failures(mtbf, copies, restart=300.0, written=written)
    for interval in (best_interval(failures), 3 * best_interval(failures)):
        simulated = simulated_goodput(failures, interval, work=20_000 * mtbf)
        assert goodput(failures, interval) == pytest.approx(simulated, rel=0.01)
    at_once = Failures(mtbf, copies + written, restart=300.0)
    assert goodput(failures, best_interval(failures)) > goodput(at_once, best_interval(at_once))


def test_no_checkpoint_begins_before_the_one_before_is_written() -> None:
    slow = Failures(HOUR, 0.1, 300.0, written=1000.0)
    assert best_interval(slow) >= 1000
    bill = bill_of("H100", 8, 2.0, Failures(HOUR, 0.0, 300.0, rate=4e6), interval=60.0)
    assert bill.failures is not None
    during = bill.failures.during(BEHIND)
    assert (during.checkpoint, during.written) == (0.5, 1000.0)
    assert bill.checkpointed(during) == 1000
    assert "a checkpoint takes 0.5 s and 16.7 min in the background (3.73 GiB" in "".join(bill.lines(BEHIND, 1e6))


def test_a_listed_price_says_its_day_and_source() -> None:
    bill = bill_of("H100", 8, None)
    assert bill.price == 4.916
    assert "2024-12-31: AWS" in bill.priced


def test_a_run_takes_its_steps_and_what_failures_take() -> None:
    failures = Failures(HOUR, 30.0, 300.0)
    bill = bill_of("H100", 8, 3.6, failures, run=1e9)
    days = 1000 * 10 / bill.useful(ACCOUNT) / 86400
    assert (
        f"the run of 1e+09 tokens: {days:.3g} days, {1000 * (bill.money(ACCOUNT) or 0):,.0f} for the GPUs"
        in "".join(bill.lines(ACCOUNT, 1e6))
    )


def test_the_page_lists_all_prices_and_powers_that_are_known() -> None:
    page = (ROOT / "docs" / "recipe-search.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    listed = {row[0]: tuple(row[1:]) for row in cells if row[0] in bill._known()["gpus"]}
    assert listed == {
        name: tuple(str(known.get(key, "")) for key in ("price", "date", "rated"))
        for name, known in bill._known()["gpus"].items()
    }


def test_of_an_unknown_gpu_nothing_is_made_up() -> None:
    bill = bill_of("K80", 8, None)
    assert bill.money(ACCOUNT) is bill.joules(ACCOUNT) is None
    assert all(" known" in line for line in bill.lines(ACCOUNT, None))


def test_failures_make_tokens_dearer() -> None:
    failures = Failures(HOUR, 30.0, 300.0)
    bill = bill_of("H100", 8, 3.6, failures)
    plain = bill_of("H100", 8, 3.6).money(ACCOUNT)
    assert plain is not None
    assert bill.money(ACCOUNT) == pytest.approx(plain / goodput(failures, best_interval(failures)))
    text = "".join(bill.lines(ACCOUNT, 1e6))
    assert "a failure every 60 min" in text
    assert "Young" in text


def test_a_checkpoint_takes_as_long_as_a_gpu_writes_its_part() -> None:
    written = Failures(HOUR, 0.0, 300.0, rate=2e9)
    assert written.during(ACCOUNT) == Failures(HOUR, 2.0, 300.0)
    bill = bill_of("H100", 8, 3.6, written)
    assert bill.useful(ACCOUNT) == bill_of("H100", 8, 3.6, Failures(HOUR, 2.0, 300.0)).useful(ACCOUNT)
    assert "a checkpoint takes 2 s (3.73 GiB a GPU, parameters and optimizer)" in "".join(bill.lines(ACCOUNT, 1e6))
    small = msgspec.structs.replace(ACCOUNT, state=ACCOUNT.state / 1000)
    assert "a checkpoint takes 0.002 s (0.00373 GiB a GPU" in "".join(bill.lines(small, 1e6))


def test_a_checkpoint_that_the_script_saves_counts_instead_of_the_optimizers_state() -> None:
    bill = bill_of("H100", 8, 3.6, Failures(HOUR, 0.0, 300.0, rate=2e9))
    saved = msgspec.structs.replace(ACCOUNT, saved=2e9)
    assert "a checkpoint takes 1 s (1.86 GiB a GPU, as the script saves)" in "".join(bill.lines(saved, 1e6))


@pytest.mark.parametrize(
    ("price", "interval", "run"),
    [(-1.0, None, None), (1.0, 0.0, None), (math.nan, None, None), ("2.5", None, None), (1.0, math.inf, None),
     (1.0, None, math.nan)],
)  # fmt: skip
def test_a_wrong_bill_is_refused(price: Any, interval: float | None, run: float | None) -> None:
    with pytest.raises(ConfigError):
        bill_of("H100", 8, price, None, interval, run)


@pytest.mark.parametrize(
    ("field", "failures", "interval"),
    [
        ("mtbf", Failures(21.0, 30.0, 300.0), None),  # 3 h for each of 512 GPUs
        ("mtbf", Failures(3600 / 2048, 30.0, 1800.0), None),
        ("checkpoint_every", Failures(2.4 * HOUR, 30.0, 300.0), 24 * HOUR),
        ("checkpoint", Failures(HOUR, 12 * HOUR, 300.0), None),
        ("repair", Failures(HOUR, 30.0, 300.0, repair=1000 * HOUR), None),
    ],
)
def test_a_job_that_fails_more_often_than_it_goes_on_is_refused(
    field: str, failures: Failures, interval: float | None
) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .* a job of 512 GPUs then fails every ") as caught:
        bill_of("H100", 512, 2.0, failures, interval)
    assert caught.value.field == field


@pytest.mark.parametrize("interval", [None, 1800.0])
def test_goodput_of_a_job_that_never_fails_or_saves_nothing_is_told(interval: float | None) -> None:
    never = bill_of("H100", 8, 2.0, Failures(math.inf, 30.0, 300.0), interval)
    assert never.useful(ACCOUNT) == (1.0 if interval is None else pytest.approx(1800 / 1830))
    lines = [*never.lines(ACCOUNT, 1e6)]
    assert any("nothing fails" in line for line in lines)
    assert not any("in a simulation" in line for line in lines)

    empty = msgspec.structs.replace(ACCOUNT, state=0.0)
    nothing = bill_of("H100", 8, 2.0, Failures(HOUR, 0.0, 300.0, rate=2e9), interval)
    assert nothing.useful(empty) <= math.exp(-300 / HOUR)
    assert "goodput " in "".join(nothing.lines(empty, 1e6))


def test_a_recipe_whose_checkpoint_never_ends_ranks_last_without_an_error() -> None:
    bill = bill_of("H100", 8, 2.0, Failures(60.0, 0.0, 30.0, rate=1.0))  # a checkpoint takes 4e9 s
    assert 0 < bill.useful(ACCOUNT) < 1e-6
    assert "goodput 0.00%" in "".join(bill.lines(ACCOUNT, 1e6))


@pytest.mark.parametrize(("every", "lasts"), [(1 / 64, 2 * HOUR), (1.0, 10.0), (1.0, 1.0), (HOUR, 1.0)])
def test_a_simulation_ends_however_often_gpus_turn_slow(every: float, lasts: float) -> None:
    stragglers = Stragglers(every, lasts, 0.7)
    failures = Failures(781 * HOUR, 30.0, 300.0, stragglers=stragglers, slowdown=1.4)
    interval = best_interval(failures)
    simulated = simulated_goodput(failures, interval, 10_000 * failures.mtbf, events=200_000)
    assert math.isnan(simulated) or simulated == pytest.approx(goodput(failures, interval), rel=0.01)
    assert math.isnan(simulated_goodput(failures, 1e9, 1e12, events=200_000))


def test_the_simulation_that_is_shown_agrees_where_failures_are_rare() -> None:
    bill = bill_of("H100", 8, 2.0, Failures(6250 * HOUR, 30.0, 300.0))
    found = bill.failure_numbers(ACCOUNT)
    assert found is not None
    assert found["simulated_goodput"] == pytest.approx(found["goodput"], rel=1e-3)
    assert found["interval"] == found["best_interval_daly"] == pytest.approx(found["best_interval_young"], rel=0.01)
    (first,) = [line for line in bill.lines(ACCOUNT, 1e6) if line.startswith("goodput")]
    interval = found["interval"]
    assert interval is not None
    assert first.endswith(f"a failure every 260 days, a checkpoint every {interval / 10:,.0f} steps (10.2 h)")


def test_goals_rank_recipes_differently() -> None:
    bill = bill_of("H100", 8, 2.0, Failures(HOUR, 0.0, 300.0, rate=1e8))
    recipe = Recipe(0, {}, {}, (), 1e6)
    accounts = {
        "fast": ACCOUNT,  # and its checkpoint takes 40 s
        "small": msgspec.structs.replace(ACCOUNT, time=10.5, compute=6.5, state=1e8),
        "frugal": msgspec.structs.replace(ACCOUNT, time=12.0, compute=3.0, exposed=1.0, waiting=4.0, idle=4.0),
    }

    def best(goal: Goal) -> str:
        objective = _objective(goal, bill)
        return min(accounts, key=lambda name: objective(accounts[name], recipe))

    assert [best(goal) for goal in ("step", "goodput", "cost", "energy")] == ["fast", "small", "small", "frugal"]
    assert _objective("step", bill)(ACCOUNT, recipe) == ACCOUNT.time / 1e6


def test_spare_servers_are_paid_and_what_one_more_would_save_is_told() -> None:
    plain = Failures(2 * HOUR, 30.0, 300.0, repair=HOUR)
    spared = Failures(2 * HOUR, 30.0, 300.0, repair=HOUR, spares=2)
    bills = [bill_of("H100", 16, 2.0, failures, gpus_per_server=8) for failures in (plain, spared)]
    paid = [(bill.money(ACCOUNT) or 0.0) * bill.useful(ACCOUNT) for bill in bills]
    assert paid[1] == pytest.approx(2 * paid[0])
    text = "".join(bills[1].lines(ACCOUNT, 1e6))
    assert "with 16 GPUs that stand by" in text
    assert f"{erlang(0.5, 3):.2%} of the time; with one more spare, {erlang(0.5, 4):.2%}" in text


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("mtbf", {"mtbf": 0.0}),
        ("mtbf", {"mtbf": math.nan}),
        ("checkpoint", {"checkpoint": -1.0}),
        ("restart", {"restart": math.inf}),
        ("rate", {"rate": 0}),
        ("spares", {"spares": -1}),
        ("spares", {"spares": 1}),  # where a repair takes no time
        ("slowdown", {"slowdown": 0.5}),
    ],
)
def test_failures_that_cannot_be_are_refused(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Failures(HOUR, 30.0, 300.0), **wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("wrong", [(0.0, HOUR, 0.7), (HOUR, math.inf, 0.7), (HOUR, HOUR, 0.0), (HOUR, HOUR, 1.5)])
def test_stragglers_that_cannot_be_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="stragglers"):
        Stragglers(*wrong)


def test_every_price_has_a_date_and_a_source() -> None:
    for name, known in bill._known()["gpus"].items():
        assert preset(name).name == name
        assert ("price" in known) == ("date" in known) == ("source" in known), name


def test_a_price_or_a_power_that_is_not_known_is_said_to_be_missing() -> None:
    lines = [*bill_of("L40S", 8, None).lines(ACCOUNT, 1.0)]
    assert any(line.startswith("no list price of L40S is known: ") and line.endswith("--price 2.5") for line in lines)
    assert "the power of L40S is not known, so neither is energy" in lines
    assert not any(" known" in line for line in bill_of("H100", 8, None).lines(ACCOUNT, 1.0))
    with pytest.raises(ConfigError, match=r"no list price of L40S is known; give what a GPU costs .* --price 2.5"):
        _objective("cost", bill_of("L40S", 8, None))
