"""Make a virtual environment for foretrain, and say first how much that downloads; ``make setup`` calls it.

    python3.12 tools/environment.py .venv --torch 'torch==2.15.0' --pip-args '--index-url https://…' foretrain[dev]

A torch that this Python already has is used as it is if it fulfils ``--torch``: a file ``.pth`` in the environment
names the folder where it is, behind the environment's own packages. So it also works where this Python is that of
another environment, whose packages ``venv --system-site-packages`` would not see. pip decides what is missing, never
changes what is outside, and puts what is too old there into the environment.

Without such a torch, uv installs, in a fourth of pip's time: it looks up, downloads and unpacks many packages at once,
and compiles none of the thousands of files that are never imported. It is told pip's settings. Where it cannot be
had, knows one of them not, or fails, pip does all.

Sizes are those of the files that would be downloaded; some of them may be in the installer's cache.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
POINTER = "of_the_chosen_python.pth"
"""The file in an environment's packages that leads to those of the Python it was made with."""
LARGE = 1 << 30
"""Bytes from which it is said how to get less."""
_VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
"""Settings of pip that are variables of uv."""
_WITHOUT_EFFECT = {"disable-pip-version-check", "no-input", "progress-bar", "require-virtualenv", "root-user-action"}
"""Settings of pip that do not change what is installed."""


@dataclass(frozen=True)
class Plan:
    """What is to be installed, and how."""

    files: dict[str, int | None]
    """Bytes to download, by name and version; None where nobody tells them."""
    commands: tuple[Sequence[str], ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def install(self) -> None:
        """Run the commands; end the program if one fails."""
        for command in self.commands:
            run(command, env=self.env)


def main() -> None:
    """Make the environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("extras", nargs="?", default="dev", help="of foretrain, which is installed as it is here")
    parser.add_argument("--torch", default="torch", help="the requirement, e.g. torch==2.15.0")
    parser.add_argument("--pip-args", default="", help="for every call of pip, e.g. '--index-url https://…'")
    given = parser.parse_args()
    made = create(given.folder)
    plan = planned(made, [given.torch, f"--editable={ROOT}[{given.extras}]"], shlex.split(given.pip_args))
    print(report(given.folder, plan.files), flush=True)
    plan.install()


def create(folder: Path, python: str = sys.executable) -> Path:
    """Make an environment of ``python`` with a new pip, unless it is there, and return its Python."""
    made = folder / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        # An older one downloads everything to tell what it would download.
        run(pip(made, "install", "--quiet", "--upgrade", "pip"))
    for path in folder.glob(f"lib/python*/site-packages/{POINTER}"):
        path.unlink()
    if python == sys.executable and (packages := packages_with_torch()):
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (site / POINTER).write_text("".join(f"{one}\n" for one in packages), encoding="utf-8")
    return made


def packages_with_torch() -> list[str]:
    """Return the folders of packages of this Python, the one with torch first; none if it has no torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    home = str(Path(found.origin).parents[1])
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and path != home]
    return [home, *others]


def planned(python: Path, wanted: Sequence[str], options: Sequence[str] = ()) -> Plan:
    """Return how ``wanted`` is installed: by uv, or else by pip with ``options``; end the program if neither can."""
    return planned_by_uv(python, wanted, options) or planned_by_pip(python, wanted, options)


