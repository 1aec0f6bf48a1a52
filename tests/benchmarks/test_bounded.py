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
    first = benchmark.Kept(arguments, [])
    assert first.find(here) is None
    first.add(here, {"tcp fifo": [0.1]})
    again = benchmark.Kept(arguments, [here, there])
    assert again.find(here) == {"tcp fifo": [0.1]}
    assert again.find(there) is None
    again.add(there, {})
    kept = json.loads(arguments.json.read_text())
    assert kept["name"] == "bounded"
    assert [each["found"] for each in kept["details"]] == [{"tcp fifo": [0.1]}, {}]
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_places_of_older_files_have_defaults_and_those_that_are_no_more_are_forgotten(benchmark, tmp_path, capsys):
    here, gone = benchmark.Place("lossy", 2, "1Gbps"), benchmark.Place("training", 2, "1Gbps", model="characters")
    older = {key: value for key, value in benchmark._described(here).items() if key != "tolerance"}
    details = [{"place": older, "found": {"tcp": [1]}}, {"place": benchmark._described(gone), "found": {}}]
    (tmp_path / "kept.json").write_text(json.dumps({"name": "bounded", "details": details}))
    kept = benchmark.Kept(Namespace(quick=False, json=tmp_path / "kept.json"), [here])
    assert kept.find(here) == {"tcp": [1]}
    assert len(kept.details) == 1
    assert "measured otherwise now: training: 2 hosts" in capsys.readouterr().out


def test_what_was_kept_is_of_places_that_are_measured(benchmark):
    """Only the two trainings that were too short are not."""
    from pathlib import Path

    record = Path(benchmark.__file__).parent / "data" / "bounded_lab.json"
    kept = benchmark.Kept(Namespace(quick=False, json=record), benchmark.places(False))
    assert len(kept.details) >= 50


def test_the_optimum_of_images_is_what_accuracy_is_measured_by(benchmark):
    """A model that is the best classifier, nearest prototype, has an accuracy of one."""
    import bounded_training
    import torch

    made = bounded_training.images(0)
    draw = torch.Generator().manual_seed(0)
    prototypes = torch.nn.functional.interpolate(
        torch.randn(10, 3, 4, 4, generator=draw), size=16, mode="bicubic"
    ).flatten(1)

    class Best(torch.nn.Module):
        def forward(self, inputs):
            return inputs.flatten(1) @ prototypes.T - (prototypes**2).sum(1) / 2

    assert made["evaluate"](Best()) == pytest.approx(1, abs=0.002)
    assert made["evaluate"](made["model"]) < 0.5
    inputs, classes = next(iter(made["batches"]))
    assert inputs.shape == (64, 3, 16, 16)
    assert classes.shape == (64,)


def test_a_quick_run_keeps_nothing(benchmark, tmp_path):
    arguments = Namespace(quick=True, json=tmp_path / "kept.json")
    kept, place = benchmark.Kept(arguments, []), benchmark.Place("lossy", 2, "1Gbps")
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


