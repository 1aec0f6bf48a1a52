"""``torch.cuda`` beyond tensors: settings, memory, storages and CUDA graphs."""

import itertools
import os
import sys
import time

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from tests.live.command import on_gpus, simulate


def test_properties_are_those_of_the_gpu() -> None:
    from foretrain.device import preset
    from foretrain.device.presets import preset_names
    from foretrain.live.device.cuda import properties_of

    found, newer = properties_of(preset("A100")), properties_of(preset("H100"))
    assert (found.shared_memory_per_block_optin, newer.shared_memory_per_block_optin) == (163 << 10, 227 << 10)
    assert (found.clock_rate, newer.clock_rate) == (1_410_000, 1_980_000)
    assert found.memory_clock_rate == pytest.approx(1_593_000, rel=1e-3)
    assert newer.memory_clock_rate == pytest.approx(2_619_000, rel=1e-3)
    assert properties_of(preset("2080Ti")).memory_clock_rate == pytest.approx(7_000_000, rel=1e-3)
    assert all(properties_of(preset(name)).clock_rate for name in preset_names())


@pytest.mark.smoke
@on_gpus()
def test_settings_handles_and_versions_are_those_of_a_build_with_cuda() -> None:
    import pytest

    from tests.live.scripts.timing import seconds

    torch.cuda.memory._set_allocator_settings("large_segment_size_mb:32")
    before = torch.cuda.memory_reserved()
    held = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == 16 * held.nbytes
    with pytest.raises(RuntimeError):
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:none")
    assert abs(seconds(lambda: torch.cuda._sleep(1_980_000)) - 1e-3) < 1e-4
    with torch.cuda.profiler.profile():
        runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaProfilerStart())
    torch.cuda.check_error(runtime.cudaHostRegister(0, 512, 0))
    assert runtime.cudaGetErrorString(runtime.cudaProfilerStop()) == "no error"
    assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    assert isinstance(torch.cuda.current_blas_handle(), int)
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() == 91002
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        rows = torch.empty(5, 3, 8, device="cuda", requires_grad=True)
        nn.LSTM(8, 16, device="cuda")(rows)[0].sum().backward()
    plain, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    plain.record()
    timed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(timed)
    parallel = nn.DataParallel(nn.Linear(4, 4).cuda())
    with pytest.raises(NotImplementedError, match=r"use torch.nn.parallel.DistributedDataParallel"):
        parallel(torch.ones(8, 4, device="cuda"))


@on_gpus(cluster="H100")
def test_functions_take_a_device_by_name() -> None:
    stream = torch.cuda.Stream(device=0)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream(device=torch.device("cuda", 0)) == stream
    assert torch.cuda.default_stream(device=0) == torch.cuda.current_stream(device="cuda:0")
    free, total = torch.cuda.mem_get_info(device=0)
    assert 0 < free <= total
    torch.cuda.synchronize(device=0)


@on_gpus("--live", "all", cluster="dgx-h100:1,ranks=0-1")
def test_a_mesh_sets_the_device_of_a_script_that_has_not_used_one() -> None:
    torch.cuda.manual_seed_all(7)
    assert torch.cuda.device_count() == 2
    assert not torch.cuda.is_initialized()
    dist.init_process_group("nccl")
    dist.init_device_mesh("cuda", (2,))
    assert torch.cuda.is_initialized()
    assert torch.cuda.current_device() == dist.get_rank()
    assert torch.cuda.initial_seed() == 7


@on_gpus("--live", "all", cluster="dgx-h100:1,ranks=0-1")
def test_kernels_of_a_stream_that_is_not_waited_for_are_told_with_what_comes_later() -> None:
    x, other = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        x.add_(1)
    for _ in range(600):
        x.add_(1)
        torch.cuda.Event().record()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        x.add_(1)
    for _ in range(9):
        x.add_(1)
    dist.recv(x, 0) if dist.get_rank() else dist.send(x, 1)
    torch.cuda.synchronize()


def test_least_squares_and_saving_need_no_values() -> None:
    def script():
        for shape, sides in (((90, 80), (90, 70)), ((90, 80), (90,)), ((80, 90), (80, 70)), ((7, 90, 80), (1, 90, 70))):
            expected = torch.linalg.lstsq(torch.randn(shape), torch.randn(sides), driver="gels")
            found = torch.linalg.lstsq(torch.empty(shape, device="cuda"), torch.empty(sides, device="cuda"))
            assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
        torch.save({"weight": torch.empty(1 << 20, device="cuda")}, os.devnull)

    ended = simulate("dgx-h100:1", script)
    assert "values" not in ended.out + ended.err.split("meaningless")[1]
    assert "linalg_lstsq" in ended.out + ended.err


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_that_cost_nothing_are_told_once(workers: int) -> None:
    def script():
        from torch.utils.data import DataLoader

        for _ in range(2):
            for batch in DataLoader(range(8), num_workers=int(sys.argv[1])):
                batch.cuda()

    told = simulate("H100", script, workers).numbers["warnings"]
    found = {text: count for text, count in told.items() if "workers" in text}
    assert list(found.values()) == [1] * bool(workers)
    assert all("script.py:" in text for text in found)


def test_peak_memory_stays_when_the_script_resets_its_own() -> None:
    def script():
        big = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        del big
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() < 1 << 20

    memory = simulate("H100", script).numbers["ranks"][0]["memory"]
    assert memory["allocated"] == memory["reserved"] == memory["breakdown"]["activations"] == 3 << 30


