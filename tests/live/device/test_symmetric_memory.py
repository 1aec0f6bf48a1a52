"""AsyncTP: collectives beside matrix products are pipelined with them, as TorchInductor's own pass has it."""

import pytest

pytest.importorskip("torch")

import json

import torch
import torch.distributed as dist

from tests.live.command import on_gpus, simulate


def _layer() -> None:
    from torch._inductor import config
    from torch.distributed import _functional_collectives as funcol
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group, ranks = dist.group.WORLD, dist.get_world_size()
    enable_symm_mem_for_group(group.group_name)

    def products(whole, up, down):
        return (whole @ up).relu() @ down

    def layer(x, up, down):
        return funcol.reduce_scatter_tensor(products(funcol.all_gather_tensor(x, 1, group), up, down), "sum", 1, group)

    def taken(call, *inputs):
        torch._dynamo.reset()
        compiled = torch.compile(call)
        for _ in range(2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = compiled(*inputs)
            result.sum().backward()
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end), list(result.shape)

    def tensors(*sides):
        return torch.empty(sides, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    for batch in (1, 2):
        x, up, down = tensors(batch, 8192 // ranks, 4096), tensors(4096, 14336 // ranks), tensors(14336 // ranks, 4096)
        computed, _ = taken(products, tensors(batch, 8192, 4096), up, down)
        config._micro_pipeline_tp = False
        plain, shape = taken(layer, x, up, down)
        config._micro_pipeline_tp = True
        overlapped, same = taken(layer, x, up, down)
        assert same == shape == list(x.shape)
        print(json.dumps({"computed": computed, "plain": plain, "overlapped": overlapped}), flush=True)


@pytest.mark.parametrize("live", [1, 8])
def test_a_layer_takes_less_than_its_products_and_collectives_one_after_the_other(live: int) -> None:
    ended = simulate("dgx-h100:1", _layer, options=["--live", live])
    found = {tuple(line.values()) for line in ended.lines}
    assert len(ended.lines) == 2 * live
    assert len(found) == 2
    for computed, plain, overlapped in found:
        assert computed < overlapped < plain


@on_gpus()
def test_parts_go_in_bytes_over_the_links_and_only_copies_are_simulated() -> None:
    import pytest
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.get_symm_mem_workspace(dist.group.WORLD.group_name, 1 << 20)
    assert memory.world_size == 8
    own = memory.get_buffer(memory.rank, (256, 512), torch.bfloat16, 1024)
    assert (own.shape, own.storage_offset()) == ((256, 512), 1024)
    other = memory.get_buffer((memory.rank + 3) % 8, (256, 512), torch.float8_e4m3fn)
    assert (other.numel(), other.element_size()) == (1 << 17, 1)
    received = torch.empty(512, 256, dtype=torch.float8_e4m3fn, device="cuda").t()
    assert received.copy_(other) is received
    for call in (lambda: torch.add(other, other), lambda: _symmetric_memory.empty(8)):
        with pytest.raises(NotImplementedError, match=r"for asynchronous tensor parallelism .* alone; use"):
            call()
