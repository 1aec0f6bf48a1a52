"""Jobs of ranks, started once per worker of the test session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec

import pytest

from tests.plugins.torch.ranks import Nursery, Ranks

collect_ignore_glob = [] if find_spec("torch") else ["*"]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def ranks(nursery: Nursery) -> Iterator[Ranks]:
    """Two ranks: a + b = b + a, so that whoever adds gradients gets the same bits."""
    with closing(Ranks(nursery, 2)) as job:
        yield job


@pytest.fixture(scope="session")
def three(nursery: Nursery) -> Iterator[Ranks]:
    """Three ranks: no power of two, and sums that depend on their order."""
    with closing(Ranks(nursery, 3)) as job:
        yield job


@pytest.fixture(scope="session")
def alone(nursery: Nursery) -> Iterator[Ranks]:
    """One rank."""
    with closing(Ranks(nursery, 1)) as job:
        yield job
