"""Which training scripts run on simulated GPUs: simulates every script of ``compatibility/`` and tabulates.

python benchmarks/compatibility.py [--only NAME] [--json FILE] [--markdown [FILE]] [--jobs N]
python benchmarks/compatibility.py --third-party --sources DIR [--only NAME] [--markdown [FILE]]

``--third-party`` simulates commands of public repositories instead, whose checkouts are in DIR; see ``third_party.py``.
``--markdown`` writes docs/live/compatibility.md, or docs/live/third-party.md, if no other file is named. Frameworks are
found where Python finds them, e.g. on PYTHONPATH; one that is not installed is told as such.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import third_party
from measure import finish, machine

HERE = Path(__file__).parent
SCRIPTS = HERE / "compatibility"
TABLE = HERE.parent / "docs/live/compatibility.md"
PATIENCE = 900
"""Seconds after which a simulation is taken to hang."""


TITAN = "torchtitan.train --module llama3 --parallelism.spmd_backend partial_dtensor --config"
TYPES = "torchtitan.train --module llama3 --config llama3_debugmodel --parallelism.spmd_backend"
DEBUG = f"{TITAN} llama3_debugmodel"
LLAMA = f"{TITAN} llama3_8b --hf_assets_path tests/assets/tokenizer --dataloader.dataset c4_test --training.steps 4"
EAGER = "--training.disable_cuda_graphs"
TENSOR = "--parallelism.tensor_parallel_degree 2"
COMPILE = "--compile.enable"
PROFILER = "--profiler.enable_profiling --profiler.profile_freq 5"
SEVERAL_GPUS = (
    "- `torch.nn.DataParallel`, and other ways to use several GPUs from one process: "
    "`torch.nn.parallel.DistributedDataParallel` has a process for each GPU, as a simulation does."
)


@dataclass(frozen=True)
class Case:
    """One row: a feature, and what shows it.

    Attributes:
        feature: as users call it.
        script: of ``compatibility/``, without its suffix, and its arguments; or with a dot, a module's name.
        cluster: simulated.
        needs: packages without which it cannot run.
        why: it fails, where it is known to.
    """

    feature: str
    script: str
    cluster: str = "dgx-h100:1"
    needs: tuple[str, ...] = ()
    why: str = ""

    @property
    def command(self) -> list[str]:
        """What comes behind ``--``."""
        first, *rest = self.script.split()
        return ["-m", first, *rest] if "." in first else [str(SCRIPTS / f"{first}.py"), *rest]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: ``step`` in s where it worked, else ``error``, the first line of what went wrong."""

    step: float | None = None
    error: str = ""
    missing: str = ""

    @property
    def works(self) -> bool:
        """Whether it ran to its end, and took time."""
        return self.step is not None

    @property
    def verdict(self) -> str:
        """For the terminal."""
        if self.missing:
            return f"not installed ({self.missing})"
        return f"fails: {self.error}" if self.error else "works"


