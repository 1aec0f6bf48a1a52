"""Make a virtual environment for foretrain, and say first how much that downloads; ``make setup`` calls it.

    python3.12 tools/environment.py .venv --torch 'torch==2.15.0' --pip-args '--index-url https://…' foretrain[dev]

A torch that this Python already has is used as it is if it fulfils ``--torch``: a file ``.pth`` in the environment
names the folder where it is, behind the environment's own packages. So it also works where this Python is that of
another environment, whose packages ``venv --system-site-packages`` would not see. pip decides what is missing, never
changes what is outside, and puts what is too old there into the environment.

Sizes are those of the files that pip would download. pip may have some of them in its cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
POINTER = "of_the_chosen_python.pth"
"""The file in an environment's packages that leads to those of the Python it was made with."""
LARGE = 1 << 30
"""Bytes from which it is said how to get less."""


def main() -> None:
    """Make the environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("extras", nargs="?", default="dev", help="of foretrain, which is installed as it is here")
    parser.add_argument("--torch", default="torch", help="the requirement, e.g. torch==2.15.0")
    parser.add_argument("--pip-args", default="", help="for every call of pip, e.g. '--index-url https://…'")
    given = parser.parse_args()
    made = create(given.folder)
    options = shlex.split(given.pip_args)
    wanted = [given.torch, f"--editable={ROOT}[{given.extras}]"]
    print(report(given.folder, downloads(made, wanted, options)), flush=True)
    install(made, wanted, options)


def create(folder: Path, python: str = sys.executable) -> Path:
    """Make an environment of ``python`` with a new pip, unless it is there, and return its Python."""
    made = folder / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        # An older one downloads everything to tell what it would download.
        pip(made, "install", "--quiet", "--upgrade", "pip")
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


def downloads(python: Path, wanted: Sequence[str], options: Sequence[str] = ()) -> dict[str, int | None]:
    """Return what ``pip install`` would download, by name and version, with bytes; None where nobody tells them."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "report.json")
        told = ["install", "--quiet", "--dry-run", "--report", str(path)]
        # Reads of wheels only what they depend on, where the index does not tell it.
        pip(python, *told, "--use-feature=fast-deps", *options, *wanted, env={"PYTHONWARNINGS": "ignore"}, quiet=True)
        items = json.loads(path.read_text(encoding="utf-8"))["install"]
    urls = {
        f"{item['metadata']['name']} {item['metadata']['version']}": item["download_info"]["url"]
        for item in items
        if "dir_info" not in item["download_info"]
    }
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
    lines = [f"{folder}: pip will download {_readable(total)} in {len(known)} files, unless it has them in its cache"]
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


def install(python: Path, wanted: Sequence[str], options: Sequence[str] = ()) -> None:
    """Install torch first: what it brings is what the rest has to fit."""
    pip(python, "install", "--quiet", *options, wanted[0])
    pip(python, "install", "--quiet", *options, *wanted)


def pip(python: Path, *arguments: str, env: dict[str, str] | None = None, quiet: bool = False) -> None:
    """Run an environment's pip; end the program as it ends if it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, check=False, env=os.environ | (env or {}), capture_output=quiet, text=True, encoding="utf-8"
    )
    if done.returncode:
        sys.exit(f"{done.stderr or ''}\nfailed: {shlex.join(command)}")


if __name__ == "__main__":
    main()
