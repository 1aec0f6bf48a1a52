"""Process groups of a simulated rank: NCCL's and Gloo's collectives happen in the simulated network.

So do those of PyTorch's backend "fake", with which one process tries out a whole world: it is one rank of it, as any.

# Note [Stores]
Under folding most ranks of the world do not exist, so no rank may wait for all of them: the live ranks share one
`FileStore` in a folder of the run's own, which also spares a listening socket. A key that only a represented rank would
set never comes. The waiting rank fails after `STORE_TIMEOUT`, whatever timeout the script has chosen: live ranks are
faster.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, FileStore, Store, TCPStore
from torch.distributed import device_mesh, distributed_c10d

from foretrain.errors import ConfigError
from foretrain.live.device import change_after_import, put
from foretrain.torch_version import nccl_classes, register_nccl


def install(device: ModuleType, store: Callable[[], Store]) -> None:
    """Put simulated process groups in place of NCCL's and Gloo's.

    Args:
        device: the loaded extension.
        store: makes the store of the rendezvous.
    """
    _install_nccl(device)
    _install_gloo(device)
    _install_fake(device)
    _install_rendezvous(store)
    _install_families(device)
    _install_objects()
    change_after_import(
        {
            "torch.distributed.rpc": lambda module: put(module, init_rpc=_refuse_rpc),
            "torch.distributed._symmetric_memory": _install_symmetric_memory,
        }
    )
    put(dist, set_timeout=lambda *_, **__: None)
    # With TORCH_DIST_INIT_BARRIER=1 all ranks of a new group meet in the store; see Note [Stores].
    put(distributed_c10d, _store_based_barrier=lambda *_, **__: None)
    # A build without NCCL has none, and would say so.
    put(dist.distributed_c10d, default_pg_nccl_timeout=timedelta(minutes=10))


def expect(world: int, rank: int, become: Callable[[int], None] | None = None) -> None:
    """Refuse a first group that is not the ``world`` which is simulated, or not by the ``rank`` of this process.

    Args:
        world: ranks of the job.
        rank: this process's.
        become: called with another rank that a fake world names for its one process; None if it cannot be another.
    """
    helper = distributed_c10d._new_process_group_helper

    def make(group_size: int, group_rank: int, *rest: Any, **named: Any) -> Any:
        if not dist.is_initialized() and group_size >= 0:
            remedy = "pass what RANK and WORLD_SIZE say, or nothing"
            if group_size != world:
                remedy = f"name a --cluster of {group_size} GPUs, or {remedy}"
                raise ConfigError("init_process_group world_size", group_size, f"is not the job's {world}", remedy)
            if group_rank != rank and become is not None and "fake" in map(str, rest[1:2]) and 0 <= group_rank < world:
                become(group_rank)
            if group_rank != rank:
                raise ConfigError("init_process_group rank", group_rank, f"is not this process's {rank}", remedy)
        return helper(group_size, group_rank, *rest, **named)

    put(distributed_c10d, _new_process_group_helper=make)


class NcclOptions(Backend.Options):
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__("nccl", timedelta(minutes=10))
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _Configuration()

    def __deepcopy__(self, memo: dict[int, Any]) -> NcclOptions:
        return NcclOptions(self.is_high_priority_stream)


class _Configuration:
    """``ncclConfig_t``: takes whatever is set, none of which has an effect here."""


class _Named(type):
    """Metaclass with isinstance by the backend's name, as all groups here are of one C++ class."""

    backend: str

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Backend) and instance.name() == cls.backend


def _install_nccl(device: ModuleType) -> None:
    class ProcessGroupNCCL(metaclass=_Named):
        """Simulated; isinstance holds for every group of backend "nccl"."""

        backend = "nccl"
        Options = NcclOptions
        NCCLConfig = _Configuration

        def __new__(cls, store: Store, rank: int, size: int, options: Any = None, **_: Any) -> Any:
            ranks = getattr(options, "global_ranks_in_group", None) or range(size)
            return device.group("nccl", rank, list(ranks), options or NcclOptions())

    names = nccl_classes(distributed_c10d)
    for module in (distributed_c10d, dist):
        put(module, **dict.fromkeys(names, ProcessGroupNCCL), is_nccl_available=lambda: True)
    put(distributed_c10d, _NCCL_AVAILABLE=True)
    register_nccl(distributed_c10d)
    lacking = {
        "options": property(lambda self: NcclOptions()),
        "comm_split_count": lambda self: 0,
        "_set_default_timeout": lambda self, timeout: None,
        "perform_nocolor_split": lambda self, device: None,
        "register_mem_pool": lambda self, pool: None,
        "deregister_mem_pool": lambda self, pool: None,
    }
    put(Backend, **{name: value for name, value in lacking.items() if not hasattr(Backend, name)})


