"""attach: a model and its optimizer, and from then on their communication is scheduled.

warm-up steps      everything is reduced after backward() and watched: order of use, times, costs      `Warmup`
one agreement      the slowest rank's times, the measured network, knobs at their best           `setup`
scheduled steps    hooks → Exchange → Carrier → Updates → the next forward pass                  `Scheduled`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import get_args

import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.options import Agreement, AttachOptions, Means, Place
from foretrain.comm.ps.consistency import consistency as read_consistency
from foretrain.errors import ConfigError, unknown
from foretrain.planner import SavedPlan, Wanted, requested_schedule
from foretrain.plugins.torch.attached import Attached
from foretrain.plugins.torch.compression import wire_dtype
from foretrain.plugins.torch.optimizers import check
from foretrain.units import parse_time, to_seconds

logger = logging.getLogger("foretrain")


def attach(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    schedule: str | os.PathLike[str] | Wanted = "bytescheduler",
    group: dist.ProcessGroup | None = None,
    *,
    compression: str | None = None,
    engine: Means = "all_reduce",
    servers: str | None = None,
    updates: Place | None = None,
    consistency: str = "bsp",
    elastic: bool = False,
    tune: bool = False,
    agreement: Agreement = "coordinator",
    broadcast_buffers: bool = True,
    warmup: int = 3,
    timeout: float | str = 60.0,
    patience: float | str = 1800.0,
    check_every: int = 50,
    interface: str | None = None,
    trace: bool = False,
) -> Attached:
    """Schedules the communication of ``model``, trained by ``optimizer``, over the ranks of ``group``.

    Call it once on every rank, after ``init_process_group`` and in place of DistributedDataParallel; then train as
    before. Parameters and buffers begin as rank 0's.

    Args:
        model: on one device; not wrapped in DistributedDataParallel or FSDP.
        optimizer: one, or several, of its parameters.
        schedule: a policy of `foretrain.schedule`; knobs that it leaves open are set by simulating what was observed.
            ``"auto"``: the one that is forecast to be best on what was observed, or plain DDP's where nothing is to be
            won. The path of a plan file (``foretrain tune`` writes one): what it says, its compression included; where
            it was made for something else rank 0 warns.
        group: None is the default group. Collectives run on groups of their own.
        compression: None, "fp16" or "bf16": what is sent, with error feedback.
        engine: "all_reduce" among the ranks, or "ps": over a parameter server, see ``foretrain server``. Each rank then
            decides for itself, and ``agreement`` and ``check_every`` have no meaning.
        servers: with "ps" where the servers are, by number: ``"host:port,host:port"``; by default FORETRAIN_SERVERS,
            which ``foretrain run --servers`` sets. They and all ranks have the same FORETRAIN_SECRET.
        updates: with "ps" where optimizers run: "workers", the default, each on its own copy of the parameters; or
            "servers", which then send parameters back instead of sums. See the documentation for what that refuses.
        consistency: "bsp": a step is that of all ranks. "async": each rank's gradients are an update of their own, and
            nobody waits. "ssp(3)": the same, but nobody goes more than 3 steps ahead of the slowest. The latter two
            run optimizers on the servers.
        elastic: with "ps", and servers started with ``--elastic``: whether this rank goes on without others that are
            lost once steps are scheduled. The process group is not used from then on: buffers stay each rank's own.
        tune: whether knobs that ``schedule`` leaves open are searched on as the job runs: those that the simulator
            promises most of are tried, what turns out worse is taken back at once, and what is found is kept for the
            next run. See `Attached.tuner`.
        agreement: "coordinator" orders what is ready on all ranks; "replay" repeats one fixed order, without messages.
        broadcast_buffers: whether buffers are rank 0's before each forward pass with gradients enabled. An evaluation
            never communicates; see `Attached.share_buffers`.
        warmup: steps to watch before scheduling begins, at least 1.
        timeout: seconds, or e.g. "30s", after which a rank that says nothing counts as lost.
        patience: seconds after which a collective, or work that does not move, counts as stuck.
        check_every: steps between two comparisons of what all ranks have issued; 0 never.
        interface: where the coordinator listens, e.g. "eth0"; by default gloo's, or the one towards MASTER_ADDR.
        trace: whether to keep a timeline of everything.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be scheduled; says why.
        Disagreement: the ranks' models or arguments differ.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "group", group, "does not exist yet", "call torch.distributed.init_process_group before attach"
        )
    if agreement not in ("coordinator", "replay"):
        raise unknown("agreement", agreement, ("coordinator", "replay"))
    if not isinstance(warmup, int) or warmup < 1:
        raise ConfigError("warmup", warmup, "is not a number of steps", "watch at least 1")
    if not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 0:
        raise ConfigError("check_every", check_every, "is not a number of steps", "write e.g. 50, or 0 for never")
    for field, flag in (
        ("broadcast_buffers", broadcast_buffers),
        ("trace", trace),
        ("elastic", elastic),
        ("tune", tune),
    ):
        if not isinstance(flag, bool):
            raise ConfigError(field, flag, "is neither True nor False", "write one of them")
    if engine not in get_args(Means):
        raise unknown("engine", engine, get_args(Means))
    if servers is not None and engine != "ps":
        raise ConfigError("servers", servers, "are of no use to all-reduce", "write engine='ps'")
    place = _place(engine, updates, consistency)
    if elastic and engine != "ps":
        raise ConfigError("elastic", elastic, "is not possible with all-reduce", "write engine='ps', or leave it out")
    refuse_wrapped(model)
    optimizers = check(optimizer, model)
    if place == "servers":
        from foretrain.plugins.torch.ps.remote_optimizer import refuse

        refuse(optimizers, model)
    asked = requested_schedule(schedule)
    if isinstance(asked, SavedPlan):
        compression = compression or asked.compression
    options = AttachOptions(
        asked,
        compression,
        agreement,
        broadcast_buffers,
        warmup,
        _seconds("timeout", timeout),
        _seconds("patience", patience),
        check_every,
        interface,
        trace,
        engine,
        _addresses(servers) if engine == "ps" else (),
        place,
        consistency,
        elastic,
        tune,
    )
    _check_tuning(options)
    wire_dtype(compression)
    if options.apart and broadcast_buffers and dist.get_rank(group) == 0 and any(True for _ in model.buffers()):
        logger.warning("under %s each rank's buffers stay its own; share_buffers() makes them rank 0's", consistency)
    return Attached(model, optimizers, group, options)


