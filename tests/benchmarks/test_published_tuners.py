"""Random search and published Bayesian optimisation, which benchmarks compare our tuner with."""

import sys

import pytest

from tests.examples.torchrun import ROOT
from tests.planner.test_simulator_prior import SPACE, search, valley


def test_random_search_and_bayesian_optimisation_find_the_same(monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from published_tuners import Bayesian, RandomSearch

    truth = valley(2e6, 2e7)
    for proposer in (RandomSearch(SPACE, SPACE.at(), 40, seed=1), Bayesian(SPACE, SPACE.at(), 13, seed=1)):
        assert proposer.best == SPACE.at()
        tried = search(proposer, truth)
        assert len(tried) in (13, 40)
        assert truth(proposer.best) == min(map(truth, tried))
        assert truth(proposer.best) < 1.03
