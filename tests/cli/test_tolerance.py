from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foretrain.cli import main  # noqa: E402
from foretrain.comm.options import BoundedLoss  # noqa: E402
from tests.processes import started  # noqa: E402

SCRIPT = """
import torch

torch.manual_seed(0)
inputs = torch.randn(64, 12)
labels = inputs @ torch.linspace(-1, 1, 12)

class Made:
    def __init__(self, seed):
        self.model = torch.nn.Linear(12, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = [(inputs[:32], labels[:32]), (inputs[32:], labels[32:])]

    def loss(self, model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square().mean()

    def evaluate(self, model):
        return 1 - self.loss(model, (inputs, labels))

class Wide(Made):
    def __init__(self, seed):
        super().__init__(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(12, 400), torch.nn.Linear(400, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)

def build(seed): return Made(seed)
def wide(seed): return Wide(seed)
def without_seed(): return Made(0)
def nothing(seed): pass
def failing(seed): return undefined_name
number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "train.py").write_text(SCRIPT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield "train.py:build"
    torch.set_num_threads(threads)


FAST = ("--seeds", "2", "--rounds", "40", "--evaluations", "4")
ANYTHING = ("--small", "lossy", "--grid", "0", "2%", "1")
"""All of it may be lost."""


@pytest.mark.parametrize("command", ["tolerance", "record"])
def test_sigterm_in_a_script_ends_the_command_without_a_traceback(script, command):
    Path("wait.py").write_text("import time\ndef build(*seed):\n print('in', flush=True)\n time.sleep(600)\n")
    words = [sys.executable, "-m", "foretrain", command, "wait.py:build"]
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 143


@pytest.mark.parametrize(
    ("exchange", "way"),
    [
        ("transpose", "transpose"),
        ("ring", "ring"),
        ("halving-doubling", "halving_doubling"),
        ("ps", "parameter_server"),
    ],
)
def test_it_says_what_is_tolerable_and_writes_the_numbers(script, exchange, way, capsys):
    main(["tolerance", script, *FAST, *ANYTHING, "--exchange", exchange, "--json", "t.json"])

    out, err = capsys.readouterr()
    assert "Tolerates a loss of 2 % at equal rounds" in out
    assert "not worse" in out
    assert "wrote t.json" in out
    assert "wrote" not in err
    found = json.loads(Path("t.json").read_text())
    assert (found["tolerable"], found["exchange"]) == (0.02, way)
    assert [level["p"] for level in found["levels"]] == [0, 0.02, 1]
    assert len(found["levels"][1]["accuracies"]) == 2


def test_what_it_finds_is_what_foretrain_run_takes(script, capsys):
    pytest.importorskip("jinja2")
    main(["tolerance", script.replace("build", "wide"), *FAST, "--grid", "0", "2%", "--html", "t.html"])
    command = "foretrain run --tolerance 2% -- train.py"
    assert f"Use it: {command}" in capsys.readouterr().out
    assert f'data-copy="{command}"' in Path("t.html").read_text()


def test_help_says_what_bounded_loss_never_loses(capsys):
    with pytest.raises(SystemExit):
        main(["tolerance", "--help"])
    usual, said = BoundedLoss(), " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"tensors of up to {usual.reliable_bytes >> 10} KiB and the first {usual.reliable_steps} rounds" in said


def test_a_page(script, capsys):
    pytest.importorskip("jinja2")
    options = ("--exchange", "ps", "--back", "lossy", "--losses", "magnitude")
    main(["tolerance", script, *FAST, *ANYTHING, *options, "--html", "t.html"])

    page = Path("t.html").read_text()
    for words in ("Tolerates a loss of 2 %", "small magnitudes first", 'id="curves"', "accuracy"):
        assert words in page
    assert "Use it" not in page  # no transport loses small tensors, too


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.py:nothing",), "nothing() returned nothing without model, optimizer, batches, loss, evaluate"),
        (("train.py:without_seed",), "without_seed() must take one argument, the seed"),
        (("train.py:failing",), "NameError: name 'undefined_name' is not defined"),
        (("train.py:build", "--grid", "0", "lots"), "grid[1]: 'lots' is not a share; write e.g. '3.5%'"),
        (("train.py:build", "--grid", "1%", "2%"), "does not rise from 0"),
        (("train.py:build", "--workers", "1"), "workers: 1 exchange nothing"),
        (("train.py:wide", "--workers", "64"), "workers: 64 are more than the samples of a batch, 32"),
        (("train.py:build", "--payload", "2"), "payload: 2 holds no value"),
        (("train.py:build",), "small: 'reliable' leaves nothing to lose: tensors have one dimension, or at most 16,38"),
    ],
)
def test_wrong_input_is_named(arguments, message, refused):
    assert message in refused(("tolerance", *arguments))
