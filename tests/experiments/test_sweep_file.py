"""Sweep files: lists and ranges of values, and mistakes, which are named with their remedy."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.experiments import expand, parse, read
from foretrain.experiments.sweep_file import Quantity, Range, quantity, values
from foretrain.workload import save, zoo

GOOD = {
    "workloads": 'workloads = ["alexnet"]',
    "clusters": 'clusters = ["4x1xV100@10Gbps"]',
    "schedules": 'schedules = ["ddp"]',
}


def text(**parts: str) -> str:
    return "\n".join(sorted((GOOD | parts).values(), key=lambda part: "[[" in part))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"more": "seds = 3"}, ("sweep: 'seds' is unknown", "did you mean 'seeds'")),
        ({"workloads": '[[workloads]]\nmodel = "vgg16"\nbach = 2'}, ("workloads[0]: 'bach'", "did you mean 'batch'")),
        ({"clusters": '[[clusters]]\nnotaton = "4x1@1Gbps"'}, ("clusters[0]: 'notaton'", "did you mean 'notation'")),
        ({"schedules": '[[schedules]]\nnotation = "p3"\ntune = true'}, ("schedules[0]: 'tune'", "'tuned'")),
        (
            {"schedules": '[[schedules]]\nnotation = "p3"\nknobs.slice = { from = "1MB", to = "2MB", point = 3 }'},
            ("'point' is unknown", "did you mean 'points'"),
        ),
        ({"clusters": "", "schedules": '[[schedules]]\nclusters = ["a"]'}, ("'clusters' is unknown", "above all [[")),
        ({"schedules": '[[schedules]]\nknobs = {}'}, ("schedules[0].notation", "is missing")),
        ({"clusters": "clusters = []"}, ("clusters", "is empty")),
        ({"more": "jitter = 'x'"}, ("jitter: 'x'", "expected `float | array`, got `str`")),
        ({"more": "= 3"}, ("does not parse", "line 4")),
    ],
)  # fmt: skip
def test_what_does_not_read_is_named(parts, words):
    with pytest.raises(ConfigError) as told:
        parse(text(**parts))
    for word in words:
        assert word in str(told.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"workloads": "[[workloads]]\nbatch = 3"}, ("workloads[0]", "not either a model or a file")),
        ({"workloads": '[[workloads]]\nfile = "no.toml"'}, ("workloads[0].file", "cannot be read")),
        ({"workloads": '[[workloads]]\nfile = "no.toml"\nbatch = 3'}, ("workloads[0].batch", "leave it out")),
        ({"workloads": '[[workloads]]\nmodel = "vgg16"\nprecision = "bf16"'}, ("workloads", "bf16")),
        ({"clusters": 'clusters = ["4x1xV100@10GB"]'}, ("clusters[0]", "'10GB' is not a rate")),
        ({"clusters": 'clusters = ["4x1@{rate}"]'}, ("clusters[0].axes: 'rate'", "has no values")),
        ({"clusters": '[[clusters]]\nnotation = "4x1@1Gbps"\naxes.rate = "1Gbps"'}, ("is nowhere in",)),
        ({"clusters": '[[clusters]]\nnotation = "4x1@{seed}"\naxes.seed = "1Gbps"'}, ("'seed' is taken",)),
        ({"clusters": '[[clusters]]\nnotation = "4x1@{A b}"\naxes."A b" = "1Gbps"'}, ("'A b' is no name",)),
        ({"schedules": 'schedules = ["dpd"]'}, ("schedules[0].schedule: 'dpd'", "'ddp'")),
        ({"schedules": '[[schedules]]\nnotation = "p3"\nknobs.slce = "1MB"'}, ("of p3: 'slce'", "'slice'")),
        ({"schedules": '[[schedules]]\nnotation = "p3"\nknobs.slice = 4'}, ("knobs.slice: 4 is not a size",)),
        ({"schedules": '[[schedules]]\nnotation = "p3(slice=1MB)"\nknobs.slice = "1MB"'}, ("sets it already",)),
        ({"more": "seeds = 3"}, ("seeds", "change nothing without jitter")),
        ({"more": "seeds = 0\njitter = 0.1"}, ("seeds", "is no number of seeds")),
        ({"more": "seeds = [-1]\njitter = 0.1"}, ("seeds", "below 0")),
        ({"more": "jitter = 3.0"}, ("jitter: 3.0",)),
        ({"more": 'baseline = "dpd"'}, ("baseline", "'ddp'")),
        ({"more": 'exclude = ["modle = vgg16"]'}, ("exclude: 'modle'", "did you mean 'model'")),
        ({"more": 'exclude = ["model vgg16"]'}, ("is no comparison",)),
        ({"more": 'exclude = ["batch >= 1"]'}, ("leaves none of 1 scenarios",)),
        ({"more": 'exclude = ["schedule < 3"]'}, ("'ddp' is no number",)),
        ({"more": 'exclude = ["batch < 3MB"]'}, ("compares a number with a size",)),
    ],
)
def test_what_makes_no_sense_is_named(parts, words, tmp_path: Path):
    with pytest.raises(ConfigError) as told:
        expand(parse(text(**parts)), tmp_path)
    for word in words:
        assert word in str(told.value)


def test_a_file_names_itself_and_is_looked_for(tmp_path: Path):
    (tmp_path / "s.toml").write_text(text(more="seds = 3"))
    with pytest.raises(ConfigError, match=r"s\.toml: sweep: 'seds'"):
        read(tmp_path / "s.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.toml")


def test_recorded_workloads_and_files_of_clusters_are_found_beside_the_sweep(tmp_path: Path):
    save(zoo("alexnet", batch=8), tmp_path / "mine.toml")
    (tmp_path / "four.toml").write_text('workers = 4\nrate = "10Gbps"\n')
    sweep = parse(text(workloads='[[workloads]]\nfile = "mine.toml"', clusters='clusters = ["four.toml"]'))

    first = expand(sweep, tmp_path)
    (one,) = first.scenarios.values()
    assert one.source.recorded == zoo("alexnet", batch=8)
    assert one.where.notation == str(tmp_path / "four.toml")

    (tmp_path / "four.toml").write_text('workers = 4\nrate = "20Gbps"\n')
    assert not expand(sweep, tmp_path).scenarios.keys() & first.scenarios.keys()


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("ring", ("ring",)),
        (4, (4,)),
        (["1MB", "4MB", "1MB"], ("1MB", "4MB")),
        (Range("1Gbps", "100Gbps", 3), ("1Gbps", "10Gbps", "100Gbps")),
        (Range("1Gbps", "100Gbps", 5), ("1Gbps", "3160Mbps", "10Gbps", "31600Mbps", "100Gbps")),
        (Range("1MB", "4MB", 3), ("1MB", "2MB", "4MB")),
        (Range("0us", "20us", 3, "linear"), ("0us", "10us", "20us")),
        (Range(2, 16, 4), (2, 4, 8, 16)),
        (Range(0.5, 1.5, 3, "linear"), (0.5, 1.0, 1.5)),
    ],
)
def test_an_axis_is_its_values(axis, expected):
    assert values(axis, "x") == expected


@given(st.floats(1e3, 1e11), st.floats(1.5, 1e4), st.integers(2, 40))
def test_a_range_ascends_from_end_to_end(low, ratio, points):
    low, high = f"{low:.0f}bps", f"{low * ratio:.0f}bps"
    found = values(Range(low, high, points), "rate")

    numbers = [one.number for one in map(quantity, found) if one]
    assert (found[0], found[-1]) == (low, high)
    assert numbers == sorted(numbers)
    assert len(found) <= points


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ([], "is empty"),
        (Range("1Gbps", "4MB", 3), "from a rate to a size"),
        (Range("1Gbps", "1Gbps", 3), "does not ascend"),
        (Range("1Gbps", "2Gbps", 1), "points: 1 "),
        (Range("ring", "2Gbps", 3), "'ring' is no end"),
        (Range("0us", "2us", 3), "has no logarithm"),
    ],
)
def test_wrong_axes_are_named(axis, words):
    with pytest.raises(ConfigError, match=words):
        values(axis, "x")


def test_quantities_have_kinds():
    assert quantity("8Gbps") == Quantity("rate", 1e9)
    assert quantity("8ms") == Quantity("time", 0.008)
    assert quantity("8MB") == Quantity("size", 8e6)
    assert quantity("8") == quantity(8) == Quantity("number", 8)
    assert quantity("hdrm") is None
