"""Ray Train: a model that is prepared for DistributedDataParallel under foretrain's schedule.

model = ft.ray.prepare_model(model, "auto")  # instead of ray.train.torch.prepare_model(model)
"""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.options import Compression, Timeouts, Transport, TransportKind
from foretrain.launch import LaunchSettings
from foretrain.launch.ddp_patch import DdpPatch

_patches: list[DdpPatch] = []
"""The one of this worker, from its first model to the end of its process group."""


def prepare_model(
    model: nn.Module,
    schedule: str = "auto",
    *,
    transport: Transport | TransportKind = "all_reduce",
    compression: Compression | None = None,
    timeouts: Timeouts | None = None,
    tune: bool = False,
    **options: Any,
) -> nn.Module:
    """Prepare ``model`` as Ray does, with its gradients exchanged by a schedule. Make its optimizer afterwards.

    Call it in the training loop of each worker. What a schedule cannot do is done by PyTorch's own reducer, and a line
    on rank 0's stderr says so; see `foretrain.launch.scheduled_ddp`. The schedule ends when Ray, or the loop, destroys
    the process group.

    Args:
        model: on any device.
        schedule: a policy, ``"auto"``, or a plan file's path, as of `foretrain.plugins.torch.api.attach`; of the first
            model, for all.
        transport, compression, timeouts, tune: as of `attach`.
        options: of `ray.train.torch.prepare_model`.

    Raises:
        ConfigError: an argument is wrong.
    """
    if not _patches:
        _patches.append(_begun(LaunchSettings.of(schedule, transport, compression, timeouts, tune)))
    return ray.train.torch.prepare_model(model, **options)


def _begun(settings: LaunchSettings) -> DdpPatch:
    """Patch PyTorch until the worker's process group is destroyed."""
    patch = DdpPatch(settings).__enter__()
    closing = dist.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group not in (None, dist.group.WORLD):
            closing(group)
            return
        _patches.clear()
        patch.__exit__(None, None, None)  # puts PyTorch's own destroy_process_group back
        dist.destroy_process_group(group)

    dist.destroy_process_group = destroy_process_group
    return patch
