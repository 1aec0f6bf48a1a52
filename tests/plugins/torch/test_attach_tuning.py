"""attach(tune=True): knobs move on all ranks alike, training stays the same, and what is found is kept."""

import os
import shutil
import tempfile

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from foretrain.comm.options import AllReduce, ParameterServer  # noqa: E402
from foretrain.errors import ConfigError  # noqa: E402
from foretrain.network import cluster  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from foretrain.plugins.torch.rendezvous import SECRET  # noqa: E402
from foretrain.plugins.torch.runtime_plan import search_of  # noqa: E402
from foretrain.schedule import Spec  # noqa: E402
from foretrain.workload import zoo  # noqa: E402
from tests.planner.plans import plan_of  # noqa: E402
from tests.plugins.torch.models import assert_same, batch, mlp, objective, sgd  # noqa: E402
from tests.plugins.torch.ps.serving import KEY, servers  # noqa: E402

STEPS = 50
PLANS = ["bytescheduler", "prophet(credit=64KiB)", "fusion"]


def in_cache(folder, function, *args):
    """What ``function`` yields or returns, with results of searches in ``folder``."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ.update({"XDG_CACHE_HOME": folder, SECRET: KEY.hex()})
    try:
        return function(*args)
    finally:
        del os.environ[SECRET]
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update({"XDG_CACHE_HOME": before})


def long(side):
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def cached(side, folder):
    os.environ.update({"XDG_CACHE_HOME": folder, SECRET: KEY.hex()})
    try:
        yield from long(side)
    finally:
        del os.environ["XDG_CACHE_HOME"], os.environ[SECRET]


@pytest.fixture
def folder():
    made = tempfile.mkdtemp()
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("plan", PLANS)
def test_a_tuned_job_trains_the_same(ranks, plan, folder):
    assert_same(ranks, cached, folder, schedule=plan, tune=True)


@pytest.mark.parametrize("updates", ["workers", "servers"])
def test_a_tuned_job_over_servers_trains_the_same(ranks, updates, folder):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, cached, folder, transport=ParameterServer(addresses, updates), tune=True)


def events(folder, steps, **options):
    """What the tuner of this rank did, and the knobs in force after each step."""

    def run():
        model = mlp()
        optimizer = sgd(model)
        seen = []
        with attach(model, optimizer, "bytescheduler", tune=True, warmup=1, **options) as attached:
            for step in range(steps):
                objective(model(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                attached.synchronize()
                if attached.schedule is not None:
                    seen.append(in_full(attached.schedule))
            told = attached.tuner and [in_full(event.spec) for event in attached.tuner.events]
        return told, seen

    return in_cache(folder, run)


def in_full(plan):
    return str(Spec(plan.name, plan.settings))


@pytest.mark.smoke
def test_rank_0_decides_and_all_follow(ranks, folder):
    (told, seen), (nothing, followed) = ranks(events, folder, 120)
    assert nothing is None
    assert len(set(told)) > 1  # something else was tried
    assert 1 < len(set(followed)) <= len(set(told))
    assert set(followed) | set(seen) <= set(told)


def test_over_servers_all_ranks_have_the_same_knobs_in_the_same_step(ranks, folder):
    with servers(1, 2) as (addresses, _):
        (told, seen), (_, followed) = ranks(events, folder, 120, transport=ParameterServer(addresses))
    assert seen == followed
    assert 1 < len(set(seen)) <= len(set(told))
    assert set(seen) <= set(told)


def by_hand(folder, addresses):
    """Rank 1 sets a knob: which it has then, and which at the end."""

    def run():
        model = mlp()
        optimizer = sgd(model)
        found = None
        options = {"transport": ParameterServer(addresses), "tune": True, "warmup": 1}
        with attach(model, optimizer, "bytescheduler", **options) as attached:
            for step in range(100):
                objective(model(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                attached.synchronize()
                if step == 4 and dist.get_rank() == 1:
                    attached.set("partition", "3KiB")
                found = attached.schedule
        return found.settings["partition"]

    return in_cache(folder, run)


def test_over_servers_a_rank_keeps_what_was_set_by_hand(ranks, folder):
    with servers(1, 2) as (addresses, _):
        first, second = ranks(by_hand, folder, addresses)
    assert second == 3 << 10 != first


def test_where_no_knob_is_open_it_says_so_and_trains(ranks, folder):
    said = assert_same(ranks, cached, folder, schedule="p3(slice=1KiB)", tune=True, said="")
    assert any("p3(slice=1KiB) leaves no knob open" in word for word in said[0].said)


def test_a_search_keeps_how_a_plan_file_has_the_policy_work(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_of("prophet(partition=2MB, ahead=0.0)")
    tuner, _ = search_of(plan, plan.schedule, zoo("alexnet"), cluster("4x1xV100@10Gbps"))
    while tuner.searching:
        assert tuner.spec.knobs["ahead"] == 0
        tuner.iterated(1.0)
    assert len({str(event.spec) for event in tuner.events}) > 1


def refused(**options):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(ConfigError) as caught:
        attach(model, optimizer, **options)
    return str(caught.value)


def test_where_knobs_cannot_be_searched(ranks):
    for text in ranks(refused, tune=True, transport=AllReduce("replay")):
        assert "fixed order" in text
    for text in ranks(refused, tune=True, transport=ParameterServer("127.0.0.1:1", consistency="async")):
        assert "bsp" in text
    for text in ranks(refused, tune=True, transport=ParameterServer("127.0.0.1:1", elastic=True)):
        assert "elastic" in text
    for text in ranks(refused, tune="yes"):
        assert "neither True nor False" in text
