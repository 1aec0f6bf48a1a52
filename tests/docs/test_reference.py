"""The reference and the pages of policies leave nothing out."""

import re
from pathlib import Path

import pytest

import foretrain as ft
from foretrain.cli import main
from foretrain.schedule import POLICIES

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("command", ["compare", "bound", "record", "schedule", "catalog"])
def test_every_option_of_every_command_is_described(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    section = page.split(f"## foretrain {command}\n")[1].split("\n## ")[0]

    assert not {option for option in options if not re.search(rf"`{option}[ `]", section)}


def test_every_policy_has_a_page():
    for name in POLICIES.keys() - {"tic"}:
        page = (DOCS / "policies" / f"{name}.md").read_text(encoding="utf-8")
        for part in ("## How it decides", "## Knobs", "## Source", "## Departures", "## When it wins, when it loses"):
            assert part in page, name


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert not {name for name in ft.__all__ if name not in page}
