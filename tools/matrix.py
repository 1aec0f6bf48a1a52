"""Test foretrain with several versions of torch and Python: the smoke tests and the simulated examples in each.

    python tools/matrix.py 2.14.1/3.11 2.15.0/3.12     versions of torch and Python; ``make test-matrix`` names them
    python tools/matrix.py --sizes 2.15.0/3.13         only says what that would download

Each pair gets an environment of its own, ``.matrix/torch2.15.0-py3.12``, which is kept: a CUDA build of torch takes
4 to 6 GB there. All sizes are printed before anything is downloaded. A pair whose Python is not on this machine, or for
which there are no wheels, is reported as such. Exits with 1 if a test or an example failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import environment

ROOT = environment.ROOT
EXTRAS = "torch,report,tune,sweep,dask,examples,test"
EXAMPLES = {
    "cnn_ddp.py": "star:4@25Gbps,device=A100",
    "gpt_fsdp2.py": "dgx-h100:2",
    "moe_all_to_all.py": "dgx-h100:1",
    "pipeline_1f1b.py": "dgx-a100:1",
    "tensor_parallel.py": "dgx-h100:1",
}
"""Each example of ``examples/simulate`` and the cluster that it is simulated on."""


@dataclass
class Pair:
    """One version of torch with one of Python, and what became of it."""

    torch: str
    python: str
    folder: Path
    found: list[str] = field(default_factory=list)
    failed: bool = False

    @property
    def name(self) -> str:
        """As it is given on the command line."""
        return f"{self.torch}/{self.python}"

    @property
    def wanted(self) -> list[str]:
        """What pip is asked for."""
        return [f"torch=={self.torch}", f"--editable={ROOT}[{EXTRAS}]"]

    def note(self, text: str, failed: bool = False) -> None:
        """Keep a finding, and say it at once."""
        self.found.append(text)
        self.failed = self.failed or failed
        print(f"{self.name}: {text}", flush=True)


def main() -> None:
    """Test all pairs and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("pairs", nargs="+", help="torch/Python, e.g. 2.15.0/3.12")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    parser.add_argument("--sizes", action="store_true", help="say what would be downloaded, and stop")
    parser.add_argument("--pip-args", default="", help="for every call of pip")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    given = parser.parse_args()
    options = shlex.split(given.pip_args)
    pairs = [pair(text, given.folder) for text in given.pairs]
    ready = [(one, *found) for one in pairs if (found := prepared(one, options))]
    for one, python, plan in [] if given.sizes else ready:
        test(one, python, plan, given.workers)
    width = max(len(one.name) for one in pairs)
    print("\n" + "\n".join(f"{one.name:{width}}  {'; '.join(one.found)}" for one in pairs))
    passed = sum(not one.failed for one in pairs)
    print(f"\n{passed} passed, {len(pairs) - passed} failed")
    sys.exit(1 if passed < len(pairs) else 0)


def pair(text: str, folder: Path) -> Pair:
    """Read one from the command line."""
    torch, _, python = text.partition("/")
    if not (torch and python):
        sys.exit(f"{text!r} is no pair of versions; write e.g. 2.15.0/3.12")
    return Pair(torch, python, folder / f"torch{torch}-py{python}")


def prepared(one: Pair, options: Sequence[str]) -> tuple[Path, environment.Plan] | None:
    """Make the environment, empty, and say what is to be downloaded; None if that cannot be had here."""
    found = interpreter(one.python)
    if found is None:
        one.note(f"not run: no Python {one.python} on this machine")
        return None
    try:
        python = environment.create(one.folder, found)
        plan = environment.planned(python, one.wanted, options)
        print(environment.report(one.folder, plan.files), flush=True)
    except SystemExit as error:
        # Two lines of what pip asked for, e.g. a constraint of this machine, stand before a conflict's name.
        lines = [line.strip() for line in str(error).splitlines() if line.startswith(("ERROR", "    The user"))]
        one.note(f"cannot be installed: {'; '.join(lines) or error}", failed=True)
        return None
    return python, plan


def interpreter(version: str) -> str | None:
    """Return the path of a Python of this version: on the search path, or of pyenv."""
    if found := shutil.which(f"python{version}"):
        works = subprocess.run([found, "-c", ""], check=False, capture_output=True)  # not so a shim of pyenv
        if not works.returncode:
            return found
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    return next((str(path) for path in sorted(kept, reverse=True)), None)


def test(one: Pair, python: Path, plan: environment.Plan, workers: int) -> None:
    """Install, compile, run the smoke tests and every example."""
    plan.install()
    version = run(python, "-c", "import torch; print(torch.__version__)")
    one.note(f"torch {version.stdout.strip()}", failed=bool(version.returncode))
    run(python, "-m", "tests.prebuild", shown=True)
    smoke = run(python, "-m", "pytest", "-m", "smoke", "-rsfE", "-n", str(workers))
    (one.folder / "smoke.log").write_text(smoke.stdout + smoke.stderr, encoding="utf-8")
    summary = (smoke.stdout.strip() or smoke.stderr.strip() or "no output").splitlines()[-1].strip("= ")
    told = ("SKIPPED", "FAILED", "ERROR")
    print(*(line for line in smoke.stdout.splitlines() if line.startswith(told)), sep="\n", flush=True)
    one.note(f"smoke: {summary}", failed=bool(smoke.returncode))
    good = [example for example in sorted(EXAMPLES) if simulated(one, python, example)]
    one.note(f"examples: {len(good)} of {len(EXAMPLES)}", failed=len(good) < len(EXAMPLES))


def simulated(one: Pair, python: Path, example: str) -> bool:
    """Return whether one example could be simulated; what it printed is in a file beside the environment."""
    told = ("simulate", "--cluster", EXAMPLES[example], "--steps", "3", "--", f"examples/simulate/{example}")
    ended = run(python, "-m", "foretrain", *told)
    (one.folder / f"{example}.log").write_text(ended.stdout + ended.stderr, encoding="utf-8")
    if ended.returncode:
        print(f"{example} failed:\n{ended.stderr[-2000:]}", flush=True)
    return not ended.returncode


def run(python: Path, *arguments: str, shown: bool = False) -> subprocess.CompletedProcess[str]:
    """Run an environment's Python in the repository."""
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, check=False, capture_output=not shown, text=True, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
