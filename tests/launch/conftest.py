"""The ranks of the runtime's tests serve here too."""

from tests.plugins.torch.conftest import collect_ignore_glob, nursery, ranks

__all__ = ["collect_ignore_glob", "nursery", "ranks"]
