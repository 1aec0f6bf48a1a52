"""Llama trained as torchtitan and fms-fsdp do: FSDP2 or HSDP, tensor, context and pipeline parallel.

torchrun --nproc-per-node 8 llama.py --model llama3-8b --sequence 8192 --batch 2 --recompute selective

What is parallel, checkpointed and compiled, and in which order, follows torchtitan at the end of 2024.
"""

from __future__ import annotations

import argparse
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial

import ring_attention
import torch
import torch.distributed as dist
from async_tensor_parallel import AsyncColumns, AsyncRows, GatherAndMultiply
from float8 import convert, gather_in_float8
from float8_parallel import Columns, GatherInput, Rows, Split
from job import Meter, join
from llama_model import SHAPES, Llama, angles_of
from ring_attention import zigzag
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten._scaled_mm.default}
KEPT = {
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""What selective checkpointing keeps, besides every other matrix product."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="of the model, where it is to have others than its own")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each data-parallel rank")
    parser.add_argument("--shard", type=int, help="ranks that shard parameters; replicated beyond (HSDP)")
    for name in ("tp", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--schedule", choices=("1f1b", "interleaved"), default="1f1b")
    parser.add_argument("--microbatches", type=int, help="of the pipeline; one for each of its ranks by default")
    parser.add_argument("--recompute", choices=("none", "selective", "layers", "full"), default="none",
                        help="selective: all but the costly operators; layers: every other layer")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="each layer by torch.compile")
    parser.add_argument("--compile-loss", action="store_true")
    parser.add_argument("--async-tp", action="store_true",
                        help="tensor parallel collectives beside products")  # fmt: skip
    parser.add_argument("--float8", choices=("tensorwise", "rowwise"))
    parser.add_argument("--reduce", choices=("float32", "bfloat16"), default="float32", help="dtype of reductions")
    parser.add_argument("--exact", action="store_true", help="all in float32, to compare layouts")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.async_tp and not (args.compile or args.float8 == "tensorwise"):
        parser.error("--async-tp: the compiler's work; add --compile, or leave --async-tp out")
    return args


def tensor_parallel(model: Llama, mesh: DeviceMesh, float8: str | None, overlapped: bool) -> None:
    """Splits matrices over ``mesh``, and the sequence where there are none (Korthikanti et al., 2022)."""
    split, whole = Shard(1), Replicate()
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, {name: plan for name, plan in ends.items() if getattr(model, name) is not None})
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(split, None), desired_input_layouts=(whole, None)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=split),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=split),
    }
    if float8 == "tensorwise":
        rows, columns = (AsyncRows, AsyncColumns) if overlapped else (Rows, Columns)
        plan |= {
            "attention": GatherAndMultiply("wq", "wk", "wv") if overlapped else GatherInput(),
            "feed_forward": GatherAndMultiply("w1", "w3") if overlapped else GatherInput(),
        }
        plan |= {name: Split(rows if isinstance(style, RowwiseParallel) else columns)
                 for name, style in plan.items() if isinstance(style, (ColwiseParallel, RowwiseParallel))}  # fmt: skip
    for block in model.layers.values():
        parallelize_module(block, mesh, plan)


def _kept(products: Counter, context, operator, *_args, **_kwargs) -> CheckpointPolicy:
    products[context.is_recompute] += operator in PRODUCTS
    keep = operator in KEPT or (operator in PRODUCTS and products[context.is_recompute] % 2)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model: Llama, which: str) -> None:
    """Wraps layers so that their backward pass computes again what is not kept."""
    for position, (name, block) in enumerate(model.layers.items()):
        if which == "selective":
            contexts = lambda: create_selective_checkpoint_contexts(partial(_kept, Counter()))  # noqa: E731
            model.layers[name] = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
        elif which == "full" or (which == "layers" and position % 2):
            model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)


def shard(model: Llama, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """FSDP2, layer by layer; a pipeline's stages keep their parameters for the next micro-batch."""
    dtype = torch.float32 if args.exact else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=getattr(torch, args.reduce))
    blocks = list(model.layers.values())
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=args.pp == 1 and block is not blocks[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=args.pp == 1)


