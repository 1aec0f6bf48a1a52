"""``foretrain search`` from end to end, on a tiny script; and its page."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from foretrain.cli.search import SearchOptions, _failures, _seconds, run_command
from foretrain.errors import ConfigError
from foretrain.experiments import result_store
from foretrain.experiments.result_store import ResultStore
from foretrain.files import write_atomically
from foretrain.live.imbalance import COUNT
from foretrain.live.rank_processes import WarmForkServers
from foretrain.live.simulate import simulate
from foretrain.network.deployment_notation import deployment, equipped
from foretrain.network.fidelity import Fidelity
from foretrain.recipe_search import SearchResult, search
from foretrain.recipe_search.api import _objective
from foretrain.recipe_search.bill import Failures, bill_of
from foretrain.recipe_search.evaluation import RecipeRun, RunResult, RunSetting, run
from foretrain.recipe_search.expert_curve import expert_curves
from foretrain.recipe_search.space import declared, expand
from foretrain.report import recipes
from foretrain.report.recipes import (
    cells,
    indistinguishable,
    listed,
    numbers,
    page,
    pareto_fronts,
    search_lines,
    show,
    summary_lines,
    warnings,
)
from tests import warm
from tests.examples.torchrun import ROOT
from tests.live import forked
from tests.live.command import _require_device
from tests.processes import foretrain, module_at
from tests.recipe_search.test_strategy import SCRIPT as SCRIPT_OF_PIPELINES
from tests.recipe_search.test_strategy import SPACE as SPACE_OF_PIPELINES
from tests.recipe_search.test_strategy import Workers, searched, simulated
from tests.waiting import until

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--batch", type=int)
args = parser.parse_args()
if args.width == 96:
    raise ValueError("96 is no width")
model = nn.Sequential(nn.Linear(1024, args.width), nn.Linear(args.width, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.randn(args.batch << 10, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""
SPACE = """
tokens = "batch"
[values]
width = [96, 4096, 16384]
batch = [1, 2]
[memory]
grows = ["batch"]
"""


SEARCH = ("search", "--cluster", "H100", "--space", "space.toml")
HERE = ("--jobs", "1")
"""One worker, which is the command's own process."""


def _written(folder: Path) -> tuple[str, ...]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "space.toml").write_text(SPACE)
    return ("--", "train.py", "--width", "{width}", "--batch={batch}")


