"""The example of a sweep, and what its page quotes, are what a user can type."""

import re

import pytest

from foretrain.experiments import SweepFile, expand, parse, read
from tests.examples.torchrun import ROOT

PAGE = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")


def test_the_example_has_as_many_scenarios_as_it_says():
    path = ROOT / "examples" / "sweep.toml"

    assert f"# {len(expand(read(path)).scenarios)} scenarios" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SweepFile.__struct_fields__)
def test_every_key_is_described(name):
    assert f"| `{name}` |" in PAGE


def test_quoted_axes_and_conditions_read():
    axes, conditions = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    cluster = f'[[clusters]]\nnotation = "{{hosts}}x1xV100@{{rate}},latency={{latency}}"\n[clusters.axes]\n{axes}'
    schedules = '[[schedules]]\nnotation = "bytescheduler"\nknobs = { credit = "4MB", partition = "1MB" }\n'
    text = f'workloads = ["alexnet"]\n{conditions}\n{schedules}\n{cluster}'

    made = expand(parse(text))

    assert len(made.scenarios) == 9 * 5 * 6
    assert "4x1xV100@1780Mbps,latency=5us" in {one.where.notation for one in made.scenarios.values()}
