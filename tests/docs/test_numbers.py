"""The numbers that the pages of policies quote stand in the generated tables."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(path for path in (DOCS / "policies").glob("*.md") if path.stem != "index")
HEADING = "## When it wins, when it loses\n"


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
