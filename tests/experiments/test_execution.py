"""Nothing is lost, nothing is done twice, nobody stays behind: whatever ends a sweep, and whoever simulates it."""

import os
import random
import signal
import time
from pathlib import Path

import msgspec
import pytest

from foretrain.cli import main
from foretrain.errors import ConfigError, MissingExtra
from foretrain.experiments import ResultStore, ScenarioResult, evaluation, expand, parse, run
from foretrain.experiments.result_store import StoredResults
from foretrain.experiments.result_table import check_parquet, table
from foretrain.planner import tune
from foretrain.schedule import Spec
from foretrain.simulation import simulate
from foretrain.units import to_seconds
from foretrain.workload import zoo
from foretrain.workload.step import jittered
from tests.experiments.sweeps import COUNT, SWEEP, commands_of, gone, start, stored, wait_for

pytest.importorskip("joblib")
pytest.importorskip("pyarrow")

SMALL = """
workloads = ["alexnet"]
schedules = ["fifo", "ddp"]
clusters = ["4x1xV100@10Gbps", "4x1xV100@10Gbps,ps=2", "star:4@10Gbps"]
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The Parquet file of a sweep that nothing interrupted."""
    file = tmp_path_factory.mktemp("whole") / "s.toml"
    file.write_text(SWEEP)
    main(["sweep", str(file), "--jobs", "1"])
    out = file.with_suffix(".parquet")
    assert len(stored(out)) == COUNT
    return out.read_bytes()