def fill(model: nn.Module, exact: bool) -> None:
    """Initial values; in ``exact`` runs they depend on a parameter's name alone, not on how it is split."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            nn.init.ones_(p)
        elif exact:
            plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(plain.encode()))) * 0.02
            if isinstance(p, DTensor):
                values = distribute_tensor(values.to(p.device), p.device_mesh, p.placements)
            p.data.copy_(values)
        else:
            nn.init.normal_(p, std=0.02)


def stage(
    args: argparse.Namespace, meshes: dict[str, DeviceMesh], number: int, count: int, device: torch.device
) -> Llama:
    """Stage ``number`` of ``count``, split, wrapped and initialised."""
    shape = replace(SHAPES[args.model], layers=args.layers or SHAPES[args.model].layers)
    layers = range(number * shape.layers // count, (number + 1) * shape.layers // count)
    with torch.device("meta"):
        model = Llama(shape, layers, first=number == 0, last=number == count - 1)
    for block in model.layers.values():
        block.attention.context = meshes["cp"].get_group() if args.cp > 1 else None
        if args.float8:
            convert(block, args.float8)
    if args.tp > 1:
        tensor_parallel(model, meshes["tp"], args.float8, args.async_tp)
    if args.recompute != "none":
        recompute(model, args.recompute)
    if args.compile:
        for name, block in model.layers.items():
            model.layers[name] = torch.compile(block)
    shard(model, meshes["shard"], args)
    model.to_empty(device=device)
    fill(model, args.exact)
    if args.float8 == "tensorwise":
        gather_in_float8(model)
    positions = torch.arange(args.sequence, device=device)
    model.angles = angles_of(
        zigzag(positions, 0, meshes["cp"].get_local_rank(), args.cp) if args.cp > 1 else positions, shape
    )
    return model


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def meshes_of(args: argparse.Namespace) -> dict[str, DeviceMesh]:
    """By what they are for. Parameters are sharded over context-parallel ranks too, as in torchtitan."""
    data = dist.get_world_size() // (args.tp * args.cp * args.pp)
    shards = args.shard or data * args.cp
    sizes = (args.pp, data * args.cp // shards, shards // args.cp, args.cp, args.tp)
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "copies", "shards", "cp", "tp"))
    sharded = mesh["shards", "cp"]._flatten("sharded")
    return {
        "tp": mesh["tp"],
        "cp": mesh["cp"],
        "pp": mesh["pp"],
        "data": mesh["copies", "shards"]._flatten("data"),
        "replicas": mesh["copies", "shards", "cp"]._flatten("replicas"),
        "shard": mesh["copies", "sharded"] if sizes[1] > 1 else sharded,
    }


def pipeline_products(group: dist.ProcessGroup) -> None:
    """Has TorchInductor pipeline the group's collectives with the products beside them, as torchtitan does."""
    from torch._inductor import config  # takes a second
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def main() -> None:
    """Trains, and prints each step."""
    args = options()
    loss_of = torch.compile(mean_loss) if args.compile_loss else mean_loss
    if args.compile:
        ring_attention.fuse()
    device = join(args.device)
    meshes = meshes_of(args)
    if args.async_tp and args.float8 != "tensorwise":
        pipeline_products(meshes["tp"].get_group())
    pp, rank = args.pp, meshes["pp"].get_local_rank()
    count = 2 * pp if args.schedule == "interleaved" and pp > 1 else pp
    models = [stage(args, meshes, number, count, device) for number in range(rank, count, pp)]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if pp > 1:
        pieces = args.microbatches or pp
        group = meshes["pp"].get_group()
        stages = [PipelineStage(model, rank + i * pp, count, device, group=group) for i, model in enumerate(models)]
        if count > pp:
            schedule = ScheduleInterleaved1F1B(stages, pieces, loss_fn=loss_of)
        else:
            schedule = Schedule1F1B(stages[0], pieces, loss_fn=loss_of)

    data = meshes["data"].size()
    torch.manual_seed(1)
    tokens = torch.randint(SHAPES[args.model].words, (data * args.batch, args.sequence + 1))
    tokens = tokens.chunk(data)[meshes["data"].get_local_rank()]
    inputs, targets = (
        (zigzag(part, 1, meshes["cp"].get_local_rank(), args.cp) if args.cp > 1 else part).to(device).contiguous()
        for part in (tokens[:, :-1], tokens[:, 1:])
    )
    meter = Meter(data * args.batch * args.sequence, talks=dist.get_rank() == (pp - 1) * (dist.get_world_size() // pp))
    for _ in range(args.steps):
        losses: list[Tensor] = []
        with loss_parallel():
            if pp > 1:
                given = {"target": targets, "losses": losses} if rank == pp - 1 else {}
                schedule.step(*((inputs,) if rank == 0 else ()), **given)
            else:
                losses.append(loss_of(models[0](inputs), targets))
                losses[0].backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if pp > 1:
            norm = norm**2
            dist.all_reduce(norm, group=meshes["pp"].get_group())
            norm = norm**0.5
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            means = [part.full_tensor() if isinstance(part, DTensor) else part for part in losses]
            loss = torch.stack(means).mean() if means else torch.zeros((), device=device)
            dist.all_reduce(loss, group=meshes["replicas"].get_group())
        meter.step(loss / meshes["replicas"].size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