def test_a_training_is_summed_up_by_its_seeds(benchmark, capsys):
    """Two seeds of three reach 94 %; ours takes 2 s in the median where the faster one over TCP takes 3."""
    import bounded_training

    def curve(*accuracies, step):
        return [(step * number, accuracy) for number, accuracy in enumerate(accuracies, 1)]

    found = {
        "tcp gloo": [
            curve(0.90, 0.94, 0.96, step=2.0),
            curve(0.90, 0.95, 0.96, step=2.0),
            curve(0.95, 0.9, 0.9, step=3.0),
        ],
        "tcp ring": [
            curve(0.90, 0.94, 0.96, step=1.5),
            curve(0.90, 0.95, 0.96, step=1.5),
            curve(0.9, 0.95, 0.9, step=3.0),
        ],
        "bounded": [
            curve(0.90, 0.94, 0.95, step=1.0),
            curve(0.90, 0.95, 0.97, step=1.0),
            curve(0.5, 0.6, 0.7, step=1.0),
        ],
        "lost": {"bounded": "1.00% were lost"},
    }
    place = benchmark.Place("training", 2, "1Gbps", model="digits", seeds=3)
    summary = bounded_training.summary(place, found)
    assert summary["ratio"] == pytest.approx(1.5)
    ours = summary["cases"]["bounded"]
    assert (ours["rounds"], ours["seconds"], ours["reached"], ours["seeds"], ours["steps"]) == (10, 2.0, 2, 3, 3.0)
    # Student's t of two degrees of freedom, 2.92, times the standard error.
    means = [[sum(a for _, a in curve) / 3 for curve in found[name]] for name in ("bounded", "tcp ring")]
    deltas = [ours - theirs for ours, theirs in zip(*means, strict=True)]
    assert summary["delta"] == pytest.approx(sum(deltas) / 3)
    error = (sum((each - summary["delta"]) ** 2 for each in deltas) / 2 / 3) ** 0.5
    assert summary["least"] == pytest.approx(summary["delta"] - 2.92 * error)
    bounded_training.table(summary, found["lost"])
    said = capsys.readouterr().out
    assert "bounded    94% after 10 rounds,   2.00 s (2 of 3 seeds), all steps 3.00 s" in said
    assert "best over TCP over ours: 1.50" in said
    assert "not shown to be no worse by a margin of 1%" in said


def test_a_training_that_never_gets_there_has_a_ratio_of_nothing(benchmark):
    import bounded_training

    found = {"tcp ring": [[(1.0, 0.95)]], "bounded": [[(1.0, 0.90)]]}
    summary = bounded_training.summary(benchmark.Place("training", 2, "1Gbps", model="digits"), found)
    assert summary["ratio"] == 0
    assert summary["cases"]["bounded"]["seconds"] is None
    assert summary["least"] is None


def test_drops_are_summed_up_by_rounds(benchmark, capsys):
    import bounded_training

    def seeds(*rounds):
        return [{"lost": 0.1, "accuracies": [0.5] * (there - 1) + [0.95]} for there in rounds]

    place = benchmark.Place("drops", 4, "none", 0.1, model="digits", seeds=3)
    summary = bounded_training.drops_summary(place, {"random": seeds(10, 12, 14), "selective": seeds(7, 8, 9)})
    assert summary["ratio"] == pytest.approx(12 / 8)
    assert summary["cases"]["selective"]["rounds"] == 8
    bounded_training.drops_table(summary)
    assert "10.0% of the bytes lost; 94% after 12 rounds (3 of 3 seeds)" in capsys.readouterr().out


@pytest.mark.parametrize("by", ["random", "selective"])
def test_as_many_bytes_are_dropped_either_way(benchmark, by, monkeypatch):
    import bounded_training

    monkeypatch.setattr(bounded_training, "DROPS", {by: bounded_training.DROPS[by]})
    found = bounded_training.drops(benchmark.Place("drops", 4, "none", 0.3, model="digits", seeds=1, steps=12))
    [one] = found[by]
    # By magnitude nothing may be dropped in the first round, and the share of others varies with their values.
    assert one["lost"] == pytest.approx(0.3, rel=0.15)
    assert len(one["accuracies"]) == 12


def test_tasks_over_gloo_are_there_when_the_first_is(benchmark, monkeypatch):
    """One rank's sums are its own gradients; waiting for one layer waits for all, as DistributedDataParallel does."""
    import numpy as np

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with benchmark.gloo() as tasks:
        assert len(tasks) == benchmark.LAYERS
        gradients = [np.full(3, k, np.float32) for k in range(len(tasks))]
        for task, gradient in zip(tasks, gradients, strict=True):
            task.ready(gradient)
        tasks[0].wait()
        assert not tasks[-1]._flying
    assert [each.tolist() for each in gradients] == [[k] * 3 for k in range(len(gradients))]


def test_records_have_a_line_for_each_of_the_details(benchmark):
    import measure

    record = {"name": "bounded", "values": {"a": 1.5}, "details": [{"place": 1}, {"place": 2}]}
    text = measure.written(record)
    assert json.loads(text) == record
    assert len(text.splitlines()) == 6
