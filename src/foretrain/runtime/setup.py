"""How ranks find each other and agree before the first step: groups, connections, one plan."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

from foretrain.errors import ConfigError
from foretrain.network import Cluster
from foretrain.runtime.address import local_address
from foretrain.runtime.handshake import SECRET_SIZE, Listener, connect
from foretrain.runtime.link import Link, LinkError
from foretrain.runtime.observation import Observed
from foretrain.runtime.options import Options
from foretrain.runtime.sideband import Sideband
from foretrain.schedule import POLICIES, Cost, Spec
from foretrain.tasks import Chunk
from foretrain.tune import tune
from foretrain.units import COST_SHIFT, SECOND
from foretrain.virtual import simulate
from foretrain.workload.step import Workload

logger = logging.getLogger("foretrain")

SECRET = "FORETRAIN_SECRET"
"""Environment variable with the job's secret, in hexadecimal, where a launcher hands one out."""
_ONE_SECRET = (
    f"give all nodes the same {SECRET} (or foretrain run --secret-file), made with: openssl rand -hex {SECRET_SIZE}; "
    "or give it to none, and rank 0 makes one"
)
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737): the way to it is the default route."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_TRUE = ("1", "t", "true", "y", "yes")
"""What PyTorch takes for true in the environment."""
_CONNECT = 20.0
"""Seconds the ranks have to connect to the coordinator."""


