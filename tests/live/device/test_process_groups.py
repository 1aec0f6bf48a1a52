"""Process groups of simulated ranks: families, and values of ranks that others stand for."""

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.live.device.process_groups import _Families
from tests.live.command import on_gpus, simulate

TWO = "dgx-h100:1,ranks=0-1"


def numbered(*groups: list[int]) -> list[int]:
    """The family of each of ``groups``, made one after the other."""
    told: list[int] = []
    families = _Families(lambda ranks, family: told.append(family) or 0)
    for group in groups:
        families.add(group)
    return told


def test_groups_of_one_size_without_a_common_rank_that_are_made_in_one_go_are_a_family() -> None:
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert numbered([0, 1, 2, 3], *rows, *columns) == [1, 2, 2, 3, 3]
    assert numbered([0], [1], [2, 3]) == [1, 1, 2]
    assert numbered([0, 1], [0, 1]) == [1, 2]


@on_gpus(cluster="dgx-h100:2")
def test_a_broadcast_of_a_represented_rank_has_the_value_of_who_stands_for_it() -> None:
    last = dist.get_world_size() - 1
    tensor = torch.tensor([3.0, 4.0], device="cuda")
    for _ in range(2):
        dist.broadcast(tensor, src=last)
        assert tensor.tolist() == [3.0, 4.0]
    objects = [{"lr": 0.1}, "abc"]
    dist.broadcast_object_list(objects, src=last)
    assert objects == [{"lr": 0.1}, "abc"]
    objects = ["of the first"] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["of the first"]
    large = torch.empty(1 << 20, device="cuda")
    dist.broadcast(large, src=last)


@on_gpus()
def test_a_barrier_behind_new_groups_does_not_wait_for_represented_ranks() -> None:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group("nccl")
    group = dist.new_group(range(dist.get_world_size()))
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)


@on_gpus()
def test_every_represented_rank_has_the_value_of_its_own_kind() -> None:
    # Odd ranks are like rank 1, even ones like rank 0: neither stands for just those behind it.
    mesh = dist.device_mesh.init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "stage"))
    stage, pair = mesh.get_local_rank("stage"), mesh.get_group("stage")
    token = torch.ones(4, device="cuda")
    if stage == 0:
        dist.send(token, group=pair, group_dst=1)
    else:
        dist.recv(token, group=pair, group_src=0)
    mine = torch.tensor([10.0 + stage], device="cuda")
    everyone = torch.zeros(8, device="cuda")
    dist.all_gather_into_tensor(everyone, mine)
    assert everyone.tolist() == [10.0, 11.0] * 4
    for root in range(8):
        value = mine.clone()
        dist.broadcast(value, src=root)
        assert value.item() == 10.0 + root % 2


@pytest.mark.parametrize("live", ["all", "1"])
def test_collectives_of_uneven_sizes_have_the_values_that_were_sent_or_none(live: str) -> None:
    def script():
        rank, ranks, whole, gpu = dist.get_rank(), range(dist.get_world_size()), sys.argv[1] == "all", "cuda"

        def has_values(tensor):
            return not tensor.numel() or "..." not in repr(tensor)

        def check(found, expected):
            assert found.shape == expected.shape
            if whole or has_values(found):
                assert has_values(found)
                assert found.tolist() == expected.tolist()

        gathered = [torch.zeros(k + 1, device=gpu) for k in ranks]
        dist.all_gather(gathered, torch.full((rank + 1,), rank + 0.5, device=gpu))
        for k in ranks:
            check(gathered[k], torch.full((k + 1,), k + 0.5))

        parts = [torch.arange(k + 1.0, device=gpu) + 10 * k for k in ranks]
        mine = torch.zeros(rank + 1, device=gpu)
        dist.reduce_scatter(mine, parts)
        assert has_values(mine)
        assert mine.tolist() == ((torch.arange(rank + 1.0) + 10 * rank) * len(ranks)).tolist()

        # Rank r sends (r + k) % 3 rows of 2 to rank k, each of them 10 r + k.
        sent, got = ([(rank + k) % 3 for k in ranks] for _ in range(2))
        rows = torch.cat([torch.full((count, 2), 10.0 * rank + k) for k, count in enumerate(sent)]).to(gpu)
        expected = torch.cat([torch.full((count, 2), 10.0 * k + rank) for k, count in enumerate(got)])
        out = torch.zeros(sum(got), 2, device=gpu)
        dist.all_to_all_single(out, rows, got, sent)
        check(out, expected)

        outs = [torch.zeros(count, device=gpu) for count in got]
        dist.all_to_all(outs, [torch.full((count,), 10.0 * rank + k, device=gpu) for k, count in enumerate(sent)])
        for k, found in enumerate(outs):
            check(found, torch.full((got[k],), 10.0 * k + rank))

        out = torch.zeros(len(ranks), device=gpu)
        dist.all_to_all_single(out, 10.0 * rank + torch.arange(len(ranks), device=gpu))
        assert has_values(out)
        assert not whole or out.tolist() == [10.0 * k + rank for k in ranks]

    simulate("dgx-h100:1,ranks=0-3", script, live, options=("--live", live))


