"""The documentation's pictures, tables and command outputs are what the code says today, as are quoted numbers."""

import json
import re
from pathlib import Path

import pytest

from tests.processes import module_at

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(path for path in (DOCS / "policies").glob("*.md") if path.stem != "index")
HEADING = "## When it wins, when it loses\n"
REMEDY = "run: python docs/figures.py"


SEARCHED = (0, 5, 9, 10)
"""Of the cases of `docs/figures.py`, those whose knobs are searched anew: a search takes seconds.

A hidden network, several GPUs to a host, long round trips, a parameter server.
"""


@pytest.mark.process  # it simulates live ranks, too
def test_regenerating_gives_the_same_bytes():
    figures = module_at(DOCS / "figures.py")
    figures.CASES = [figures.CASES[place] for place in SEARCHED]
    made = dict(figures.figures())
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "_figures").iterdir()}

    assert sorted(made) == sorted(kept), REMEDY
    overview = made.pop("cases.md"), kept.pop("cases.md")
    searched = {f"{name}.md" for name in figures.PICTURED}
    stale = [name for name in made.keys() - searched if kept[name] != made[name]]
    stale += [name for name in searched if not set(rows(made[name])) <= set(rows(kept[name]))]
    assert not stale, REMEDY
    new, old = ([row.split("|")[1:-1] for row in rows(text)[2:]] for text in overview)
    assert new == [[row[0], *(row[1 + place] for place in SEARCHED)] for row in old], REMEDY


@pytest.mark.process  # as the one above, whose module it loads
def test_the_table_of_servers_says_when_and_where_each_cell_was_measured():
    figures = module_at(DOCS / "figures.py")
    measured = json.loads(figures.SERVERS.read_text(encoding="utf-8"))
    cells = sorted(measured["details"]["cells"], key=lambda one: (one["setup"], one["cell"]["ratio"]))
    expected = [f"{one['date']}, {one['machine']}" for one in cells]
    del cells[0]["date"], cells[0]["machine"]
    expected[0] = "–"
    table = [line for line in rows(figures.servers(measured)) if not line.startswith(("| model", "|--"))]
    assert [line.split("|")[-2].strip() for line in table] == expected


@pytest.mark.process  # as the one above
def test_how_busy_gpus_were_is_drawn_where_it_was_recorded():
    figures = module_at(DOCS / "figures.py")
    measured = {"details": {"cells": [{}, {"busy": {"window": 0.5, "shares": {"fifo": [1, 0.5], "prophet": [1]}}}]}}
    ((name, picture),) = figures.busy(measured)
    assert name == "busy.svg"
    assert all(text in picture for text in (">fifo<", ">prophet<", "GPU busy"))
    assert not list(figures.busy({"details": {"cells": [{}]}}))


def rows(page: str) -> list[str]:
    """Return the rows of a page's tables."""
    return [line for line in page.splitlines() if line.startswith("|")]


def test_pictures_are_small():
    for path in (DOCS / "_figures").iterdir():
        assert path.stat().st_size < 60_000, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_ratio_that_is_quoted_is_in_a_table(path):
    prose = path.read_text(encoding="utf-8").split(HEADING)[1].split("```{include}")[0]
    tables = "".join((DOCS / "_figures" / f"{name}.md").read_text(encoding="utf-8") for name in (path.stem, "cases"))
    if names := re.findall(r"{doc}`(\w+)`", prose):
        tables += "".join((DOCS / "_figures" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    quoted = re.findall(r"\b\d\.\d{2,3}\b", prose)

    assert quoted, "no numbers"
    missing = [number for number in quoted if number not in re.findall(r"\d\.\d{2,3}", tables)]
    assert not missing, "python docs/figures.py has changed them"