def _install_gloo(device: ModuleType) -> None:
    class ProcessGroupGloo(metaclass=_Named):
        """Simulated; isinstance holds for every group of backend "gloo"."""

        backend = "gloo"

        def __new__(cls, store: Store, rank: int, size: int, timeout: Any = None, **_: Any) -> Any:
            ranks = _member_ranks[-1] if _member_ranks and len(_member_ranks[-1]) == size else range(size)
            return device.group("gloo", rank, list(ranks), Backend.Options("gloo"))

    for module in (distributed_c10d, dist):
        put(module, ProcessGroupGloo=ProcessGroupGloo)


def _install_fake(device: ModuleType) -> None:
    """Give groups of backend "fake", with which one process tries out a whole world, NCCL's time in its network."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # else it registers its own, later

    def make(common: Any, options: Any) -> Any:
        ranks = common.global_ranks_in_group or range(common.group_size)
        return device.group("fake", common.group_rank, list(ranks), NcclOptions())

    dist.Backend._plugins["FAKE"] = dist.Backend._BackendPlugin(make, True)


def _install_rendezvous(store: Callable[[], Store]) -> None:
    """Make ranks meet in the run's own store; see Note [Stores]."""
    # `torch.distributed.rendezvous` is the function, which hides the module of the same name.
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    put(rendezvous, TCPStore=lambda *_, **__: store(), _create_c10d_store=lambda *_, **__: store())


_member_ranks: list[Sequence[int]] = []
"""World ranks of the group that is being made, which Gloo's constructor does not get."""
_local_families: list[set[int]] = []
"""The ranks of families of groups whose members alone need make them; the same one for each group of a family."""


def hidden_siblings(world: int) -> str | None:
    """Return a warning if the script has announced some groups that members make alone, but not those of all ranks."""
    if all(len(told) == world for told in _local_families):
        return None
    return (
        "new_group(use_local_synchronization=True) has told of a group, but not of those that other ranks make: where"
        " their traffic shares links, times are too short; make all groups on all ranks, or simulate with --live all"
    )


def _install_families(device: ModuleType) -> None:
    """Announce every group that the script makes: families of groups show which ranks act alike."""
    families = _Families(device.announce_group)
    helper = distributed_c10d._new_process_group_helper

    def make(group_size: int, group_rank: int, global_ranks_in_group: Sequence[int], *rest: Any, **named: Any) -> Any:
        ranks = list(global_ranks_in_group) or list(range(group_size))
        families.add(ranks)
        _member_ranks.append(ranks)
        try:
            return helper(group_size, group_rank, global_ranks_in_group, *rest, **named)
        finally:
            _member_ranks.pop()

    put(distributed_c10d, _new_process_group_helper=make)
    plain = dist.new_group

    def new_group(ranks: Any = None, *rest: Any, use_local_synchronization: bool = False, **named: Any) -> Any:
        if use_local_synchronization and ranks is not None and dist.get_rank() not in ranks:
            families.add(sorted(ranks))  # of which PyTorch makes nothing
        made = plain(ranks, *rest, use_local_synchronization=use_local_synchronization, **named)
        if use_local_synchronization and ranks is not None:
            _local_families.append(families.told)
        return made

    for module in (dist, distributed_c10d, device_mesh):
        put(module, new_group=new_group)
    split = dist.split_group

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *rest: Any, **named: Any) -> Any:
        for ranks in split_ranks or ():
            families.add(dist.get_process_group_ranks(parent_pg or dist.group.WORLD)[rank] for rank in ranks)
        return split(parent_pg, split_ranks, *rest, **named)

    for module in (dist, distributed_c10d, device_mesh):
        put(module, split_group=split_group)


def _refuse_rpc(*_: Any, **__: Any) -> None:
    """Refuse calls between ranks: PyTorch's own sockets would carry them, of which no simulated network knows."""
    raise NotImplementedError(
        "init_rpc: calls from rank to rank (torch.distributed.rpc) are not simulated; simulate what uses collectives or"
        " send and recv of torch.distributed, or run the script as it is with torchrun"
    )


def _install_symmetric_memory(module: ModuleType) -> None:
    from foretrain.live.device import symmetric_memory  # few scripts have it

    symmetric_memory.install(module)


