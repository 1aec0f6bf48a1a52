"""Other people's training scripts on simulated GPUs: commands of public repositories, in checkouts that are there.

``compatibility.py --third-party`` runs the rows of ``compatibility/third_party.toml``. Nothing is fetched: a row whose
checkout or packages are absent is skipped, and says what would be needed. A row runs in a copy of its checkout, since
scripts write beside themselves; data that a repository would download is made by ``compatibility/third_party_data.py``.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import machine
from packaging.requirements import Requirement

HERE = Path(__file__).parent
TABLE = HERE / "compatibility/third_party.toml"
DATA = HERE / "compatibility/third_party_data.py"
KEPT = HERE / "data/third_party.json"
"""Outcomes of earlier runs: a row is replaced when it runs again, and the page is written from all."""
PAGE = HERE.parent / "docs/live/third-party.md"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled"}
_LIVE = re.compile(
    r"^foretrain: (?:starting again with ([\d,]+) live|[\d,]+ ranks in ([\d,]+) class|all ([\d,]+))", re.M
)


@dataclass(frozen=True)
class Source:
    """A repository.

    Attributes:
        name: of the checkout's folder in ``--sources``.
        repository: owner and name on GitHub.
        commit: that the rows were written for, in full.
        words: what ``{NAME}`` in its commands stands for.
        note: what else a reader of the page must know.
    """

    name: str
    repository: str
    commit: str
    words: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def remedy(self) -> str:
        """Return the command that makes the checkout, for people to run."""
        return f"git clone https://github.com/{self.repository} {self.name}; git -C {self.name} checkout {self.commit}"


@dataclass(frozen=True)
class Row:
    """A command of a repository.

    Attributes:
        source: name of its source.
        feature: what it shows.
        command: as the repository's README gives it, behind torchrun and its options.
        shorter: further arguments that end it soon, or replace data that would be downloaded.
        then: further arguments of a second run, which begins with what the first has left; the outcome is that of the
            second, if the first worked. Empty where there is none.
        folder: of the checkout, where the command is typed.
        cluster: simulated.
        options: of ``foretrain simulate``.
        needs: packages that it imports, as pip wants them.
        prepare: kind of data and its arguments, see ``third_party_data.py``.
        environment: that the README sets.
        limit: seconds after which the simulation is taken to hang.
        why: it fails, where it is known to.
    """

    source: str
    feature: str
    command: str
    shorter: str = ""
    then: str = ""
    folder: str = "."
    cluster: str = "dgx-h100:1"
    options: str = ""
    needs: Sequence[str] = ()
    prepare: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limit: int = 900
    why: str = ""

    @property
    def name(self) -> str:
        """Return what tells it from all others."""
        return f"{self.source}: {self.feature}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a row.

    Attributes:
        step: forecast of an iteration, s; None where it failed or was skipped.
        error: the first line of what went wrong.
        skipped: what is absent, and what to do.
        seconds: that the simulation took.
        live: ranks that ran as processes.
        commit: of the checkout; empty where it is no git checkout.
        date, python, torch, foretrain, cpu: when, with what and where it was simulated; foretrain by its commit.
    """

    step: float | None = None
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0
    live: int = 0
    commit: str = ""
    date: str = ""
    python: str = ""
    torch: str = ""
    foretrain: str = ""
    cpu: str = ""

    @property
    def verdict(self) -> str:
        """Return the outcome in words, for the terminal."""
        return f"skipped: {self.skipped}" if self.skipped else f"fails: {self.error}" if self.error else "works"


def table(path: Path = TABLE) -> tuple[dict[str, Source], list[Row]]:
    """Return the sources by name, and all rows, in the order of the file."""
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = {name: Source(name, **values) for name, values in read["sources"].items()}
    return sources, [Row(**row) for row in read["rows"]]


def untried(path: Path = TABLE) -> list[tuple[str, str]]:
    """Return what was not tried, and why."""
    return [(one["what"], one["why"]) for one in tomllib.loads(path.read_text(encoding="utf-8"))["untried"]]


