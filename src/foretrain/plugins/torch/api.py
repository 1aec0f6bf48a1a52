"""Entry point of the runtime: attach a model and its optimizer to schedule their communication.

warm-up steps      gradients are reduced after backward(); order of use and times observed   `Warmup`
one agreement      times of the slowest rank, measured network, knobs at their best          `runtime_plan`
scheduled steps    hooks → exchange → executor → deferred optimizer → next forward pass      `GradientDispatcher`
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.options import (
    AllReduce,
    AttachOptions,
    BoundedLoss,
    Collective,
    ParameterServer,
    Timeouts,
    Transport,
    TransportKind,
    as_transport,
    check_watching,
)
from foretrain.errors import ConfigError
from foretrain.planner import SavedPlan, ScheduleRequest, requested_schedule
from foretrain.plugins.torch.attached import Attached
from foretrain.plugins.torch.gradient_buffer import wire_dtype
from foretrain.plugins.torch.optimizers import check

logger = logging.getLogger("foretrain")

_DEFAULT_TIMEOUTS = Timeouts()


def attach(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    schedule: str | os.PathLike[str] | ScheduleRequest = "bytescheduler",
    group: dist.ProcessGroup | None = None,
    *,
    transport: Transport | TransportKind = "all_reduce",
    timeouts: Timeouts = _DEFAULT_TIMEOUTS,
    compression: str | None = None,
    tune: bool = False,
    broadcast_buffers: bool = True,
    warmup: int = 3,
    interface: str | None = None,
    trace: bool = False,
) -> Attached:
    """Schedule the communication of ``model``, trained by ``optimizer``, over the ranks of ``group``.

    Call it once on every rank, after ``init_process_group`` and in place of DistributedDataParallel; then train as
    before. Parameters and buffers begin as rank 0's.

    Args:
        model: on one device; not wrapped in DistributedDataParallel or FSDP.
        optimizer: one, or several, of its parameters.
        schedule: a policy of `foretrain.schedule`; knobs that it leaves open are set by simulating the observed steps.
            ``"auto"``: the policy with the best forecast for them, or plain DDP's order if none is faster. The path of
            a plan file (``foretrain plan`` writes one): its policy and compression; rank 0 warns if it was made for
            another job.
        group: None is the default group. Collectives run on groups of their own.
        transport: `AllReduce` among the ranks, `BoundedLoss` for a network that loses packets, or `ParameterServer`;
            "all_reduce", "bounded" and "ps" are short for their defaults.
        timeouts: how long a rank may be silent, and how long there may be no progress.
        compression: None, "fp16" or "bf16": the type that is sent, with error feedback.
        tune: whether knobs that ``schedule`` leaves open are searched as the job runs: the simulator proposes knobs, a
            change for the worse is undone at once, and the best are kept for the next run. See `Attached.tuner`.
        broadcast_buffers: whether buffers are rank 0's before each forward pass with gradients enabled. An evaluation
            never communicates; see `Attached.share_buffers`.
        warmup: steps to observe before scheduling begins, at least 1.
        interface: where the coordinator listens, e.g. "eth0"; by default gloo's, or the one towards MASTER_ADDR.
        trace: whether to keep a timeline.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be scheduled.
        Disagreement: the ranks' models or arguments differ.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "group", group, "does not exist yet", "call torch.distributed.init_process_group before attach"
        )
    check_watching(warmup, timeouts, broadcast_buffers=broadcast_buffers, trace=trace, tune=tune)
    transport = as_transport(transport)
    servers = transport.endpoints() if isinstance(transport, ParameterServer) else ()
    if isinstance(transport, ParameterServer):  # ranks compare the addresses, given here or in the environment
        transport = dataclasses.replace(transport, addresses=",".join(f"{host}:{port}" for host, port in servers))
    elif isinstance(transport, BoundedLoss) and dist.get_world_size(group) == 1:
        transport = dataclasses.replace(transport, updates="workers")  # there is no server, nor anything to sum
    refuse_wrapped(model)
    optimizers = check(optimizer, model)
    wanted = requested_schedule(schedule)
    if isinstance(wanted, SavedPlan):
        compression = compression or wanted.compression
    wire_dtype(compression)
    options = AttachOptions(
        *(wanted, compression, transport, timeouts, servers, tune, broadcast_buffers, warmup, interface, trace)
    )
    if options.updates == "servers":
        if isinstance(transport, BoundedLoss) and compression is not None:
            problem = "is not for updates on servers under bounded loss, whose pulls are as wide as pushes"
            raise ConfigError("compression", compression, problem, "leave it out, or write updates='workers'")
        from foretrain.plugins.torch.ps.remote_optimizer import refuse

        refuse(optimizers, model)
    _check_tuning(options)
    if not isinstance(transport, ParameterServer):
        _check_backend(transport, group, next(model.parameters()).device)
    if options.asynchronous and broadcast_buffers and dist.get_rank(group) == 0 and any(True for _ in model.buffers()):
        logger.warning(
            "the ranks update asynchronously, and each rank's buffers stay its own; share_buffers() makes them rank 0's"
        )
    return Attached(model, optimizers, group, options)


def _check_backend(transport: Collective, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ConfigError if gradients on ``device`` cannot be summed by the backend that is asked for."""
    if isinstance(transport, BoundedLoss):
        if device.type != "cpu":
            remedy = "leave it out: the process group sums on the device"
            raise ConfigError("transport", "bounded", f"sums on the CPU, not on {device}", remedy)
        return
    if transport.backend is None:
        return
    if transport.on_host:
        if device.type != "cpu":
            remedy = "leave it out: the process group sums on the device"
            raise ConfigError("transport.backend", transport.backend, f"sums on the CPU, not on {device}", remedy)
        return
    own = (group or dist.group.WORLD)._get_backend(device).name()  # pyright: ignore[reportOptionalMemberAccess]
    if own != transport.backend:
        remedy = f"write backend={own!r}, or init_process_group({transport.backend!r})"
        raise ConfigError("transport.backend", transport.backend, f"is not the process group's, {own}", remedy)


def _check_tuning(options: AttachOptions) -> None:
    """Raise ConfigError if knobs cannot be searched as the job runs."""
    if not options.tune:
        return
    if isinstance(options.transport, AllReduce) and options.transport.order == "replay":
        raise ConfigError("tune", True, "has nothing to change where a fixed order is replayed", "leave it out")
    if options.asynchronous or options.elastic:
        what = f"measures what all ranks do together, which an {'elastic' if options.elastic else 'asynchronous'} job"
        raise ConfigError("tune", True, f"{what} does not", "write consistency='bsp', and leave elastic out")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a model that is wrapped already, has complex parameters, or none to train."""
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "is no torch.nn.Module", "hand in the model")
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for wrapper in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"):
            if wrapper in kinds:
                remedy = "attach the plain model: foretrain takes the wrapper's place"
                raise ConfigError("model", name or type(module).__name__, f"is wrapped in {wrapper}", remedy)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            remedy = "keep real and imaginary part (torch.view_as_real), or train it with DistributedDataParallel"
            raise ConfigError("model", name, f"is complex ({parameter.dtype})", remedy)
    if not any(parameter.requires_grad and parameter.numel() for parameter in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter that requires a gradient", "unfreeze some")
