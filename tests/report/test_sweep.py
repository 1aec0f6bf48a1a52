"""What a sweep shows: a summary, numbers, a page; and a Parquet file that DuckDB reads."""

import json
import re
import shutil
from pathlib import Path

import pytest

from foretrain.cli import main
from foretrain.experiments import ResultStore, ScenarioResult, expand, parse, run
from foretrain.experiments.result_table import OUTCOMES, PARAMETERS, table
from foretrain.report.sweep import findings, lines, page, parallel, to_dict, verdict

SWEEP = """
name = "a <small> one"
baseline = "ddp(bucket=25MB)"
workloads = ["alexnet", "vgg16"]
schedules = ["ddp", "fifo", { notation = "p3", knobs = { slice = ["2MB", "8MB"] } }]
[[clusters]]
notation = "{hosts}x1xV100@{rate},{how}"
axes = { hosts = [2, 4], rate = ["1Gbps", "10Gbps"], how = ["all_reduce", "ps=colocated"] }
"""
COUNT = 2 * 4 * 8


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the results."""
    folder = tmp_path_factory.mktemp("sweep") / "journal"
    with ResultStore(folder, ScenarioResult) as journal:
        run(expand(parse(SWEEP)).scenarios.values(), journal, jobs=1)
    return folder


@pytest.fixture(scope="module")
def made(simulated: Path):
    with ResultStore(simulated, ScenarioResult) as journal:
        return table(expand(parse(SWEEP)).scenarios, journal.found)


def test_the_page_has_its_figures_and_numbers(made, tmp_path: Path):
    found = findings(made)
    page(found, tmp_path / "s.html", "a <small> one")
    text = (tmp_path / "s.html").read_text()

    assert "a &lt;small&gt; one" in text
    assert verdict(found).split(";")[0] in text
    data = {
        name: json.loads(re.search(rf'id="{name}-data">(.*?)</script>', text, re.DOTALL)[1])  # pyright: ignore
        for name in ("parallel", "front")
    }
    labels = {one["label"] for one in data["parallel"]["data"][0]["dimensions"]}
    assert labels > {"workload", "policy", "hosts", "rate", "how", "slice", "iteration time", "speedup", "gap"}
    assert {one["name"] for one in data["front"]["data"]} == {"all scenarios", "alexnet", "vgg16"}
    assert "http://" not in text.split("<script>")[0]


def test_parallel_coordinates_show_what_varies_and_what_is_missing(made):
    (trace,) = parallel(made.columns, made.rows).data
    axes = {one["label"]: one for one in trace["dimensions"]}

    assert "precision" not in axes
    assert list(axes["rate"]["ticktext"]) == ["1.00 Gbps", "10.0 Gbps"]
    assert list(axes["slice"]["ticktext"]) == ["none", "2.00 MB", "8.00 MB"]
    assert all(len(one["values"]) == COUNT for one in trace["dimensions"])


def test_numbers_and_summary(made):
    found = findings(made, ["iteration_time", "gpus"])

    assert len(lines(found)) == 2 * 8
    told = to_dict(found)
    assert len(told["rows"]) == COUNT
    assert told["objectives"] == ["iteration_time", "gpus"]
    assert {row["gpus"] for row in told["front"]["vgg16"]} <= {2, 4}
    assert {row["error"] for row in told["rows"]} == {None}
    assert set(told["rows"][0]) == set(told["columns"])


def test_the_command_goes_on_with_what_was_simulated_and_writes_what_duckdb_reads(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    duckdb = pytest.importorskip("duckdb")
    file = tmp_path / "s.toml"
    file.write_text(SWEEP)
    outputs = [f"--{kind}={tmp_path / f'x.{kind}'}" for kind in ("html", "json")]
    main(["sweep", str(file), "--dry-run"])
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
    shutil.copytree(simulated, tmp_path / "s.parquet.journal")
    main(["sweep", str(file), "--jobs=1", "--out", str(tmp_path / "s.parquet"), *outputs])
    main(["sweep", str(file), "--dry-run"])

    said = capsys.readouterr()
    assert "Pareto front of vgg16" in said.out
    assert f"{COUNT} scenarios, {COUNT} done before" in said.err
    assert (tmp_path / "x.html").stat().st_size < 800_000
    numbers = json.loads((tmp_path / "x.json").read_text())
    with duckdb.connect() as db:
        named = f"'{tmp_path / 's.parquet'}'"
        names = [row[0] for row in db.execute(f"DESCRIBE SELECT * FROM {named}").fetchall()]
        assert {column.name for column in (*PARAMETERS, *OUTCOMES)} < set(names)
        assert {"axis_hosts", "axis_rate", "axis_how", "knob_slice"} < set(names)
        rows = db.execute(f"SELECT id, iteration_time, axis_rate, knob_slice FROM {named}").fetchall()
        assert rows == [
            (row["id"], row["iteration_time"], row["axis_rate"], row["knob_slice"]) for row in numbers["rows"]
        ]
        (worst,) = db.execute(f"SELECT min(gap) FROM {named}").fetchone()
        assert worst >= 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('objectives = ["iteration_tme", "gpus"]', "did you mean 'iteration_time'"),
        ('objectives = ["gpus"]', "two columns"),
    ],
)
def test_the_command_refuses_before_it_starts(more, words, tmp_path: Path, refused):
    (tmp_path / "s.toml").write_text(more + SWEEP)
    assert words in refused(["sweep", str(tmp_path / "s.toml")])
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
