"""GPT trained as Megatron-LM does: tensor, sequence, context, pipeline, data and expert parallel, in mixed precision.

torchrun --nproc-per-node 8 megatron.py --model gpt3-175b --tp 8 --pp 8 --micro-batch 1 --global-batch 64

Plain torch.distributed, one process for each GPU. Ranks are numbered as Megatron numbers them: tensor parallel first,
then context, data and pipeline parallel. Those of a pipeline's stage share experts: the parts of each first, then ranks
with other experts, and those with the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import megatron_experts
import torch
import torch.distributed as dist
from job import Meter, join
from megatron_batch import load
from megatron_experts import Grouped
from megatron_model import SHAPES, Shape, Stage, Way, fuse, gpt
from megatron_optimizer import Gradients, MixedPrecisionAdam, counted, sum_partial, wait_before_use
from megatron_pipeline import Line, beside, interleaved, one_forward_one_backward
from megatron_servers import Servers
from megatron_turns import Turns
from ring_attention import zigzag
from tensor_layers import Column, Row, Split
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformer_engine_memory import let_stand_in

RECOMPUTED = ("none", "selective", "activations", "latents", "experts", "full")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*SHAPES, "gpt"), default="gpt")
    for name in ("layers", "hidden", "heads", "words"):
        parser.add_argument(f"--{name}", type=int, help="of the model: given for gpt, else changes what it has")
    parser.add_argument(
        "--feed", type=int, help="hidden size of feed-forward networks, of each expert if there are any"
    )
    parser.add_argument("--experts", type=int, help="of a model that has some")
    parser.add_argument("--dense", type=int, help="layers at the beginning that have no experts")
    parser.add_argument("--predict", type=int, default=0, help="words after the next one that are predicted as well")
    parser.add_argument("--drop", action="store_true", help="tokens above an expert's equal share; pads what lacks")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences of a step, of all GPUs")
    for name in ("tp", "cp", "pp", "vp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--etp", type=int, default=1, help="ranks that split each expert")
    parser.add_argument("--servers", type=int, default=1, help="that share experts; a token travels to each once")
    parser.add_argument(
        "--room", type=float, default=1, help="for tokens between servers, times what they need on average"
    )
    parser.add_argument("--ends-count", action="store_true", help="embedding and loss take a layer's place each")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--overlap-tensor", action="store_true", help="gradients of inputs travel under other products")
    parser.add_argument("--pieces", type=int, default=1, help="of a split sequence, which travel beside products")
    parser.add_argument("--overlap-data", action="store_true", help="gradients are reduced during the backward pass")
    parser.add_argument("--overlap-gather", action="store_true", help="parameters are gathered during the forward pass")
    parser.add_argument("--overlap-pipeline", action="store_true", help="the host does not wait for messages")
    parser.add_argument("--overlap-experts", action="store_true", help="tokens travel under other micro-batches")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--gradients", choices=DTYPES, help="dtype in which gradients add up; the model's by default")
    parser.add_argument(
        "--float8",
        choices=("delayed", "current", "nvfp4"),
        help="layers multiply in float8, with these scales, or NVFP4",
    )
    parser.add_argument(
        "--float8-weights",
        action="store_true",
        help="layers keep weights in float8 alone, which are gathered where gradients add up later",
    )
    parser.add_argument("--attention", choices=("core", "flash", "cudnn"), default="core")
    parser.add_argument("--recompute", choices=RECOMPUTED, default="none")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--fuse", action="store_true", help="compile what Megatron has kernels of its own for")
    parser.add_argument("--fused-loss", action="store_true", help="the loss is Transformer Engine's")
    parser.add_argument("--stand-ins", action="store_true", help="autograd is given gradients besides those added up")
    parser.add_argument("--load", action="store_true", help="each stage loads each micro-batch from its host")
    parser.add_argument("--reproducible", action="store_true", help="initial values do not depend on the layout")
    parser.add_argument(
        "--first", type=int, nargs="+", default=(), help="micro-batches of the first steps; the others have all"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if any(count % args.pp for count in args.first):
        parser.error("--first must be multiples of --pp")
    if args.recompute == "activations" and not (args.model in SHAPES and SHAPES[args.model].mixture):
        parser.error("--recompute activations needs a model with experts")
    if args.ep * args.etp > 1 and not args.distributed_optimizer:
        parser.error("--ep and --etp need --distributed-optimizer, which knows whose gradients are whose")
    if args.overlap_experts and args.pp > 1 and args.vp == 1:
        parser.error("--overlap-experts needs --vp in a pipeline, whose passes are not beside one another without")
    if args.servers > 1 and (args.drop or args.ep % args.servers):
        parser.error("--servers must divide --ep, and tokens be dropped for lack of --room only, not by --drop")
    alone = args.float8 and args.distributed_optimizer and args.overlap_gather and args.gradients in (None, args.dtype)
    if args.float8_weights and not alone:
        parser.error("--float8-weights needs --float8, --distributed-optimizer and --overlap-gather, and gradients "
                     "of the dtype of the model")  # fmt: skip
    return args


def shape_of(args: argparse.Namespace) -> Shape:
    """The model, its words padded as Megatron pads them: to 128 on each tensor-parallel rank."""
    if args.model == "gpt":
        shape = gpt(args.layers, args.hidden, args.heads, args.words or 50257)
    else:
        given = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "words")}
        shape = replace(SHAPES[args.model], **{name: value for name, value in given.items() if value})
    if mixture := shape.mixture:
        given = {"experts": args.experts, "feed": args.feed, "dense": args.dense, "drop": args.drop}
        mixture = replace(mixture, **{name: value for name, value in given.items() if value is not None})
    shape = replace(shape, mixture=mixture, feed=args.feed or shape.feed, predict=args.predict)
    return replace(shape, words=math.ceil(shape.words / (128 * args.tp)) * 128 * args.tp)


def layers_of(shape: Shape, args: argparse.Namespace, number: int) -> range:
    """The layers of stage ``number`` of all: each has as many, but the last one what is left."""
    stages, ends = args.pp * args.vp, 1 if args.ends_count else 0
    places = shape.layers + ends * (2 + bool(shape.predict))
    each = math.ceil(places / stages)
    if (stages - 1) * each >= places:
        raise SystemExit(f"{places} layers do not fill {stages} stages of {each}: the last ones would have none")
    return range(max(0, number * each - ends), min(shape.layers, (number + 1) * each - ends))


def build(
    args: argparse.Namespace,
    mesh: DeviceMesh,
    of_experts: DeviceMesh | None,
    servers: Servers | None,
    turns: Turns | None,
    split: Split,
    device: torch.device,
) -> list[Stage]:
    """The stages that this rank has."""
    shape, count = shape_of(args), args.pp * args.vp
    context = mesh["cp"].get_group() if args.cp > 1 else None
    experts, parts = (of_experts[name].get_group() if of_experts else None for name in ("ep", "etp"))
    way = Way(args.attention, args.recompute, args.dropout, context, experts, parts, servers, args.fused_loss, turns)
    stages = []
    for number in range(mesh["pp"].get_local_rank(), count, args.pp):
        with device:
            positions = torch.arange(args.sequence)
            positions = zigzag(positions, 0, mesh["cp"].get_local_rank(), args.cp) if context else positions
            layers, ends = layers_of(shape, args, number), {"first": number == 0, "last": number == count - 1}
            stage = Stage(split, shape, way, layers, positions, args.sequence, **ends)
        for p in stage.parameters():
            p.data = p.data.to(DTYPES[args.dtype])
        split_layers = [module for module in stage.modules() if isinstance(module, (Column, Row))]
        for layer in split_layers if args.float8_weights else ():
            if layer.scaled:
                layer.weight.cast = partial(layer.scaled.weight, layer.weight)
        if args.stand_ins:
            weights = [layer.weight for layer in split_layers]
            let_stand_in(weights, stage.head.weight if stage.last else None)
        stages.append(stage)
    return stages


def multiplied(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields weights whose gradients are added where they are computed, once for each use."""
    for part in module.modules():
        if isinstance(part, (Column, Row)):
            yield part.weight
        elif isinstance(part, Grouped):
            yield from (part.up, part.down)