def _install_objects() -> None:
    """Take objects of a represented root from the rank that represents it."""
    plain, plain_scatter = dist.broadcast_object_list, dist.scatter_object_list

    def broadcast_object_list(
        object_list: list[Any], src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        group = distributed_c10d._group_or_default_group(group)
        src = 0 if src is None and group_src is None else src
        outside = distributed_c10d._rank_not_in_group(group)
        root = None if outside else distributed_c10d._canonicalize_group_rank(group, src, group_src)
        if outside or group.rank() == root:
            plain(object_list, src, group, device, group_src)
            return
        where = device or distributed_c10d._get_object_coll_device(group)
        pickled = [distributed_c10d._object_to_tensor(one, "cpu", group) for one in object_list]
        own, lengths = (torch.cat(parts) for parts in zip(*pickled, strict=True))
        sizes = lengths.to(where, copy=True)  # On the CPU it would be the same tensor, and always equal.
        dist.broadcast(sizes, group_src=root, group=group)
        own = own.to(where) if sizes.tolist() == lengths.tolist() else own.new_empty(int(sizes.sum()), device=where)
        dist.broadcast(own, group_src=root, group=group)
        for place, part in enumerate(own.split(sizes.tolist())):
            object_list[place] = distributed_c10d._tensor_to_object(part, part.numel(), group)

    def scatter_object_list(*given: Any, **named: Any) -> None:
        try:
            plain_scatter(*given, **named)
        except (EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                "scatter_object_list: its root is a rank that another stands for, which has nothing to scatter; "
                "simulate with --live all"
            ) from error

    for module in (dist, distributed_c10d):
        put(module, broadcast_object_list=broadcast_object_list, scatter_object_list=scatter_object_list)


class _Families:
    """Families of groups: of the same size, with no rank in common, made at one place or one after the other.

    A place is a line with the calls around it: Megatron's loops make groups of several families in turn.
    """

    def __init__(self, announce: Callable[[list[int], int], int]) -> None:
        self._announce = announce
        self._last: tuple[int, int, set[int]] = (0, 0, set())  # number, size, ranks
        self._at: dict[tuple[tuple[CodeType, int], ...], tuple[int, int, set[int]]] = {}
        self._count = 0

    @property
    def told(self) -> set[int]:
        """Return the ranks of the last group's family so far."""
        return self._last[2]

    def add(self, ranks: Any) -> None:
        """Announce one more group, of the world ranks ``ranks``, made by the caller."""
        ranks = list(ranks)
        place = _place()
        fitting = (
            family
            for family in (self._at.get(place, self._last), self._last)
            if family[1] == len(ranks) and family[2].isdisjoint(ranks)
        )
        found = next(fitting, None)
        if found is None:
            self._count += 1
            found = self._count, len(ranks), set[int]()
        self._last = self._at[place] = found
        found[2].update(ranks)
        self._announce(ranks, found[0])


def _place() -> tuple[tuple[CodeType, int], ...]:
    """Return the calls under way around the caller's; the innermost alone may be a helper's."""
    frame, place = sys._getframe(2), []
    while frame is not None:
        place.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(place)


STORE_TIMEOUT: Final = timedelta(seconds=30)
"""Time that a rank waits for a key of a store when some ranks are only represented."""
_REMEDY: Final = (
    "foretrain: some ranks are not live but represented by others (the lines on folding above say which), and leave no "
    "notes in a store; if this one is theirs, run all with --live all"
)


def shared_store(path: str, folded: bool) -> FileStore:
    """Return the store that all live ranks of a run share."""
    return _BoundedFileStore(path, -1) if folded else FileStore(path, -1)


def install_stores() -> None:
    """Make stores that a script creates itself not wait for ranks that are only represented."""
    put(dist, TCPStore=_BoundedTCPStore)


class _BoundedFileStore(FileStore):
    def __init__(self, path: str, ranks: int) -> None:
        super().__init__(path, ranks)
        super().set_timeout(STORE_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeouts that process groups set, of many minutes."""


class _BoundedTCPStore(TCPStore):
    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = STORE_TIMEOUT,
        wait_for_workers: bool = True,
        **named: Any,
    ) -> None:
        super().__init__(host_name, port, world_size, is_master, min(timeout, STORE_TIMEOUT), False, **named)


def explain_store_timeout(error: BaseException) -> None:
    """Add the likely cause to an error of a store in a folded run."""
    text = str(error)
    if isinstance(error, RuntimeError) and ("Timeout waiting for key" in text or "ait timeout" in text):
        error.add_note(_REMEDY)
