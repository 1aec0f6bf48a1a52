"""``foretrain accuracy add``: checks a measured run, and merges it into a table."""

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from foretrain.cli.accuracy import add, load_measurements
from foretrain.device.calibration import Calibration, OperatorTime, dump, load
from foretrain.device.work import Gemm
from foretrain.errors import ConfigError

RUN = {
    "command": "train.py --batch 2",
    "cluster": "dgx-h100:1,device=H100",
    "step_time": "2.84 s",
    "contributor": "Ada",
    "source": "log of a night",
    "software": "torch 2.6",
    "date": "2025-11-25",
}


def written(tmp_path, **changes):
    path = tmp_path / "run.toml"
    entry = {key: value for key, value in (RUN | changes).items() if value is not None}
    path.write_text("".join(f'{key} = "{value}"\n' for key, value in entry.items()))
    return path


def test_a_run_is_added_and_measured_again_replaced(tmp_path, capsys):
    table = tmp_path / "table.toml"

    add(written(tmp_path), into=table)
    add(written(tmp_path, contributor="Bob", memory="70 GiB", stack="torchtitan"), into=table)
    add(written(tmp_path, step_time="2.9 s"), into=table)

    assert [(run.contributor, run.step_time) for run in load_measurements(table).runs] == [
        ("Ada", "2.9 s"),
        ("Bob", "2.84 s"),
    ]
    assert len(tomllib.loads(table.read_text())["run"]) == 2
    said = capsys.readouterr().out
    assert "foretrain simulate --cluster dgx-h100:1,device=H100 --factor torchtitan -- train.py --batch 2" in said
    assert "table.toml: 1 run, one more" in said
    assert "2 runs, one replaced" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_time": None}, "step_time is missing"),
        ({"step_tim": "2 s"}, "key: 'step_tim' is unknown; did you mean 'step_time'"),
        ({"step_time": "2.84"}, "step_time: '2.84'"),
        ({"step_time": "0 s"}, "step_time: '0 s' is 0"),
        ({"cluster": "leaf_spine:4x8@25Gbps"}, "cluster: 'leaf_spine:4x8@25Gbps' does not say which GPUs it has"),
        ({"command": "torchrun train.py"}, "command: 'torchrun train.py' does not begin with a script"),
        ({"command": "X=1 -m"}, "command: 'X=1 -m' does not begin with a script"),
        ({"memory": "640 GiB"}, "memory: '640 GiB' is more than a GPU has; H100 has 79.2 GiB"),
        ({"stack": "torchtitann"}, "run.toml: stack: 'torchtitann' is unknown; did you mean 'torchtitan'"),
        ({"date": "2999-01-01"}, "date: '2999-01-01' is in the future"),
        ({"date": "yesterday"}, "date: 'yesterday' is not a date; write the day of the measurement, e.g. 2026-11-25"),
        ({"command": "train.py 'x"}, "command: .* cannot be split into words"),
        ({"contributor": " "}, "contributor: ' ' is no text, or empty"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, message):
    table = tmp_path / "table.toml"

    with pytest.raises(ConfigError, match=message):
        add(written(tmp_path, **changes), into=table)
    assert not table.exists()


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("-m train.all --batch 2", "foretrain simulate --cluster H100 -- -m train.all --batch 2"),
        ("X=1 Y='a b' train.py", "X=1 Y='a b' foretrain simulate --cluster H100 -- train.py"),
    ],
)
def test_modules_variables_and_a_single_gpu(tmp_path, capsys, command, printed):
    add(written(tmp_path, cluster="H100", command=command), into=tmp_path / "table.toml")

    assert printed in capsys.readouterr().out


