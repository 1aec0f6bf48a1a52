"""Ranks of a framework that is not PyTorch: a module names, in ``JOB``, the module that they have imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.plugins.torch.ranks import Nursery, Ranks


@pytest.fixture(scope="module")
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    with Nursery(request.module.JOB) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def ranks(nursery: Nursery) -> Iterator[Ranks]:
    """Two ranks."""
    with closing(Ranks(nursery, 2)) as job:
        yield job


@pytest.fixture(scope="module")
def alone(nursery: Nursery) -> Iterator[Ranks]:
    """One rank."""
    with closing(Ranks(nursery, 1)) as job:
        yield job


@pytest.fixture
def job(nursery: Nursery) -> Iterator[Callable[[int], Ranks]]:
    """Makes jobs of their own, for tests that do not leave their ranks alive."""
    with ExitStack() as jobs:
        yield lambda size: jobs.enter_context(closing(Ranks(nursery, size)))
