"""Pages are in tables of contents, links lead somewhere, and console blocks name commands and options that exist."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from foretrain.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not {"_figures", "_build"} & set(path.parts)]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


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


def test_tables_of_contents_of_the_first_page_have_captions():
    captions = re.findall(r":caption: (\w+)", TEXTS[DOCS / "index.md"])
    assert captions == ["Start", "Guides", "Concepts", "Reference", "Results", "Contributing"]


def test_links_between_pages_lead_somewhere():
    broken = []
    for path, text in TEXTS.items():
        targets = re.findall(r"\{doc\}`(?:[^`<]*<)?([^`<>]+)>?`", text)
        for one in targets:
            base = DOCS if one.startswith("/") else path.parent
            broken += [f"{path.name}: {one}"] * (not (base / f"{one.lstrip('/')}.md").exists())
        files = re.findall(r"\]\((?!http|#|mailto|…)([^)#\s]+)", text)
        broken += [f"{path.name}: {one}" for one in files if not (path.parent / one).exists()]
        pictures = re.findall(r"```\{figure\} (\S+)", text)
        broken += [f"{path.name}: {one}" for one in pictures if not (path.parent / one).exists()]
    assert not broken


def commands() -> dict[str, set[str]]:
    """Return the options of each command that a console block names, by command."""
    found: dict[str, set[str]] = {}
    for text in TEXTS.values():
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            for line in re.findall(r"^\$ foretrain (.+)$", block.replace("\\\n", " "), re.MULTILINE):
                words = shlex.split(line.partition(" -- ")[0].partition(" | ")[0], comments=True)
                if words and not words[0].startswith("-"):
                    options = {word.partition("=")[0] for word in words[1:] if re.match(r"--[a-z]", word)}
                    name = " ".join(words[:2]) if words[0] in ("lab", "topology") else words[0]
                    found.setdefault(name, set()).update(options)
    return found


def test_console_blocks_name_commands_and_options_that_exist(capsys):
    named = commands()
    assert len(named) > 10
    wrong = []
    for name, options in sorted(named.items()):
        if name == "help":
            continue
        with pytest.raises(SystemExit, match="0"):
            main([*name.split(), "--help"])
        known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) | {"--quiet"}
        wrong += [f"{name} {one}" for one in options - known]
    assert not wrong


@pytest.mark.process
@pytest.mark.skipif(not find_spec("codespell_lib"), reason="codespell is missing: pip install codespell")
def test_codespell_finds_nothing():
    files = [str(path) for path in (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *files], capture_output=True, text=True, check=False)
    assert not done.stdout
