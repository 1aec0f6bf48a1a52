"""Every numbered example runs to its end, as a reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "foretrain run": ["-m", "foretrain", "run", "--nproc", "2", "--"],
}
"""Of an example that names one: the options of Python before its path."""
ELSEWHERE = ("07_train", "09_keras", "10_jax")
"""Run by tests.launch.test_run, and in tests.plugins by ranks that have imported the framework."""


def test_there_are_examples():
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("path", [one for one in EXAMPLES if one.stem not in ELSEWHERE], ids=lambda path: path.stem)
@pytest.mark.smoke_case("01_compare")
def test_example_runs(path, tmp_path):
    launcher = next((options for word, options in LAUNCHERS.items() if word in path.read_text()), [])
    ran = subprocess.run([sys.executable, *launcher, path], cwd=tmp_path, capture_output=True, text=True, timeout=600)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves files behind"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
