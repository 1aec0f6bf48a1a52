"""Shards that run PyTorch's optimizers, part by part. `make_optimizer_shard` imports PyTorch unless `prepare` has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Import PyTorch and all it loads lazily: some seconds in which a server does not answer."""
    import torch

    from foretrain.plugins.torch.ps.server import optimizer_shard

    assert optimizer_shard.OptimizerShard
    torch.optim.SGD([torch.nn.Parameter(torch.empty(0))])