def _check_tuning(options: AttachOptions) -> None:
    """ConfigError where knobs cannot be searched as the job runs."""
    if not options.tune:
        return
    if options.agreement == "replay":
        raise ConfigError("tune", True, "has nothing to change where a fixed order is replayed", "leave it out")
    if options.apart or options.elastic:
        what = (
            f"measures what all ranks do together, which {'elastic' if options.elastic else options.consistency} ends"
        )
        raise ConfigError("tune", True, what, "write consistency='bsp', and leave elastic out")


def _place(engine: Means, updates: Place | None, text: str) -> Place:
    """Where optimizers run; ConfigError where what is asked for does not go together."""
    apart = read_consistency(text).apart
    if updates is not None and updates not in get_args(Place):
        raise unknown("updates", updates, get_args(Place))
    if engine != "ps" and (updates == "servers" or apart):
        field, value = ("updates", updates) if updates == "servers" else ("consistency", text)
        raise ConfigError(field, value, "is of no use to all-reduce", "write engine='ps'")
    if apart and updates == "workers":
        what = "cannot be with optimizers on the workers: each would have other parameters"
        raise ConfigError("consistency", text, what, "write updates='servers'")
    return "servers" if apart else updates or "workers"


SERVERS = "FORETRAIN_SERVERS"
"""Environment variable with the addresses of a job's servers."""


def _addresses(servers: str | None) -> tuple[tuple[str, int], ...]:
    field, text = ("servers", servers) if servers is not None else (SERVERS, os.environ.get(SERVERS, ""))
    found = []
    for each in filter(None, map(str.strip, text.split(","))):
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(field, each, "is no address", "write e.g. '10.0.0.5:5555'")
        found.append((host, int(port)))
    if not found:
        remedy = "start some with `foretrain server`, or the job with `foretrain run --servers 1`"
        raise ConfigError(field, text, "names no server", remedy)
    return tuple(found)


def refuse_wrapped(model: nn.Module) -> None:
    """ConfigError for a model whose gradients somebody else reduces, cannot be sent as they are, or do not exist."""
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


def _seconds(field: str, value: float | str) -> float:
    seconds = to_seconds(parse_time(value)) if isinstance(value, str) else value
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(field, value, "is not a positive time", "write e.g. 60 or '60s'")
    return float(seconds)
