"""Imports that ranks and simulations share: modules of PyTorch, and libraries that a script imports, before the fork.

# Note [Shared libraries]
Ranks of a simulation, and simulations that differ in their arguments alone, import the same. What a script imports of
its own, it imports itself: it may look at its arguments and its rank. What it imports of installed libraries is the
same in all, and may take seconds. Imported are those that its sources name at their top level, outside of conditions,
and its own modules' that it imports in this way. Its own is what lies beside it, in its package, or anywhere but where
packages are installed, which have their metadata beside them.

A library may do when it is imported what must happen in each rank. So they are imported in a process of their own, and
that is used only if none has asked for the rank, started a thread of Python's, which a fork would lose, used the GPU,
or is hidden by a file of its name beside the script. Native threads, of allocators and pools, are no reason: libraries
bear a fork after their import, as DataLoader's workers are one. What a library has taken then from modules that a rank
changes later, e.g. ``from time import sleep``, is changed in the library as well (`following`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from foretrain.live.device import put, stand_ins
from foretrain.live.device.settings import RankSettings

ALWAYS = ("torch._dynamo", "torch._dynamo.trace_rules")
"""Modules that optimizers and DistributedDataParallel import: a second, and 50 MiB in every rank."""
OFTEN = (
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
    "foretrain.live.device.rank",
)
"""Modules that many scripts import, too."""
_COMPILING = (
    *("torch._dynamo.backends.common", "torch._functorch.partitioners"),
    *("torch._inductor.decomposition", "torch._inductor.pattern_matcher"),
)
"""Modules that ``torch.compile`` imports: a second, which a script may never need."""
_CHANGED = ("time", "timeit", "torch.multiprocessing", "torch.multiprocessing.spawn", "torch.utils.cpp_extension")
"""Modules with functions that a rank replaces."""
_NOT_LIBRARIES = sys.stdlib_module_names | {"foretrain"}


def preload(settings: RankSettings) -> None:
    """Import the modules of PyTorch that the script and files beside it name; errors are left to the script."""
    import_all([*ALWAYS, *(name for source in _script_sources(settings) for name in _torch_imports(source))])


def preload_compiler(settings: RankSettings) -> None:
    """Import what ``torch.compile`` imports, if the script or a module of its own calls it."""
    texts = [*_script_sources(settings), *(source.text for source in _own_sources(settings))]
    if any("torch.compile" in text for text in texts):
        import_all(_COMPILING)


def import_all(names: Iterable[str]) -> None:
    """Import modules; leave errors to who imports them next."""
    for name in dict.fromkeys(names):
        with suppress(Exception):
            importlib.import_module(name)


def _script_sources(settings: RankSettings) -> list[str]:
    """Return the sources of a script and of files beside it that it imports; none of a module."""
    script = Path(settings.script[0])
    waiting, sources = [] if settings.module else [script], dict[Path, str]()
    while waiting:
        path = waiting.pop()
        with suppress(OSError, ValueError, SyntaxError):
            sources[path] = path.read_text(encoding="utf-8")
            beside = (script.parent / f"{name}.py" for name in _imports(ast.parse(sources[path])))
            waiting += [each for each in beside if each not in sources and each.is_file()]
    return list(sources.values())


def _torch_imports(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (name for name in _imports(tree) if name.startswith("torch."))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


# Libraries; see Note [Shared libraries]


@dataclass(frozen=True, slots=True)
class Imported:
    """Import of a source: ``import module``, or ``from module import names``."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    """Python source of the script's own.

    Attributes:
        name: of the module.
        package: that relative imports begin at.
        text: of the file.
    """

    name: str
    package: str
    text: str


def libraries_of(settings: RankSettings) -> tuple[Imported, ...]:
    """Return what the script and its own modules import at once of installed libraries, but for what is imported."""
    found = dict.fromkeys(each for source in _own_sources(settings) for each in _top_imports(source))
    return tuple(each for each in found if not _is_imported(each) and _is_library(each.module))


@cache
def _own_sources(settings: RankSettings) -> tuple[_Source, ...]:
    """Return the source of the script, and of its own modules that it imports as soon as it starts."""
    script, places = settings.script[0], _places(settings)
    found: dict[str, _Source] = {}
    waiting = _with_packages(script) if settings.module else []
    if not settings.module:
        with suppress(OSError, ValueError):
            found["__main__"] = _Source("__main__", "", Path(script).read_text(encoding="utf-8"))
            waiting += _modules(found["__main__"])
    while waiting:
        name = waiting.pop()
        path = None if name in found else _file_of(name, places)
        if path is None or (_is_installed(path, name) and name.partition(".")[0] != script.partition(".")[0]):
            continue
        with suppress(OSError, ValueError):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            main = settings.module and name == script
            found[name] = _Source("__main__" if main else name, package, path.read_text(encoding="utf-8"))
            waiting += _modules(found[name])
    return tuple(found.values())


def _modules(source: _Source) -> list[str]:
    """Return the modules that a source imports as soon as it is imported, with the packages that they are in.

    Each name of ``from package import name`` may be a module, too.
    """
    every = [name for one in _top_imports(source) for name in (one.module, *(f"{one.module}.{n}" for n in one.names))]
    return [part for name in dict.fromkeys(every) for part in _with_packages(name)]


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _top_imports(source: _Source) -> Iterator[Imported]:
    """Yield what a source imports at its top level, outside of conditions."""
    try:
        waiting: list[ast.stmt] = ast.parse(source.text).body[::-1]
    except (SyntaxError, ValueError):
        return
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Imported(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), source.package)
                yield Imported(module, tuple(alias.name for alias in node.names if alias.name != "*"))
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            waiting += node.body[::-1]


def _places(settings: RankSettings) -> tuple[str, ...]:
    """Return where the script's imports are looked for, in this order."""
    if settings.module:
        return tuple(sys.path)
    return (os.path.dirname(os.path.realpath(settings.script[0])), *sys.path[1:])