def test_after_kills_at_any_moment_a_sweep_ends_as_one_that_was_left_alone(whole: bytes, tmp_path: Path):
    chance = random.Random(0)
    file, out = tmp_path / "s.toml", tmp_path / "s.parquet"
    file.write_text(SWEEP)
    before: set[str] = set()
    for _ in range(3):
        with start(file, "--jobs", "2") as process:
            wait_for(process, out, chance.randrange(COUNT // 3))
            process.kill()
        assert gone(process.pid)
        assert process.returncode == -signal.SIGKILL, process.stdout
        after = stored(out)
        assert len(after) == len(set(after))
        assert before <= set(after)
        before = set(after)

    main(["sweep", str(file), "--jobs", "1"])

    assert out.read_bytes() == whole
    assert len(stored(out)) == COUNT


@pytest.mark.parametrize(
    ("backend", "number", "status"),
    [("processes", signal.SIGINT, 130), ("processes", signal.SIGTERM, 143), ("dask", signal.SIGINT, 130)],
)
def test_ctrl_c_leaves_no_process_and_loses_nothing(backend: str, number: int, status: int, tmp_path: Path):
    if backend == "dask":
        pytest.importorskip("distributed")
    file, out = tmp_path / "s.toml", tmp_path / "s.parquet"
    file.write_text(SWEEP)
    with start(file, "--jobs", "2", "--backend", backend) as process:
        wait_for(process, out, 20)
        # As a terminal does: to all of them.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        said, _ = process.communicate(timeout=300)

    assert process.returncode == status, said
    assert gone(process.pid)
    assert backend == "dask" or "Traceback" not in said  # Dask's processes may lament that they lost each other
    assert "Warning" not in said
    done = stored(out)
    assert f"{len(done):,} scenarios are done and kept" in said
    assert COUNT > len(done) == len(set(done)) >= 20
    assert not out.exists()


def test_ctrl_c_while_processes_start_ends_without_a_traceback(tmp_path: Path):
    file, out = tmp_path / "s.toml", tmp_path / "s.parquet"
    file.write_text(SWEEP)
    with start(file, "--jobs", "2") as process:
        while not any(b"loky" in each for each in commands_of(process.pid)):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "Warning" not in said
    assert not out.exists()


def test_a_changed_file_goes_on_with_what_still_applies(tmp_path: Path):
    def simulated(text: str) -> int:
        with ResultStore(tmp_path / "journal", ScenarioResult) as journal:
            return run(expand(parse(text)).scenarios.values(), journal, jobs=1)

    assert simulated(SMALL) == 6
    assert simulated(SMALL) == 0
    assert simulated(SMALL.replace('"ddp"', '"ddp", "mgwfbp"')) == 3
    assert simulated(SMALL.replace("10Gbps,ps", "20Gbps,ps")) == 2
    assert simulated(SMALL) == 0


def test_a_result_is_what_simulating_gives():
    text = SMALL + 'jitter = 0.1\nseeds = [7]\ntuned = true\nbaseline = "ddp(bucket=25MB)"\n'
    for one in expand(parse(text)).scenarios.values():
        work = jittered(zoo("alexnet"), 0.1, 7)
        result = evaluation.result_of(one)
        alone = simulate(work, one.where.notation, tune(work, one.where.notation, one.schedule), trace=False)
        assert result.iteration_time == to_seconds(alone.iteration_time)
        assert (result.schedule, result.gap) == (str(alone.schedule), alone.gap)
        assert isinstance(alone.schedule, Spec)
        numbers = {name: value for name, value in alone.schedule.settings.items() if not isinstance(value, tuple)}
        assert result.knobs == numbers
        base = simulate(work, one.where.notation, tune(work, one.where.notation, "ddp(bucket=25MB)"), trace=False)
        assert result.speedup == base.iteration_time / alone.iteration_time


def test_what_cannot_be_simulated_says_why_and_stops_nothing(tmp_path: Path):
    file = tmp_path / "four.toml"
    file.write_text('workers = 4\nrate = "10Gbps"\n')
    made = expand(parse(SMALL.replace("4x1xV100@10Gbps,ps=2", "four.toml")), tmp_path)
    file.write_text('workers = 4\nrate = "20Gbps"\n')
    with ResultStore(tmp_path / "journal", ScenarioResult) as journal:
        run(made.scenarios.values(), journal, jobs=1)
        found = table(made.scenarios, journal.found)

    assert len(found.failed) == 2
    assert len(found.made) == 4
    assert "is not the file that the sweep began with" in found.failed[0]["error"]
    assert found.failed[0]["iteration_time"] is None


@pytest.mark.process
@pytest.mark.parametrize("backend", ["processes", "dask", "ray"])
@pytest.mark.smoke_case("processes")
def test_every_backend_gives_the_same(backend, tmp_path: Path):
    if backend != "processes":
        pytest.importorskip({"dask": "distributed"}.get(backend, backend), reason=f"{backend} is not installed")
    made = expand(parse(SMALL))
    with ResultStore(tmp_path / "journal", ScenarioResult) as journal:
        told = []
        run(made.scenarios.values(), journal, jobs=2, backend=backend, progress=lambda *now: told.append(now))
        found = journal.found
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)
    assert [found[known] for known in made.scenarios] == [evaluation.result_of(one) for one in made.scenarios.values()]


@pytest.mark.process
def test_a_dask_cluster_that_runs_is_used_by_its_address(tmp_path: Path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        ResultStore(tmp_path / "journal", ScenarioResult) as journal,
    ):
        made = expand(parse(SMALL))
        assert run(made.scenarios.values(), journal, backend="dask", address=cluster.scheduler_address) == 6
        assert len(cluster.workers) == 1


def test_a_command_that_cannot_begin_does_not_say_that_it_goes_on(tmp_path: Path, refused):
    file = tmp_path / "s.toml"
    file.write_text(SMALL)
    said = refused(["sweep", str(file), "--jobs", "0"])
    assert "jobs: 0 is no number of workers; write 1 or more" in said
    assert "goes on" not in said
    assert "add --backend dask" in refused(["sweep", str(file), "--address", "tcp://1.2.3.4:5"])


@pytest.mark.parametrize(
    ("missing", "backend", "words"),
    [
        ("joblib", "processes", r"'joblib'; install it with: pip install 'foretrain\[sweep\]'"),
        ("distributed", "dask", r"pip install 'foretrain\[dask\]'"),
        ("ray", "ray", r"pip install 'foretrain\[ray\]'"),
        ("pyarrow", "", r"'pyarrow'; install it with: pip install 'foretrain\[sweep\]'"),
    ],
)
def test_what_is_not_installed_is_named(missing, backend, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    scenarios = expand(parse(SMALL)).scenarios
    with ResultStore(tmp_path / "journal", ScenarioResult) as journal, pytest.raises(MissingExtra, match=words):
        run(scenarios.values(), journal, jobs=2, backend=backend) if backend else check_parquet()


def test_two_sweeps_do_not_share_a_folder_and_shards_are_checked(tmp_path: Path):
    folder = tmp_path / "journal"
    with (
        ResultStore(folder, ScenarioResult),
        pytest.raises(ConfigError, match="in use by another command"),
        ResultStore(folder, ScenarioResult),
    ):
        pass
    (folder / ".half.tmp").write_text("{")
    (folder / "old.json").write_bytes(msgspec.json.encode(StoredResults("0.0.0", [msgspec.Raw(b"{}")])))
    with ResultStore(folder, ScenarioResult) as journal:
        assert (journal.found, journal.stale) == ({}, 1)
    assert not (folder / ".half.tmp").exists()
    (folder / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match=r"torn\.json.*delete that file"), ResultStore(folder, ScenarioResult):
        pass
