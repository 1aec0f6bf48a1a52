"""The reference and the pages of policies leave nothing out."""

import re
from pathlib import Path

import pytest

import foretrain as ft
from foretrain.cli import main
from foretrain.schedule import POLICIES

DOCS = Path(__file__).parent.parent.parent / "docs"


COMMANDS = [
    "compare",
    "plan",
    "what-if",
    "grid",
    "share",
    "collective",
    "bound",
    "record",
    "schedule",
    "run",
    "catalog",
]
COMMANDS += ["simulate", "search", "calibrate", "tolerance", "server", "sweep", "doctor", "explore", "completion"]
LAB = [f"lab {name}" for name in ("up", "rate", "exec", "status", "down", "compare")]
TOPOLOGY = ["topology show", "topology list"]
ACCURACY = ["accuracy add"]


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS + LAB + TOPOLOGY + ACCURACY)
def test_every_option_of_every_command_is_described(command, capsys):
    options = set(re.findall(r"--[a-z][a-z-]*", help_of(command, capsys))) - {"--help"}
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    section = re.split(rf"\n###? foretrain {command}\n", page)[1].split("\n##")[0]

    assert not {option for option in options if not re.search(rf"`(torchrun )?{option}[ `]", section)}


def test_the_overview_leaves_no_command_out(capsys):
    main([])
    listed = re.findall(r"^  (\S+) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted([*COMMANDS, "lab", "topology", "accuracy"])


@pytest.mark.parametrize(("group", "known"), [("lab", LAB), ("topology", TOPOLOGY), ("accuracy", ACCURACY)])
def test_no_command_of_a_group_is_left_out(group, known, capsys):
    listed = re.findall(r"• (\w+)", help_of(group, capsys))
    assert sorted(listed) == sorted(name.split()[-1] for name in known)


def test_every_policy_has_a_page():
    for name in POLICIES.keys() - {"tic"}:
        page = (DOCS / "policies" / f"{name}.md").read_text(encoding="utf-8")
        for part in ("## How it decides", "## Knobs", "## Source", "## Departures", "## When it wins, when it loses"):
            assert part in page, name


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert not {name for name in ft.__all__ if name not in page}
