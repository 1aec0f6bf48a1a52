"""The commands, run as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrain import __version__
from foretrain.cli import main
from foretrain.workload import save, zoo
from tests.processes import foretrain, started

HERE = ("vgg16", "--cluster", "4 workers @ 1Gbps")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, and returns what it printed."""

    def run(*arguments: str) -> str:
        main(arguments)
        return capsys.readouterr().out

    return run


def test_version_and_help(capsys):
    assert foretrain("--version").stdout == f"foretrain {__version__}\n"
    main(["-V"])
    assert capsys.readouterr().out == f"foretrain {__version__}\n"
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        main(arguments)
        shown = capsys.readouterr().out
        assert "\nForecast\n  compare " in shown
        assert "  record " in shown
    for arguments in (["help", "bound"], ["bound", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "Print the optimum T*" in capsys.readouterr().out


def test_a_command_that_is_mistyped_is_answered_with_the_near_ones(refused):
    assert "'comparee' is unknown; did you mean 'compare'? known: " in refused(["comparee"])


def test_only_json_is_written_to_stdout(refused):
    assert "only --json takes; name a file" in refused(["compare", *HERE, "--html", "-"])


@pytest.mark.smoke
def test_a_full_disk_is_named():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "foretrain", "bound", *HERE], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "foretrain: nothing more can be written: No space left on device\n"


@pytest.mark.parametrize("closed", [True, False])
def test_a_wrong_input_ends_with_2_also_where_stderr_takes_no_message(closed: bool):
    where = "2>&-" if closed else "2>/dev/full"
    done = subprocess.run(["sh", "-c", f'"$0" -m foretrain comparee {where}', sys.executable], check=False)
    assert done.returncode == 2


@pytest.mark.smoke
def test_compare_prints_the_table_and_writes_what_was_asked(tmp_path: Path):
    outputs = {kind: tmp_path / f"vgg.{kind}" for kind in ("json", "html", "perfetto")}
    done = foretrain(
        "compare", "vgg16", "--cluster", "4x8xV100@100Gbps", "--schedules", "ddp", "bytescheduler,prophet", "--no-tune",
        "--json", str(outputs["json"]), "--html", str(outputs["html"]), "--trace", str(outputs["perfetto"]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("bytescheduler", "prophet", "T/T*", "T* = ", "orth it"):
        assert word in done.stdout
    numbers = json.loads(outputs["json"].read_text())
    assert [run["schedule"] for run in numbers["runs"]] == ["ddp", "bytescheduler", "prophet"]
    assert all(run["gap"] >= 0 for run in numbers["runs"])
    assert outputs["html"].read_text().lstrip().lower().startswith("<!doctype html>")
    assert outputs["perfetto"].stat().st_size > 1000


def test_compare_takes_a_file_a_sweep_and_knobs(tmp_path: Path):
    save(zoo("alexnet", batch=8), tmp_path / "mine.toml")
    done = foretrain(
        "compare", "mine.toml", "--cluster", "4 workers @ 10Gbps", "--schedules", "p3(slice=1MB)", "--sweep",
        "rate=1Gbps:100Gbps", "--points", "3", "--json", "-", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "T/T*" in done.stderr  # what people read
    assert sorted(tmp_path.iterdir()) == [tmp_path / "mine.toml"]
    sweep = json.loads(done.stdout)["sweep"]
    assert sweep["labels"] == ["1.00 Gbps", "10.0 Gbps", "100 Gbps"]
    assert all(time >= best for time, best in zip(sweep["times"]["p3(slice=1MB)"], sweep["optimum"], strict=True))


def test_bound_schedule_and_catalog(printed):
    assert "embedding-bound at layer" in printed("bound", "gpt2", "--cluster", "4x1xV100@25Gbps")
    text = printed("schedule", "alexnet", "--cluster", "4 workers @ 10Gbps", "-s", "ddp(bucket=25MB)")
    assert text.splitlines()[0].startswith("# ddp(bucket=25MB) for alexnet on 4 workers")
    assert text.splitlines()[1].startswith("all_reduce classifier.6.bias + ") or "classifier" in text.splitlines()[1]
    names = printed("catalog")
    for name in ("llama3_8b", "H100", "dgx-h100", "largest_tail_first"):
        assert name in names


def test_a_written_schedule_is_validated_and_run(tmp_path: Path, printed, refused):
    path, here = tmp_path / "plan.txt", ("alexnet", "--cluster", "4 workers @ 10Gbps")
    printed("schedule", *here, "-s", "p3(slice=4MB)", "--out", str(path))
    ran = printed("schedule", *here, "--run", str(path))
    assert "an iteration" in ran
    assert "above the optimum" in ran
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3] + lines[4:]))
    assert "are never reduced" in refused(["schedule", *here, "--run", str(path)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("vgg61", "--cluster", "4 workers @ 1Gbps"), ("model", "'vgg61'", "did you mean", "'vgg16'")),
        (("vgg16", "--cluster", "4x8xV10@1Gbps"), ("device", "did you mean 'V100'")),
        (("vgg16", "--cluster", "4x1xV100@1Gbps,ps=2,all_reduce"), ("contradicts",)),
        (("vgg16", "--cluster", "cluster.toml"), ("cluster.toml",)),
        (("none.toml", "--cluster", "4 workers @ 1Gbps"), ("none.toml",)),
        ((*HERE, "--schedules", "profet"), ("did you mean 'prophet'",)),
        ((*HERE, "--batch", "0"), ("batch", "0")),
        ((*HERE, "--html", "/nowhere/x.html"), ("html", "/nowhere")),
        ((*HERE, "--sweep", "rat=1Gbps:2Gbps"), ("did you mean 'rate'",)),
        ((*HERE, "--html", "x.html", "--trace", "x.html"), ("trace", "is already the file of --html")),
        ((*HERE, "--throughput", "1e30"), ("throughput", "leaves no time")),
    ],
)
def test_wrong_input_is_named_with_its_remedy(arguments, words, refused):
    error = refused(("compare", *arguments))
    assert all(word in error for word in words)


def test_ctrl_c_leaves_no_file(tmp_path: Path):
    out = tmp_path / "page.html"
    command = [
        sys.executable, "-m", "foretrain", "compare", "bert_large", "--cluster", "4 workers @ 1Gbps", "--sweep",
        "rate=1Gbps:100Gbps", "--points", "99", "--html", str(out),
    ]  # fmt: skip
    shown = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}  # the progress, which tells when it is in the middle
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=shown) as process:
        assert process.stderr is not None
        error = b""
        while b"sweeping" not in error:
            more = process.stderr.read1()
            assert more, error
            error += more
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"interrupted" in error
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("foretrain", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["foretrain.cli.main", "tyro", "foretrain.cli.topology"])
def test_ctrl_c_while_the_commands_are_imported_is_told_in_one_line(module: str):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr == "foretrain: interrupted; no file was left half written\n"


@pytest.mark.parametrize("own", [True, False])
def test_a_broken_promise_of_the_package_is_said_to_be_its_own_fault(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    module = sys.modules["foretrain.cli.main"]
    made: dict[str, Any] = {}
    code = "def fail(arguments): raise AssertionError('clock')"
    exec(compile(code, str(module.__file__) if own else "train.py", "exec"), made)
    monkeypatch.setattr(module, "run_command", made["fail"])
    with pytest.raises(AssertionError, match="clock") as raised:
        main(["run"])
    notes = "".join(getattr(raised.value, "__notes__", ()))
    assert ("a fault of foretrain, not of your script" in notes) == own
