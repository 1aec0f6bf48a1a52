"""``foretrain simulate`` from end to end: what scripts see, what they print, and what the command says of it."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from tests.live.command import SCRIPTS, Ended, simulate


def forecast(ended: Ended) -> dict[str, object]:
    """What must be the same from run to run."""
    return {key: value for key, value in ended.numbers.items() if key != "wall"}


def by_rank(ended: Ended) -> dict[int, object]:
    return {
        rank["rank"]: [rank[key] for key in ("steps", "compute", "exposed", "waiting", "memory")]
        for rank in ended.numbers["ranks"]
    }


@pytest.mark.parametrize(
    ("cluster", "arguments", "live"),
    [
        ("dgx-a100:2,ranks=0-1+8-9", (), [0]),
        ("dgx-h100:1,ranks=0-3", ("--tensor", 2, "--shard"), [0]),
        ("dgx-h100:1", ("--pipeline", 2, "--tensor", 2, "--shard", "--layers", 2, "--steps", 2), [0, 4]),
    ],
    ids=["DDP on 2 servers", "FSDP2 by tensor parallel", "pipeline by FSDP2 by tensor parallel"],
)
@pytest.mark.smoke_case("DDP on 2 servers")
def test_few_live_ranks_tell_what_all_would(cluster: str, arguments: tuple[object, ...], live: list[int]) -> None:
    few = simulate(cluster, "train.py", *arguments)
    every = simulate(cluster, "train.py", *arguments, options=("--live", "all"))
    assert few.numbers["live"] == live
    assert every.numbers["live"] == list(range(every.numbers["world"]))
    assert few.numbers["iteration_time"] == every.numbers["iteration_time"]
    assert by_rank(few).items() <= by_rank(every).items()
    assert few.lines == every.lines


@pytest.mark.parametrize("way", [("--bound",), ("--backend", "cpu:gloo,cuda:nccl")], ids=["split off", "two backends"])
def test_groups_act_together_however_they_are_made(way: tuple[str, ...]) -> None:
    script = ("dgx-a100:2,ranks=0-1+8-9", "train.py", "--tensor", 2, "--shard")
    plain, other = simulate(*script), simulate(*script, *way)
    assert other.numbers["live"] == plain.numbers["live"] == [0]
    assert other.numbers["iteration_time"] == plain.numbers["iteration_time"]
    assert other.numbers["links"] == plain.numbers["links"]


def test_a_slow_gpu_is_live_and_the_others_wait_for_it() -> None:
    usual, slow = (
        simulate("dgx-h100:1,ranks=0-3", "train.py", options=options)
        for options in ((), ("--fault", "gpu:s0.gpu2=50%"))
    )
    assert slow.numbers["live"] == [0, 2]
    first, other = slow.numbers["ranks"]
    assert other["compute"] == pytest.approx(2 * usual.numbers["ranks"][0]["compute"], rel=0.05)
    assert first["waiting"] > usual.numbers["ranks"][0]["waiting"]
    assert slow.numbers["iteration_time"] > usual.numbers["iteration_time"]


def test_a_faulty_link_slows_what_crosses_it() -> None:
    usual, slow = (
        simulate("2x1xA100@10Gbps", "train.py", options=options)
        for options in ((), ("--fault", "link:host1-switch=10%"))
    )
    assert slow.numbers["live"] == [0, 1]
    assert slow.numbers["ranks"][0]["communication"] > 3 * usual.numbers["ranks"][0]["communication"]


def test_a_shift_by_an_uneven_all_to_all_takes_as_long_folded() -> None:
    def script():
        rank, world = dist.get_rank(), dist.get_world_size()
        layer = nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        keys, received = torch.randn(2, 1 << 14, 1024, device="cuda")
        to_next = [len(keys) if other == (rank + 1) % world else 0 for other in range(world)]
        from_last = [len(keys) if other == (rank - 1) % world else 0 for other in range(world)]
        for _ in range(3):
            for _ in range(world - 1):
                dist.all_to_all_single(received, keys, from_last, to_next)
                keys, received = received, keys
                layer(keys).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()

    few, every = (simulate("dgx-h100:1,ranks=0-3", script, options=("--live", live)) for live in ("auto", "all"))
    assert few.numbers["live"] == [0]
    assert few.numbers["iteration_time"] == pytest.approx(every.numbers["iteration_time"], rel=1e-3)


def test_objects_come_to_ranks_that_are_live() -> None:
    def script():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        for length in (0, 3, 9000):
            given = [{"name": "a" * length}, length] if dist.get_rank() == 0 else [None, None]
            dist.broadcast_object_list(given, src=0)
            assert given == [{"name": "a" * length}, length]

    ended = simulate("dgx-h100:1,ranks=0-1", script, options=("--live", "all"))
    assert ended.numbers["live"] == [0, 1]


@pytest.mark.smoke
def test_two_runs_give_the_same_forecast_and_the_script_prints_it() -> None:
    where, script = "dgx-h100:1,ranks=0-3", ("train.py", "--pipeline", 2)
    once, again = (simulate(where, *script) for _ in range(2))
    assert forecast(once) == forecast(again)
    assert once.lines == again.lines
    assert len(once.lines) == 3
    step = once.numbers["ranks"][0]["steps"][-1]
    for line in once.lines:
        assert line["events"] == pytest.approx(line["seconds"], rel=1e-3)  # reading a clock takes time as well
    assert once.lines[-1]["seconds"] == pytest.approx(step, rel=1e-3)
    assert once.numbers["iteration_time"] == pytest.approx(step, rel=1e-9)


def test_asynchronous_checkpoints_leave_forecasts_alike(tmp_path: Path) -> None:
    def script():
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_rank())
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(6):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if step % 2:
                saved = dcp.async_save(model.state_dict(), checkpoint_id=os.path.join(sys.argv[1], str(step)))
        saved.result()

    where = "dgx-h100:1,ranks=0-3"
    once, again = (simulate(where, script, tmp_path / name) for name in ("1", "2"))
    for one, other in zip(once.numbers["ranks"], again.numbers["ranks"], strict=True):
        # What ranks tell each other of a checkpoint, with its folder's name and random ones, is not always as long.
        assert one["steps"] == pytest.approx(other["steps"], rel=1e-6)
    assert (tmp_path / "1" / "5" / ".metadata").exists()
    every = simulate(where, script, tmp_path / "3", options=("--live", "all"))
    assert every.numbers["live"] == [0, 1, 2, 3]


def test_script_has_its_usual_surroundings_and_virtual_time() -> None:
    ended = simulate("dgx-a100:2,ranks=0-2", "surroundings.py", "--rate", 0.5, "--status", 3, status=3)
    assert "the script failed on rank 0 with exit status 3" in ended.err
    thread, told, atexit = ended.lines
    assert (thread, atexit) == ({"thread": True}, {"atexit": True})
    assert (told["rate"], told["name"], told["gpus"], told["rows"]) == (0.5, "__main__", 3, [64, 64])
    assert told["environment"] == {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
        **{"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    }
    assert told["slept"] == pytest.approx([1.5, 1.5], abs=1e-5)
    assert told["polled"] == pytest.approx([10_000] * 3, abs=2)  # 100 ns each, as floats
    assert told["queries"] > 1
    assert told["instant"]


def test_module_on_one_gpu_and_steps_that_are_enough() -> None:
    module = simulate("H100", "-m", "kit.job", "word", folder=SCRIPTS)
    assert forecast(module)["world"] == 1
    assert module.lines == [{"name": "__main__", "package": "kit", "arguments": ["word"]}]
    enough = simulate("4x1xV100@10Gbps", "train.py", "--steps", 100, options=("--steps", 2, "--live", 2))
    assert len(enough.lines) == 1  # the second step ends the script before it prints
    assert [len(rank["steps"]) for rank in enough.numbers["ranks"]] == [2, 2]
    assert [rank["stands_for"] for rank in enough.numbers["ranks"]] == [2, 2]


def test_script_without_a_step_has_no_forecast() -> None:
    ended = simulate("H100", "stepless.py", status=1)
    assert ended.out == ""
    assert "without a step of an optimizer" in ended.err


def test_backward_passes_are_steps_of_a_script_that_updates_by_hand() -> None:
    def script() -> None:
        weight = nn.Parameter(torch.ones(1024, 1024, device="cuda"))
        for _ in range(8):
            weight.grad = None
            (weight @ weight).sum().backward()
            weight.data.add_(weight.grad, alpha=-0.1)  # no optim

    ended = simulate("H100", script, options=("--steps", 4))
    assert len(ended.numbers["ranks"][0]["steps"]) == 4
    assert "the script has no optimizer of torch.optim: each backward pass is taken for a step" in ended.out


def test_an_optimizer_called_for_each_group_of_parameters_makes_one_step() -> None:
    def script() -> None:
        weights = [nn.Parameter(torch.ones(1024, 1024, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
        groups = optimizer.param_groups
        for _ in range(4):
            (weights[0] @ weights[1] @ weights[2]).sum().backward()
            for group in groups:  # as DeepSpeed's ZeRO
                optimizer.param_groups = [group]
                optimizer.step()
            optimizer.param_groups = groups

    assert len(simulate("H100", script).numbers["ranks"][0]["steps"]) == 4


def test_passes_in_an_optimizers_closure_are_none_of_its_update() -> None:
    def script() -> None:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.ones(1 << 16, 1024, device="cuda")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        for _ in range(2):
            optimizer.step(closure=closure)

    (rank,) = simulate("H100", script).numbers["ranks"]
    assert len(rank["steps"]) == 4
    memory = rank["memory"]["breakdown"]
    assert memory["optimizer"] == memory["parameters"]  # the momentum alone
    assert memory["activations"] > 8 * 4 * 1024 << 16


def test_batch_norm_across_ranks_warns_of_nothing() -> None:
    def script() -> None:
        norm = nn.SyncBatchNorm(512).cuda()
        norm(torch.rand(8, 512, 4, 4, device="cuda")).sum().backward()

    assert "made up" not in simulate("dgx-h100:1", script).out


def test_host_that_takes_longer_than_its_gpus_sets_the_pace() -> None:
    def told(host: str) -> dict[str, float]:
        ended = simulate("H100", "train.py", "--steps", 3, options=("--host", host))
        (rank,) = ended.numbers["ranks"]
        return {"step": rank["steps"][-1], "kernels": rank["kernels"]}

    slow = told("1ms")
    assert slow["step"] >= 1e-3 * slow["kernels"] > 10 * told("modelled")["step"]
    assert told("measured")["step"] > 0


def test_comparison_writes_both_forecasts() -> None:
    options = ("--schedule", "fifo", "--compare")
    ended = simulate("4x1xV100@10Gbps", "train.py", "--steps", 6, options=options)
    stock, speedup = ended.numbers["stock"], ended.numbers["speedup"]
    assert stock["world"] == ended.numbers["world"] == 4
    assert speedup == pytest.approx(stock["iteration_time"] / ended.numbers["iteration_time"])


def test_a_gpu_may_be_given_another_memory() -> None:
    def script():
        tensor = torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
        total = torch.cuda.get_device_properties(0).total_memory >> 30
        print(json.dumps({"total": total, "tensor": tensor.nbytes >> 30}))

    ended = simulate("H100", script, options=("--memory", "120GiB"))
    assert ended.lines == [{"total": 120, "tensor": 100}]
    refused = simulate("H100", script, options=("--memory", "1GiB"), status=2)
    assert "memory: '1GiB' is too little for a GPU" in refused.err


def test_the_last_rank_is_live_where_the_script_asks_for_it() -> None:
    def script() -> None:
        layer = nn.Linear(64, 64).cuda()
        model = nn.parallel.DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        if dist.get_rank() == (dist.get_world_size() - 1):
            print(json.dumps({"rank": dist.get_rank()}))

    few, every = (simulate("dgx-h100:2", script, options=("--live", live)) for live in ("auto", "all"))
    assert few.numbers["live"] == [0, 15]
    assert few.lines == [{"rank": 15}]
    assert few.err.count("asks for rank 15") == 1
    assert few.numbers["iteration_time"] == every.numbers["iteration_time"]


def test_the_last_rank_is_live_where_its_number_comes_from_the_environment() -> None:
    def script() -> None:
        from datetime import timedelta

        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=1), dist.group.WORLD)
        layer = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            layer(torch.ones(8, 64, device="cuda")).sum().backward()
            dist.all_reduce(layer.weight.grad)
            optimizer.step()
        if rank == world_size - 1:
            print(json.dumps({"rank": rank}))

    ended = simulate("dgx-h100:1", script)
    assert ended.numbers["live"] == [0, 7]
    assert ended.lines == [{"rank": 7}]


def test_the_last_rank_gets_what_a_represented_rank_of_its_group_would_broadcast() -> None:
    def script() -> None:
        rank = dist.get_rank()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
        stages = [dist.new_group([first, first + 4]) for first in range(4)]
        length = torch.tensor(0 if rank % 2 else 300, device="cuda")
        dist.broadcast(length, rank - rank % 2, group=pairs[rank // 2])
        activation = torch.empty(length.item(), 8, device="cuda")
        if rank < 4:
            dist.send(activation, rank + 4, group=stages[rank])
        else:
            dist.recv(activation, rank - 4, group=stages[rank - 4])
        if rank == dist.get_world_size() - 1:
            print(json.dumps({"length": length.item()}))

    ended = simulate("dgx-h100:1", script)
    assert ended.numbers["live"] == [0, 3, 4, 7]  # rank 6, which broadcasts to rank 7, is represented by rank 4
    assert ended.lines == [{"length": 300}]
    assert ended.err.count("starting again") == 1  # messages and the last rank were seen in one run
    last, messages = ended.numbers["more_live"]
    assert last.endswith("asks for rank 7")
    assert messages == "messages between them were seen"


def test_a_script_that_fails_by_objects_of_represented_ranks_runs_again_with_all() -> None:
    def script() -> None:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, dist.get_rank())
        if ranks != list(range(dist.get_world_size())):
            raise RuntimeError(f"these are not all ranks: {ranks}")

    ended = simulate("dgx-h100:1,ranks=0-3", script)
    assert ended.numbers["live"] == [0, 1, 2, 3]
    assert "starting again with 4 live ranks" in ended.err
    assert "gathers objects of ranks that were not" in ended.err
    assert "gathers objects of ranks that were not" in ended.numbers["more_live"][0]


def optimizer_state_of_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])  # a rank has the state of two
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.cuda.current_device())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    print(json.dumps({"rank": dist.get_rank(), "state": sorted(state)}))


def test_a_check_on_rank_0_of_what_all_ranks_will_save_begins_again_with_all(tmp_path: Path) -> None:
    """Megatron-LM's dist_checkpointing.save does so (`validate_sharding_integrity`), and others do not wait for it."""

    def script() -> None:
        from torch.distributed.checkpoint.state_dict_saver import save
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        rank, world = dist.get_rank(), dist.get_world_size()
        offsets = [None] * world
        dist.all_gather_object(offsets, rank)
        accesses = torch.bincount(torch.tensor(offsets), minlength=world)
        if rank == 0 and not torch.all(accesses == 1):
            raise RuntimeError(f"Invalid access pattern: {accesses}")
        rows = torch.ones(1, 64, device="cuda")
        weight = DTensor.from_local(rows, init_device_mesh("cuda", (world,)), [Shard(0)])
        save({"weight": weight}, checkpoint_id=sys.argv[1])

    ended = simulate("dgx-h100:1,ranks=0-3", script, tmp_path / "saved")
    assert ended.numbers["live"] == [0, 1, 2, 3]
    assert "starting again with 4 live ranks" in ended.err
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 4


def test_the_optimizer_state_of_fsdp1_is_gathered_with_all_ranks_live() -> None:
    ended = simulate("dgx-h100:1,ranks=0-3", optimizer_state_of_fsdp1)
    assert ended.numbers["live"] == [0, 1, 2, 3]


def test_on_many_ranks_it_fails_and_says_how_to_go_on() -> None:
    ended = simulate("dgx-h100:5", optimizer_state_of_fsdp1, status=1)
    assert "--live all" in ended.err


def test_objects_that_are_copies_are_told_of() -> None:
    def script() -> None:
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, "alike")

    few, every = (simulate("dgx-h100:1,ranks=0-3", script, options=("--live", live)) for live in ("auto", "all"))
    assert few.numbers["live"] == [0]
    assert "gathers objects, 3 of them copies of those of live ranks" in few.out
    assert "copies" not in every.out
