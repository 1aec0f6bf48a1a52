"""Pages are in tables of contents, links lead somewhere, and commands that pages show are understood."""

import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from foretrain.cli import accuracy, lab, main, run, search, simulate, topology
from tests import warm
from tests.live import forked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not {"_figures", "_build"} & set(path.parts)]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
OUTSIDE = {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
entry = importlib.import_module("foretrain.cli.main")


def listed(path: Path) -> set[Path]:
    """Return the pages that the tables of contents of ``path`` hold."""
    found = set()
    for block in re.findall(r"```\{toctree\}\n(.*?)```", TEXTS[path], re.DOTALL):
        for line in block.splitlines():
            if line.strip() and not line.startswith(":"):
                found.add((path.parent / f"{line.strip()}.md").resolve())
    return found


def test_every_page_is_in_one_table_of_contents():
    everything = [page for path in PAGES for page in listed(path)]
    assert sorted(everything) == sorted(path for path in PAGES if path != DOCS / "index.md")


def test_no_page_has_the_name_of_one_that_sphinx_writes():
    assert not {path.relative_to(DOCS).as_posix() for path in PAGES} & {"search.md", "genindex.md", "py-modindex.md"}


def test_notes_and_warnings_between_colons_are_rendered():
    assert any(":::{" in text for text in TEXTS.values())
    assert '"colon_fence"' in (DOCS / "conf.py").read_text(encoding="utf-8")


def test_tables_of_contents_of_the_first_page_have_captions():
    captions = re.findall(r":caption: (\w+)", TEXTS[DOCS / "index.md"])
    assert captions == ["Start", "Guides", "Concepts", "Reference", "Results", "Contributing"]


def test_links_between_pages_lead_somewhere():
    broken = []
    for path, text in (TEXTS | OUTSIDE).items():
        targets = re.findall(r"\{doc\}`(?:[^`<]*<)?([^`<>]+)>?`", text)
        for one in targets:
            base = DOCS if one.startswith("/") else path.parent
            broken += [f"{path.name}: {one}"] * (not (base / f"{one.lstrip('/')}.md").exists())
        files = re.findall(r"\]\((?!http|#|mailto|…)([^)#\s]+)", text)
        broken += [f"{path.name}: {one}" for one in files if not (path.parent / one).exists()]
        pictures = re.findall(r"```\{figure\} (\S+)", text)
        broken += [f"{path.name}: {one}" for one in pictures if not (path.parent / one).exists()]
    assert not broken


def shown() -> Iterator[tuple[str, str]]:
    """Yield page and command of every line in a block that calls foretrain, also of the outputs that pages include."""
    for path, text in (TEXTS | OUTSIDE).items():
        included = [
            (path.parent / name).read_text() for name in re.findall(r"literalinclude\} (\S+\.(?:txt|sh))", text)
        ]
        fenced = re.findall(r"(?ms)^ *```\S*$(.*?)^ *```", text)
        indented = re.findall(r"(?m)(?:^ {4}.*\n)+", text)
        for block in (*fenced, *indented, *included):
            for line in re.findall(r"(?m)^\s*(?:\$ )?foretrain (?!:)(.+)$", block.replace("\\\n", " ")):
                yield path.name, line.partition(" &")[0].replace("…", "")


def outputs() -> dict[str, set[str]]:
    """Return, for each command in a console block that has output below it, the lines of this output."""
    blocks = [(DOCS / "files" / "simulate.txt").read_text(encoding="utf-8")]
    for text in (TEXTS | OUTSIDE).values():
        blocks += re.findall(r"(?ms)^```console$\n(.*?)^```", text)
    found: dict[str, set[str]] = {}
    for block in blocks:
        for command, output in re.findall(r"(?m)^\$ foretrain (.+)\n((?:[^$\n].*\n)+)", block.replace("\\\n", " ")):
            found.setdefault(command, set()).update(output.splitlines())
    return found


def test_pages_say_when_recordings_were_made():
    recorded = {path.name for path in (DOCS / "files").glob("*.txt")} - {"simulate.txt"}
    included = set()
    for path, text in TEXTS.items():
        for name, below in re.findall(r"literalinclude\} \S*files/(\S+\.txt)\n(?:.*\n)*?```\n\n(.*\n.*\n)", text):
            if name in recorded:
                included.add(name)
                assert re.search(r"[Rr]ecorded on 20\d\d-\d\d-\d\d", below), f"{path.name}: {name}"
    assert included == recorded


def without_run_time(line: str) -> str:
    """Return a line of output without what depends on the machine: how long a simulation took, or will take."""
    return re.sub(r"(simulated in|hops, about) +(?:[\d.]+|a) \w+", r"\1", line.rstrip())


@pytest.mark.parametrize("command", sorted(outputs()))
def test_commands_in_console_blocks_print_what_pages_show(command):
    done = warm.run(forked.foretrain, shlex.split(command), ROOT)
    printed = {without_run_time(line) for line in (done.stdout + done.stderr).splitlines()}
    assert done.returncode == 0, done.stderr
    assert not {without_run_time(line) for line in outputs()[command]} - printed


def without_effect(command):
    """Return a command with the same arguments that does nothing."""
    return functools.wraps(command)(lambda *_, **__: None)


def test_commands_in_blocks_are_understood(monkeypatch, capsys):
    groups = {
        group: tuple(one if isinstance(one, tuple) else without_effect(one) for one in members)
        for group, members in entry._GROUPS.items()
    }
    monkeypatch.setattr(entry, "_GROUPS", groups)
    for module in (accuracy, lab, topology):
        made = {name: without_effect(command) for name, command in module.COMMANDS.items()}
        monkeypatch.setattr(module, "COMMANDS", made)
    for module in (run, search, simulate):
        monkeypatch.setattr(module, "_start", lambda *_: None)

    found, wrong = list(shown()), []
    assert len(found) > 50
    for page, line in found:
        try:
            main(shlex.split(line, comments=True))
        except SystemExit as end:
            wrong += [f"{page}: {line}"] * bool(end.code)
    assert not wrong, capsys.readouterr().err


def test_options_in_text_exist(capsys):
    named: dict[str, set[str]] = {}
    for text in (TEXTS | OUTSIDE).values():
        for line in re.findall(r"`foretrain ([^`]+)`", text):
            words = line.partition(" -- ")[0].split()
            name = " ".join(words[:2]) if words[0] in ("lab", "topology", "accuracy") else words[0]
            named.setdefault(name, set()).update(re.findall(r"(?<=\s)--[a-z][a-z-]*", line.partition(" -- ")[0]))
    wrong = []
    for name, options in named.items():
        if options and name != "run":  # others are torchrun's
            with pytest.raises(SystemExit, match="0"):
                main([*name.split(), "--help"])
            known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
            wrong += [f"{name} {one}" for one in options - known]
    assert not wrong


@pytest.mark.process
@pytest.mark.skipif(not find_spec("codespell_lib"), reason="codespell is missing: pip install codespell")
def test_codespell_finds_nothing():
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "GLOSSARY.md", "src/foretrain", "examples", "tools")
    files = [str(path) for path in (*PAGES, *(ROOT / name for name in names))]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *files], capture_output=True, text=True, check=False)
    assert not done.stdout
