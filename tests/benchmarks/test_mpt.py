"""The MPT script trains one and the same model however it is split; its models have the parameters published."""

import csv
import sys

import pytest
import torch

from tests.examples.torchrun import ROOT, losses, torchrun

ACCURACY = ROOT / "benchmarks" / "accuracy"
SCRIPT = "benchmarks/accuracy/mpt.py"
SMALL = ("--model", "debug", "--sequence", 32, "--global-batch", 8)


@pytest.fixture(scope="module")
def whole():
    return losses(torchrun(SCRIPT, *SMALL, "--exact", "--micro-batch", 8, ranks=1))


@pytest.mark.parametrize("layout", ["--micro-batch 4", "--micro-batch 2 --recompute full --strategy SHARD_GRAD_OP"])
def test_layouts(whole, layout):
    split = losses(torchrun(SCRIPT, *SMALL, "--exact", *layout.split()))

    assert len(split) == 3
    assert split == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("options", ["--recompute full", "--float8"])
def test_low_precision_learns(options):
    first, second, third = losses(torchrun(SCRIPT, *SMALL, "--micro-batch", 4, *options.split()))

    assert first > second > third


def test_every_published_row_has_as_many_parameters(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ACCURACY), *sys.path])
    from mpt_model import MPT, SHAPES

    with (ACCURACY / "groundtruth-train.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "llmfoundry"]
    published = {(row["model"].removeprefix("MPT-"), int(row["seq_len"]), int(row["params"])) for row in rows}
    for name, length, parameters in published:
        with torch.device("meta"):
            model = MPT(SHAPES[name], length)
        assert sum(p.numel() for p in model.parameters()) == parameters, (name, length)
    assert len(published) > 50