def test_the_documented_file_is_accepted(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    (text,) = re.findall(r"`NAME=value train.py`\):\n\n```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "run.toml").write_text(text)
    dump(Calibration("NVIDIA H100 80GB HBM3", "torch 2.13.0+cu130", ()), tmp_path / "calibration.json")

    add(tmp_path / "run.toml", into=tmp_path / "table.toml")

    (run,) = load_measurements(tmp_path / "table.toml").runs
    assert (run.contributor, run.stack) == ("Ada Example", "torchtitan")


def test_a_calibration_is_kept_beside_the_table(tmp_path, monkeypatch, capsys):
    measured = tmp_path / "mine"
    measured.mkdir()
    found = Calibration("NVIDIA H100 80GB HBM3", "torch 2.13.0+cu130", ())
    dump(found, measured / "h100.json")
    table = tmp_path / "tables" / "table.toml"
    table.parent.mkdir()

    add(written(measured, calibration="h100.json"), into=table)
    shutil.rmtree(measured)
    monkeypatch.chdir(table.parent.parent)
    (run,) = load_measurements(table).runs

    assert run.calibration.startswith("calibrations/h100-")
    assert load(table.parent / run.calibration) == found
    assert f" --device {table.parent / run.calibration} -- train.py --batch 2" in capsys.readouterr().out
    (table.parent / run.calibration).write_text("{}")
    with pytest.raises(ConfigError, match=r"table.toml: run\[0\].*calibrations/h100"):
        load_measurements(table)


def test_a_calibration_of_another_gpu_is_refused(tmp_path):
    dump(Calibration("NVIDIA A100-SXM4-80GB", "torch 2.13.0+cu130", ()), tmp_path / "a100.json")

    with pytest.raises(ConfigError, match="'NVIDIA A100-SXM4-80GB' was measured, not H100"):
        add(written(tmp_path, calibration="a100.json"), into=tmp_path / "table.toml")


H100 = Calibration("NVIDIA H100 80GB HBM3", "torch 2.13.0", (OperatorTime(Gemm(64, 64, 64, dtype="bf16"), 5_000_000),))


def test_a_calibration_without_a_run(tmp_path, capsys):
    table = tmp_path / "table.toml"
    dump(H100, tmp_path / "h100.json")
    alone = dict.fromkeys(("command", "cluster", "step_time", "software"))
    add(written(tmp_path), into=table)

    add(written(tmp_path, **alone, calibration="h100.json"), into=table)
    dump(replace(H100, launch=4_000_000), tmp_path / "h100.json")
    add(written(tmp_path, **alone, calibration="h100.json"), into=table)

    (gpu,) = load_measurements(table).gpus
    assert (gpu.contributor, len(load_measurements(table).runs)) == ("Ada", 1)
    assert load(tmp_path / gpu.calibration).launch == 4_000_000
    said = capsys.readouterr().out
    assert f"use: foretrain simulate --device {tmp_path / gpu.calibration} -- train.py" in said
    assert "1 run and 1 calibration, one more" in said
    assert "1 run and 1 calibration, one replaced" in said


@pytest.mark.parametrize(
    ("calibration", "changes", "message"),
    [
        (H100, {"contributor": None}, "contributor is missing"),
        (replace(H100, measured=()), {}, "calibration: 'gpu.json' has no measurements"),
        (replace(H100, device="Some GPU"), {}, "device: 'Some GPU' is no GPU known by name"),
        (H100, {"memory": "70 GiB"}, "key: 'memory' is unknown"),
        (H100, {"command": "train.py"}, "cluster is missing"),
    ],
)
def test_what_is_wrong_with_a_calibration_is_named(tmp_path, calibration, changes, message):
    dump(calibration, tmp_path / "gpu.json")
    alone = dict.fromkeys(("command", "cluster", "step_time", "software")) | {"calibration": "gpu.json"} | changes

    with pytest.raises(ConfigError, match=message):
        add(written(tmp_path, **alone), into=tmp_path / "table.toml")


def test_a_table_in_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="run this in a checkout of foretrain"):
        add(written(tmp_path), into=tmp_path / "none" / "table.toml")