def dedicated_groups(
    group: dist.ProcessGroup | None, patience: float, device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two groups of the same ranks and backend that nobody else uses: one for gradients, one for everything else.

    Collectives of one group must be issued in one order; the model's own collectives and ours have none in common.
    """
    # get_backend says "undefined" where init_process_group was left to choose.
    backend, patient = dist.get_backend_config(group), timedelta(seconds=patience)
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        made = [dist.new_group(timeout=patient, backend=backend) for _ in range(2)]
    else:
        made = [_subgroup(group, backend, patient, device) for _ in range(2)]
    first, second = made
    assert isinstance(first, dist.ProcessGroup)
    assert isinstance(second, dist.ProcessGroup)
    return first, second


def _subgroup(group: dist.ProcessGroup, backend: str, patience: timedelta, device: torch.device) -> dist.ProcessGroup:
    """Another group of the ranks of ``group``, made by them alone.

    ``new_group(use_local_synchronization=True)`` would name it after how many groups a process has, which differs
    between processes that are in different ones, and again after one was destroyed. Here its first rank numbers it.
    """
    ranks, store = dist.get_process_group_ranks(group), c10d._get_default_store()
    sideband = Sideband(group, device)
    number = str(store.add("foretrain/groups", 1)) if sideband.rank == 0 else ""
    name = f"foretrain-{sideband.share(number.encode()).decode()}"
    made, _ = c10d._new_process_group_helper(
        len(ranks), sideband.rank, ranks, backend, store, c10d.GroupName(name), timeout=patience
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


_OWN = ("interface", "trace")
"""Settings in which ranks may differ."""


def agree_on_model(sideband: Sideband, model: nn.Module, options: Options) -> None:
    """Raises Disagreement, on all ranks, where settings, parameters or buffers that are shared differ."""
    settings = {key: value for key, value in msgspec.structs.asdict(options).items() if key not in _OWN}
    sideband.must_agree("setting", list(settings), [_hash(f"{key}={value}") for key, value in settings.items()])
    parameters = [(name, p, "" if p.requires_grad else " frozen") for name, p in model.named_parameters()]
    buffers = [(name, buffer, "") for name, buffer in model.named_buffers() if options.broadcast_buffers]
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}" for name, tensor, frozen in tensors]
        sideband.must_agree(what, described, [_hash(text) for text in described])


def refuse_blocking_waits(sideband: Sideband) -> None:
    """ConfigError, on all ranks alike, where NCCL's waits hold the host on one of them.

    The threads that order operations wait for collectives on behalf of their streams. Held there, they would neither
    hear other ranks nor say that this one is alive.
    """
    set_here = next((name for name in _BLOCKING if os.environ.get(name, "").lower() in _TRUE), None)
    if sideband.enqueues and not sideband.everywhere(set_here is None):
        name = set_here or _BLOCKING[0]
        value = os.environ.get(name, "set on another rank")
        remedy = "unset it on all ranks; a rank that is lost is noticed without it, after `timeout`"
        raise ConfigError(name, value, "makes the host wait for every collective of NCCL", remedy)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def connect_ranks(sideband: Sideband, interface: str | None) -> dict[int, Link] | None:
    """Links between rank 0 and all others, authenticated; None on all ranks where one cannot connect.

    Rank 0 listens on one address of one interface. The secret is the launcher's, or one that rank 0 makes and hands out
    over the process group.

    Raises:
        ConfigError: on all ranks alike, where a rank's secret is wrong or another, or rank 0 cannot listen.
    """
    links: dict[int, Link] = {}
    listener = problem = None
    several = len({row[0] for row in sideband.gather([_hash(platform.node())])}) > 1
    given = _common_secret(sideband)
    secret = given or secrets.token_bytes(SECRET_SIZE)
    if sideband.rank == 0:
        try:
            listener = _listen(_own_address(interface, several), secret, sideband.ranks)
        except ConfigError as error:
            problem = error
    try:
        sideband.raise_alike(problem)
        if listener is not None:
            host, port = listener.address
            sideband.share(f"{host} {port} {'' if given else secret.hex()}".encode())
        else:
            host, port, made = sideband.share(None).decode().split(" ")
            secret = given or bytes.fromhex(made)
        try:
            if listener is not None:
                links = listener.accept(_CONNECT)
            else:
                links[0] = connect((host, int(port)), secret, sideband.rank, _CONNECT)
            complete = listener is None or len(links) == sideband.ranks - 1
        except LinkError as error:
            logger.warning("rank %d cannot connect: %s", sideband.rank, error)
            complete = False
        if sideband.everywhere(complete):
            return links
    finally:
        if listener is not None:
            listener.close()
    for link in links.values():
        link.close()
    return None


def _own_address(interface: str | None, several: bool) -> str:
    """Where rank 0 listens: of ``several`` hosts none reaches another's loopback, which its name may stand for."""
    found = local_address(interface, _master())
    if several and interface is None and found.startswith("127."):
        return local_address(None, _ELSEWHERE)
    return found


def _listen(host: str, secret: bytes, ranks: int) -> Listener:
    try:
        return Listener(host, secret, expected=range(1, ranks))
    except ConfigError as error:
        remedy = "name another: attach(..., interface='eth0'), or GLOO_SOCKET_IFNAME"
        raise ConfigError("interface", host, error.problem, remedy) from error


def _common_secret(sideband: Sideband) -> bytes | None:
    """The secret that a launcher gave to all ranks; None where it gave none."""
    secret = problem = None
    try:
        secret = _secret()
    except ConfigError as error:
        problem = error
    sideband.raise_alike(problem)
    # Of 32 random bytes: who sees 8 bytes of their hash learns no more than from the handshake.
    marks = [row[0] for row in sideband.gather([_hash(f"secret {secret.hex()}") if secret else 0])]
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            having, missing = (0, rank) if marks[0] else (rank, 0)
            what = f"is another on rank {rank} than on rank 0"
            if not (mark and marks[0]):
                what = f"is set on rank {having} and not on rank {missing}"
            raise ConfigError(SECRET, "(hidden)", what, _ONE_SECRET)
    return secret


def _secret() -> bytes | None:
    text = os.environ.get(SECRET)
    if not text:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(SECRET, "(hidden)", "is not hexadecimal", _ONE_SECRET) from None
    if len(secret) < SECRET_SIZE:
        raise ConfigError(SECRET, "(hidden)", f"has {len(secret)} bytes, fewer than {SECRET_SIZE}", _ONE_SECRET)
    return secret


def _master() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return (host, int(port)) if host and port and port.isdigit() else None


def slowest(sideband: Sideband, seen: Observed) -> Observed:
    """The observation of the rank that computes longest, on all ranks: the others will wait for it.

    How often a gradient comes in one pass is the most that any rank has seen.
    """
    computes = [row[0] for row in sideband.gather([seen.compute])]
    place = computes.index(max(computes))
    count = len(seen.order)
    times = [seen.forward, seen.backward, seen.update]
    rows = sideband.gather([*seen.fires, *seen.order, *seen.uses, *seen.releases, *times, seen.passes])
    _, order, uses, releases = (rows[place][k * count : (k + 1) * count] for k in range(4))
    forward, backward, update, passes = rows[place][4 * count :]
    return Observed(
        order=order,
        uses=uses,
        forward=forward,
        releases=releases,
        backward=backward,
        update=update,
        fires=[max(fires) for fires in zip(*(row[:count] for row in rows), strict=True)],
        passes=passes,
    )


def cluster_of(cost: Cost, ranks: int) -> Cluster:
    """A cluster whose all-reduce costs ``cost``: the measured network, for the simulator."""
    seconds_per_byte = cost.per_byte / (1 << COST_SHIFT) / SECOND
    rate = 2 * (ranks - 1) / ranks / max(seconds_per_byte, 1e-15)
    one_way = cost.latency // (2 * (ranks - 1))
    return Cluster(workers=ranks, up=rate, down=rate, latency=one_way, overhead=cost.overhead, floor=cost.floor)


def choose_knobs(wanted: Spec, workload: Workload, cost: Cost, ranks: int) -> Spec:
    """``wanted`` with every knob that it leaves open at its best in the simulator: on rank 0, in a moment."""
    free = [knob for knob in POLICIES[wanted.name].knobs if knob.name not in wanted.knobs]
    if ranks == 1 or not free or cost.per_byte == 0:
        return wanted
    return tune(workload, cluster_of(cost, ranks), wanted, careful=True)


def replayed_order(schedule: Spec, workload: Workload, cost: Cost, ranks: int) -> list[Chunk]:
    """The chunks that ``schedule`` sends in one steady step of the simulator, in order."""
    run = simulate(workload, cluster_of(cost, max(2, ranks)), schedule, trace=False)
    last = len(run.begins) - 2
    return [decision.chunk for decision in run.log if decision.step == last]


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The one device of a model; ConfigError where there are several."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        shown = ", ".join(sorted(map(str, devices)))
        raise ConfigError("model", shown, "is on several devices", "attach one model per device")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("model", str(device), "is neither on a CPU nor on a CUDA device", "move the model first")
    return device