def _file_of(name: str, places: Iterable[str]) -> Path | None:
    """Return the source of a module, which is not imported for that; None where there is none."""
    if name.partition(".")[0] in _NOT_LIBRARIES:
        return None
    where: list[str] | None = [*places]
    origin = None
    for part in name.split("."):  # alone, as the path of a package without __init__.py asks for its imported parent
        spec = None if where is None else PathFinder.find_spec(part, where)
        if spec is None:
            return None
        origin, where = spec.origin, None
        if spec.submodule_search_locations is not None:
            where = [*spec.submodule_search_locations]
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_imported(wanted: Imported) -> bool:
    module = sys.modules.get(wanted.module)
    return module is not None and all(hasattr(module, name) for name in wanted.names)


def _is_library(module: str) -> bool:
    """Return whether a module is of an installed library."""
    top = module.partition(".")[0]
    spec = None if top in _NOT_LIBRARIES else PathFinder.find_spec(top)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(_is_installed(Path(place), top) for place in places if place is not None)


def _is_installed(path: Path, name: str) -> bool:
    """Return whether the file or folder of a module is where packages are installed, with their metadata beside."""
    folders = [*path.parents][: name.count(".") + 2]
    return any(_has_metadata(folder) for folder in folders)


@cache
def _has_metadata(folder: Path) -> bool:
    return any(folder.glob("*.dist-info"))


_shared: list[ModuleType] = []
"""Modules that came with libraries; see `import_libraries`."""


def import_libraries(libraries: Iterable[Imported], settings: RankSettings, used: Callable[[], object]) -> bool:
    """Import libraries; return whether ranks may be forked from this process then, see Note [Shared libraries].

    Errors are left to the script. ``used`` tells what was done with the GPU so far.
    """
    before, used_before = set(sys.modules), used()
    own = {*settings.environment(0)} - {*_of_world(settings)}
    os.environ.update(_of_world(settings))
    stand_ins.install(settings.stand_ins, lambda _: None)
    with _asked(own) as asked:
        for each in libraries:
            with suppress(Exception):
                module = importlib.import_module(each.module)
                for name in each.names:
                    if not hasattr(module, name):
                        importlib.import_module(f"{each.module}.{name}")
    new = [name for name in sys.modules if name not in before]
    _shared[:] = [sys.modules[name] for name in new]
    folder = None if settings.module else Path(os.path.realpath(settings.script[0])).parent
    tops = {name.partition(".")[0] for name in new}
    files = (name for top in tops for name in (f"{top}.py", f"{top}/__init__.py"))
    hidden = folder is not None and any((folder / name).exists() for name in files)
    return not (asked or hidden) and used() == used_before and threading.active_count() == 1


def _of_world(settings: RankSettings) -> dict[str, str]:
    """Return the variables that all ranks have alike."""
    first, last = settings.environment(0), settings.environment(settings.world - 1)
    ranks = {name for name in first if name.endswith("RANK")}
    return {name: value for name, value in first.items() if name not in ranks and last[name] == value}


@contextmanager
def _asked(names: set[str]) -> Iterator[set[str]]:
    """Collect which environment variables of these ``names`` are read in the block."""
    kind: Any = type(os.environ)
    plain, asked = kind.__getitem__, set[str]()

    def getitem(self: Any, key: str) -> str:
        if key in names:
            asked.add(key)
        return plain(self, key)

    put(kind, __getitem__=getitem)
    try:
        yield asked
    finally:
        put(kind, __getitem__=plain)


@contextmanager
def following() -> Iterator[None]:
    """Let shared libraries have what the block puts in place of functions that they have imported."""
    known = [
        (module, name, value)
        for module in map(sys.modules.get, _CHANGED)
        if module is not None and _shared
        for name, value in vars(module).items()
        if callable(value)
    ]
    yield
    changed = {id(value): new for module, name, value in known if (new := getattr(module, name)) is not value}
    for module in _shared if changed else ():
        for name, value in [*vars(module).items()]:
            if id(value) in changed:
                put(module, **{name: changed[id(value)]})