CASES = (
    Case("DDP", "ddp plain", "dgx-h100:2"),
    Case("DDP, no_sync", "ddp no_sync"),
    Case("DDP, find_unused_parameters", "ddp unused"),
    Case("DDP, static_graph", "ddp static"),
    Case("DDP, small buckets, gradients as views", "ddp buckets"),
    Case("DDP, fp16 hook", "ddp fp16"),
    Case("DDP, bf16 hook", "ddp bf16"),
    Case("DDP, PowerSGD hook", "ddp powersgd"),
    Case("FSDP1, FULL_SHARD", "fsdp1 full", "dgx-h100:2"),
    Case("FSDP1, SHARD_GRAD_OP", "fsdp1 grad_op"),
    Case("FSDP1, HYBRID_SHARD", "fsdp1 hybrid", "dgx-h100:2"),
    Case("FSDP1, mixed precision", "fsdp1 mixed"),
    Case("FSDP1, activation checkpointing", "fsdp1 checkpoint"),
    Case("FSDP1, CPU offload", "fsdp1 offload"),
    Case("FSDP1, use_orig_params", "fsdp1 original"),
    Case("FSDP1, no_sync", "fsdp1 accumulate"),
    Case("FSDP2", "fsdp2 plain", "dgx-h100:2"),
    Case("FSDP2, mixed precision", "fsdp2 mixed"),
    Case("FSDP2, HSDP", "fsdp2 hsdp", "dgx-h100:2"),
    Case("FSDP2, CPU offload", "fsdp2 offload"),
    Case("FSDP2, meta initialisation", "fsdp2 meta"),
    Case("FSDP2, explicit prefetch", "fsdp2 prefetch"),
    Case("FSDP2, gradient accumulation", "fsdp2 accumulate"),
    Case("FSDP2, reshard_after_forward=False", "fsdp2 keep"),
    Case("DTensor tensor parallelism", "tensor_parallel plain"),
    Case("Tensor and sequence parallelism, loss_parallel", "tensor_parallel sequence"),
    Case("Tensor parallelism × FSDP2", "tensor_parallel fsdp"),
    Case("Context parallelism (torch.distributed.tensor)", "context_parallel torch"),
    Case("Context parallelism, ring of batch_isend_irecv", "context_parallel ring"),
    Case("Pipeline, GPipe", "pipeline GPipe"),
    Case("Pipeline, 1F1B", "pipeline 1F1B"),
    Case("Pipeline, Interleaved1F1B", "pipeline Interleaved1F1B"),
    Case("Pipeline, LoopedBFS", "pipeline LoopedBFS"),
    Case("Pipeline, InterleavedZeroBubble", "pipeline InterleavedZeroBubble"),
    Case("Pipeline, ZBVZeroBubble", "pipeline ZBVZeroBubble"),
    Case("Mixture of experts, all-to-all with splits from the GPU", "experts"),
    Case("autocast fp16, GradScaler, fused AdamW", "precision fp16"),
    Case("autocast bf16", "precision bf16"),
    Case("pure bf16", "precision pure"),
    Case("TF32", "precision tf32"),
    Case("SDPA, causal with dropout", "attention causal"),
    Case("SDPA, additive mask", "attention mask"),
    Case("SDPA, boolean mask", "attention bool"),
    Case("SDPA, grouped queries", "attention grouped"),
    Case("SDPA, flash kernel", "attention flash"),
    Case("SDPA, memory-efficient kernel", "attention efficient"),
    Case("SDPA, math", "attention math"),
    Case("SDPA, cuDNN kernel", "attention cudnn"),
    Case("SDPA, fp32", "attention fp32"),
    Case("nn.MultiheadAttention", "attention module"),
    Case("nn.TransformerEncoderLayer", "attention encoder"),
    Case("FlexAttention", "attention flex"),
    Case("AdamW, fused", "optimizers adamw_fused"),
    Case("AdamW, foreach", "optimizers adamw_foreach"),
    Case("AdamW, loop", "optimizers adamw_loop"),
    Case("AdamW, capturable", "optimizers adamw_capturable"),
    Case("SGD, fused", "optimizers sgd_fused"),
    Case("SGD, foreach", "optimizers sgd_foreach"),
    Case("Adafactor", "optimizers adafactor"),
    Case("Adagrad", "optimizers adagrad"),
    Case("RMSprop", "optimizers rmsprop"),
    Case("NAdam", "optimizers nadam"),
    Case("L-BFGS", "optimizers lbfgs"),
    Case("Muon", "optimizers muon"),
    Case("ZeroRedundancyOptimizer", "optimizers zero"),
    Case("Learning-rate schedules", "optimizers schedule"),
    Case("EMA and SWA", "optimizers average"),
    Case("Activation checkpointing, reentrant", "checkpointing reentrant"),
    Case("Activation checkpointing", "checkpointing plain"),
    Case("Activation checkpointing, selective", "checkpointing selective"),
    Case("Saved tensors on the CPU", "checkpointing cpu"),
    Case("torch.compile", "compiled model"),
    Case("torch.compile, per block", "compiled blocks"),
    Case("torch.compile, max-autotune", "compiled tune"),
    Case("torch.compile, reduce-overhead", "compiled overhead"),
    Case("torch.compile, dynamic shapes", "compiled dynamic"),
    Case("torch.compile, graph breaks", "compiled break"),
    Case("torch.compile × DDP", "compiled ddp"),
    Case("torch.compile × FSDP2", "compiled fsdp2"),
    Case("torch.compile × activation checkpointing", "compiled checkpoint"),
    Case("torch.compile × autocast", "compiled autocast"),
    Case("torch.compile of the optimizer", "compiled optimizer"),
    Case("CUDA graphs, torch.cuda.graph", "graphs capture"),
    Case("CUDA graphs, make_graphed_callables", "graphs callables"),
    Case("Streams, events, memory statistics and snapshots", "streams"),
    Case("DataLoader with workers and pinned memory", "loader"),
    Case("torch.save and load", "saving plain"),
    Case("torch.distributed.checkpoint", "saving distributed"),
    Case("torch.distributed.checkpoint, asynchronous", "saving async"),
    Case("Full state dict of FSDP2", "saving full"),
    Case("torch.profiler, NVTX", "profiled"),
    Case("Convolutions, channels_last, cudnn.benchmark", "layers conv"),
    Case("SyncBatchNorm", "layers syncbn"),
    Case("LSTM", "layers lstm"),
    Case("GRU", "layers gru"),
    Case("EmbeddingBag", "layers bag"),
    Case("Sparse gradients, SparseAdam", "layers sparse", why="sizes of sparse tensors hang on values"),
    Case("Conv3d", "layers conv3d"),
    Case("ConvTranspose2d", "layers transposed"),
    Case("Group, instance and RMS norms", "layers norms"),
    Case("CTC loss", "layers ctc"),
    Case("Upsampling, pixel shuffle", "layers upsample"),
    Case("Losses", "layers losses"),
    Case("Collectives and messages by hand", "collectives all"),
    Case("Object collectives", "collectives objects"),
    Case("Gloo beside NCCL, CPU tensors, monitored_barrier", "collectives gloo"),
    Case("Subgroups, DeviceMesh", "collectives subgroups"),
    Case("split_group", "collectives split"),
    Case("TCPStore", "collectives store"),
    Case("Functional collectives, differentiable ones", "collectives functional"),
    Case('Backend "cpu:gloo,cuda:nccl"', "collectives mixed"),
    Case("torch.func: vmap, grad, jvp", "functions func"),
    Case("torch.autograd.Function", "functions function"),
    Case("Hooks", "functions hooks"),
    Case("Double backward", "functions double"),
    Case("nonzero, unique, masks, bincount, histc, topk, sort", "functions values"),
    Case("Custom operators (torch.library)", "functions custom"),
    Case("FFT, complex numbers", "functions complex"),
    Case("In-place operators, scatter, einsum, cumsum", "functions inplace"),
    Case("Transformers Trainer, Llama", "huggingface trainer", needs=("transformers", "accelerate")),
    Case("Transformers Trainer, FSDP", "huggingface fsdp", needs=("transformers", "accelerate")),
    Case("Transformers, Mixtral", "huggingface mixtral", needs=("transformers",)),
    Case("Accelerate", "accelerated", needs=("accelerate",)),
    Case("Lightning, DDP", "lightning_trainer ddp", needs=("lightning",)),
    Case("Lightning, FSDP", "lightning_trainer fsdp", needs=("lightning",)),
    Case("torchtitan, Llama 3 8B, FSDP2", LLAMA, needs=("torchtitan",)),
    Case(
        "torchtitan, Llama 3 8B, FSDP2 × tensor parallelism, compile",
        f"{LLAMA} {TENSOR} {COMPILE}",
        "dgx-h100:2",
        ("torchtitan",),
    ),
    Case("torchtitan, debug model, FSDP2", DEBUG, needs=("torchtitan",)),
    Case("torchtitan, debug model, SPMD by DTensors", f"{TYPES} full_dtensor", needs=("torchtitan",)),
    Case(
        "torchtitan, debug model, SPMD by types",
        f"{TYPES} spmd_types",
        needs=("torchtitan",),
        why="torchtitan 0.3.0 gives `fully_shard(dp_mesh_dims=…)` plain tensors, and PyTorch 2.13 wants DTensors",
    ),
    Case("torchtitan, debug model, its profiler", f"{DEBUG} {PROFILER}", needs=("torchtitan",)),
    Case("torchtitan, debug model, tensor parallelism", f"{DEBUG} {TENSOR}", needs=("torchtitan",)),
    Case(
        "torchtitan, debug model, pipeline",
        f"{DEBUG} {EAGER} --parallelism.pipeline_parallel_degree 2",
        needs=("torchtitan",),
        why="torchtitan 0.3.0 hands micro-batches to `schedule.step(arg_mbs=…)`, which PyTorch 2.13 does not take",
    ),
    Case(
        "torchtitan, debug model, context parallelism",
        f"{DEBUG} {EAGER} --parallelism.context_parallel_degree 2",
        needs=("torchtitan",),
    ),
    Case("torchtitan, debug model, compile", f"{DEBUG} {COMPILE}", needs=("torchtitan",)),
    Case("DeepSpeed, ZeRO-1", "zero 1", needs=("deepspeed",)),
    Case("DeepSpeed, ZeRO-2", "zero 2", needs=("deepspeed",)),
    Case("DeepSpeed, ZeRO-3", "zero 3", needs=("deepspeed",)),
    Case("torchao, float8 training", "float8", needs=("torchao",)),
    Case("torchvision, ResNet-50", "resnet", needs=("torchvision",)),
    Case("timm, ViT", "vit", needs=("timm", "torchvision")),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose script and arguments begin so; with --third-party, whose names do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--markdown", metavar="FILE", nargs="?", const="", help="write the page of the documentation")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    parser.add_argument("--third-party", action="store_true", help="commands of public repositories")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="where their checkouts are")
    args = parser.parse_args(arguments)
    if args.third_party:
        _third_party(parser, args)
        return
    cases = [case for case in CASES if case.script.startswith(args.only or "")]
    rows: list[tuple[Case, Outcome]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for case, outcome in zip(cases, pool.map(outcome_of, cases), strict=True):
            rows.append((case, outcome))
            print(f"{case.feature:58} {case.script:32} {_milliseconds(outcome):>10}  {outcome.verdict}", flush=True)
    works = sum(outcome.works for _, outcome in rows)
    print(f"{works} of {len(rows)} work")
    if args.markdown is not None:
        Path(args.markdown or TABLE).write_text(markdown(rows), encoding="utf-8")
    told = [{"feature": case.feature, "script": case.script, "step": outcome.step, "verdict": outcome.verdict}
            for case, outcome in rows]  # fmt: skip
    shares = {"ours": works / max(len(rows), 1), "third_party": third_party.share(third_party.read_kept())}
    finish(args, "compatibility", shares, told)


def _third_party(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Simulate commands of public repositories; the page has those of earlier runs as well."""
    if args.sources is None:
        parser.error("--third-party: name the folder of the checkouts by --sources DIR")
    outcomes = third_party.run(args.sources, args.only or "")
    if args.markdown is not None:
        page = third_party.markdown(outcomes)
        Path(args.markdown or third_party.PAGE).write_text(page, encoding="utf-8")
    told = {name: asdict(outcome) for name, outcome in outcomes.items()}
    finish(args, "compatibility", {"third_party": third_party.share(outcomes)}, told)


def outcome_of(case: Case) -> Outcome:
    """Simulates ``case`` in a process of its own."""
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(missing=", ".join(missing))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", "foretrain", "simulate", "--cluster", case.cluster, "--json", str(told)]
        if case.needs == ("torchtitan",):
            quiet = subprocess.DEVNULL
            assets = [sys.executable, SCRIPTS / "titan_assets.py"]
            subprocess.run(assets, cwd=folder, stdout=quiet, stderr=quiet, check=True)
        try:
            done = subprocess.run(
                [*command, "--", *case.command], capture_output=True, text=True, timeout=PATIENCE, check=False,
                cwd=folder, env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(error=f"no end after {PATIENCE} s")
        if done.returncode:
            return Outcome(error=third_party.first_error(done.stderr + done.stdout))
        return Outcome(step=json.loads(told.read_text(encoding="utf-8"))["iteration_time"])


def markdown(rows: Sequence[tuple[Case, Outcome]]) -> str:
    """The page."""
    works = sum(outcome.works for _, outcome in rows)
    torch, today = importlib.metadata.version("torch"), machine()["date"]
    own = [row for row in rows if not row[0].needs]
    frameworks = [row for row in rows if row[0].needs]
    failing = [f"- {case.feature}: {_why(case, outcome)}." for case, outcome in rows if not outcome.works]
    lines = [
        "# What runs",
        "",
        f"{works} of {len(rows)} training scripts run on simulated GPUs, as they are, with Python",
        f"{sys.version.split()[0]} and PyTorch {torch}, on {today}. They are in",
        "`benchmarks/compatibility/`; torchtitan's is its own, with its own flags. The step is the forecast of one",
        "iteration on the cluster beside it. What was not tried does not count as running. For commands of public",
        "repositories, timm's own `train.py` among them, see {doc}`third-party`. This page is written by",
        "",
        "```console",
        "$ python benchmarks/compatibility.py --markdown",
        "```",
        "",
        "## What does not run",
        "",
        SEVERAL_GPUS,
        *failing,
        "",
        "## Frameworks",
        "",
        *_table(frameworks),
        "",
        "## PyTorch",
        "",
        *_table(own),
    ]
    return "\n".join(lines) + "\n"


def _why(case: Case, outcome: Outcome) -> str:
    """Why it does not run."""
    if outcome.missing:
        return f"not tried, as {outcome.missing} was not installed"
    error = f"`{outcome.error.rstrip('.')}`"
    return f"{case.why} ({error})" if case.why else error


def _table(rows: Sequence[tuple[Case, Outcome]]) -> list[str]:
    lines = ["| feature | script | cluster | | step |", "| --- | --- | --- | --- | ---: |"]
    for case, outcome in rows:
        versions = ", ".join(f"{name} {version}" for name in case.needs if (version := _version(name)))
        feature = f"{case.feature} ({versions})" if versions else case.feature
        verdict = "works" if outcome.works else "not tried" if outcome.missing else "fails"
        lines.append(f"| {feature} | `{case.script}` | {case.cluster} | {verdict} | {_milliseconds(outcome)} |")
    return lines


def _version(package: str) -> str:
    """Of an installed package; empty if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _milliseconds(outcome: Outcome) -> str:
    return "" if outcome.step is None else f"{outcome.step * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
