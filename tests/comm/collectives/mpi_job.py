"""One rank of MPI's; run by test_mpi: ``mpiexec -n 2 python mpi_job.py``."""

import sys
from contextlib import closing

import numpy as np
import pytest
from mpi4py import MPI

import foretrain as ft
from foretrain.comm.collectives.mpi import MpiCollectives
from foretrain.errors import ConfigError

RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def bits(values):
    """The bfloat16 bits of small integers."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def collectives():
    with closing(MpiCollectives(RANK, RANKS)) as mpi:
        total = RANKS * (RANKS + 1) // 2
        arrays = [np.arange(8).astype(kind) * (RANK + 1) for kind in ("f4", "f8", "f2", "i4", "i8")]
        works = [mpi.all_reduce(array) for array in arrays]
        assert all(work.wait(300) for work in works)
        for array in arrays:
            assert (array == np.arange(8) * total).all(), array
        half = bits(np.arange(8) * (RANK + 1))
        assert mpi.all_reduce(half, bfloat16=True).wait()
        assert (half == bits(np.arange(8) * total)).all()
        scattered = np.arange(2.0 * RANKS) + RANK
        assert mpi.reduce_scatter(scattered).wait()
        mine = slice(2 * RANK, 2 * RANK + 2)
        assert (scattered[mine] == RANKS * np.arange(2.0 * RANKS)[mine] + RANKS * (RANKS - 1) / 2).all()
        gathered = np.repeat(np.arange(RANKS), 3) * (np.repeat(np.arange(RANKS), 3) == RANK)
        assert mpi.all_gather(gathered).wait()
        assert (gathered == np.repeat(np.arange(RANKS), 3)).all()
        for step in range(50):  # an all-gather right behind the reduce-scatter whose block it gathers
            both = np.full(1000 * RANKS, step * (RANK + 1.0))
            works = [mpi.reduce_scatter(both), mpi.all_gather(both)]
            assert all(work.wait(300) for work in works)
            assert (both == step * total).all(), step
        alone = np.zeros(4)
        if RANK:
            MPI.COMM_WORLD.Barrier()
        work = mpi.all_reduce(alone)
        if not RANK:
            assert not work.wait(0.05)  # the others wait at the barrier
            MPI.COMM_WORLD.Barrier()
        assert work.wait()
    with pytest.raises(ConfigError, match="start the ranks with mpirun"):
        MpiCollectives(RANK, RANKS + 1)


def session():
    with ft.Session(schedule="dear", transport=ft.AllReduce(backend="mpi")) as session:
        tasks = session.declare([("front.weight", 4000, "float32"), ("back.weight", 80_000, "float32")])
        for step in range(8):
            session.begin_step()
            for task in reversed(tasks):
                task.ready(np.full(task.count, step * (RANK + 1), np.float32))
            for task in tasks:
                assert (task.wait() == step * (RANKS + 1) / 2).all()


def attached():
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=RANK, world_size=RANKS, init_method=sys.argv[1])
    found = []
    for backend in ("gloo", "mpi"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = "bytescheduler(partition=1KiB, credit=2KiB)"
        with ft.attach(model, optimizer, schedule, transport=ft.AllReduce(backend=backend)):
            for step in range(8):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + RANK))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    collectives()
    session()
    attached()
    sys.stdout.write(f"rank {RANK} is done\n")
