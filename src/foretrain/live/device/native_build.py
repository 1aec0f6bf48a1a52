"""Compile the simulated device on first use, keep it in the user's cache, and load it.

One C++ extension, compiled by g++ against the headers that come with PyTorch. What is kept is named after the sources,
PyTorch's version, Python's and the compiler that is asked for, so that another of these compiles anew. A wheel may
carry compiled extensions (``make wheel``), which are preferred. ``python -m foretrain.live.device.native_build``
compiles it if need be; with an argument, it also copies it into that folder.
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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from types import ModuleType

from foretrain.errors import ForetrainError, MissingExtra
from foretrain.parent_death import ending_with_this, run_to_end
from foretrain.torch_version import require_simulable_torch, torch_folder, torch_version

_log = logging.getLogger(__name__)

NAME = "foretrain_simulated_gpu"
_FILE = f"{NAME}.so"
_SOURCES = Path(__file__).parent / "native"
_PREBUILT = Path(__file__).parent / "prebuilt"
"""The extensions that a wheel carries, a folder for each."""
_UNITS = (
    ("module", "memory", "allocator", "allocator_settings", "allocator_statistics", "log"),
    ("device", "expectations", "group", "kernels", "natives", "profiler"),
)
"""Files that are compiled as one, since PyTorch's headers take longer than they do. Both units take 20 s on a core."""
_TYPICAL_DURATION = 20.0
"""Seconds that compilation takes on two cores."""
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-DUSE_C10D", f"-DTORCH_EXTENSION_NAME={NAME}")

Progress = Callable[[int, int], None]
"""Called with the seconds since compilation began, and with those that it will take, by estimate."""


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
    importlib.import_module("torch")  # its libraries, which the extension needs
    path = built(progress)
    try:
        return _loaded(path)
    except ImportError as error:
        if not path.is_relative_to(_PREBUILT):
            raise
        _log.warning("foretrain: the simulated GPU that was installed does not load here (%s); compiling it", error)
    return _loaded(_compiled(path.parent.name, _cache(), progress))


def _loaded(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built(progress: Progress | None = None) -> Path:
    """Return the compiled extension's path; compile it unless it is there."""
    name = _fingerprint(require_simulable_torch("the simulated GPU"))
    return _kept(name) or _compiled(name, _cache(), progress)


def is_built() -> bool:
    """Return whether there is nothing left to compile, or no PyTorch to compile for."""
    try:
        return _kept(_fingerprint(torch_version("the simulated GPU"))) is not None
    except MissingExtra:
        return True


def _compiled(name: str, root: Path, progress: Progress | None = None) -> Path:
    """Compile the extension into folder ``name`` in ``root``, unless it is there; return its path."""
    if (library := root / name / _FILE).exists():
        return library
    folder = _writable(root / name)
    library = folder / _FILE
    with _build_lock(folder):
        if not library.exists():
            _compile(folder, library, progress or (lambda done, all_: None))
    return library


@contextmanager
def building() -> Iterator[Callable[[Progress], None]]:
    """Compile the extension in a process beside this one, if need be; yield what waits for it.

    The process ends with the block. What is yielded raises BuildError.
    """
    if _kept(_fingerprint(require_simulable_torch("the simulated GPU"))) is not None:
        yield lambda progress: None
        return
    command = ending_with_this([sys.executable, "-m", __spec__.name])
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
        try:
            yield lambda progress: _follow(process, progress)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _follow(process: subprocess.Popen[str], progress: Progress) -> None:
    """Report what the process prints; raise BuildError if it fails."""
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        progress(*map(int, line.split()))
    problem = process.stderr.read().strip()
    if process.wait():
        raise BuildError(problem)


def _kept(name: str) -> Path | None:
    places = (root / name / _FILE for root in (_PREBUILT, _cache()))
    return next((path for path in places if path.exists()), None)


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
        " install one, e.g. with `apt install g++ python3-dev`, or name yours in the environment variable CXX."
    )


def headers() -> Path:
    """Return the folder of this Python's headers.

    Raises:
        BuildError: they are not installed, as where a distribution has a package of their own for them.
    """
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").exists():
        raise BuildError(
            f"The simulated GPU is compiled on first use and needs Python's headers, but there is no {folder}/Python.h;"
            f" install them, e.g. with `apt install python{sysconfig.get_python_version()}-dev`."
        )
    return folder


def _cache() -> Path:
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "foretrain", "simulated_gpu")
    return Path(os.path.expanduser("~"), ".cache", "foretrain", "simulated_gpu")


def _writable(folder: Path) -> Path:
    """Return the folder to compile in, or where that cannot be written one of the user's own among temporary files."""
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
    folder = ours / folder.name
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
    root, command = torch_folder(), compiler()
    includes = [root / "include", root / "include/torch/csrc/api/include", headers()]
    # Errors name files as they are in the repository and in PyTorch, on whichever machine it was compiled.
    names = [f"-ffile-prefix-map={_SOURCES}=native", f"-ffile-prefix-map={root}=torch"]
    base = [*command, *_FLAGS, *names, *(f"-I{path}" for path in includes)]
    for left in folder.glob("unfinished-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        objects = _objects(base, Path(scratch), progress)
        made = Path(scratch, library.name)
        link = [*command, "-shared", *map(str, objects), f"-L{root / 'lib'}"]
        _run([*link, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(made)])
        made.replace(library)


def _objects(base: list[str], scratch: Path, progress: Progress) -> list[Path]:
    """Compile all units side by side."""
    begin, passed = time.monotonic(), 0
    objects: list[Path] = []
    with ThreadPoolExecutor(len(_UNITS)) as pool:
        jobs = set[Future[None]]()
        for unit in _UNITS:
            source = scratch / f"{unit[0]}.cpp"
            source.write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in unit))
            objects.append(source.with_suffix(".o"))
            jobs.add(pool.submit(_run, [*base, "-c", str(source), "-o", str(objects[-1])]))
        while jobs:
            passed = round(time.monotonic() - begin)
            # A slower machine shows that little is left, not that nothing is.
            progress(passed, max(round(_TYPICAL_DURATION), passed + 1))
            done, jobs = wait(jobs, timeout=1.0)
            for job in done:
                job.result()
    progress(passed, passed)
    return objects


def _run(command: list[str]) -> None:
    try:
        run_to_end(command)
    except subprocess.CalledProcessError as error:
        wrong = [line for line in error.stderr.splitlines() if "error" in line][:8]
        what = f"The simulated GPU does not compile: `{command[0]}` failed."
        raise BuildError(what, "\n".join(wrong) or error.stderr.strip()) from None


def main() -> None:
    """Compile the extension if need be, print how far that is, and copy it into a given folder."""

    def told(done: int, every: int) -> None:
        print(done, every, flush=True)

    try:
        library = built(told)
        if sys.argv[1:]:
            shutil.copytree(library.parent, Path(sys.argv[1], library.parent.name), ignore=lambda *_: ["lock"])
    except ForetrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
