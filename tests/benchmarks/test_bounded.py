"""What benchmarks/bounded.py computes of what it has measured, keeps, and marks."""

import json
import socket
from argparse import Namespace

import pytest

from foretrain.comm.bounded import service_of
from tests.benchmarks.test_bounded_forecast import benchmark
from tests.comm.collectives.test_ring import group

__all__ = ["benchmark"]


def services(member):
    return {each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for each in member._sockets.values()}


def test_rings_that_are_made_meanwhile_mark_what_they_send_and_others_do_not(benchmark):
    with benchmark.marked(), group(3) as members:
        assert [services(each) for each in members] == [{service_of(0, 1)}] * 3
    with group(3) as members:
        assert [services(each) for each in members] == [{0}] * 3


def test_what_was_measured_is_found_again_by_another_run_but_only_at_the_same_place(benchmark, tmp_path):
    here, there = benchmark.Place("lossy", 2, "1Gbps"), benchmark.Place("lossy", 2, "1Gbps", 0.01)
    arguments = Namespace(quick=False, json=tmp_path / "kept.json")
    first = benchmark.Kept(arguments)
    assert first.find(here) is None
    first.add(here, {"tcp fifo": [0.1]})
    again = benchmark.Kept(arguments)
    assert again.find(here) == {"tcp fifo": [0.1]}
    assert again.find(there) is None
    again.add(there, {})
    kept = json.loads(arguments.json.read_text())
    assert kept["name"] == "bounded"
    assert [each["found"] for each in kept["details"]] == [{"tcp fifo": [0.1]}, {}]
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_a_quick_run_keeps_nothing(benchmark, tmp_path):
    arguments = Namespace(quick=True, json=tmp_path / "kept.json")
    kept, place = benchmark.Kept(arguments), benchmark.Place("lossy", 2, "1Gbps")
    kept.add(place, {})
    assert kept.find(place) == {}
    assert not arguments.json.exists()


def test_ratios_are_of_the_best_median_of_each_side_and_the_slowest_of_sixty_steps(benchmark, capsys):
    """The best of TCP takes 40 ms, its slowest step 200; ours 30 and 50."""
    steps = {
        "tcp fifo": [0.060] * 60,
        "tcp-server p3": [0.040] * 59 + [0.200],
        "bounded fifo": [0.035] * 60,
        "bounded prophet": [0.030] * 59 + [0.050],
        "marked-tcp fifo": [0.020] * 60,
    }
    found = steps | {"policies": dict.fromkeys(steps), "lost": {"bounded prophet": "1.00% were lost"}}
    place = benchmark.Place("lossy", 2, "1Gbps", marked=True)
    ratios = benchmark.lossy_table(place, found, {"bounded prophet": 0.033})
    assert ratios == {"median": pytest.approx(4 / 3), "p99": pytest.approx(0.25)}
    said = capsys.readouterr().out
    assert "best of TCP over best of ours: median 1.33, p99 4.00" in said
    assert "the same of marked TCP: median 0.67, p99 0.40" in said
    [line] = [line for line in said.splitlines() if "bounded prophet" in line]
    assert "forecast   33.0 ms (+10%)  1.00% were lost" in line


def test_layers_have_the_bytes_that_take_as_long_as_the_computation(benchmark):
    for hosts in (2, 3, 4):
        sizes = benchmark.sizes(benchmark.Place("lossy", hosts, "1Gbps", compute=0.04))
        each_way = 4 * sum(sizes) * 2 * (hosts - 1) / hosts
        assert 8 * each_way / 1e9 == pytest.approx(0.04, rel=1e-3)
        assert sum(sizes[-3:]) == pytest.approx(sum(sizes) / 2, rel=1e-3)


def test_an_accuracy_is_reached_at_the_first_evaluation_that_has_it(benchmark):
    import bounded_training

    curve = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (4.0, 0.95)]
    assert bounded_training.reached(curve, 0.9) == (2, 2.0)
    assert bounded_training.reached(curve, 0.96) is None
