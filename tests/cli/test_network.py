"""The commands for networks: topology, grid, share, collective, and those that take a topology as a cluster."""

import json

import pytest

from foretrain.cli import main
from foretrain.network.fabrics import FABRICS
from foretrain.network.servers import SERVERS

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
    assert "<h1>Fastest: hdrm 15.5 ms, then " in html.read_text()


def test_packets_say_what_they_went_through(tmp_path, capsys):
    numbers, details = tmp_path / "a.json", tmp_path / "details"
    main(
        "collective leaf_spine:2x2@10Gbps,routing=spray --size 100kB --collectives ring --network packet "
        f"--losses 1%,leaf0:spine1=10%x4 --json {numbers} --details {details}".split()
    )
    shown = capsys.readouterr()
    assert "packet level" in shown.err
    for words in ("99 %", "again", "deepest", "queues.csv"):
        assert words in shown.out
    found = json.loads(numbers.read_text())[0]["packets"]
    assert found["losses"] > 0
    assert found["repeated"] > 0
    assert found["completion"]["median"] <= found["completion"]["largest"]
    flows, ports, queues = (
        [line.split(",") for line in (details / name).read_text().splitlines()]
        for name in ("flows.csv", "ports.csv", "queues.csv")
    )
    # The second simulation is the first.
    assert sum(int(row[-2]) for row in flows[1:]) == found["repeated"]
    assert sum(int(row[ports[0].index("losses")]) for row in ports[1:]) == found["losses"]
    assert max(int(row[ports[0].index("deepest")]) for row in ports[1:]) == found["deepest"]
    assert 1 < len(queues[0]) <= 17
    assert 100 < len(queues) < 3000
    assert 0 < max(int(cell) for row in queues[1:] for cell in row[1:]) <= 8 * found["deepest"]


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
        ("collective star:2@10Gbps --details a", "needs packets"),
        ("collective star:2@10Gbps --losses 1%", "has no effect with --network fluid"),
        ("collective star:4@10Gbps --network ideal --queues limit=1MB", "has no effect with --network ideal"),
        ("collective star:4@10Gbps --network packet --budget 1s", "has no effect without --network auto"),
        ("collective star:4@10Gbps --network packet --transport tcp", "transport"),
        ("compare alexnet --cluster 4x1xV100@10Gbps --network packet", "name a topology"),
        ("topology show fat_tre:4@1Gbps", "did you mean 'fat_tree'"),
        ("topology show star:2@1Gbps --html /nowhere/a.html", "make the folder first"),
        ("topology show star:2@1Gbps --save a.yaml", "neither .toml nor .graphml"),
        ("collective star:2@10Gbps --network packet --losses much", "does not read"),
        ("collective star:2@10Gbps --network packet --losses 200%", "is no probability"),
        ("collective star:2@10Gbps --network packet --losses host0:nowhere=1%", "'nowhere'"),
    ],
)
def test_wrong_input_is_named(command, message, refused):
    assert message in refused(command.split())


@pytest.mark.parametrize("level", ["ideal", "packet", "auto"])
def test_collective_at_every_fidelity(level, capsys):
    main(["collective", "star:4@10Gbps", "--size", "1MB", "--collectives", "ring", "--network", level])
    shown = capsys.readouterr()
    assert "ring" in shown.out
    assert ("packet hops, about" in shown.err) == (level != "ideal")
    assert ("auto takes the packet level" in shown.err) == (level == "auto")


@pytest.mark.parametrize(
    "command",
    [
        "compare alexnet --cluster star:2@10Gbps --schedules ddp --no-tune",
        "schedule alexnet --cluster star:2@10Gbps",
        "grid alexnet star:2@10Gbps --schedules fifo --no-tune",
    ],
)
def test_schedules_over_packets_take_longer(command, capsys):
    main(command.split())
    fluid = capsys.readouterr()
    main([*command.split(), "--network", "packet", "--transport", "newreno(payload=9000B)", "--queues", "limit=1MB"])
    packets = capsys.readouterr()
    assert "packet hops" not in fluid.err
    assert "packet level: " in packets.err
    assert packets.out != fluid.out


def test_jobs_share_packets(capsys):
    jobs = ["alexnet@0-1+4-5", "alexnet@2-3+6-7:fifo", "--steps", "1"]
    main(["share", "leaf_spine:2x4@10Gbps,collective=ring", *jobs, "--network", "auto", "--budget", "0s"])
    assert "auto takes the fluid level: packets would be" in capsys.readouterr().err


def test_topology_list_cuts_nothing_in_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    main(["topology", "list"])
    shown = capsys.readouterr().out.split()
    for fabric in FABRICS.values():
        assert {fabric.example, *fabric.options} <= set(shown)


def test_topology_show_prints_and_writes_what_was_asked(tmp_path, capsys):
    html, numbers, saved = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.toml"
    main(["topology", "show", "dgx-h100:4", "--html", str(html), "--json", str(numbers), "--save", str(saved)])
    shown = capsys.readouterr().out
    for words in ("32 on 4 servers", "gpu – nvswitch", "3600 Gbps", "bisection"):
        assert words in shown.replace("3.60 Tbps", "3600 Gbps")
    assert html.read_text().lower().startswith("<!doctype html>")
    assert json.loads(numbers.read_text())["counts"]["gpu"] == 32
    main(["topology", "show", str(saved)])
    again = capsys.readouterr().out
    assert shown.startswith(again.rstrip())  # What was written is named behind it.


def test_topology_list_names_every_fabric_and_server(capsys):
    main(["topology", "list"])
    shown = capsys.readouterr().out
    for name in (*FABRICS, *SERVERS[1:]):
        assert name in shown
