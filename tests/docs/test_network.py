"""What the pages on networks show runs."""

import re
from pathlib import Path

import pytest

from foretrain.network import cluster

PAGES = Path(__file__).parent.parent.parent / "docs" / "network"


def test_the_example_of_the_fluid_simulation_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", (PAGES / "fluid.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(code, "fluid.md", "exec"), {})
    alone, first, second = map(int, capsys.readouterr().out.split())
    assert first > alone
    assert second > first


def test_the_examples_of_packets_run(capsys):
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (PAGES / "packet.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, "packet.md", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    levels = dict(line.split() for line in shown if line.split()[0] in ("ideal", "fluid", "packet"))
    assert int(levels["ideal"]) <= int(levels["fluid"]) < int(levels["packet"])


@pytest.mark.parametrize(
    "text", sorted(set(re.findall(r"--cluster (\S+)", (PAGES / "index.md").read_text(encoding="utf-8"))))
)
def test_every_cluster_on_the_page_is_read(text):
    assert cluster(text).total_gpus > 1
