"""Every number of the benchmark page names a command that the repository has, a date and a machine."""

import json
import re
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what ")
]


def program(command: str) -> Path:
    """Return the file that a row's command runs."""
    found = re.match(r"`(?:python|foretrain \w+) ([\w/]+\.py)", command)
    assert found, f"{command} names no program"
    return ROOT / found[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_a_program_of_the_repository_a_date_and_a_machine(row):
    what, result, command, day, machine = row

    assert what
    assert result
    assert program(command).is_file(), command
    assert date.fromisoformat(day)
    assert machine in {"EPYC", "Xeon", "any"}


def test_options_in_commands_exist():
    for _, _, command, _, _ in ROWS:
        for option in re.findall(r"--\w+", command):
            text = program(command).read_text(encoding="utf-8")
            text += (ROOT / "benchmarks" / "measure.py").read_text(encoding="utf-8")
            assert option in text, command


def test_make_bench_runs_every_benchmark_of_the_page():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    by_hand = {"benchmarks/attach.py", "benchmarks/compatibility.py", "examples/tolerance/digits.py"}
    introduction = PAGE.partition("\n## ")[0]
    for name in by_hand:
        assert name in introduction, name
    for name in {program(row[2]).relative_to(ROOT).as_posix() for row in ROWS} - by_hand:
        assert name in recipe, name


@pytest.mark.parametrize("name", ["compatibility", "third-party"])
def test_shares_of_scripts_that_run_are_those_of_their_pages(name):
    page = (ROOT / "docs" / "live" / f"{name}.md").read_text(encoding="utf-8")
    share = re.search(r"^\d+ of \d+", page, re.MULTILINE)
    row = next(row for row in ROWS if f"{{doc}}`live/{name}`" in row[1])

    assert share
    assert row[1].startswith(f"{share[0]}: ")


def test_the_share_of_public_commands_is_that_of_the_outcomes_kept():
    page = (ROOT / "docs" / "live" / "third-party.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "benchmarks" / "data" / "third_party.json").read_text(encoding="utf-8")).values()
    tried = [one for one in kept if not one["skipped"]]
    works = sum(one["step"] is not None for one in tried)

    assert page.splitlines()[2].startswith(f"{works} of {len(tried)} commands")


def test_numbers_of_the_readme_stand_on_the_page_too():
    rows = re.findall(r"^\| .* \| `(?:python|foretrain) .*$", README, re.MULTILINE)
    assert rows
    page = set(re.findall(r"\d[\d.,]*", PAGE))
    for row in rows:
        result = row.split("|")[2]
        assert set(re.findall(r"\d[\d.,]*", result)) <= page, row


def test_the_readme_says_how_far_off_single_forecasts_are():
    page = (ROOT / "docs" / "live" / "accuracy.md").read_text(encoding="utf-8")
    of_runs = page.partition("\n| family, GPU ")[2].partition("\n\n")[0]
    largest = max(abs(float(line.split("|")[6].strip(" %"))) for line in of_runs.splitlines()[2:])
    said = re.search(r"\[single runs\]\(docs/live/accuracy.md\) are off by up to (\d+) %", README)

    assert said
    assert int(said[1]) == round(largest)


def test_the_readme_fits_a_screen_or_two():
    assert len(README.splitlines()) < 120


def test_every_link_of_the_readme_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if not link.startswith("http")]
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]