def copied_words(stages: list[Stage]) -> nn.Parameter | None:
    """The words' vectors where the first and the last stage both have them, on different ranks."""
    first, last = stages[0], stages[-1]
    if first.first and not last.last:
        return first.words.weight if first.shape.tied or first.shape.predict else None
    if last.last and not first.first:
        return last.head.weight if last.shape.tied else last.ahead.words.weight if last.ahead else None
    return None


def share_words(stages: list[Stage], line: Line) -> None:
    """Sums the gradients of the words' vectors, which the first and the last rank of a pipeline both have."""
    weight = copied_words(stages)
    if weight is None:
        return
    other = torch.empty_like(weight.main_grad)
    peer = dist.get_global_rank(line.group, line.ranks - 1 - line.rank)
    ops = [dist.P2POp(dist.isend, weight.main_grad, peer, line.group), dist.P2POp(dist.irecv, other, peer, line.group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    weight.main_grad.add_(other)


def main() -> None:
    """Trains, and prints each step."""
    args = options()
    device = join(args.device)
    world = dist.get_world_size()
    dp = world // (args.tp * args.cp * args.pp)
    mesh = init_device_mesh(args.device, (args.pp, dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    replicas = mesh["dp", "cp"]._flatten("replicas").get_group()
    micro_batches, rest = divmod(args.global_batch, args.micro_batch * dp)
    if rest or not micro_batches or (args.vp > 1 and micro_batches % args.pp):
        raise SystemExit(f"{args.global_batch} sequences do not make micro-batches of {args.micro_batch} on {dp} ranks")
    of_experts, holders, servers = None, None, None
    if args.fuse and shape_of(args).latent:
        import megatron_latent

        megatron_latent.fuse()
    if mixture := shape_of(args).mixture:
        if args.fuse:
            megatron_experts.fuse()
        sizes = (args.pp, world // (args.pp * args.ep * args.etp), args.ep, args.etp)
        of_experts = init_device_mesh(args.device, sizes, mesh_dim_names=("stage", "holders", "ep", "etp"))
        holders = of_experts["holders"].get_group()
        if args.servers > 1:
            sizes = (world // args.ep, args.servers, args.ep // args.servers)
            of_servers = init_device_mesh(args.device, sizes, mesh_dim_names=("others", "across", "within"))
            servers = Servers(of_servers["across"].get_group(), of_servers["within"].get_group(), args.room)
        if args.tp > 1 and not args.sequence_parallel:
            raise SystemExit("experts need --sequence-parallel: else each tensor-parallel rank would send all tokens")
        if args.etp > 1 and not mixture.drop:
            raise SystemExit("--etp needs --drop, with which all ranks gather equally much")
        if args.float8_weights:
            raise SystemExit("--float8-weights needs a model without experts, whose weights are cast one by one")
    if args.fuse:
        fuse()

    torch.manual_seed(1)
    tp, pp = mesh["tp"].get_group(), mesh["pp"].get_group()
    split = Split(tp, args.sequence_parallel, args.overlap_tensor, args.float8, args.pieces, args.reproducible)
    turns = Turns() if args.overlap_experts else None
    stages = build(args, mesh, of_experts, servers, turns, split, device)
    of_stages = [list(stage.parameters()) for stage in stages]
    parameters = list(dict.fromkeys(p for each in of_stages for p in each))
    uses = {
        stage.head.weight: 1 + (stage.first and stage.shape.tied) + stage.shape.predict
        for stage in stages
        if stage.last
    }
    uses |= {weight: stage.shape.predict for stage in stages if stage.ahead for weight in multiplied(stage.ahead)}
    if (words := copied_words(stages)) is not None:
        words.copied = args.distributed_optimizer
    scatter, overlap = args.distributed_optimizer, args.overlap_data
    kind = DTYPES[args.gradients or args.dtype]
    gradients = Gradients(
        of_stages, uses, kind, replicas,
        scatter=scatter, overlap=overlap, first=pp.rank() == 0, shared=args.float8_weights, experts=holders,
    )  # fmt: skip
    shared = (tp, pp, replicas) if scatter else (tp, pp)
    mine = counted(parameters, tp.rank())
    if stages[-1].last:
        mine.discard(words)
    optimizer = MixedPrecisionAdam(gradients, shared, mine, overlap=args.overlap_gather)
    for stage in stages:
        wait_before_use(stage)

    here = args.sequence // args.cp // (args.tp if args.sequence_parallel else 1)
    activations = (here, args.micro_batch, stages[0].shape.hidden)
    alike = None if args.sequence_parallel or args.tp == 1 else tp
    line = Line(
        pp, activations, DTYPES[args.dtype], device, synchronous=not args.overlap_pipeline, alike=alike, turns=turns
    )
    schedule = interleaved if args.vp > 1 else beside if turns else one_forward_one_backward
    words = 50257 if args.words is None else args.words
    torch.manual_seed(2)
    tokens = torch.randint(words, (args.global_batch, args.sequence + 1)).chunk(dp)[mesh["dp"].get_local_rank()]
    on_host = tokens.split(args.micro_batch)
    batches = [
        tuple(
            zigzag(part, 1, mesh["cp"].get_local_rank(), args.cp) if args.cp > 1 else part
            for part in (t[:, :-1], t[:, 1:])
        )
        for t in tokens.to(device).split(args.micro_batch)
    ]

    def run(stage: Stage, came: torch.Tensor | None, number: int) -> torch.Tensor:
        inputs, targets = load(on_host[number], device, tp) if args.load else batches[number]
        return stage(inputs if came is None else came, targets if stage.last else None)

    layers = [module for stage in stages for module in stage.modules() if getattr(module, "scaled", None)]
    scaled = [one for layer in layers for one in (layer.scaled if isinstance(layer.scaled, list) else [layer.scaled])]
    meter = Meter(args.global_batch * args.sequence, talks=dist.get_rank() == (args.pp - 1) * (world // args.pp))
    torch.manual_seed(3 + dist.get_rank())
    for number in range(args.steps):
        count = args.first[number] if number < len(args.first) else micro_batches
        gradients.zero(count)
        steps = [lambda came, number, stage=stage: run(stage, came, number) for stage in stages]
        loss = schedule(line, steps, count, optimizer.scale)
        loss = torch.zeros((), device=device) if loss is None else loss
        gradients.finish()
        dist.all_reduce(loss, group=replicas)
        sum_partial(parameters, tp)
        share_words(stages, line)
        optimizer.step()
        for layer in scaled:
            layer.forget_weight()
        meter.step(loss / replicas.size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
