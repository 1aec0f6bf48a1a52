"""The commands for networks: grid, share, and those that take a topology as a cluster."""

import json

import pytest

from foretrain.cli import main

NETWORK = "leaf_spine:2x4@10Gbps,oversubscription=4,collective=ring"


def test_grid_prints_a_row_for_each_pair_and_writes_a_page(tmp_path, capsys):
    html, numbers = tmp_path / "a.html", tmp_path / "a.json"
    main(
        f"grid alexnet bigraph:4x2@10Gbps star:4@10Gbps --collectives ring hdrm --schedules fifo,ddp --no-tune "
        f"--html {html} --json {numbers}".split()
    )
    shown = capsys.readouterr().out
    for words in ("bigraph:4x2", "star:4", "hdrm", "fifo", "ddp", "T*", "hdrm needs a BiGraph"):
        assert words in shown
    assert html.read_text().lower().startswith("<!doctype html>")
    assert len(json.loads(numbers.read_text())["cells"]) == 4


def test_share_says_what_each_job_loses(tmp_path, capsys):
    numbers, trace = tmp_path / "a.json", tmp_path / "a.trace.json"
    main(["share", NETWORK, "alexnet@0-1+4-5", "alexnet@2-3+6-7:fifo", "--json", str(numbers), "--trace", str(trace)])
    assert "slowdown" in capsys.readouterr().out
    rows = json.loads(numbers.read_text())
    assert [row["schedule"].split("(")[0] for row in rows] == ["bytescheduler", "fifo"]
    assert all(row["slowdown"] > 1.1 for row in rows)
    assert trace.stat().st_size > 1000


def test_collective_ranks_what_suits_and_paints_the_network(tmp_path, capsys):
    html, numbers = tmp_path / "a.html", tmp_path / "a.json"
    main(["collective", "bigraph:8x4@100Gbps", "--html", str(html), "--json", str(numbers)])
    shown = capsys.readouterr().out
    assert shown.index("hdrm") < shown.index("halving_doubling")
    first = json.loads(numbers.read_text())[0]
    assert first["collective"] == "hdrm"
    assert first["time"] == pytest.approx(first["least"], rel=0.01)
    assert 0.98 < first["busiest"]["used"] <= 1
    assert html.read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_every_operation_has_something_that_suits(operation, tmp_path, capsys):
    numbers = tmp_path / "a.json"
    main(["collective", "fat_tree:4@100Gbps", "--operation", operation, "--json", str(numbers)])
    for row in json.loads(numbers.read_text()):
        assert row["time"] >= row["least"]


@pytest.mark.parametrize(
    "command",
    [
        "compare alexnet --cluster bigraph:4x2@10Gbps,collective=hdrm --schedules ddp prophet "
        "--sweep rate=5Gbps:20Gbps --points 2",
        "bound alexnet --cluster dgx-a100:2,collective=nccl",
        "schedule alexnet --cluster star:4@10Gbps,routing=shortest -s prophet",
    ],
)
def test_a_topology_stands_wherever_a_cluster_does(command, capsys):
    main(command.split())
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("share 4x1xV100@10Gbps alexnet@0-1", "option"),
        (f"share {NETWORK} alexnet", "job: 'alexnet' is not WORKLOAD@RANKS"),
        (f"share {NETWORK} alexnet@0-9", "9 is no rank of the topology"),
        (f"share {NETWORK} alexnet@0-1 alexnet@1-2", "is a rank that job 0 has"),
        ("bound alexnet --cluster bigraf:4x2@10Gbps", "did you mean 'bigraph'"),
        ("bound alexnet --cluster star:4", "say how fast a host's link is"),
    ],
)
def test_what_is_wrong_is_said(command, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
