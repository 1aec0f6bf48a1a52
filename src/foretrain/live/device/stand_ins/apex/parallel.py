"""Data parallelism, which PyTorch has taken over."""

from __future__ import annotations

from typing import Any

import torch

SyncBatchNorm = torch.nn.SyncBatchNorm
convert_syncbn_model = torch.nn.SyncBatchNorm.convert_sync_batchnorm


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel of this process's GPU."""

    def __init__(self, module: torch.nn.Module, **_: Any) -> None:
        super().__init__(module, device_ids=[torch.cuda.current_device()])
