"""A user's script, loaded as ``python script.py`` would find its neighbours, and its errors told as its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path

from foretrain.errors import ConfigError, ForetrainError, RecordError, unknown

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_fresh = count()


@contextmanager
def loaded(target: str) -> Iterator[Callable[..., object]]:
    """The function that ``target``, such as ``train.py:setup``, names; usable inside the block.

    The script runs under a fresh module name, so what stands under ``if __name__ == "__main__"`` does not. Inside the
    block its folder leads ``sys.path`` and ``sys.argv`` has its name alone.

    Raises:
        ConfigError: the text, the file or the function is wrong.
        RecordError: anything that the script raises, here or later in the block, with its own traceback.
    """
    path, name = _split(target)
    spec = spec_from_file_location(f"_foretrain_script_{next(_fresh)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("target", target, "is not a Python file", "give a script that ends in .py")
    module = module_from_spec(spec)
    path_before, argv_before = sys.path[:], sys.argv[:]
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        with _told_as_its_own(path):
            spec.loader.exec_module(module)
            yield _function(vars(module), name)
    finally:
        sys.path[:], sys.argv = path_before, argv_before
        del sys.modules[spec.name]


def _split(target: str) -> tuple[Path, str]:
    script, colon, name = target.rpartition(":")
    if not colon or not script or not name:
        raise ConfigError("target", target, "names no function", "write e.g. 'train.py:setup'")
    path = Path(script).expanduser().resolve()
    if not path.is_file():
        raise ConfigError("target", script, "is no file", f"there is none at {path}")
    return path, name


def _function(names: dict[str, object], name: str) -> Callable[..., object]:
    found = names.get(name)
    if found is None:
        raise unknown("target", name, (key for key, value in names.items() if callable(value) and key[0] != "_"))
    if not callable(found):
        raise ConfigError("target", name, f"is a {type(found).__name__}", "name a function")
    return found


@contextmanager
def _told_as_its_own(path: Path) -> Iterator[None]:
    try:
        yield
    except ForetrainError:
        raise
    except (Exception, SystemExit) as error:
        raise RecordError(f"{path.name} failed\n\n{_story(error)}") from error


def _story(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import system, which are not the user's."""
    told = traceback.TracebackException.from_exception(error)
    kept = [f for f in told.stack if not f.filename.startswith((_PACKAGE, "<frozen importlib"))]
    told.stack = traceback.StackSummary.from_list(kept)
    return "".join(told.format()).rstrip()