def test_memory_is_that_of_the_gpu_that_needs_most() -> None:
    def script():
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda:1")

    ended = simulate("dgx-h100:1,ranks=0-1", script, options=("--live", 1))
    assert ended.numbers["ranks"][0]["memory"]["reserved"] == 20 << 30


@on_gpus()
def test_saved_tensors_load_with_the_values_they_have() -> None:
    path = os.path.join(os.path.dirname(__file__), "saved")
    small, large = torch.arange(5, device="cuda"), torch.empty(1 << 20, device="cuda")
    torch.save({"small": small, "large": large}, path)
    loaded = torch.load(path, map_location="cuda")
    assert loaded["small"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["large"].shape == large.shape
    before = torch.cuda.memory_allocated()
    storage = torch.UntypedStorage(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1 << 20
    assert storage.device == torch.device("cuda", 0)


@on_gpus("--live", 2)
def test_values_stay_in_a_storage_that_grows() -> None:
    tensor = torch.tensor([1, 2, 3], dtype=torch.uint8, device="cuda")
    tensor.resize_(100_000)
    assert tensor[:3].tolist() == [1, 2, 3]
    told = [None]
    objects = [list(range(10_000 * k)) for k in range(8)]
    dist.scatter_object_list(told, objects if dist.get_rank() == 0 else None, src=0)
    assert told[0] == objects[dist.get_rank()]


@pytest.mark.smoke
@on_gpus()
def test_a_represented_world_writes_and_reads_distributed_checkpoints() -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64, device="cuda")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    path = os.path.join(os.path.dirname(__file__), "checkpoint")
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "step": 7}
    checkpoint.async_save(state, checkpoint_id=path, process_group=dist.new_group(backend="gloo")).result()
    state["step"] = 0
    checkpoint.load(state, checkpoint_id=path)
    assert state["step"] == 7
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.smoke
@on_gpus()
def test_a_replayed_graph_takes_the_kernels_time_and_one_launch() -> None:
    import pytest

    x, other = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()

    def work():
        total = torch.zeros(1 << 24, device="cuda")
        for _ in range(100):
            x.add_(1)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            total.add_(1)
            dist.all_reduce(total)
        torch.cuda.current_stream().wait_stream(other)

    def taken(call):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        return host, time.perf_counter() - begin

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        work()
        with pytest.raises(RuntimeError, match="capturing"):
            x.sum().item()
    host, both = taken(work)
    replayed_host, replayed = taken(graph.replay)
    assert replayed_host < host / 20
    assert 0 < replayed < both
    assert abs(taken(graph.replay)[1] - replayed) < 1e-9
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(64, 512, device="cuda", requires_grad=True),))
    graphed(torch.randn(64, 512, device="cuda", requires_grad=True)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_steps_in_a_graph_are_made_when_it_is_replayed() -> None:
    def script():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 512, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(7):
            graph.replay()

    (rank,) = simulate("H100", script).numbers["ranks"]
    assert len(rank["steps"]) == 3 + 7
    assert 0 < rank["steps"][-1] < 0.9 * rank["steps"][1]  # one launch, where there were dozens
    assert rank["flops"] > 0


def test_what_is_computed_again_counts_once() -> None:
    def script():
        from torch.utils.checkpoint import checkpoint

        class Product(torch.autograd.Function):  # its forward pass is computed with gradients disabled
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            def backward(ctx, gradient):
                x, weight = ctx.saved_tensors
                return gradient @ weight.T, x.T @ gradient

        product = {"matmul": torch.matmul, "function": Product.apply}[sys.argv[1]]
        weights = [nn.Parameter(torch.ones(256, 256, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, lr=0.1)

        def model(x):
            for weight in weights:
                x = product(x, weight)
            return x

        call = {
            "once": model,
            "again": lambda x: checkpoint(model, x, use_reentrant=False),
            "reentrant": lambda x: checkpoint(model, x, use_reentrant=True),
            "compiled": torch.compile(lambda x: checkpoint(model, x, use_reentrant=False)),
            "compiled within": lambda x: checkpoint(torch.compile(model), x, use_reentrant=False),
        }[sys.argv[2]]
        for _ in range(3):
            x = torch.ones(64, 256, device="cuda", requires_grad=True)
            call(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    ways = "once", "again", "reentrant", "compiled", "compiled within"
    for product, way in itertools.product(("matmul", "function"), ways):
        found = simulate("H100", script, product, way).numbers
        flops = found["flops_per_gpu"] * found["iteration_time"]
        assert flops == pytest.approx(3 * 3 * 2 * 64 * 256 * 256), (product, way)


@on_gpus(cluster="H100", says="an optimizer makes several steps is")
def test_several_steps_in_one_graph_are_taken_for_one_and_said_so() -> None:
    weight = nn.Parameter(torch.ones(1 << 20, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    for _ in range(3):
        graph.replay()


@on_gpus()
def test_tensor_types_of_old_make_tensors_and_say_what_is_one() -> None:
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    made = [torch.cuda.HalfTensor(2, 3), torch.cuda.HalfTensor(torch.Size([2, 3])), torch.cuda.HalfTensor()]
    assert [(one.shape, one.type()) for one in made] == [
        (size, "torch.cuda.HalfTensor") for size in ((2, 3), (2, 3), (0,))
    ]
    moved = torch.ones(3).type(torch.cuda.HalfTensor)
    assert isinstance(moved, torch.cuda.HalfTensor)
    assert not isinstance(moved, torch.cuda.FloatTensor)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.ones(2).is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.ones(2).is_cuda
