"""Process groups by hand: every collective, objects of any size, Gloo beside NCCL, subgroups, stores, barriers."""

import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("all", "objects", "gloo", "subgroups", "split", "store", "functional", "mixed"))
kind = parser.parse_args().kind
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
backend, own = "cpu:gloo,cuda:nccl" if kind == "mixed" else "nccl", device if kind == "split" else None
dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5), device_id=own)
rank, world = dist.get_rank(), dist.get_world_size()
big, small = torch.ones(1 << 20, device=device), torch.full((world,), float(rank), device=device)


def everything() -> None:
    for x in (big, small):
        dist.all_reduce(x)
        dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        dist.gather(x, parts if rank == 0 else None)
        dist.scatter(x, parts if rank == 0 else None)
        whole = torch.empty(world * x.numel(), device=device)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.reduce_scatter(x, parts)
        dist.all_to_all(parts, list(whole.chunk(world)))
        dist.all_to_all_single(torch.empty_like(x), x)
        other = (rank + 1) % world, (rank - 1) % world
        requests = [dist.isend(x, other[0]), dist.irecv(torch.empty_like(x), other[1])]
        for request in requests:
            request.wait()
    dist.barrier(device_ids=[device.index])
    print(f"rank {rank}: {sum(small.tolist()):.0f}")


def objects() -> None:
    payload = {"rank": rank, "numbers": list(range(200_000))}
    gathered = [None] * world
    dist.all_gather_object(gathered, payload)
    assert [len(one["numbers"]) for one in gathered] == [200_000] * world
    told = [payload if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0]["rank"] == 0
    some = [None]
    dist.scatter_object_list(some, [str(k) for k in range(world)] if rank == 0 else None, src=0)
    found = [None] * world if rank == 0 else None
    dist.gather_object(payload, found, dst=0)


def gloo() -> None:
    cpu = dist.new_group(backend="gloo")
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x, group=cpu)
    parts = [torch.empty(1000) for _ in range(world)]
    dist.all_gather(parts, x, group=cpu)
    dist.broadcast(x, 0, group=cpu)
    dist.monitored_barrier(group=cpu, timeout=datetime.timedelta(seconds=10))
    dist.barrier(group=cpu)
    dist.all_gather_object([None] * world, {"rank": rank}, group=cpu)


def subgroups() -> None:
    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for name in mesh.mesh_dim_names:
        group = mesh.get_group(name)
        dist.all_reduce(big, group=group)
        assert dist.get_world_size(group) == mesh[name].size()
    flat = mesh._flatten("all") if hasattr(mesh, "_flatten") else None
    assert flat is None or flat.size() == world
    pairs, _ = dist.new_subgroups(2)
    dist.all_reduce(big, group=pairs)
    halves = [dist.new_group(list(range(k, world, 2))) for k in range(2)]
    dist.all_reduce(big, group=halves[rank % 2])


def split() -> None:
    dist.all_reduce(big)
    half = dist.split_group(dist.group.WORLD, [list(range(world // 2)), list(range(world // 2, world))])
    dist.all_reduce(big, group=half)


def store() -> None:
    shared = dist.distributed_c10d._get_default_store()
    shared.set(f"hello{rank}", str(rank))
    assert shared.get(f"hello{rank}") == str(rank).encode()
    shared.add("count", 1)
    own = dist.TCPStore("127.0.0.1", 29400, world, rank == 0, wait_for_workers=False)
    own.set("key", "value")
    assert own.get("key") == b"value"
    assert dist.PrefixStore("mine", own).check(["no"]) is False


def functional() -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.nn.functional import all_gather, all_reduce

    x = torch.randn(1 << 16, device=device, requires_grad=True)
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    whole = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    part = functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD)
    (total.sum() + part.sum() + all_reduce(x).sum() + torch.cat(all_gather(x)).sum()).backward()


def mixed() -> None:
    dist.all_reduce(torch.ones(10))
    dist.all_reduce(big)
    dist.barrier()


weight = nn.Linear(64, 64, device=device)
optimizer = optim.SGD(weight.parameters(), lr=0.1)
made = {"all": everything, "objects": objects, "gloo": gloo, "subgroups": subgroups, "split": split, "store": store}
for _ in range(2):
    (made | {"functional": functional, "mixed": mixed})[kind]()
    weight(torch.randn(8, 64, device=device)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
