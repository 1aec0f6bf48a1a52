"""attach(tune=True): knobs move on all ranks alike, training stays the same, and what is found is kept."""

import contextlib
import os
from unittest import mock

import pytest
import torch.distributed as dist

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer
from foretrain.comm.runtime_plan import search_of
from foretrain.network import cluster
from foretrain.plugins.torch import attach
from foretrain.schedule import Spec
from foretrain.workload import zoo
from tests.planner.plans import plan_of
from tests.plugins.torch.models import assert_same, loop, pair, steps
from tests.plugins.torch.ps.serving import KEY, servers


@contextlib.contextmanager
def environment(folder):
    """Results of searches are in ``folder``, and servers know the secret."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder, SECRET: KEY.hex()}):
        yield


def cached(side, folder):
    with environment(folder):
        yield from loop(side, steps=50)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


@pytest.mark.parametrize("plan", ["prophet(credit=64KiB)", "fusion"])
def test_a_tuned_job_trains_the_same(ranks, plan, folder):
    assert_same(ranks, cached, folder, schedule=plan, tune=True)


@pytest.mark.parametrize("updates", ["workers", "servers"])
def test_a_tuned_job_over_servers_trains_the_same(ranks, updates, folder):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, cached, folder, transport=ParameterServer(addresses, updates), tune=True)


def events(folder, **options):
    """What the tuner of this rank has tried, and the knobs in force after each step."""
    model, optimizer = pair()
    seen = []
    with environment(folder), attach(model, optimizer, "bytescheduler", tune=True, warmup=1, **options) as attached:
        for _ in steps(model, optimizer, 120):
            attached.synchronize()
            if attached.schedule is not None:
                seen.append(in_full(attached.schedule))
        return attached.tuner and [in_full(event.spec) for event in attached.tuner.events], seen


def in_full(plan):
    return str(Spec(plan.name, plan.settings))


@pytest.mark.smoke
def test_rank_0_decides_and_all_follow(ranks, folder):
    (tried, seen), (nothing, followed) = ranks(events, folder)
    assert nothing is None
    assert 1 < len(set(followed)) <= len(set(tried))
    assert set(followed) | set(seen) <= set(tried)


def test_over_servers_all_ranks_have_the_same_knobs_in_the_same_step(ranks, folder):
    with servers(1, 2) as (addresses, _):
        (tried, seen), (_, followed) = ranks(events, folder, transport=ParameterServer(addresses))
    assert seen == followed
    assert 1 < len(set(seen)) <= len(set(tried))
    assert set(seen) <= set(tried)


def by_hand(folder, addresses):
    """Rank 1 sets a knob; this rank's at the end."""
    model, optimizer = pair()
    options = {"transport": ParameterServer(addresses), "tune": True, "warmup": 1}
    with environment(folder), attach(model, optimizer, "bytescheduler", **options) as attached:
        for step in steps(model, optimizer, 100):
            attached.synchronize()
            if step == 5 and dist.get_rank() == 1:
                attached.set("partition", "3KiB")
        return attached.schedule.settings["partition"]


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