def outcome_of(row: Row, source: Source, checkouts: Path) -> Outcome:
    """Simulate ``row`` in a copy of its checkout, a folder in ``checkouts``."""
    checkout = checkouts / source.name
    if not checkout.is_dir():
        return Outcome(skipped=f"no folder {checkout}; in {checkouts}: {source.remedy}")
    if missing := [need for need in row.needs if not _installed(need)]:
        return Outcome(skipped=f"pip install {shlex.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="third-party-") as scratch:
        copy = Path(scratch, source.name)
        shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        command = f"{row.command} {row.shorter}".format_map(source.words)
        folder, environment = copy / row.folder, _environment(row)
        if error := _prepare(row, folder, environment):
            return Outcome(error=error)
        for script in filter(None, (command, row.then and f"{command} {row.then}")):
            outcome = _simulated(row, shlex.split(script), folder, environment, _commit(checkout))
            if outcome.error:
                break
        return outcome


def _installed(need: str) -> bool:
    """Return whether a package is installed, in a version that fits."""
    wanted = Requirement(need)
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _environment(row: Row) -> dict[str, str]:
    # As in an activated environment: what a script starts is of this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | OFFLINE | {"PATH": path} | dict(row.environment)
    if "PYTHONPATH" in row.environment:
        environment["PYTHONPATH"] = os.pathsep.join([row.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    return environment


def _prepare(row: Row, folder: Path, environment: Mapping[str, str]) -> str:
    """Make the data of ``row``; return what went wrong."""
    for data in row.prepare:
        made = subprocess.run(
            [sys.executable, str(DATA), *shlex.split(data)], cwd=folder, env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            return f"{data}: {first_error(made.stderr)}"
    return ""


def _simulated(row: Row, script: Sequence[str], folder: Path, environment: Mapping[str, str], commit: str) -> Outcome:
    told = folder / "foretrain.json"
    command = [sys.executable, "-m", "foretrain", "simulate", "--cluster", row.cluster, "--json", str(told)]
    command += [*shlex.split(row.options), "--", *script]
    here = machine()
    seen = Outcome(
        commit=commit,
        foretrain=str(here["commit"]),
        cpu=f"{here['cores']} cores of {here['cpu']}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        python=platform.python_version(),
        torch=version("torch").partition("+")[0],
    )
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=row.limit,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        output = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
        return replace(seen, error=f"no end after {row.limit} s", seconds=row.limit, live=_live_ranks(output))
    output = done.stderr + done.stdout
    seen = replace(seen, seconds=round(time.perf_counter() - began, 1), live=_live_ranks(output))
    if done.returncode:
        return replace(seen, error=first_error(output))
    return replace(seen, step=json.loads(told.read_text(encoding="utf-8"))["iteration_time"])


def _live_ranks(output: str) -> int:
    """Return the number of ranks that were live in the end, as the command has told."""
    found = _LIVE.findall(output)
    return int(next(filter(None, found[-1])).replace(",", "")) if found else 1


def _commit(checkout: Path) -> str:
    """Return what is checked out; empty where git does not know."""
    if not (checkout / ".git").exists():
        return ""
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def first_error(text: str) -> str:
    """Return the line of the last start's last traceback that names the exception, or the last line of all."""
    lines = text[max(text.rfind("foretrain: starting again"), 0) :].splitlines()
    for at, line in reversed(list(enumerate(lines))):
        if line.startswith("Traceback"):
            for after in lines[at + 1 :]:
                if after and not after.startswith(" "):
                    return after
    told = [line for line in lines if line.startswith("foretrain: ") and "warning" not in line]
    return next((line for line in reversed(told or lines) if line.strip()), "")


def run(checkouts: Path, only: str, kept: Path = KEPT) -> dict[str, Outcome]:
    """Simulate the rows whose names begin with ``only``, print and keep each outcome; return all that are kept.

    Ends the program if there are none, or no such folder.
    """
    if not checkouts.is_dir():
        sys.exit(f"--sources: there is no folder '{checkouts}'; name the one that the checkouts are in")
    sources, rows = table()
    wanted = [row for row in rows if row.name.startswith(only)]
    if not wanted:
        sys.exit(f"--only: no row begins with '{only}'; they begin with one of {', '.join(sources)}")
    for row in wanted:
        outcome = outcome_of(row, sources[row.source], checkouts)
        print(_told(row, outcome, sources[row.source]), flush=True)
        outcomes = read_kept(kept)
        if outcome.skipped and row.name in outcomes:
            continue  # what was seen where it could run
        outcomes[row.name] = outcome
        told = {row.name: asdict(outcomes[row.name]) for row in rows if row.name in outcomes}
        kept.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return read_kept(kept)


def _told(row: Row, outcome: Outcome, source: Source) -> str:
    """Return what the terminal shows of a row."""
    live = "" if outcome.skipped else f"{outcome.live} live"
    seen = f"{_forecast(outcome):>11} {outcome.seconds:6.0f} s {live:>9}"
    return f"{row.name:62} {seen}  {outcome.verdict}{_elsewhere(outcome, source)}"


def read_kept(kept: Path = KEPT) -> dict[str, Outcome]:
    """Return the outcomes that were kept, by the rows' names."""
    if not kept.exists():
        return {}
    return {name: Outcome(**values) for name, values in json.loads(kept.read_text(encoding="utf-8")).items()}


def share(outcomes: Mapping[str, Outcome]) -> float:
    """Return the share of rows that work, of those that were not skipped."""
    tried = [outcome for outcome in outcomes.values() if not outcome.skipped]
    return sum(outcome.step is not None for outcome in tried) / max(len(tried), 1)


def markdown(outcomes: Mapping[str, Outcome]) -> str:
    """Return the page of the documentation."""
    sources, rows = table()
    shown = [(row, outcomes.get(row.name, Outcome(skipped="never run"))) for row in rows]
    tried = [(row, outcome) for row, outcome in shown if not outcome.skipped]
    works = sum(outcome.step is not None for _, outcome in tried)
    stacks = sorted({f"Python {one.python} and PyTorch {one.torch}" for _, one in tried})
    days = sorted({one.date for _, one in tried})
    when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    where = sorted({f"on {one.cpu or 'a machine that is not recorded'}" for _, one in tried})
    by = sorted({f"`{one.foretrain}`" if one.foretrain else "one that is not recorded" for _, one in tried})
    skipped = f" {len(shown) - len(tried)} more were not tried." if len(shown) > len(tried) else ""
    lines = [
        "# Other people's code",
        "",
        f"{works} of {len(tried)} commands of public repositories run on simulated GPUs, as these document them,",
        f"with {', '.join(stacks)}, simulated {when} {', '.join(where)}.",
        f"Commit of foretrain: {', '.join(by)}.{skipped}",
        "What is in brackets is added, and ends them sooner or sets what is left open. Data that they would download",
        "is random. The step is the forecast of one iteration; the time is that of the whole simulation, beside other",
        "processes; live ranks ran as processes, and stand for the others. Nothing is fetched: checkouts lie in a",
        "folder. This page is written by",
        "",
        "```console",
        "$ python benchmarks/compatibility.py --third-party --sources DIR --markdown",
        "```",
        "",
    ]
    for name, source in sources.items():
        mine = [(row, outcome) for row, outcome in shown if row.source == name]
        lines += [
            f"## {source.repository}",
            "",
            f"Commit `{source.commit[:12]}`. {source.note}".strip(),
            *_packages([row for row, _ in mine]),
            *(f"`{{{word}}}` stands for `{text}`." for word, text in source.words.items()),
            "",
            "| what | command | cluster | | step | live ranks | time |",
            "| --- | --- | --- | --- | ---: | ---: | ---: |",
        ]
        lines += [_line(row, outcome, source) for row, outcome in mine]
        lines.append("")
    lines += ["## What was not tried", "", *(f"- {what}: {why}" for what, why in untried()), ""]
    failing = [f"- {row.name}: {_why(row, outcome)}" for row, outcome in shown if outcome.step is None]
    lines += ["## What does not run", "", *failing, ""] if failing else []
    return "\n".join(lines)


def _line(row: Row, outcome: Outcome, source: Source) -> str:
    settings = " ".join(f"{name}={value}" for name, value in row.environment.items())
    command = f"`{' '.join(filter(None, (settings, row.command)))}`" + (f" [`{row.shorter}`]" if row.shorter else "")
    command += f", then with `{row.then}`, too" if row.then else ""
    verdict = "works" if outcome.step is not None else "not tried" if outcome.skipped else "fails"
    verdict += _elsewhere(outcome, source)
    cluster = f"{row.cluster} `{row.options}`" if row.options else row.cluster
    seen = ("", "") if outcome.skipped else (f"{outcome.live}", f"{outcome.seconds:.0f} s")
    command = command.replace("{{", "{").replace("}}", "}").replace("|", "\\|")
    cells = (row.feature, command, cluster, verdict, _forecast(outcome), *seen)
    return f"| {' | '.join(cells)} |"


def _packages(rows: Sequence[Row]) -> list[str]:
    """Return a line that says what a source's rows need, as one types it."""
    needs = dict.fromkeys(need for row in rows for need in row.needs)
    return [f"`pip install {shlex.join(needs)}`"] if needs else []


def _elsewhere(outcome: Outcome, source: Source) -> str:
    """Return which commit was simulated, where it is not the source's."""
    if outcome.skipped or outcome.commit == source.commit:
        return ""
    return f" at {outcome.commit[:12]}" if outcome.commit else " at an unknown commit"


def _why(row: Row, outcome: Outcome) -> str:
    seen = f"not tried ({outcome.skipped})" if outcome.skipped else f"`{outcome.error.rstrip('.')}`"
    if outcome.error.startswith("no end") and outcome.seconds < row.limit:
        seen += f", with a limit that is now {row.limit:,} s"
    return f"{row.why} ({seen})" if row.why else seen


def _forecast(outcome: Outcome) -> str:
    return "" if outcome.step is None else f"{outcome.step * 1e3:.2f} ms"