def _search(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = _written(folder)
    return warm.run(forked.foretrain, [*SEARCH, *HERE, *options, *script], folder)


@pytest.mark.smoke
def test_a_search_ranks_recipes_of_a_script(tmp_path: Path) -> None:
    _require_device()
    ended = _search(tmp_path, "--json", "found.json", "--html", "found.html", "--compare-with", "width=16384,batch=2")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    statuses = {tuple(one["values"].values()): one["status"] for one in found["recipes"]}
    assert found["winner"]["width"] == 4096
    assert statuses[16384, 2] == "whole"
    assert statuses[96, 1] == statuses[96, 2] == "invalid"
    assert "refused by the script, 2 recipes: ValueError: 96 is no width" in ended.stdout
    assert "yours, width=16384, batch=2: " in ended.stdout
    assert "train.py --width 4096" in ended.stdout
    assert "4096" in (tmp_path / "found.html").read_text()

    again = _search(tmp_path, "--json", "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["winner"] == found["winner"]
    assert again.returncode == 0, again.stderr


def test_a_search_over_dask_finds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    _require_device()
    here = _search(tmp_path, "--store", "here", "--json", "here.json")
    assert here.returncode == 0, here.stderr
    words = [*SEARCH, *HERE, "--backend", "dask", "--store", "dask", "--json", "dask.json", *_written(tmp_path)]
    there = foretrain(*words, cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    found = [json.loads((tmp_path / name).read_text()) | {"cpu_seconds": 0.0} for name in ("here.json", "dask.json")]
    assert found[0] == found[1]


def test_a_search_whose_numbers_find_a_full_disk_says_so_and_keeps_what_it_simulated(tmp_path: Path) -> None:
    _require_device()
    for _ in range(2):
        ended = _search(tmp_path, "--json", "/dev/full")
        assert ended.returncode == 1
        assert "nothing more can be written to /dev/full: No space left on device" in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr
        assert "winner width=4096" in ended.stdout
    assert any((tmp_path / "train.py.search").glob("*.json"))


def test_a_search_whose_store_finds_a_full_disk_says_that_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk of the test's own would need root: a store that is full stands for it."""
    _require_device()
    monkeypatch.chdir(tmp_path)

    def full(path: Path, data: bytes) -> None:
        write_atomically("/dev/full", data)

    monkeypatch.setattr(result_store, "write_atomically", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        run_command([*SEARCH[1:], *HERE, *_written(tmp_path)])
    assert "what was simulated is kept in train.py.search; the same command goes on" in capsys.readouterr().err


def test_the_example_compares_three_clusters() -> None:
    _require_device()

    def told() -> str:
        example = module_at(ROOT / "examples/search/three_clusters.py")
        example.LAYERS = 1
        example.SPACE["values"] |= {"tp": 8, "batch": 1}
        example.ft = SimpleNamespace(search=partial(search, jobs=1))
        with redirect_stdout(io.StringIO()) as printed:
            example.main()
        return printed.getvalue()

    lines = [line for line in forked.call(told).splitlines() if line and not line.startswith(" ")]
    assert [line.partition(":2: tp=8")[0] for line in lines] == ["dgx-a100", "dgx-h100", "dgx-h200"]
    assert all(line.endswith("tokens/s/GPU") for line in lines)


SAVING = """
import os
import sys
import torch

model = torch.nn.Linear(1024, int(sys.argv[1]), device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for step in range(9):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    if step == 0:
        torch.save(model.state_dict(), os.devnull)
"""


def test_the_bytes_of_a_recipes_checkpoint_are_those_that_the_script_saves(tmp_path: Path) -> None:
    _require_device()
    script = tmp_path / "train.py"
    script.write_text(SAVING)
    found = forked.call(run, RecipeRun(RunSetting("H100"), (str(script), "4096"), 3))
    assert found.account is not None
    parameters = 4 * (1024 * 4096 + 4096)
    assert found.account.checkpoint == found.account.saved == parameters
    assert found.account.copies == 0
    assert found.account.state == pytest.approx(3 * parameters, rel=0.01)
    assert not any("contains a checkpoint" in warning for warning in found.warnings)


SAVING_BEHIND = """
import os
import tempfile
import torch
import torch.distributed.checkpoint as dcp

torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(1024, 4096, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for step in range(9):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    if step == 0:
        dcp.async_save(model.state_dict(), checkpoint_id=tempfile.mkdtemp())
"""


def test_a_checkpoint_that_is_written_in_the_background_stops_the_job_for_its_copies_alone(tmp_path: Path) -> None:
    _require_device()
    script = tmp_path / "train.py"
    script.write_text(SAVING_BEHIND)
    found = forked.call(run, RecipeRun(RunSetting("dgx-h100:1,ranks=0-1"), (str(script),), 3, str(tmp_path)))
    assert found.account is not None, found.reason
    during = Failures(3600.0, 0.0, 300.0, rate=1e6).during(found.account)
    assert during.checkpoint == found.account.copies > 0
    assert during.written == found.account.saved / 1e6 > during.checkpoint


COMPILED = """
import sys
import torch

double = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2)
width = int(sys.argv[1])
model = torch.nn.Linear(width, width, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    double(model(torch.randn(width, width, device="cuda"))).sum().backward()
    optimizer.step()
"""


def test_simulations_that_share_an_activated_device_forecast_what_one_alone_does(tmp_path: Path) -> None:
    _require_device()
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    where = equipped("H100", None)[0].simulated(Fidelity("fluid"))

    def step(width: int, servers: WarmForkServers | None) -> int:
        return simulate([str(script), str(width)], where, steps=3, warm=servers).forecast.iteration_time

    def steps() -> tuple[list[int], int]:
        with Path(os.devnull).open("w") as output, WarmForkServers(output.fileno()) as servers:
            return [step(width, servers) for width in (4096, 8192, 4096)], step(4096, None)

    shared, alone = forked.call(steps)
    assert shared[0] == shared[2] == alone < shared[1]


def test_an_interrupted_search_leaves_no_temporary_files(tmp_path: Path) -> None:
    _require_device()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "foretrain", *SEARCH, *_written(tmp_path)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as search:
        until(lambda: any(scratch.glob("foretrain-*/foretrain-*")) or search.poll() is not None)
        search.send_signal(signal.SIGINT)
        assert search.wait(600) == 130
    assert not list(scratch.glob("foretrain-*"))


MUON = """
import sys
import torch
from torch import nn

model = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.register_step_pre_hook(lambda *_: [model.weight.grad @ model.weight.grad.T for _ in range(5)] and None)
for _ in range(3):
    for _ in range(int(sys.argv[1])):
        model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_products_of_an_optimizer_are_not_taken_for_a_micro_batchs(tmp_path: Path) -> None:
    _require_device()
    (tmp_path / "muon.py").write_text(MUON)
    runs = [RecipeRun(RunSetting("dgx-h100:1,ranks=0"), (str(tmp_path / "muon.py"), batches), 3) for batches in "14"]
    one, four = (each.account for each in forked.call(lambda: [run(each) for each in runs]))
    assert one is not None
    assert four is not None
    assert four.repeated == pytest.approx(4 * one.repeated)
    assert one.kernels["aten::mm"] > one.repeated > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--space", "none.toml"], "cannot be read"),
        (["--space", "space.toml", "--budget", "0s"], "is no time"),
        (["--space", "space.toml", "--jobs", "0"], "is no number of workers"),
        (["--space", "space.toml", "--price", "nan", "--goal", "cost"], "is no price"),
        (["--space", "space.toml", "--mtbf", "50000"], "has no unit"),
        (["--space", "space.toml", "--mtbf", "50000h", "--checkpoint", "0s"], "is not above 0"),
        (["--space", "space.toml", "--stragglers", "every=1h,lasts=1h,speed=70%"], "how often the job fails"),
        (["--space", "space.toml", "--mtbf", "1h", "--stragglers", "every=1h,lasts=1h"], "not all of every"),
        (["--space", "space.toml", "--mtbf", "1h", "--stragglers", "often=1h"], "'often' is unknown"),
        (["--space", "space.toml", "--mtbf", "1h", "--stragglers", "every=1h,lasts=1h,speed=120%"], "is no speed"),
        (["--space", "space.toml", "--mtbf", "1h", "--stragglers", "every=1h,lasts=0s,speed=70%"], "a time of 0"),
        (["--space", "space.toml", "--checkpoint", "10s"], "checkpoint: .* how often the job fails"),
        (["--space", "space.toml", "--checkpoint-every", "1h"], "checkpoint_every: .* how often the job fails"),
        (["--space", "space.toml", "--restart", "1min"], "restart: .* how often the job fails"),
        (["--space", "space.toml", "--repair", "1d"], "repair: .* how often the job fails"),
        (["--space", "space.toml", "--spares", "1"], "spares: .* how often the job fails"),
        (["--space", "space.toml", "--mtbf", "2000d", "--spares", "1"], "say how long a repair takes"),
        (["--space", "space.toml", "--mtbf", "2000 weeks"], "is no time; write e.g. 30min or 24h"),
        (["--space", "space.toml", "--mtbf", "3min"], "mtbf: '3min' is too short: .* then fails every"),
        (
            ["--space", "space.toml", "--mtbf", "99h", "--checkpoint-every", "9000d"],
            "checkpoint_every: '9000d' is too long",
        ),
        (["--space", "space.toml", "--mtbf", "99h", "--repair", "90000h"], "repair: '90000h' is too long"),
        (["--space", "nothing.toml", "--run-tokens", "1e12"], "run_tokens: .* needs the tokens of a step"),
        (["--space", "space.toml", "--cluster", "dgx-x"], "cluster"),
        (["--space", "space.toml", "--compare-with", "tp=1"], "'tp' is unknown"),
        (["--space", "space.toml", "--mtbf", "0h"], "mtbf: '0h' is not above 0"),
        (["--space", "space.toml", "--html", "none/found.html"], "does not exist"),
        (["--space", "space.toml", "--factor", "nope"], "factor: 'nope' is unknown"),
        (["--space", "space.toml", "--mtbf", "50000h", "--checkpoint", "2GB"], "checkpoint: '2GB' .* e.g. 2GB/s"),
        (["--space", "space.toml", "--mtbf", "50000h,gpu=5h"], "mtbf: '50000h,gpu=5h' says gpu twice"),
        (
            ["--space", "space.toml", "--mtbf", "9h", "--stragglers", "every=1h,lasts=1h,speed=70%,every=2h"],
            "says every twice",
        ),
        (
            ["--space", "space.toml", "--fault", "gpu:s0.gpu0=50%", "--fault=gpu:s0.gpu1=80%"],
            "option: '--fault' is given twice; write all its values behind one",
        ),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.toml").write_text(SPACE)
    (tmp_path / "nothing.toml").write_text(SPACE.replace('tokens = "batch"', ""))
    with pytest.raises(ConfigError, match=words):
        run_command([*options, "--", "train.py", "--width={width}", "--batch={batch}"])
    assert not (tmp_path / "train.py.search").exists()


@pytest.mark.parametrize(("cluster", "warned"), [("dgx-h100:1", True), ("dgx-h100:2", False)])
def test_failures_of_links_are_warned_of_where_the_job_uses_none(cluster: str, warned: bool, capsys) -> None:
    options = SearchOptions("space.toml", cluster, mtbf="server=50000h,link=5000h")
    failures = _failures(options, deployment(cluster))
    assert failures is not None
    assert (failures.mtbf == 50_000 * 3600) is warned
    assert ("link=… does nothing: the job is in one server" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("text", "seconds"), [("2d", 172800.0), ("1.5 h", 5400.0), ("30min", 1800.0), ("90s", 90.0), (".5h", 1800.0)]
)
def test_times_may_be_hours_and_days(text: str, seconds: float) -> None:
    assert _seconds(text, "mtbf") == seconds


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_narrow_terminal_loses_columns_and_no_letters(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "recipe": "tp=2, pp=4, micro_batch=1", "step": "12.34 ms", "time/goodput × winner": "1.234 ± 0.123",
        "GiB": "34.5", "goodput": "99.1%", "USD/Mtoken": "0.0123",
        "loses by": "+24% computation, most in aten::split_with_sizes", "": "yours",
    }  # fmt: skip
    monkeypatch.setattr(recipes, "_first", lambda result, most: [row])
    monkeypatch.setattr(recipes, "cells", lambda result, candidate: candidate)
    console = Console(width=width, file=io.StringIO())
    console.print(recipes._ranking(SimpleNamespace(goal="energy"), console))  # pyright: ignore[reportArgumentType]
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "yours" in shown
    assert ("loses by" in shown) == (width >= 100)


def test_a_script_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text(SPACE)
    with pytest.raises(ConfigError, match="is no file"):
        run_command(["--space", "space.toml", "--", "train.py", "--width={width}", "--batch={batch}"])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("torchrun --nproc-per-node 8 train.py --tp 1", "foretrain search -- train.py --tp 1"),
        ("python train.py --tp 1", "is the interpreter, not the script; leave it out"),
    ],
)
def test_what_starts_a_script_is_to_be_left_out(script: str, words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text(SPACE)
    with pytest.raises(ConfigError, match=words):
        run_command(["--space", "space.toml", "--", *script.split()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint_every": 60.0}, "checkpoint_every: .* say what fails"),
        ({"checkpoint_every": "auto"}, "checkpoint_every: .* say what fails"),
        ({"checkpoint_every": "often", "failures": Failures(9e3, 30, 300)}, "is no time; .* in Python, seconds"),
        ({"jobs": "a"}, "jobs: 'a' is no number of workers"),
        ({"backend": "spark"}, "backend: 'spark' is unknown; known: dask, processes, ray"),
        ({"faults": "gpu:s0.gpu9=80%"}, "s0.gpu9' is unknown"),
        ({"failures": 5}, "failures: 5 is no Failures; say what fails"),
        ({"compare_with": 5}, "compare_with: 5 is no recipe"),
        ({"price": 0, "goal": "cost"}, "price: 0 is no price"),
        (
            {"checkpoint_every": 1e-3, "failures": Failures(9e3, 30, 300)},
            "checkpoint_every: 0.001 is too short: .* write",
        ),
        ({"compare_with": {"tp": 5}}, "'tp' is unknown"),
        ({"factor": "nope"}, "factor: 'nope' is unknown"),
        ({"script": 5}, "script: 5 is neither a text nor several"),
        ({"script": ["train.py", None]}, "script: .*None.* is neither a text nor several"),
        ({"space": 5}, "space: 5 is no space; give a dictionary"),
        ({"space": {"values": {"width": [[1]]}}}, "values.width: .* is no list of values"),
        ({"cluster": 5}, "cluster: 5 is no text"),
        ({"faults": 5}, "faults: 5 is neither a text nor several"),
        ({"experts": 5}, "experts: 5 is no text; "),
        ({"store": 5}, "store: 5 is no folder"),
    ],
)
def test_wrong_input_from_python_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    space = {"values": {"width": [4096, 8192], "batch": 1}}
    script = [str(tmp_path / "train.py"), "--width={width}", "--batch={batch}"]
    with pytest.raises(ConfigError, match=words):
        search(**{"script": script, "space": space, "cluster": "H100"} | options)


def test_from_python_ones_own_recipe_may_be_a_dictionary(tmp_path: Path) -> None:
    _require_device()
    (tmp_path / "train.py").write_text(SCRIPT)
    space = {"values": {"width": [4096, 8192], "batch": 1}}
    script = [str(tmp_path / "train.py"), "--width={width}", "--batch={batch}"]
    mine = {"width": 8192, "batch": 1}
    failing: dict[str, Any] = {"failures": Failures(9e3, 30, 300), "checkpoint_every": "auto"}
    found = forked.call(search, script, space, "H100", compare_with=mine, jobs=1, **failing)
    assert found.compared is not None
    assert found.compared.recipe.values == {"width": 8192}


def test_the_page_and_the_numbers_hold_every_recipe(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, also="tp=8,pp=1,mbs=4")
    own = next(one for one in found.candidates if one.recipe.values == {"tp": 8, "pp": 1, "mbs": 4})
    result = SearchResult(found, "dgx-h100:2", 16, own)
    document = numbers(result)
    assert len(document["recipes"]) == len(found.candidates)
    assert {one["status"] for one in document["recipes"]} == {"whole", "estimated", "beaten"}
    tied = [one["values"] for one in document["recipes"] if one.get("indistinguishable")]
    in_order = sorted(indistinguishable(result), key=lambda one: one.recipe.number)
    assert tied == [dict(one.recipe.values) for one in in_order]
    lines = list(summary_lines(result))
    assert lines[0].startswith("33 recipes of 36 points on dgx-h100:2, for the least time: ")
    assert lines[-1].startswith("yours, tp=8, pp=1, mbs=4: ")
    assert "times the winner's time" in lines[-1]
    page(result, tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert all(str(one.recipe) in text for one in found.candidates)


def test_ones_own_recipe_that_has_too_little_memory_is_told_to(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    own = replace(found.ranked[-1], status="memory", reason="needs 99.0 of 80.0 GiB, extended from smaller runs")
    lines = [*summary_lines(SearchResult(found, "dgx-h100:2", 16, own))]
    assert lines[-1] == f"yours, {own.recipe}: out of memory: {own.reason}"


def test_ones_own_recipe_is_shown_where_the_space_does_not_list_it_or_the_budget_left_it_out(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, also="tp=8,pp=1,mbs=8", deadline=0.0)
    *others, own = found.candidates
    lines = [*summary_lines(SearchResult(found, "dgx-h100:2", 16, own))]
    assert lines[0].startswith(f"{len(others)} recipes of 36 points and yours on dgx-h100:2, ")
    assert "yours, tp=8, pp=1, mbs=8: is the winner" in lines
    lines = [*summary_lines(SearchResult(found, "dgx-h100:2", 16, others[0]))]
    assert f"yours, {others[0].recipe}: not tried" in lines


def test_ones_own_recipe_is_as_good_only_if_it_cannot_be_told_from_the_winner(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    for one in found.ranked:
        result = SearchResult(found, "dgx-h100:2", 16, one)
        (line,) = [line for line in summary_lines(result) if line.startswith("yours, ")]
        tied = any(one is other for other in indistinguishable(result))
        assert tied or "(as good)" not in line
        assert line.endswith(": is the winner") == (one is found.winner)


def test_recipes_that_cannot_be_told_from_the_winner_are_named_the_best_first(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    result = SearchResult(found, "dgx-h100:2", 16)
    tied = indistinguishable(result)
    assert len(tied) > 1
    assert tied == [one for one in found.ranked if one in tied]
    (line,) = [line for line in summary_lines(result) if line.startswith("cannot be told from the winner: ")]
    assert line.index(str(tied[0].recipe)) < line.index(str(tied[1].recipe))


def test_the_command_of_a_module_names_it_as_one(tmp_path: Path) -> None:
    found, _ = searched(tmp_path)
    script = SearchResult(found, "dgx-h100:2", 16)
    module = replace(script, module=True)
    assert module.command == ("-m", *script.command)
    page(module, tmp_path / "found.html")
    assert "<title>train.py on dgx-h100:2" in (tmp_path / "found.html").read_text()


def test_the_page_names_the_winner_with_its_own_time_where_an_extended_recipe_may_be_better(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    best, second = found.ranked[:2]
    extended = replace(best, status="estimated")
    candidates = tuple(extended if one is best else one for one in found.candidates)
    late = replace(found, candidates=candidates, ranked=found.ranked[1:], finished=False)
    result = SearchResult(late, "dgx-h100:2", 16)
    assert listed(result)[0] is extended
    row = cells(result, second)
    page(result, tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert f"{row['step']} a step" in text
    assert f"{cells(result, extended)['step']} a step" not in text
    assert any(line.endswith("may be among those not simulated whole") for line in summary_lines(result))


def test_the_terminals_table_is_readable_in_80_columns(tmp_path: Path, monkeypatch, capsys) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    bill = bill_of("H100", 16, 2.5, Failures(3600.0, 0.0, 300.0, rate=1e9))
    result = SearchResult(found, "dgx-h100:2", 16, bill=bill)
    for width, names in ((80, ("× winner", "goodput", "price/Mtoken")), (200, ("95 %", "MFU", "bound by", "goodput"))):
        monkeypatch.setenv("COLUMNS", str(width))
        show(result)
        table = capsys.readouterr().out.partition("33 recipes of")[0]
        assert all(len(line) <= width for line in table.splitlines())
        assert all(name in "".join(table.splitlines()[:2]) for name in names)
        assert "kWh" not in table
        assert "on fronts" not in table
        for name, value in result.best.values.items():
            assert f"{name}={value}" in table


def test_ones_own_recipe_is_in_the_table_and_the_page_wherever_it_ranks(tmp_path: Path, monkeypatch, capsys) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        for place, shown in ((0, 12), (11, 12), (12, 13), (len(found.ranked) - 1, 13)):
            result = SearchResult(found, "dgx-h100:2", 16, found.ranked[place])
            show(result)
            table, _, rest = capsys.readouterr().out.partition("…")
            (row,) = [line for line in table.splitlines() if line.endswith("yours")]
            assert re.sub(r"\s", "", row).startswith(f"tp={found.ranked[place].recipe.values['tp']}")
            assert rest.startswith(f" and {len(found.ranked) - shown} recipes more (--html)")
            page(result, tmp_path / "found.html")
            (line,) = [
                each for each in (tmp_path / "found.html").read_text().splitlines() if '<tr class="best">' in each
            ]
            assert str(found.ranked[place].recipe) in line
            assert "<td>yours</td>" in line
    few = replace(found, candidates=found.candidates[:3], ranked=found.ranked[:1])
    show(SearchResult(few, "dgx-h100:2", 16))
    assert "(--html)" not in capsys.readouterr().out


def test_results_say_what_they_are_of(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    asked = {"device": "H200", "faults": ("gpu:s0.gpu3=50%",), "factor": "0.8", "experts": "lognormal(0.3)"}
    result = SearchResult(found, "dgx-h100:2", 16, **asked)
    said = "dgx-h100:2, device H200, fault gpu:s0.gpu3=50%, factor 0.8, experts lognormal(0.3)"
    assert f" on {said}, for the least time: " in next(search_lines(result))
    page(result, tmp_path / "found.html")
    assert f"<title>train.py on {said}: foretrain</title>" in (tmp_path / "found.html").read_text()
    document = numbers(result)
    assert {key: document[key] for key in ("cluster", "device", "faults", "factor", "goal", "experts")} == {
        "cluster": "dgx-h100:2",
        "device": "H200",
        "faults": ["gpu:s0.gpu3=50%"],
        "factor": "0.8",
        "goal": "step",
        "experts": "lognormal(0.3)",
    }


@pytest.mark.parametrize(
    ("goal", "ratio", "column"),
    [
        ("step", "time × winner", "step"),
        ("goodput", "time/goodput × winner", "goodput"),
        ("cost", "price × winner", "price/Mtoken"),
        ("energy", "energy × winner", "kWh/Mtoken"),
    ],
)
@pytest.mark.parametrize("tokens", [True, False])
def test_what_was_minimised_is_shown(goal, ratio, column, tokens, tmp_path: Path, monkeypatch, capsys) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    if not tokens:
        column = column.replace("Mtoken", "step")
        candidates = tuple(replace(one, recipe=replace(one.recipe, tokens=None)) for one in found.candidates)
        ranked = tuple(candidates[one.recipe.number] for one in found.ranked)
        found = replace(found, candidates=candidates, ranked=ranked)
    bill = bill_of("H100", 16, 2.5, Failures(3600.0, 0.0, 300.0, rate=1e9) if goal == "goodput" else None)
    result = SearchResult(replace(found, objective=_objective(goal, bill)), "dgx-h100:2", 16, bill=bill, goal=goal)
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        show(result)
        head = " ".join(" ".join(capsys.readouterr().out.splitlines()[:2]).split())
        assert all(word in head for word in ratio.split(" × "))
        assert column in head
        assert ("kWh" in head) == (goal == "energy")
    page(result, tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert f"<th>{ratio}</th>" in text
    assert f"<th>{column}</th>" in text
    assert f"{ratio}: with the interval" in text


def test_a_page_ends_no_sentence_twice(tmp_path: Path) -> None:
    found, _ = searched(tmp_path)
    page(SearchResult(replace(found, warnings=("is it ignored?",)), "dgx-h100:2", 16), tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert "is it ignored?</li>" in text


def test_a_space_of_one_point_has_a_recipe_with_a_name() -> None:
    recipes = expand(declared({"values": {"tp": 8, "pp": [1, 2]}, "require": ["pp == 2"]}), ["a.py", "{tp}{pp}"], 16, 8)
    assert [str(one) for one in recipes.recipes] == ["pp=2"]
    recipes = expand(declared({"values": {"tp": 8, "pp": 2}}), ["a.py", "{tp}", "{pp}"], 16, 8)
    assert [str(one) for one in recipes.recipes] == ["tp=8, pp=2"]
    recipes = expand(declared({"values": {"tp": 8}, "flags": {"tp": "--tp"}}), ["a.py", "--tp", "4"], 16, 8)
    assert [str(one) for one in recipes.recipes] == ["the only recipe"]


def test_one_of_a_kind_is_counted_as_one(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    lost = replace(found.candidates[-1], status="memory", reason="it is large")
    few = replace(found, candidates=(found.winner, lost), runs=1, space=replace(found.space, points=2))
    lines = [*summary_lines(SearchResult(few, "dgx-h100:2", 16))]
    assert lines[0].startswith("2 recipes of 2 points on ")
    assert lines[0].endswith("; 1 simulation")
    assert "out of memory, 1 recipe: it is large" in lines


def test_price_has_a_front_only_with_failures(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    result = SearchResult(found, "dgx-h100:2", 16, bill=bill_of("H100", 16, 2.5))
    assert [one.name for one in pareto_fronts(result)] == ["memory", "energy"]
    assert "goodput" not in cells(result, found.winner)


def test_a_front_holds_for_time_and_each_other_quantity_what_no_other_recipe_beats_in_both(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, exhaustive=True)
    result = SearchResult(found, "dgx-h100:2", 16)
    assert [one.name for one in pareto_fronts(result)] == ["memory"]

    failures = Failures(3600.0, 0.0, 300.0, rate=1e9)
    result = replace(result, bill=bill_of("H100", 16, 2.5, failures))
    shown = listed(result)
    times = [one.account.time / one.recipe.tokens for one in shown if one.account and one.recipe.tokens]
    fronts = {one.name: one for one in pareto_fronts(result)}
    assert [*fronts] == ["memory", "price", "energy", "goodput"]
    for name, one in fronts.items():
        sign = -1 if name == "goodput" else 1
        points = [(time, sign * value) for time, value in zip(times, one.values, strict=True)]
        for index, (time, value) in enumerate(points):
            beaten = any(a <= time and b <= value and (a, b) != (time, value) for a, b in points)
            assert (index in one.members) == (not beaten)
    assert len(fronts["memory"].members) > 1

    document = numbers(result)
    failing = document["failures"]
    assert failing["mtbf"] == 3600
    assert failing["interval"] == failing["best_interval_daly"]
    assert failing["interval"] == pytest.approx(failing["best_interval_young"], rel=0.1)
    assert failing["simulated_goodput"] == pytest.approx(failing["goodput"], rel=0.01)
    for index, one in enumerate(shown):
        names = [name for name, each in fronts.items() if index in each.members]
        assert document["recipes"][one.recipe.number]["fronts"] == names
        assert cells(result, one, names)["on fronts"] == ", ".join(names)
    page(result, tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert "<th>on fronts</th>" in text
    assert "memory, price, energy, goodput" in text  # the fastest one


ROUTED = """
import sys
from pathlib import Path

import torch
from torch import nn

width, batch = map(int, sys.argv[1:])
router, expert = nn.Linear(1024, 8).cuda(), nn.Linear(1024, width).cuda()
optimizer = torch.optim.SGD(router.parameters(), 0.1)
for step in range(4):
    x = torch.randn(batch << 10, 1024, device="cuda")
    counts = router(x).topk(2).indices.flatten().bincount(minlength=8).tolist()
    Path(f"seen-{width}-{batch}").write_text(f"{max(counts) / sum(counts):.2f}")
    (expert(x[: max(counts)]).sum() + router(x).sum()).backward()
    optimizer.step()
"""


def test_given_loads_of_experts_reach_every_recipe(tmp_path: Path) -> None:
    _require_device()

    def shares(experts: str) -> dict[str, float]:
        (tmp_path / "train.py").write_text(ROUTED)
        (tmp_path / "space.toml").write_text("[values]\nwidth = [1024, 4096]\nbatch = [2, 4, 8]\n")
        words = ["--exhaustive", "--experts", experts, "--", "train.py", "{width}", "{batch}"]
        ended = warm.run(forked.foretrain, [*SEARCH, *HERE, *words], tmp_path)
        assert ended.returncode == 0, ended.stderr
        return {path.name: float(path.read_text()) for path in tmp_path.glob("seen-*")}

    balanced, uneven = shares("balanced"), shares("lognormal(1)")
    assert len(uneven) == len(balanced) == 6
    assert set(balanced.values()) == {0.12}
    assert len(set(uneven.values())) == 1  # the same seed and step
    assert min(uneven.values()) > 0.2


def test_what_other_loads_of_experts_take_is_a_curve_of_the_two_best_recipes(tmp_path: Path) -> None:
    _require_device()
    (tmp_path / "train.py").write_text(ROUTED)
    (tmp_path / "space.toml").write_text("[values]\nwidth = [1024, 2048, 4096]\nbatch = 4\n")
    options = ["--experts", "lognormal(0.4,2)", "--experts-curve", "--json", "found.json", "--html", "found.html"]
    ended = warm.run(forked.foretrain, [*SEARCH, *HERE, *options, "--", "train.py", "{width}", "{batch}"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    seconds = {one["values"]["width"]: one["seconds"] for one in found["recipes"]}
    assert [one["values"] for one in found["experts_curves"]] == [{"width": 1024}, {"width": 2048}]
    for curve in found["experts_curves"]:
        points = {(one["sigma"], one["seed"]): one for one in curve["points"]}
        assert len(points) == 10
        assert points[0, 0]["busiest_expert"] == 1
        assert points[0.4, 2]["seconds"] == pytest.approx(seconds[curve["values"]["width"]])
        assert points[0.8, 2]["seconds"] > points[0, 0]["seconds"]
    assert "uneven loads of experts, width=1024: +" in ended.stdout
    assert 'id="imbalance"' in (tmp_path / "found.html").read_text()


def _point(run: RecipeRun) -> RunResult:
    sigma = float(run.setting.experts.removeprefix("lognormal(").partition(",")[0])
    if sigma == 0.8:
        return RunResult(run.id, "memory", reason="out of memory")
    return _uneven(simulated(run), 1 + sigma)


def _uneven(result: RunResult, factor: float) -> RunResult:
    assert result.account is not None
    longer = structs.replace(result.account, time=result.account.time * factor)
    return structs.replace(result, account=longer, busiest_expert=factor)


def _curves(folder: Path, answer: Callable[[RecipeRun], RunResult], **options: Any) -> tuple[Any, Workers]:
    recipes = expand(declared(SPACE_OF_PIPELINES), SCRIPT_OF_PIPELINES, 16, 8).recipes[:2]
    pool = Workers(answer)
    folder.mkdir(exist_ok=True)
    with ResultStore(folder, RunResult) as store:
        return expert_curves(recipes, RunSetting("dgx"), 3, store, pool, **options), pool  # pyright: ignore


def test_a_curve_of_loads_is_simulated_once_and_shown_with_what_fails(tmp_path: Path) -> None:
    curves, pool = _curves(tmp_path / "curve", _point)
    assert len(pool.asked) == 2 * COUNT
    assert {point.failure for one in curves for point in one.points if point.sigma == 0.8} == {"out of memory"}
    again, none = _curves(tmp_path / "curve", _point)
    assert again == curves
    assert not none.asked

    found, _ = searched(tmp_path)
    result = SearchResult(found, "dgx-h100:2", 16, experts="lognormal(0.3)", curves=curves)
    first = str(curves[0].recipe)
    sentence = f"uneven loads of experts, {first}: +20.0% with lognormal(0.2), +40.0% with lognormal(0.4)"
    assert any(line.startswith(sentence) for line in summary_lines(result))
    page(result, tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text()
    assert 'id="imbalance"' in text
    assert f"{first}, lognormal(0.8,1): out of memory" in text


def test_a_script_without_routers_has_no_curve_of_loads(tmp_path: Path) -> None:
    curves, pool = _curves(tmp_path / "none", simulated)
    assert curves == ()
    assert len(pool.asked) == 2


@pytest.mark.parametrize(("factor", "warned"), [(None, True), (1.5, False)])
def test_loads_of_experts_that_no_router_takes_are_warned_of(
    factor: float | None, warned: bool, tmp_path: Path
) -> None:
    found, _ = searched(tmp_path)
    for one in found.candidates:
        one.pieces = {index: structs.replace(each, busiest_expert=factor) for index, each in one.pieces.items()}
        one.outcome = one.outcome and structs.replace(one.outcome, busiest_expert=factor)
    words = "the loads of --experts changed nothing"
    assert (words in "".join(warnings(SearchResult(found, "dgx-h100:2", 16, experts="lognormal(0.3)")))) == warned
    assert words not in "".join(warnings(SearchResult(found, "dgx-h100:2", 16)))


def test_a_budget_ends_a_curve_of_loads_with_what_it_has(tmp_path: Path, capsys) -> None:
    curves, pool = _curves(tmp_path / "late", _point, deadline=0.0)
    assert not pool.asked
    assert [one.points for one in curves] == [(), ()]
    found, _ = searched(tmp_path)
    result = SearchResult(found, "dgx-h100:2", 16, curves=curves)
    page(result, tmp_path / "found.html")
    assert 'id="imbalance"' not in (tmp_path / "found.html").read_text()
    warning = "the budget left 0 of 20 simulations of the curves of experts' loads"
    assert numbers(result)["warnings"][-1] == warning
    show(result)
    assert warning in " ".join(capsys.readouterr().out.split())