def planned_by_pip(python: Path, wanted: Sequence[str], options: Sequence[str]) -> Plan:
    """Return pip's plan. It installs torch first: what that brings is what the rest has to fit."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "report.json")
        told = ["install", "--quiet", "--dry-run", "--report", str(path)]
        # Reads of wheels only what they depend on, where the index does not tell it.
        command = pip(python, *told, "--use-feature=fast-deps", *options, *wanted)
        run(command, env={"PYTHONWARNINGS": "ignore"}, quiet=True)
        items = json.loads(path.read_text(encoding="utf-8"))["install"]
    urls = {
        f"{item['metadata']['name']} {item['metadata']['version']}": item["download_info"]["url"]
        for item in items
        if "dir_info" not in item["download_info"]
    }
    installs = (pip(python, "install", "--quiet", *options, *chosen) for chosen in (wanted[:1], wanted))
    return Plan(sizes(urls), tuple(installs))


def planned_by_uv(python: Path, wanted: Sequence[str], options: Sequence[str]) -> Plan | None:
    """Return uv's plan, with the versions of a file in the environment; None where pip has to do it."""
    if any(python.parents[1].glob(f"lib/python*/site-packages/{POINTER}")):
        return None  # uv looks only at an environment's own packages
    listed = subprocess.run(pip(python, "config", "list"), check=True, capture_output=True, text=True).stdout
    settings = as_uv(listed)
    if settings is None or _status(pip(python, "install", *options, "uv")):
        return None
    flags, env = settings
    uv, lock = str(python.with_name("uv")), python.parents[1] / "pylock.toml"
    # Of all indexes the newest version, as pip does it.
    asked = [*flags, *options, "--quiet", "--python", str(python), "--index-strategy", "unsafe-best-match"]
    found = subprocess.run(
        [uv, "pip", "compile", *asked, "--output-file", str(lock), "-"],
        input="\n".join(wanted), check=False, capture_output=True, text=True, env=os.environ | env,
    )  # fmt: skip
    if found.returncode:
        print(f"uv: {found.stderr.strip()}\npip is asked instead", flush=True)
        return None
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    there = {f"{_normal(one.name)} {one.version}" for one in importlib.metadata.distributions(path=[str(site)])}
    files: dict[str, int | None] = {}
    urls: dict[str, str] = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]:
        if "directory" in package or (name := f"{package['name']} {package['version']}") in there:
            continue
        file = (package.get("wheels") or [package["sdist"]])[0]
        files[name], urls[name] = file.get("size"), file["url"]
    files |= sizes({name: url for name, url in urls.items() if files[name] is None})
    return Plan(files, ([uv, "pip", "install", *asked, "--requirement", str(lock)],), env)


def _status(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def as_uv(settings: str) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments and the environment of uv for what ``pip config list`` printed; None if it has no such."""
    said: dict[str, str] = {}
    # What is said for one command holds before what is said for all, and a variable before both.
    for line in sorted(settings.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install."))):
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            said[name] = ast.literal_eval(value)
    arguments: list[str] = []
    environment: dict[str, str] = {}
    for name, value in said.items():
        if name in ("index-url", "extra-index-url", "find-links", "constraint"):
            arguments += [word for each in value.split() for word in (f"--{name}", each)]
        elif name in _VARIABLES:
            environment[_VARIABLES[name]] = value
        elif name not in _WITHOUT_EFFECT:
            return None
    return arguments, environment


def sizes(urls: Mapping[str, str]) -> dict[str, int | None]:
    """Return the bytes of files, by name."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(urls, pool.map(size, urls.values()), strict=True))


def size(url: str) -> int | None:
    """Return the bytes of a file, which are none to download if it is on this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return 0
    certificates = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        asked = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(asked, timeout=30, context=certificates) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def report(folder: Path, files: dict[str, int | None], largest: int = 5) -> str:
    """Return how much will be downloaded, the largest first."""
    known = {name: bytes_ for name, bytes_ in files.items() if bytes_}
    total = sum(known.values())
    lines = [f"{folder}: {_readable(total)} in {len(known)} files will be downloaded, unless they are in the cache"]
    biggest = sorted(known, key=lambda name: -known[name])[:largest]
    lines += [f"  {_readable(known[name]):>9}  {name}" for name in biggest]
    if unknown := [name for name, bytes_ in files.items() if bytes_ is None]:
        lines.append(f"  of unknown size: {', '.join(unknown)}")
    if total > LARGE:
        lines.append(
            "  most of it is CUDA, which nothing here needs; for a build without: "
            "PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
        )
    return "\n".join(lines)


def _readable(bytes_: int) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def pip(python: Path, *arguments: str) -> list[str]:
    """Return the command of an environment's pip."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]


def run(command: Sequence[str], env: Mapping[str, str] | None = None, quiet: bool = False) -> None:
    """Run a command; end the program as it ends if it fails."""
    done = subprocess.run(
        command, check=False, env={**os.environ, **(env or {})}, capture_output=quiet, text=True, encoding="utf-8"
    )
    if done.returncode:
        sys.exit(f"{done.stderr or ''}\nfailed: {shlex.join(command)}")


if __name__ == "__main__":
    main()
