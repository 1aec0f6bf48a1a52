"""Jobs of ranks, as in the tests of the runtime."""

from tests.plugins.torch.conftest import alone, nursery, ranks

__all__ = ["alone", "nursery", "ranks"]
