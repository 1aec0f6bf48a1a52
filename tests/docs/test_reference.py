"""The reference and the pages of policies leave nothing out."""

import ast
import re
from pathlib import Path

import pytest

import foretrain as ft
from foretrain import errors
from foretrain.cli import main
from foretrain.schedule import POLICIES
from tests.processes import module_at

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


def test_tables_of_options_are_what_help_says():
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert module_at(DOCS / "commands.py").rewritten(page) == page, "run: python docs/commands.py"


def test_every_command_has_a_section():
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = re.findall(r"(?m)^###? foretrain (.+)$", page)
    assert sorted(sections) == sorted([*COMMANDS, *LAB, *TOPOLOGY, *ACCURACY, "lab", "topology", "accuracy"])


@pytest.mark.parametrize(
    ("name", "before"), [("reports.md", "writes one page:"), ("reference/cli.md", "These commands have it:")]
)
def test_a_page_names_every_command_that_writes_a_report(name, before, capsys):
    page = (DOCS / name).read_text(encoding="utf-8")
    listed = re.findall(r"`([a-z -]+)`", page.split(before)[1].split(".")[0])
    leaves = [*COMMANDS, *LAB, *TOPOLOGY, *ACCURACY]
    assert sorted(listed) == sorted(name for name in leaves if "--html" in help_of(name, capsys))


def test_the_overview_leaves_no_command_out(capsys):
    main([])
    listed = re.findall(r"^  (\S+) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted([*COMMANDS, "lab", "topology", "accuracy"])


@pytest.mark.parametrize(("group", "known"), [("lab", LAB), ("topology", TOPOLOGY), ("accuracy", ACCURACY)])
def test_no_command_of_a_group_is_left_out(group, known, capsys):
    listed = re.findall(r"• (\w+)", help_of(group, capsys))
    assert sorted(listed) == sorted(name.split()[-1] for name in known)


def test_every_environment_variable_of_ours_is_in_the_reference():
    page = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    sources = (DOCS.parent / "src").rglob("*.py")
    names = {name for path in sources for name in re.findall(r'"(FORETRAIN_(?!LAB)[A-Z]+)"', path.read_text("utf-8"))}
    assert len(names) > 3
    assert not {name for name in names if f"`{name}`" not in page}


def test_messages_of_the_troubleshooting_page_exist():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"(?m)^\| `([^`]+)` \|", page.split("## By message")[1].split("## By error")[0])
    texts = (path.read_text("utf-8") for path in (DOCS.parent / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", "".join(texts))  # parts of one literal
    assert len(messages) > 10
    assert not [message for message in messages if message not in source]


def test_every_policy_has_a_page():
    for name in POLICIES.keys() - {"tic"}:
        page = (DOCS / "policies" / f"{name}.md").read_text(encoding="utf-8")
        for part in ("## How it decides", "## Knobs", "## Source", "## Departures", "## When it wins, when it loses"):
            assert part in page, name


def homes_and_public_names() -> tuple[dict[str, str], set[str]]:
    """Return where each imported name comes from, and all names in ``__all__``, both without importing anything."""
    homes, public = {}, set()
    for path in (DOCS.parent / "src").rglob("*.py"):
        module = ".".join(path.relative_to(DOCS.parent / "src").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module=str(origin), names=names):
                    homes |= {f"{module}.{one.asname or one.name}": f"{origin}.{one.name}" for one in names}
                case ast.Assign(targets=[ast.Name("__all__")], value=value) if "stand_ins" not in module:
                    public |= {f"{module}.{name}" for name in ast.literal_eval(value)}
    return homes, public


def documented() -> set[str]:
    """Return the full names that the reference's directives document."""
    found = set()
    for page in ("api.md", "errors.md"):
        text = (DOCS / "reference" / page).read_text(encoding="utf-8")
        for kind, name, members in re.findall(r"(?m)^\.\. auto(\w+):: (\S+)(?:\n {3}:members: (.+))?", text):
            found |= {name, *(f"{name}.{member}" for member in members.split(", ") if kind == "module")}
    return found


def test_every_public_name_is_in_the_reference():
    homes, public = homes_and_public_names()

    def home(name: str) -> str:
        return home(homes[name]) if homes.get(name, name) != name else name

    assert len(public) > 200
    assert not {home(name) for name in public} - {home(name) for name in documented()}


def test_every_name_of_the_face_is_in_its_table():
    table = (DOCS / "reference" / "api.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert not {name for name in ft.__all__ if f"`ft.{name}`" not in table}


HANDLED = {"FoldingInvalid"}
"""Errors that never leave the library: the simulation starts again, with other live ranks."""


def errors_of_ours() -> set[str]:
    """Return the public subclasses of ForetrainError in all modules, whether they are imported or not."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in (DOCS.parent / "src" / "foretrain").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found, more = set(), {"ForetrainError"}
    while more:
        found |= more
        more = {name for name, above in bases.items() if above & found} - found
    return {name for name in found if not name.startswith("_")} - HANDLED


def test_every_error_is_in_the_reference_and_in_the_tree():
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^\.\. autoclass:: \S+\.(\w+)$", page)
    listed += re.search(r":members: (.+)", page)[1].split(", ")
    tree = re.findall(r"(?:[├└]── |^    )(\w+)(?=  |$)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(tree) == sorted(errors_of_ours())
