"""Give tests markers by what they use, so that nobody has to remember them.

``make test`` runs what has none of them, and the smoke tests; ``make test-all`` runs everything.

- ``ranks``: forks PyTorch processes that are joined by gloo, see `tests.plugins.torch.ranks`.
- ``device``: runs a script on the simulated CUDA device.
- ``lab``: makes network namespaces.
- ``process``: starts any other process. Where the product starts it, the test is marked by hand.

``smoke`` is written by hand; ``smoke_case("ID")`` makes a smoke test of that one case of a parametrized test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

PROCESSES = ("ranks", "device", "lab", "process")
_BY_FIXTURE = {
    ("nursery", "tests.plugins.torch.conftest"): "ranks",
    ("name", "tests.conftest"): "lab",
    ("device", "tests.live.conftest"): "device",
}
_BY_MODULE = {
    "subprocess": "process",
    "multiprocessing": "process",
    "tests.warm": "process",
    "tests.processes": "process",
    "tests.live.forked": "device",
    "tests.live.command": "device",
    "foretrain.live.simulate.simulate": "device",
}
"""Marker of a test that uses, directly or through helpers of the tests, a module, a function of it, or one function."""


def mark(item: pytest.Item) -> None:
    """Add the markers of all that a test's function and its fixtures use."""
    if not isinstance(item, pytest.Function):
        return
    fixtures = item._fixtureinfo.name2fixturedefs
    functions = [item.function, *(found[-1].func for found in fixtures.values())]
    # A hypothesis test wraps the function that was written.
    functions += [inner.inner_test for one in functions if (inner := getattr(one, "hypothesis", None))]
    keys = {(name, found[-1].func.__module__) for name, found in fixtures.items()}
    found = {_BY_FIXTURE[key] for key in keys & _BY_FIXTURE.keys()}
    found |= {_BY_MODULE[name] for one in functions for name in _modules(one) if name in _BY_MODULE}
    if len(found) > 1:
        found.discard("process")  # for what has no other marker
    if any(item.callspec.id in case.args for case in item.iter_markers("smoke_case")):
        found.add("smoke")
    for name in sorted(found):
        item.add_marker(name)


@cache
def _modules(function: Callable[..., Any]) -> frozenset[str]:
    """Return the modules that a function uses, following helpers defined in the tests."""
    return frozenset(_used(function))


def _used(function: Callable[..., Any]) -> Iterator[str]:
    todo, seen = [function], set[int]()
    while todo:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        names = set(_names(function.__code__))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                yield value.__name__
                if value.__name__.startswith("tests."):
                    todo += [found for name in names if (found := vars(value).get(name)) is not None]
            elif (module := getattr(value, "__module__", None) or "").startswith("tests."):
                yield module
                todo += vars(value).values() if isinstance(value, type) else [value]
            elif isinstance(value, FunctionType):
                yield module
                yield f"{module}.{value.__name__}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
