"""The tables of commands and options in ``docs/reference/cli.md``, from their help: ``python docs/commands.py``."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout, suppress
from io import BytesIO, TextIOWrapper
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

from foretrain.cli import main

PAGE = Path(__file__).parent / "reference" / "cli.md"
SHARED = {"scenario options": "The scenario", "fidelity options": "The fidelity of a network"}
"""Boxes of help that several commands have, and the section that describes each once."""
HEAD = ["| option | meaning | default |", "|---|---|---|"]
COMMANDS = ["| group | command | what it does |", "|---|---|---|"]
DEFAULTS = {"": "", "default: True": "on", "required": "required", "optional": ""}


def rewritten(page: str) -> str:
    """Return the page with its table of commands and every table of options as help has them today."""
    table = "\n".join([*COMMANDS, *_commands()])
    page = re.sub(r"(?m)^\| group \|.*\n(?:\|.*\n)+", lambda _: f"{table}\n", page, count=1)
    return "".join(_with_table(section) for section in re.split(r"(?m)^(?=###? )", page))


def _commands() -> list[str]:
    """Return a row for each command of the overview; the first of a group has the group's name."""
    rows, group = [], ""
    for line in map(str.rstrip, _told([])):
        if found := re.fullmatch(r"  (\S+) +(.+)", line):
            text = re.sub(r"(?<![\w`])--?[a-z][a-z-]*", r"`\g<0>`", found[2].replace("T*", r"T\*"))
            rows.append(f"| {group} | [{found[1]}](#foretrain-{found[1]}) | {text} |")
            group = ""
        elif re.fullmatch(r"[A-Z]\w+", line):
            group = line
    return rows


def _told(arguments: list[str]) -> TextIOWrapper:
    """Return what a command prints, as lines of any length."""
    told = TextIOWrapper(BytesIO(), encoding="utf-8")
    with patch.dict(os.environ, COLUMNS="1000"), redirect_stdout(told), suppress(SystemExit):
        main(arguments)
    told.seek(0)
    return told


def _with_table(section: str) -> str:
    title = section.partition("\n")[0].lstrip("# ")
    if HEAD[0] not in section:
        return section
    if title in SHARED.values():
        rows = [_row(name, meaning) for box, name, meaning in _arguments("compare") if SHARED.get(box) == title]
    else:
        rows = _rows(title.removeprefix("foretrain "))
    table = "\n".join([*HEAD, *rows])
    return re.sub(r"(?m)^\| option \|.*\n(?:\|.*\n)+", lambda _: f"{table}\n", section, count=1)


def _rows(command: str) -> list[str]:
    """Return a row for each argument of a command, and one for each box that it shares with others."""
    rows = []
    for box, arguments in groupby(_arguments(command), key=lambda argument: argument[0]):
        if box in SHARED:
            names = ", ".join(f"`{name.split()[0]}`" for _, name, _ in arguments)
            rows.append(f"| {names} | [{SHARED[box].lower()}](#{SHARED[box].lower().replace(' ', '-')}) | |")
        else:
            rows += [_row(name, meaning) for _, name, meaning in arguments]
    return rows


def _arguments(command: str) -> list[tuple[str, str, str]]:
    """Return the box, the name and the meaning of each argument in a command's help."""
    found: list[tuple[str, str, str]] = []
    box = ""
    for line in map(str.rstrip, _told([*command.split(), "--help"])):
        text = line.strip("│").rstrip()
        if line.startswith("╭"):
            box = line.strip("╭╮─ ")
        elif line.startswith("│  ") and found:  # what an argument means, below its long name
            found[-1] = (box, found[-1][1], text.strip())
        elif text.startswith(" -") or (line.startswith("│ ") and box == "positional arguments"):
            name, _, meaning = text.strip().partition("  ")
            found.append((box, name, meaning.strip()))
    return [argument for argument in found if not argument[1].startswith("-h,")]


def _row(name: str, meaning: str) -> str:
    text, default = re.fullmatch(r"(.*?)\.?(?: \((required|optional|default: .*)\))?", meaning).groups()
    short = re.sub(r"\[(.+?) \[\1 \.\.\.\]\]", r"\1 ...", name)
    names = ", ".join(f"`{one}`" for one in short.split(", "))
    # As code, lest quotes are made curly and two hyphens a dash; "--json -" is one word of it.
    code = r'"[^"]*"|(?<![\w-])--[a-z][a-z-]*(?: -(?![\w-]))?'
    text = re.sub(code, lambda found: f"`{found[0]}`", text.replace("T*", r"T\*"))
    cells = names, text, DEFAULTS.get(default or "", f"`{(default or '').removeprefix('default: ')}`")
    row = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {row} |"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
