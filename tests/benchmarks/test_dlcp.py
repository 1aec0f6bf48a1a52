"""The paper's testbed stands beside what the lab has measured."""

import json
import sys

import pytest

from tests.examples.torchrun import ROOT


@pytest.fixture
def dlcp(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "paper"), str(ROOT / "benchmarks"), *sys.path])
    import dlcp

    return dlcp


def test_the_paper_stands_beside_the_simulation_and_the_lab(dlcp):
    first, second, *lab = dlcp.testbed_rows({"speedup_ps": 0.472, "speedup_ring": 0.083}, dlcp.MEASURED)
    assert first == ("parameter server", "up to 84.3%", "up to 47.2%", "0.56")
    assert second == ("rings", "up to 11.0%", "up to 8.3%", "0.75")
    values = json.loads(dlcp.MEASURED.read_text())["values"]
    names = ("median_vs_best_tcp", "tta_vs_best_tcp", "clean_vs_tcp")
    assert [row[2] for row in lab] == [f"{values[name] - 1:.1%}" for name in names]


def test_what_was_not_measured_has_no_row(dlcp, tmp_path):
    file = tmp_path / "bounded.json"
    file.write_text(json.dumps({"values": {"median_vs_best_tcp": 1.3, "tta_vs_best_tcp": float("nan")}}))
    assert [row[2] for row in dlcp.testbed_rows({}, file)] == ["30.0%"]