@on_gpus()
def test_tensors_on_the_host_are_exchanged_while_the_gpu_computes() -> None:
    host = dist.new_group(backend="gloo")
    big = torch.ones(1 << 14, 1 << 14, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.mm(big, big)
    dist.all_reduce(torch.ones(1), group=host)
    dist.barrier(group=host)
    dist.monitored_barrier(host)
    exchanged = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert exchanged < (time.perf_counter() - begin) / 2


def test_nccl_refuses_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def script():
        import pytest

        rank = dist.get_rank()
        own, first = torch.ones(4, device=f"cuda:{rank}"), torch.ones(4, device="cuda:0")
        if rank:
            with pytest.raises(RuntimeError, match="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"):
                dist.all_reduce(first)
        dist.all_reduce(own)
        dist.all_reduce(first, group=dist.new_group(backend="gloo"))

    def shared():
        dist.all_reduce(torch.ones(4, device="cuda:0"))

    simulate(TWO, script, options=("--live", "all"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    simulate(TWO, shared, options=("--live", "all"))


@pytest.mark.parametrize("way", ["all", "own"])
def test_groups_that_only_their_members_make_are_known_as_far_as_the_script_names_them(way: str) -> None:
    def script():
        rank, group = dist.get_rank(), None
        for first in range(0, dist.get_world_size(), 2):
            mine = rank in (first, first + 1)
            if mine or sys.argv[1] != "own":
                made = dist.new_group([first, first + 1], use_local_synchronization=sys.argv[1] != "all members wait")
                group = made if mine else group
        x = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
        optimizer = torch.optim.SGD([x])
        for _ in range(3):
            x.grad = torch.ones_like(x)
            dist.all_reduce(x.grad, group=group)
            optimizer.step()

    ended = simulate("dgx-h100:1", script, way)
    assert ended.numbers["live"] == [0]
    warning = "new_group(use_local_synchronization=True) has told of a group"
    assert (ended.out + ended.err).count(warning) == (way == "own")
    if way == "all":
        assert ended.numbers["links"] == simulate("dgx-h100:1", script, "all members wait").numbers["links"]


def test_groups_made_at_one_place_are_a_family_though_others_are_made_in_between() -> None:
    made: list[tuple[list[int], int]] = []
    families = _Families(lambda ranks, family: made.append((ranks, family)) or 0)

    def helper(*ranks: int) -> None:
        families.add(ranks)

    for rank in range(4):
        helper(rank, rank + 4)  # a pipeline
        helper(rank, rank + 4)  # its ends
        helper(rank)
    numbers = [family for _, family in made]
    assert numbers == [1, 2, 3] * 4
    helper(0, 1)
    helper(2, 3)  # elsewhere, but next to it
    for pair in ((0, 2), (1, 3), (0, 3), (1, 2)):
        helper(*pair)
    assert [family for _, family in made[12:]] == [4, 4, 5, 5, 6, 6]


@pytest.mark.smoke
def test_fake_backend_takes_the_time_of_nccl_in_the_simulated_network() -> None:
    def script():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = sys.argv[1]
        store = {"store": FakeStore()} if backend == "fake" else {}
        dist.init_process_group(backend, rank=rank, world_size=world, **store)
        assert dist.get_backend() == backend
        mesh = dist.device_mesh.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("data", "tensor"))
        layer = nn.Linear(4096, 4096, device="cuda")
        model = nn.parallel.DistributedDataParallel(layer, process_group=mesh["data"].get_group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            out = model(torch.randn(64, 4096, device="cuda"))
            dist.all_reduce(out.detach(), group=mesh["tensor"].get_group())
            out.sum().backward()
            optimizer.step()

    fake, real = (simulate("dgx-h100:2", script, backend) for backend in ("fake", "nccl"))
    assert fake.numbers["iteration_time"] == real.numbers["iteration_time"]
    assert fake.numbers["ranks"][0]["communication"] > 0
    assert "rank 0 stands for 0-15" in fake.err


def test_process_of_a_fake_world_is_the_rank_that_it_says() -> None:
    def script():
        dist.init_process_group("fake", rank=int(sys.argv[1]), world_size=16)
        assert os.environ["LOCAL_RANK"] == str(dist.get_rank() % 8)
        mesh = dist.device_mesh.init_device_mesh("cuda", (2, 8))
        dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=mesh.get_group(1))
        assert list(mesh.get_coordinate()) == [1, 3]

    ended = simulate("dgx-h100:2", script, 11)
    assert "starting again as rank 11, which the script says that it is" in ended.err
    assert "rank 11 stands for 0-15" in ended.err
    refused = simulate("dgx-h100:2", script, 11, options=("--live", "all"), status=1)
    assert "init_process_group rank: 11 is not this process's" in refused.err


def test_ranks_of_mpi4py_are_those_of_the_job(tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"  # MPI need not be installed
    package.mkdir()
    (package / "__init__.py").write_text(MPI_PACKAGE)
    (package / "of_mpich.py").write_text("COMM_WORLD = None\n")
    script = tmp_path / "script.py"
    script.write_text(MPI_SCRIPT)
    ended = simulate("dgx-h100:1", script, options=("--live", 2))
    assert sorted(ended.out.splitlines()[:2]) == ["0 8 first", "1 8 first"]


MPI_PACKAGE = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mpi4py.MPI":
            return importlib.util.spec_from_file_location(name, __file__.replace("__init__", "of_mpich"))

sys.meta_path.append(Finder)
"""
"""As the real package chooses the MPI that is there."""
MPI_SCRIPT = """
import torch
import torch.distributed as dist
from mpi4py import MPI

comm = MPI.COMM_WORLD
print(comm.Get_rank(), comm.size, comm.bcast("first" if comm.rank == 0 else None))
try:
    comm.Scatter
except NotImplementedError as error:
    assert "MPI.COMM_WORLD.Scatter is not simulated" in str(error)
dist.init_process_group("nccl", rank=comm.rank, world_size=comm.size)
weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
weight.sum().backward()
torch.optim.SGD([weight]).step()
"""
