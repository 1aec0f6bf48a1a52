"""Jobs of ranks, started once per worker of the test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.plugins.torch.ranks import Nursery, Ranks

collect_ignore_glob = [] if find_spec("torch") else ["*"]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def _job(nursery: Nursery, size: int) -> Iterator[Ranks]:
    job = Ranks(nursery, size)
    yield job
    job.close()


@pytest.fixture(scope="session")
def ranks(nursery: Nursery) -> Iterator[Ranks]:
    """Two ranks: a + b = b + a, so that whoever adds gradients gets the same bits."""
    yield from _job(nursery, 2)


@pytest.fixture(scope="session")
def three(nursery: Nursery) -> Iterator[Ranks]:
    """Three ranks: no power of two, and sums that depend on their order."""
    yield from _job(nursery, 3)


@pytest.fixture(scope="session")
def alone(nursery: Nursery) -> Iterator[Ranks]:
    """One rank."""
    yield from _job(nursery, 1)


@pytest.fixture
def job(nursery: Nursery) -> Iterator[Callable[[int], Ranks]]:
    """Makes jobs of their own, for tests that do not leave their ranks alive."""
    jobs: list[Ranks] = []

    def make(size: int) -> Ranks:
        jobs.append(Ranks(nursery, size))
        return jobs[-1]

    yield make
    for one in jobs:
        one.close()
