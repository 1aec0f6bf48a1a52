"""What was found is kept."""

import dataclasses

import pytest

from foretrain.comm.runtime_plan import Saved, folder
from foretrain.network import cluster
from foretrain.planner.search import IterationTimes
from foretrain.schedule import spec
from foretrain.workload import zoo

WORK = zoo("vgg16", device="V100")
PLACE = cluster("8xV100@10Gbps")
PLAN = spec("bytescheduler")
FOUND, SAMPLE = spec("bytescheduler(partition=2MB, credit=8MB, fuse=4)"), IterationTimes(0.7, 0.01, 8)


@pytest.fixture
def kept(tmp_path):
    saved = Saved(tmp_path / "tuned", WORK, PLACE, PLAN)
    assert saved.load() is None
    saved.keep(FOUND, SAMPLE)
    return saved


def test_the_same_job_begins_with_it(kept, tmp_path):
    found, sample = Saved(tmp_path / "tuned", WORK, PLACE.scaled(1.2), PLAN).load()
    assert found.settings == FOUND.settings
    assert sample == SAMPLE


@pytest.mark.parametrize(
    "other",
    [
        (zoo("resnet50", device="V100"), PLACE, PLAN),
        (WORK, PLACE.scaled(2), PLAN),
        (WORK, dataclasses.replace(PLACE, workers=4), PLAN),
        (WORK, cluster("8xV100@10Gbps,ps=4"), PLAN),
        (WORK, PLACE, spec("prophet")),
        (WORK, PLACE, spec("bytescheduler(credit=1MB)")),
    ],
    ids=["model", "rate", "ranks", "servers", "policy", "knobs"],
)
def test_another_job_does_not(kept, tmp_path, other):
    assert Saved(tmp_path / "tuned", *other).load() is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"time":0.7', '"time":0'),
        ('"error":0.01', '"error":-1'),
        ('"rate":1250000000.0', '"rate":1e-320'),
        ("bytescheduler(", "auto("),
        ("partition=2MB", "partition=1B"),
        ('"iterations":8', '"iterations":' + "[" * 100_000),
        ('"iterations":8', '"iterations":8,"x":' + "[" * 100_000 + "]" * 100_000),
    ],
    ids=lambda text: text[:24],
)
def test_a_file_that_does_not_read_or_makes_no_sense_counts_as_none(kept, old, new):
    text = kept.path.read_text()
    assert old in text
    for wrong in (text.replace(old, new), "", "{", '{"format": 1}', "\xff", '{"format": 2}'):
        kept.path.write_text(wrong, encoding="latin-1")
        assert kept.load() is None


def test_a_folder_that_cannot_be_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    Saved(tmp_path / "file" / "tuned", WORK, PLACE, PLAN).keep(FOUND, SAMPLE)


def test_where(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "foretrain" / "tuned"
