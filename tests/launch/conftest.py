"""The ranks of the runtime's tests serve here too."""

from tests.plugins.torch.conftest import nursery, ranks

__all__ = ["nursery", "ranks"]
