"""Which of the published rows a plain run of benchmarks/accuracy.py takes."""

import sys
from itertools import pairwise

import pytest

from tests.examples.torchrun import ROOT


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "accuracy"), *sys.path])
    import accuracy

    return accuracy


def test_a_plain_run_takes_some_of_a_large_family_and_says_what_it_leaves(accuracy):
    rows, _ = accuracy.read()
    taken, left = accuracy.chosen(rows)

    assert len(taken) + sum(map(len, left.values())) == len(rows)
    single = [row for row in taken if row.family == "vtrain-single"]
    assert len(single) == accuracy.SAMPLED["vtrain-single"]
    assert all(row.micro_batches <= accuracy.LONG for row in taken)
    assert {row.family for row in taken} == {row.family for row in rows}
    assert "korthikanti22-0006" in left["more than 2,500 micro-batches to execute"]
    assert (taken, left) == accuracy.chosen(rows)
    assert taken != accuracy.chosen(rows, seed=2)[0]


def test_strata_are_spread_over_all(accuracy):
    rows, _ = accuracy.read()
    single = sorted((row for row in rows if row.family == "vtrain-single"), key=lambda row: row.rate)
    places = sorted(single.index(row) for row in accuracy.chosen(rows)[0] if row.family == "vtrain-single")

    assert all(later - earlier < 2 * len(single) / len(places) + 1 for earlier, later in pairwise(places))


def test_micro_batches_that_are_executed(accuracy):
    rows = {row.id: row for row in accuracy.read()[0]}

    assert rows["korthikanti22-0006"].micro_batches == 35 * 280  # one replica of 35 stages
    assert rows["vtrain-multi-0001"].micro_batches == 1  # 512 sequences, 64 replicas, 8 at once
    assert rows["torchtitan-0001"].micro_batches == 1


def test_anchors_are_at_most_two_rows_and_a_stack_has_one_factor(accuracy):
    names = {row.id for row in accuracy.read()[0]}
    from factors import ANCHORS, HOST_ANCHORS

    anchors = [*ANCHORS.values(), *HOST_ANCHORS.values()]

    assert all(1 <= len(chosen) <= 2 for chosen in anchors)
    assert all(set(chosen) <= names for chosen in anchors)
    assert not set(ANCHORS) & set(HOST_ANCHORS)
