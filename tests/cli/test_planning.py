"""foretrain plan, foretrain what-if, and plan files on the command line."""

import json
from pathlib import Path

import pytest

from foretrain.cli import main
from foretrain.planner import load, save
from foretrain.workload import save as save_workload
from foretrain.workload import zoo
from tests.planner.plans import plan_of

HERE = ("--cluster", "4x1xV100@7Gbps")


def test_tune_prints_every_candidate_and_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.toml"
    main(["plan", "resnet50", *HERE, "--engines", "all_reduce", "--out", str(out)])
    shown = capsys.readouterr().out
    for word in ("chosen", "baseline", "cannot win", "auto: because", f"wrote {out}"):
        assert word in shown
    assert sum(line.startswith("auto: ") for line in shown.splitlines()) == 2
    plan = load(out)
    assert plan.schedule.name in shown
    assert plan.gain > plan.uncertainty > 0
    main(["compare", "resnet50", *HERE, "--schedules", str(out), "ddp"])
    assert "1.2" in capsys.readouterr().out
    main(["schedule", "resnet50", *HERE, "-s", "auto"])
    assert capsys.readouterr().out.startswith(f"# {plan.schedule.name}")


def test_tune_of_a_recorded_step_that_may_be_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine, out = tmp_path / "mine.toml", tmp_path / "plan.toml"
    save_workload(zoo("alexnet"), mine)
    main(["plan", str(mine), *HERE, "--allow", "fp16", "bf16", "--out", str(out)])
    assert load(out).compression == "fp16"
    assert "sent as" in capsys.readouterr().out


def test_plan_compares_what_ifs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    numbers, page = tmp_path / "plan.json", tmp_path / "plan.html"
    changes = ["rate=40Gbps", "batch=64", "hosts=8"]
    main(["what-if", "vgg16", *HERE, "--changes", *changes, "--json", str(numbers), "--html", str(page)])
    shown = capsys.readouterr().out
    for word in ("as it is", "rate=40Gbps helps most", f"wrote {page}"):
        assert word in shown
    told = json.loads(numbers.read_text())
    assert [case["case"] for case in told["cases"]] == ["as it is", *changes]
    assert told["helps_most"] == "rate=40Gbps"
    text = page.read_text()
    assert "rate=40Gbps helps most" in text
    assert "{{" not in text.partition("<script>")[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "vgg16", *HERE, "--engines", "ps"), ("engines", "ps=K")),
        (("plan", "vgg16", *HERE, "--out", "/nowhere/plan.toml"), ("out", "make the folder first")),
        (("plan", "vgg16", *HERE, "--out", "plan"), ("out", "'plan'", "name end in .toml")),
        (("plan", "mine.toml", *HERE, "--out", "mine.toml"), ("out", "is the input file")),
        (("sweep", "s.toml", "--out", "./s.toml"), ("out", "is the input file")),
        (("what-if", "vgg16", *HERE, "--changes", "rte=1Gbps"), ("did you mean 'rate'",)),
        (("compare", "vgg16", *HERE, "--schedules", "none.toml"), ("none.toml", "give the path of a plan file")),
        (("compare", "vgg16", *HERE, "--schedules", "auto(partition=1MB)"), ("write auto alone",)),
        (("run", "--plan", "none.toml", "--", __file__), ("none.toml", "give the path of a plan file")),
        (("run", "--plan", "plan.toml", "--schedule", "auto", "--", __file__), ("plan", "give one of them")),
        (("run", "--plan", "plan.txt", "--", __file__), ("plan", "foretrain plan")),
        (("simulate", "--plan", "plan.toml", "--schedule", "auto", "--", __file__), ("plan", "give one of them")),
    ],
)
def test_wrong_input_is_named_with_its_remedy(arguments, words, refused):
    error = refused(arguments)
    assert all(word in error for word in words)


def test_a_plan_file_that_does_not_read_is_refused_before_anything_starts(tmp_path: Path, refused):
    path = tmp_path / "plan.toml"
    save(plan_of(), path)
    path.write_text(path.read_text().replace('policy = "prophet"', 'policy = "profet"'))
    assert "did you mean 'prophet'" in refused(("run", "--plan", str(path), "--", __file__))
