from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")

from foretrain.cli.record import record  # noqa: E402
from foretrain.errors import ConfigError, RecordError  # noqa: E402
from foretrain.workload.file import load  # noqa: E402

SCRIPT = """
import sys
from types import SimpleNamespace
import torch
from neighbour import WIDTH

assert __name__ != "__main__"
assert sys.argv == [__file__]

model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12)))

def step():
    import lazy
    model.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()

def setup(): return model, step, 2
def without_batch(): return model, step
def as_dict(): return {"model": model, "step": step, "batch": 3}
def as_object(): return SimpleNamespace(model=model, step=step)
def nothing(): pass
def single(): return model
def swapped(): return step, model
def no_step(): return model, None, 2
def bad_batch(): return model, step, "2"
def failing(): return undefined_name
def failing_step():
    def step(): raise ArithmeticError("too bad")
    return model, step, 2
def leaving(): sys.exit("bye")
def forward_only(): return model, lambda: model(torch.ones(2, WIDTH)), 2
number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    (tmp_path / "lazy.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(dedent(SCRIPT))
    yield str(path)
    for name in ("neighbour", "lazy"):
        sys.modules.pop(name, None)


FAST = {"iterations": 1, "warmup": 0}


def test_it_writes_the_workload_and_says_what_it_is(script, capsys):
    before = sys.path[:], sys.argv[:], set(sys.modules)
    record(f"{script}:setup", **FAST)
    workload = load("workload.toml")
    assert (workload.name, workload.batch, len(workload.layers)) == ("Sequential", 2, 12)
    out, err = capsys.readouterr()
    assert "(2 smaller)" in out
    assert "total" in out
    assert "Gradients leave the backward pass in" in out
    assert "Wrote workload.toml" in out
    assert "Wrote" not in err
    assert (sys.path, sys.argv) == before[:2]
    assert not [name for name in set(sys.modules) - before[2] if name.startswith("_foretrain_script")]


@pytest.mark.parametrize(
    ("function", "batch", "expected"),
    [("without_batch", 5, 5), ("setup", 7, 7), ("as_dict", None, 3), ("as_object", 4, 4)],
)
def test_what_the_function_may_return(script, function, batch, expected):
    record(f"{script}:{function}", Path("out.toml"), batch=batch, **FAST)
    assert load("out.toml").batch == expected


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_a_plot(script, suffix):
    record(f"{script}:setup", plot=Path(f"releases.{suffix}"), **FAST)
    assert "time since backward begins (ms)" in Path(f"releases.{suffix}").read_text()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", r"'train\.py' names no function; write e\.g\. 'train\.py:setup'"),
        ("nowhere.py:setup", r"'nowhere\.py' is no file"),
        ("train.py:setpu", r"'setpu' is unknown; did you mean 'setup'"),
        ("train.py:number", r"'number' is a int; name a function"),
        ("notes.txt:setup", r"is not a Python file"),
        ("train.py:without_batch", r"batch: None is not known; give --batch"),
        ("train.py:bad_batch", r"batch: '2' is not a positive number"),
        ("train.py:nothing", r"nothing\(\) returned nothing; it must return \(model, step\)"),
        ("train.py:single", r"single\(\) returned a Sequential"),
        ("train.py:swapped", r"gave a function as its model, not a torch\.nn\.Module"),
        ("train.py:no_step", r"no_step\(\) returned a tuple of 3"),
        ("train.py:forward_only", r"no backward pass was seen"),
    ],
)
@pytest.mark.usefixtures("script")
def test_what_can_be_wrong_with_the_target_and_what_it_returns(target, message):
    Path("notes.txt").write_text("")
    with pytest.raises((ConfigError, RecordError), match=message):
        record(target, **FAST)
    assert not Path("workload.toml").exists()


@pytest.mark.parametrize(
    ("function", "line", "error"),
    [
        ("failing", "return undefined_name", "NameError: name 'undefined_name' is not defined"),
        ("failing_step", 'raise ArithmeticError("too bad")', "ArithmeticError: too bad"),
        ("leaving", 'sys.exit("bye")', "SystemExit: bye"),
    ],
)
@pytest.mark.usefixtures("script")
def test_errors_of_the_script_are_told_with_its_own_traceback(function, line, error):
    with pytest.raises(RecordError) as caught:
        record(f"train.py:{function}", **FAST)
    text = str(caught.value)
    assert text.startswith("train.py failed")
    assert line in text
    assert text.endswith(error)
    assert "recorder.py" not in text
    assert "importlib" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plot": Path("releases.png")}, r"'releases\.png' is neither \.html nor \.svg"),
        ({"plot": Path("no/releases.svg")}, r"plot: 'no/releases\.svg' is in a folder that does not exist"),
        ({"out": Path("no/w.toml")}, r"out: 'no/w\.toml' is in a folder that does not exist"),
        ({"iterations": 0}, "iterations: 0 is too few"),
    ],
)
@pytest.mark.usefixtures("script")
def test_options_that_are_wrong_are_refused_before_recording(options, message):
    with pytest.raises(ConfigError, match=message):
        record("train.py:setup", **options)


@pytest.mark.usefixtures("script")
def test_it_is_a_command_line():
    tyro.cli(record, args=["train.py:setup", "--out", "w.toml", "--iterations", "1", "--warmup", "0", "--batch", "9"])
    assert load("w.toml").batch == 9
