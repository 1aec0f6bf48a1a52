"""Compile the simulated device on first use, keep it in the user's cache, and load it.

One C++ extension, compiled by g++ against the headers that come with PyTorch. What is kept is named after the sources,
PyTorch's version, Python's and the compiler that is asked for, so that another of these compiles anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from foretrain.errors import ForetrainError
from foretrain.torch_version import require_simulable_torch

_log = logging.getLogger(__name__)

NAME = "foretrain_fakecuda"
_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-DUSE_C10D", f"-DTORCH_EXTENSION_NAME={NAME}")

Progress = Callable[[int, int], None]
"""Called with the number of files compiled and the number of all."""


class BuildError(ForetrainError):
    """The simulated device could not be compiled; ``output`` is the compiler's."""

    def __init__(self, message: str, output: str = "") -> None:
        self.output = output
        super().__init__(message + (f"\n{output}" if output else ""))


def load(progress: Progress | None = None) -> ModuleType:
    """Return the extension, compiled first if need be.

    Raises:
        MissingExtra: PyTorch is not installed.
        ForetrainError: it is a release that was not tested, and lacks private interfaces that the device uses.
        BuildError: there is no compiler, or it fails.
    """
    path = built(progress)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built(progress: Progress | None = None) -> Path:
    """Return the compiled extension's path; compile it unless it is in the cache."""
    version = require_simulable_torch("the simulated GPU")
    name = _fingerprint(version)
    library = _cache() / name / f"{NAME}.so"
    if not library.exists():
        folder = _writable(name)
        library = folder / f"{NAME}.so"
        with _build_lock(folder):
            if not library.exists():
                _compile(folder, library, progress or (lambda done, all_: None))
    return library


def compiler() -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, or g++, c++, or clang++.

    Raises:
        BuildError: there is none, or not the one that is asked for.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and not shutil.which(asked[0]):
        raise BuildError(f"CXX: {asked[0]!r} is no compiler on this machine; name another, or unset CXX")
    for name in ("g++", "c++", "clang++"):
        if asked or shutil.which(name):
            return asked or [name]
    raise BuildError(
        "The simulated GPU is compiled on first use and needs a C++ compiler, but neither g++ nor clang++ is installed;"
        " install one, e.g. with `apt install g++`, or name yours in the environment variable CXX."
    )


def _cache() -> Path:
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "foretrain", "fakecuda")
    return Path(os.path.expanduser("~"), ".cache", "foretrain", "fakecuda")


def _writable(name: str) -> Path:
    """Return the folder in the cache to compile in, or one of the user's own among temporary files."""
    folder = _cache() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
        return folder
    except OSError as error:
        ours = Path(tempfile.gettempdir(), f"foretrain-{os.getuid()}")
        _log.warning("foretrain: %s cannot be written (%s); using %s instead", folder, error.strerror, ours)
    ours.mkdir(mode=0o700, exist_ok=True)
    if ours.stat().st_uid != os.getuid():
        raise BuildError(f"{ours} belongs to somebody else; name a folder to keep what is compiled in XDG_CACHE_HOME")
    folder = ours / name
    folder.mkdir(exist_ok=True)
    return folder


def _fingerprint(version: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.?pp")):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join([*_FLAGS, os.environ.get("CXX", ""), sysconfig.get_python_version()]).encode())
    return f"torch{version}-{digest.hexdigest()[:16]}"


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the build folder: one process compiles, others wait."""
    with open(folder / "lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("foretrain: waiting for another process, which compiles the simulated GPU")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, library: Path, progress: Progress) -> None:
    import torch

    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    base = [*compiler(), *_FLAGS, *(f"-I{path}" for path in includes)]
    for left in folder.glob("unfinished-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        objects = _objects(base, Path(scratch), progress)
        made = Path(scratch, library.name)
        link = [*compiler(), "-shared", *map(str, objects), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        _run([*link, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(made)])
        made.replace(library)


def _objects(base: list[str], scratch: Path, progress: Progress) -> list[Path]:
    """Compile all files, as many at a time as there are processors."""
    files = sorted(_SOURCES.glob("*.cpp"))
    objects = [scratch / f"{path.stem}.o" for path in files]
    progress(0, len(files))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_run, [*base, "-c", str(source), "-o", str(target)])
            for source, target in zip(files, objects, strict=True)
        ]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                progress(done, len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return objects


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = [line for line in done.stderr.splitlines() if "error" in line][:8]
        raise BuildError(
            f"The simulated GPU does not compile: `{command[0]}` failed.", "\n".join(wrong) or done.stderr.strip()
        )
