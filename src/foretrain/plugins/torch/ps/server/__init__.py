"""Shards that run PyTorch's optimizers, part by part. `make_optimizer_shard` imports PyTorch unless `prepare` has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from foretrain.comm.ps.placement import Declared, Optimized, ShardPart
from foretrain.comm.ps.server.shard import Mode

__all__ = ["make_optimizer_shard", "prepare"]


def make_optimizer_shard(
    parts: Iterable[ShardPart], tasks: Sequence[Declared], optimized: Optimized, workers: int, lost: Iterable[int]
) -> Mode:
    """Return a shard that updates ``parts``; see `foretrain.comm.ps.server.shard.OptimizerShardFactory`."""
    from foretrain.plugins.torch.ps.server.optimizer_shard import OptimizerShard

    return OptimizerShard(parts, tasks, optimized, workers, lost)


def prepare() -> None:
    """Import PyTorch and all it loads lazily: some seconds in which a server does not answer. Nothing is compiled here.

    Call it in processes that only serve.
    """
    import torch

    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _NoCompiler("torch._dynamo")
    from foretrain.plugins.torch.ps.server import optimizer_shard

    assert optimizer_shard.OptimizerShard
    torch.optim.SGD([torch.nn.Parameter(torch.empty(0))])


class _NoCompiler(ModuleType):
    """Stand-in for ``torch._dynamo``, which takes as long to import as all of PyTorch.

    Optimizers import it to say what it must not trace. Whoever wants anything else of it gets the module itself.
    """

    __file__ = None  # `inspect` asks all modules for theirs

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return ``function``, which nobody traces."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
