"""Jobs of ranks, as in the tests of the runtime."""

from tests.runtime.conftest import alone, nursery, ranks

__all__ = ["alone", "nursery", "ranks"]
