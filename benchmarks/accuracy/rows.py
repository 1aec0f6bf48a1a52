"""The published measurements as commands: which script, with which arguments, on which cluster, repeats each.

python benchmarks/accuracy/rows.py [--data PATH] [--family NAME]      lists them, and those that no script can repeat

Where a script departs from what was measured, or where what was measured is not fully published, the row says so.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foretrain.cli.accuracy import load_measurements
from foretrain.network.deployment_notation import place
from foretrain.units import SECOND, parse_size, parse_time

HERE = Path(__file__).parent
DATA = HERE / "groundtruth-train.csv"
CONTRIBUTED = HERE.parent / "data/contributed.toml"
Record = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, and the run that repeats it.

    Attributes:
        cluster: in foretrain's notation of topologies; its servers may have more GPUs than the job uses, whose ranks
            are then the first, or named. Of a contributed run in that of clusters, all of whose GPUs take part.
        gpu: one of `GPUS`; empty for a contributed run.
        ranks: processes, one for each GPU.
        script: a file of this folder.
        argv: its arguments.
        tokens: of a step, of all GPUs together.
        seconds: of a step, as measured.
        memory: peak of a GPU in bytes, as measured; reserved, or `allocated`; None where it is not published.
        stack: what was measured: framework, and its version where published.
        device, factor, calibration, contributor: of a contributed run: its GPU's preset, the name of its stack, a file
            of ``foretrain calibrate``, and who measured.
        departures: in what the run differs from what was measured, or assumes what was not published.
    """

    id: str
    family: str
    tier: str
    model: str
    precision: str
    cluster: str
    gpu: str
    ranks: int
    script: str
    argv: tuple[str, ...]
    tokens: int
    seconds: float
    memory: int | None
    stack: str
    departures: tuple[str, ...]
    device: str = ""
    factor: str = ""
    calibration: str = ""
    contributor: str = "published"

    @property
    def allocated(self) -> bool:
        """Whether `memory` is of PyTorch's tensors alone (`torch.cuda.max_memory_allocated`), not what it reserved."""
        return self.family in ALLOCATED

    @property
    def rate(self) -> float:
        """Tokens per second and GPU, as measured."""
        return self.tokens / self.seconds / self.ranks

    @property
    def micro_batches(self) -> int:
        """That a simulation executes in a step over all its live ranks: those of a pipeline, and of a ring."""
        if self.script == "mpt.py":
            return int(self.given("global-batch", "1")) // (self.ranks * int(self.given("micro-batch", "1"))) or 1
        if self.script == "llama.py":
            return int(self.given("pp", "1")) ** 2  # as many as ranks
        if self.script != "megatron.py":
            return 1
        given = {name: int(self.given(name, "1")) for name in ("pp", "cp", "tp", "micro-batch", "global-batch")}
        live = given["pp"] * given["cp"]
        replicas = self.ranks // (live * given["tp"])
        return live * (given["global-batch"] // (replicas * given["micro-batch"]))

    @property
    def of_a_pipeline(self) -> int:
        """Micro-batches of a step that go through one pipeline."""
        return self.micro_batches // (int(self.given("pp", "1")) * int(self.given("cp", "1")))

    @property
    def effort(self) -> int:
        """About in proportion to how long a simulation takes."""
        return self.micro_batches * int(self.given("layers", "32"))

    def given(self, option: str, default: str) -> str:
        """The value of ``--option`` among the arguments."""
        name = f"--{option}"
        return self.argv[self.argv.index(name) + 1] if name in self.argv else default


ALLOCATED = ("simumax-b200",)
"""SimuMax measures the most that was allocated on any rank (docs/b200/b200_real_repro_guide.md there, section 6)."""


@dataclass(frozen=True, slots=True)
class Left:
    """A measurement that no script here repeats, and why."""

    id: str
    family: str
    reason: str


GPUS = {
    "A100-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "A100-80GB": "a100-80gb",
    "A100-80GB-SXM": "a100-80gb",
    "A100-80GB-SXM (Selene)": "a100-80gb",
    "A100 (variant not stated in repo)": "a100-80gb",
    "H100-80GB": "h100-80gb",
    "H100-80GB-SXM": "h100-80gb",
    "H100-80GB-HBM3": "h100-80gb",
    "DGX-H100": "h100-80gb",
    "H100-96GB-HBM2e-500W (2.4TB/s)": "h100-96gb-hbm2e-500w",
    "H100-95GB-HBM2e lower TDP": "h100-96gb-hbm2e-500w",
    "H200-SXM": "h200",
    "B200-SXM": "b200",
    "DGX-B200": "b200",
    "DGX-B300": "b300",
    "DGX-GB200": "gb200",
    "DGX-GB300": "gb300",
}
"""GPUs by their published names. Meta's H100 with HBM2e has 96 GB at 2.4 TB/s and draws 500 W, not the preset's 80 GB
at 3.35 TB/s and 700 W: its clocks under load are lower."""

SERVERS = {
    "a": "dgx-a100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
RACK, OF_A_RACK = 72, 64
"""GPUs of an NVL72, and how many of each of several a job takes: groups are powers of two."""
RATES = {
    "800Gb/s per node": "@100Gbps",
    "400Gb/s per node": "@50Gbps",
    "NVLink(150GB/s in cfg) + 800Gb/s per node": "@100Gbps",
}
"""Of each of 8 cables of a server, where it is not that of the preset."""
ADAPTIVE = ("DGX H100 ref arch: NVLink4 + 8x NDR 400Gb/s IB", "DGX reference", "NVLink3 + 8x HDR 200Gb/s")
"""InfiniBand as in NVIDIA's reference architecture (DGX SuperPOD), whose switches route adaptively. Elsewhere flows are
hashed to their ways (ECMP), as Ethernet does."""
UNPUBLISHED_NETWORK = ("not stated", "not stated (Meta cluster)", "not stated (H100 cluster)")


COMPUTED = frozenset({"vtrain-single"})
"""Families whose published times are what another model computed, though published as measured.

Two runs of vTrain's table of one server without a pipeline that differ in their data-parallel ranks alone differ by
what two entries of its table of all-reduces differ by, to the nanosecond in all 560 pairs, whatever the micro-batch;
and where gradients exceed 1 GiB, by what its predictor's formula makes of the last entry, less time for more ranks.
(github.com/VIA-Research/vTrain@f8dda8473a: data/ground_truth_single.csv, trace/a100, src/predictor.py.)
"""


class _Cannot(Exception):
    """Why no script repeats a row."""


Run = tuple[str, dict[str, object], tuple[str, ...]]
"""A script, its options (True for a flag), and departures."""


def _torchtitan(row: Record) -> Run:
    names = {"Llama-2-13B": "llama2-13b", "Llama-2-70B": "llama2-70b"}
    model = names.get(row["model"]) or "llama3-" + row["model"].rpartition("-")[2].lower()
    recomputed = {"full": "full", "none": "none", "selective(op)": "selective", "selective(layer)": "layers"}
    float8 = ("rowwise" if "rowwise" in row["precision"] else "tensorwise") if "fp8" in row["precision"] else None
    departures = []
    if row["compile"] == "?":
        departures.append(f"whether layers were compiled is not published: {'they are' if float8 else 'not'} here")
    if "AsyncTP" in row["parallelism"] and float8 == "rowwise":
        departures.append("TorchInductor pipelines no product by rows of float8 here (AsyncTP)")
    if row["pp"] != "1":
        departures.append("micro-batches are not published: as many as pipeline ranks")
    if "assumed" in row["notes"]:
        departures.append("the sequence's length is not published: 8,192, torchtitan's default")
    return "llama.py", {
        "model": model, "sequence": row["seq_len"], "batch": row["micro_batch"],
        "tp": row["tp"], "cp": row["cp"], "pp": row["pp"],
        "schedule": "interleaved" if "Interleaved" in row["parallelism"] else None,
        "recompute": recomputed[row["act_ckpt"]],
        "compile": row["compile"] == "1" or (row["compile"] == "?" and bool(float8)),
        "float8": float8,
        "async-tp": "AsyncTP" in row["parallelism"],
        # In 2025 torchtitan began to compile the loss where it compiles the layers.
        "compile-loss": row["compile"] == "1" and "2025" in row["framework"],
    }, tuple(departures)  # fmt: skip


def _fmsfsdp(row: Record) -> Run:
    departures = ["FSDP2 instead of FSDP1", "compiled layer by layer, not as a whole"]
    if row["act_ckpt"] == "selective":
        which = "all, as every other does not fit" if row["model"].endswith("70B") else "every other"
        departures.append(f"which layers are recomputed is not published: {which}")
    return "llama.py", {
        "model": row["model"].lower().replace("llama-2", "llama2"), "sequence": row["seq_len"],
        "batch": row["micro_batch"], "shard": 8 if row["parallelism"] == "HSDP" else None,
        "recompute": "none" if row["act_ckpt"] != "selective" else "full" if row["model"].endswith("70B") else "layers",
        "compile": True, "reduce": "bfloat16",
    }, tuple(departures)  # fmt: skip


TRITON = "which FlashAttention is not published: that in Triton, llm-foundry's own choice of that time"


def _llmfoundry(row: Record) -> Run:
    float8 = "fp8" in row["precision"]
    return "mpt.py", {
        "model": row["model"].removeprefix("MPT-"), "sequence": row["seq_len"], "micro-batch": row["micro_batch"],
        "global-batch": row["global_batch"], "strategy": row["parallelism"].removeprefix("FSDP "),
        "recompute": row["act_ckpt"], "float8": float8,
    }, (TRITON, *((DELAYED,) if float8 else ()))  # fmt: skip


def _megatron(row: Record, **options: object) -> dict[str, object]:
    """What every run of the Megatron-like script has."""
    return {
        "sequence": row["seq_len"] or 4096, "micro-batch": row["micro_batch"], "global-batch": row["global_batch"],
        "tp": row["tp"], "pp": row["pp"], "cp": row["cp"], "vp": row["vp"].replace("n/a", ""), "fuse": True,
    } | options  # fmt: skip


def _vtrain(row: Record) -> Run:
    hidden, layers, heads = re.findall(r"[hLa](\d+)", row["model"].removeprefix("GPT"))
    size = {"hidden": hidden, "layers": layers, "heads": heads}
    departures = ("precision and vocabulary are not published: fp16, 50,257 words",)
    # Over several servers micro-batches are large: loading one is less than 1 % of its time, and left out.
    small = {"load": True} if row["family"] == "vtrain-single" else {}
    return "megatron.py", _megatron(row, **size, dtype="fp16", recompute="full", **small), departures


def _korthikanti(row: Record) -> Run:
    model = row["model"].lower().replace("gpt-3", "gpt3")
    return "megatron.py", _megatron(
        row, model=model, dtype="fp16", recompute=row["act_ckpt"].partition("(")[0],
        **{"sequence-parallel": "SP" in row["parallelism"], "overlap-tensor": True},
    ), ()  # fmt: skip


def _modern(row: Record, model: str, float8: str | None, gradients: str, **options: object) -> dict[str, object]:
    """What Megatron-Core has been doing since 2024; Transformer Engine prefers cuDNN's attention from Hopper on."""
    return _megatron(
        row, model=model, dtype="bf16", gradients=gradients, attention="cudnn", dropout=0, float8=float8,
        **{"sequence-parallel": row["tp"] != "1", "overlap-tensor": True, "overlap-data": True},
        **{"distributed-optimizer": True, "overlap-pipeline": bool(row["vp"].isdecimal() and int(row["vp"]) > 1)},
        **options,
    )  # fmt: skip


def _nemo(row: Record) -> dict[str, object]:
    """What NeMo's recipes of large models add: ``ub_tp_comm_overlap`` and ``overlap_param_gather``."""
    return {"pieces": row["tp"] if row["tp"] != "1" else None, "overlap-gather": True}


BALANCED = "no loss balances the experts, who get equally many tokens"
HYBRID = "tokens are exchanged by NCCL, not by HybridEP"
ONCE = "tokens are exchanged by NCCL: once to each server as by HybridEP and DeepEP, but in messages of equal length"
UNPUBLISHED = "which float8 scales is not published: of the tensor at hand"
DELAYED = "float8 scales of the micro-batch before, not of the greatest of many"

GROK = (
    "what experts give is weighted before their second product, not after tokens have come back",
    BALANCED,
)


def _grok(row: Record) -> dict[str, object]:
    """As in dgxc-benchmarking@v25.01, grok1/configure.sh, which turns off cuDNN's attention; each expert is split."""
    trimmed = re.search(r"layers=(\d+)", row["notes"])
    float8 = "delayed" if row["precision"] == "fp8" else None
    options = _modern(row, "grok1", float8, "bf16", layers=trimmed[1] if trimmed else None, **_nemo(row))
    return options | {"attention": "flash", "drop": True, "ep": row["ep"], "etp": row["tp"]}


def _dgxc(row: Record) -> Run:
    if "JAX" in row["framework"]:
        raise _Cannot("trained by JAX, whose compiler orders communication itself")
    if not row["tp"]:
        raise _Cannot("how it was parallel is not in the table")
    if row["model"].startswith("Grok1"):
        return "megatron.py", _grok(row), GROK if row["precision"] == "bf16" else (*GROK, DELAYED)
    model = row["model"].lower().replace("gpt-3", "gpt3").replace("llama-3.1", "llama3")
    trimmed = re.search(r"layers=(\d+)", row["notes"])
    float8 = "delayed" if row["precision"] == "fp8" else None
    departures = []
    if float8:
        departures.append(DELAYED)
    options = _modern(row, model, float8, "bf16", layers=trimmed[1] if trimmed else None, **_nemo(row))
    return "megatron.py", options, tuple(departures)


MIXTURES = {
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "GPT OSS 120B": "gpt-oss-120b",
}
"""Models with experts by their names in Megatron-Bridge's tables."""


CURRENT = ("FP8", "FP8-CS", "FP8 (see note)", "FP8-CS (FP8-MX)")
BLOCKS = ("MXFP8", "FP8-MX")
"""Precisions of Megatron-Bridge's tables: scales of the tensor at hand, and of blocks of 32 numbers."""


def _float8(row: Record) -> str | None:
    """Scales of blocks cost what delayed ones do: one kernel reads a tensor once and writes it along and transposed."""
    if row["precision"] == "NVFP4":
        return "nvfp4"
    return "current" if row["precision"] in CURRENT else "delayed" if row["precision"] in BLOCKS else None


def _scales(row: Record) -> list[str]:
    """In what `_float8` departs."""
    if row["precision"] == "NVFP4":
        return ["gradients are not rounded at random, and no Hadamard transform comes before numbers of 4 bits"]
    if row["precision"] in BLOCKS:
        return ["float8 scales of the micro-batch before, not of blocks (MXFP8), which are a byte more in 32"]
    return [UNPUBLISHED] if row["precision"] in ("FP8", "FP8 (see note)") else []


def _hybrid_exchange(row: Record, drop: bool) -> tuple[dict[str, object], str]:
    """Options for HybridEP's exchange, and in what they depart: in a server, a token goes to each expert by itself."""
    servers = 1 if row["gpu"].startswith("DGX-GB") or drop else int(row["ep"]) // 8
    return ({"servers": servers}, ONCE) if servers > 1 else ({}, HYBRID)


def _mixture(row: Record, model: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """As in Megatron-Bridge's scripts/performance/configs, v0.2.1 to v0.4.0: routers draw experts, equally likely."""
    departures = [BALANCED, *_scales(row)]
    if _is_fused(row):
        departures.append(FUSED)
    if "[^gpt-oss-note]" in row["model_tflops_per_gpu"]:
        departures.append("its publisher says that this release was slow by a fault of cuDNN's")
    drop, gpt_oss = _is_fused(row) or "tokendrop" in row["model"], model == "gpt-oss-120b"
    exchange: dict[str, object] = {}
    if gpt_oss:
        departures.append("attention sees the whole sequence in all layers, not 128 words in every other")
        departures.append("attention has no sinks, and activations no bound")
    rack = row["gpu"].startswith("DGX-GB")
    if (
        rack
        or (model == "qwen3-30b-a3b" and not drop)
        or (gpt_oss and "26.04" in row["framework"] and row["gpu"] == "DGX-B200")
    ):
        exchange, departure = _hybrid_exchange(row, drop)
        departures.append(departure)
    spread = row["ep"]
    if gpt_oss and "25.11" in row["framework"] and row["gpu"] == "DGX-B200":
        spread = "64"
        departures.append("64 ranks share the experts, as in the recipe of its release (v0.2.1), not 8 as in its table")
    options = _modern(row, model, _float8(row), "bf16", ep=spread, drop=drop)
    options |= {"recompute": "activations" if gpt_oss and not _is_fused(row) else None, "overlap-gather": True}
    beside = _is_fused(row) or (row["gpu"] == "DGX-H100" and row["pp"] != "1" and not gpt_oss)
    options |= exchange | {"overlap-experts": beside}
    options |= {"ends-count": row["pp"] != "1" and model == "qwen3-235b-a22b"}
    return options, tuple(departures)


FUSED = "no iteration is a CUDA graph, no expert is a single kernel, and attention is not in float8"
"""What Megatron-Bridge's recipes of experts in MXFP8 have done since 26.06, and megatron.py does not.

In one graph the host cannot learn how many tokens come: it is given as many as are equally spread, as by ``--drop``.
"""


def _is_fused(row: Record) -> bool:
    release = re.search(r"(\d+\.\d+)", row["framework"])
    return row["precision"] == "MXFP8" and release is not None and float(release[1]) >= 26.06


def _deepseek_v3(row: Record) -> tuple[dict[str, object], tuple[str, ...]]:
    """As in Megatron-Bridge's recipes, v0.2.1 to v0.6.0: stages of equal size but the last, which also looks ahead."""
    if row["tp"] != "1":
        raise _Cannot("latents are not split over tensor-parallel ranks in megatron.py")
    if row["pp"] == "8" and row["vp"] == "4":
        raise _Cannot("how 61 layers were laid out on 32 stages is not published")
    release, gpu = row["framework"], row["gpu"]
    recompute: str | None = "latents"
    if gpu == "DGX-GB300" and (_is_fused(row) or "25.11" in release):
        recompute = None
    fused, pipelined = _is_fused(row), row["vp"] not in ("", "1", "n/a")
    drop = fused or "tokendrop" in row["model"]
    exchange, departure = _hybrid_exchange(row, drop)
    departures = [BALANCED, *_scales(row), departure]
    if "25.11" in release and gpu == "DGX-GB300":
        departures.append("what it recomputed is not published: nothing")
    if "26.04" in release and gpu == "DGX-GB200":
        recompute = None
    if ("26.04" in release and gpu == "DGX-GB200") or (gpu == "DGX-B200" and pipelined):
        departures.append("networks of the three layers without experts are not recomputed")
    if fused:
        departures.append(FUSED)
        if not pipelined:
            departures.append("tokens do not travel under other micro-batches: how stages were cut is not published")
    options = _modern(row, "deepseek-v3", _float8(row), "bf16", ep=row["ep"], drop=drop) | exchange
    options |= {"overlap-experts": pipelined and (fused or gpu == "DGX-B200")}
    options |= {"predict": None if "w/o MTP" in row["model"] else 1, "recompute": recompute, "overlap-gather": True}
    options |= {"fused-loss": True}
    return options, tuple(departures)


HYBRIDS = {
    "Nemotron_3_Nano": ("nemotron-3-nano", None),
    "Nemotron_3_5_Lightning": ("nemotron-3-nano", 2),
    "Nemotron_3_Super": ("nemotron-3-super", 2),
}
"""Models with layers of Mamba, and how many words they look ahead, by their names in Megatron-Bridge's tables."""


def _hybrid(row: Record, model: str, predict: int | None) -> tuple[dict[str, object], tuple[str, ...]]:
    """As in Megatron-Bridge's recipes, v0.4.0 to v0.6.0."""
    exchange, departure = _hybrid_exchange(row, drop=False)
    recompute, departures = None, [BALANCED, *_scales(row), departure]
    is_super, gpu = model == "nemotron-3-super", row["gpu"]
    if gpu == "DGX-H100":
        recompute = "experts"
    elif is_super and ((gpu == "DGX-B200" and row["tp"] == "1") or (gpu == "DGX-B300" and row["precision"] == "NVFP4")):
        recompute = "activations"
    if _is_fused(row):
        departures.append("the products of an expert are not one kernel, and attention is not in float8")
    options = _modern(row, model, _float8(row), "bf16", ep=row["ep"], predict=predict, recompute=recompute)
    return options | exchange | {"overlap-gather": True, "fused-loss": True}, tuple(departures)


def _mbridge(row: Record) -> Run:
    if row["gpu"] not in GPUS:
        raise _Cannot(f"no server with {row['gpu'].removeprefix('DGX-')} is known here")
    name = row["model"].partition(" (")[0]
    if not name.startswith(("LLAMA", "DeepSeekV3", *HYBRIDS, *MIXTURES)):
        raise _Cannot("megatron.py has no such model")
    if row["parallelism"] != "Pre-Training Performance":
        raise _Cannot("not pre-training")
    if row["fsdp_or_zero"] not in ("", "0"):
        raise _Cannot("Megatron's own FSDP")
    if name == "DeepSeekV3":
        return "megatron.py", *_deepseek_v3(row)
    if name in HYBRIDS:
        return "megatron.py", *_hybrid(row, *HYBRIDS[name])
    if name in MIXTURES:
        return "megatron.py", *_mixture(row, MIXTURES[name])
    size = row["model"].rpartition("_")[2].lower()
    uneven = size == "405b" and 126 % (int(row["pp"]) * int(row["vp"]))
    options = _modern(row, f"llama3-{size}", _float8(row), "bf16", **{"ends-count": bool(uneven)}, **_nemo(row))
    if row["precision"] == "NVFP4":
        options["pieces"] = None  # tp_comm_overlap is off
    # No recipe in float8 has weights in bf16 (``fp8_param_gather``). It takes as long; only here is there no room.
    crowded = size == "405b" and row["gpu"].startswith("DGX-GB") and _float8(row) in ("current", "delayed")
    return "megatron.py", options | {"float8-weights": crowded}, tuple(_scales(row))


def _simumax(row: Record) -> Run:
    found = re.search(r"(llama3_\d+b|deepseekv\d) trimmed layers=(\d+)", row["model"])
    assert found
    memory = {"fused-loss": "cef" in row["parallelism"], "stand-ins": True}
    if found[1].startswith("deepseek"):
        return "megatron.py", _deepseek(row, found[1].replace("seekv", "seek-v"), found[2]) | memory, (CHOSEN,)
    micro_batches = re.search(r"mbc(\d+)", row["parallelism"])
    assert micro_batches
    options = _modern(row, found[1].replace("_", "-"), None, "fp32", layers=found[2])
    options["global-batch"] = int(micro_batches[1]) * int(row["dp"])
    return "megatron.py", options | memory, ("which collectives overlap is not published",)


CHOSEN = f"{BALANCED}, chosen among all"


def _deepseek(row: Record, model: str, layers: str) -> dict[str, object]:
    """As in SimuMax@4dcaae513b, run_pretrain_deepseekv2.sh: the first layer alone is dense, and nothing overlaps."""
    micro_batches = re.search(r"mbc(\d+)", row["parallelism"])
    assert micro_batches
    options = _modern(row, model, None, "fp32", layers=layers, dense=1, drop=True, ep=row["ep"])
    return options | {"overlap-data": False, "global-batch": int(micro_batches[1]) * int(row["dp"])}


def _neusight(row: Record) -> Run:
    if not row["parallelism"].startswith("TP"):
        raise _Cannot("micro-batches of the pipeline are not published")
    size = {"GPT2-Large": (1280, 36, 20), "GPT3-XL": (2048, 24, 16)}[row["model"]]
    options = _megatron(row, **dict(zip(("hidden", "layers", "heads"), size, strict=True)), dtype="fp32", fuse=False)
    options |= {"tp": 4, "micro-batch": row["global_batch"]}
    return "megatron.py", options, ("layers as Megatron's, not Hugging Face's", "heads of GPT3-XL as in NeuSight: 16")


def _none(reason: str) -> Callable[[Record], Run]:
    def run(_row: Record) -> Run:
        raise _Cannot(reason)

    return run


FAMILIES: Mapping[str, Callable[[Record], Run]] = {
    "torchtitan": _torchtitan,
    "fmsfsdp": _fmsfsdp,
    "llmfoundry": _llmfoundry,
    "vtrain-multi": _vtrain,
    "vtrain-single": _vtrain,
    "korthikanti22": _korthikanti,
    "dgxc": _dgxc,
    "mbridge": _mbridge,
    "simumax-b200": _simumax,
    "neusight": _neusight,
    "stas00": _none("DeepSpeed with its optimizer on the CPU, and no time of a step is published"),
    "nvdle-resnet50": _none("the batch is not published"),
}


def _cluster(row: Record) -> str:
    gpu = GPUS[row["gpu"]]
    server = next(name for start, name in SERVERS.items() if gpu.startswith(start))
    routing = ",routing=adaptive" if row["interconnect"] in ADAPTIVE else ""
    ranks = int(row["n_gpus"])
    if server.endswith("nvl72"):
        racks = 1 if ranks <= RACK else -(-ranks // OF_A_RACK)
        parts = (f"{RACK * rack}-{RACK * rack + OF_A_RACK - 1}" for rack in range(racks))
        return f"{server}:{racks}{routing}" + (f",ranks={'+'.join(parts)}" if racks > 1 else "")
    return f"{server}:{-(-ranks // 8)}{RATES.get(row['interconnect'], '')}{routing}"


def _argv(options: Mapping[str, object]) -> tuple[str, ...]:
    """Options as a shell wants them; what is left at its default, None, False or empty, is left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif not (
            value is None
            or value is False
            or value == ""
            or (name in ("tp", "cp", "pp", "vp", "ep", "etp") and str(value) == "1")
        ):
            words += [f"--{name}", str(value)]
    return tuple(words)


def _row(row: Record) -> Row:
    if row["family"] not in FAMILIES:
        raise _Cannot("its family is unknown here")
    script, options, departures = FAMILIES[row["family"]](row)
    if row["gpu"] not in GPUS:
        raise _Cannot(f"no server with {row['gpu']} is known here")
    if not row["iter_time_s"]:
        raise _Cannot("no time of a step is published")
    batch = int(str(options.get("global-batch") or row["global_batch"]))
    if row["interconnect"] in UNPUBLISHED_NETWORK and int(row["n_gpus"]) > 8:
        departures = (*departures, "the network between servers is not published: that of the preset")
    if (cluster := _cluster(row)).startswith("gb") and int(row["n_gpus"]) > RACK:
        departures = (*departures, f"how many GPUs of a rack take part is not published: {OF_A_RACK}")
    return Row(
        id=row["id"],
        family=row["family"],
        tier=row["tier"],
        model=row["model"],
        precision=row["precision"],
        cluster=cluster,
        gpu=GPUS[row["gpu"]],
        ranks=int(row["n_gpus"]),
        script=script,
        argv=_argv(options),
        tokens=batch * int(str(options["sequence"])),
        seconds=float(row["iter_time_s"]),
        memory=round(float(row["peak_mem_gib"]) * 2**30) if row["peak_mem_gib"] else None,
        stack=row["framework"],
        departures=departures,
    )


def read(path: Path = DATA) -> tuple[list[Row], list[Left]]:
    """All rows of ``path`` that a script repeats, and all others."""
    rows: list[Row] = []
    left: list[Left] = []
    with path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            try:
                rows.append(_row(record))
            except _Cannot as reason:
                left.append(Left(record["id"], record["family"], str(reason)))
    return rows, left


def contributed(path: Path = CONTRIBUTED) -> tuple[list[Row], list[Left]]:
    """The runs of a table that ``foretrain accuracy add`` wrote, if their scripts are in this checkout, and others."""
    rows: list[Row] = []
    left: list[Left] = []
    for number, run in enumerate(load_measurements(path).runs, 1):
        name = f"contributed-{number:04d}"
        variables, (script, *argv) = run.parts()
        if not (HERE.parents[1] / script).is_file():
            script = argv[0] if script == "-m" else script
            left.append(Left(name, "contributed", f"{script} is not in this checkout"))
            continue
        if variables:
            left.append(Left(name, "contributed", f"{script} needs variables of the environment"))
            continue
        where = place(run.cluster)
        seconds = parse_time(run.step_time) / SECOND
        beside = os.path.relpath(HERE.parents[1] / script, HERE)
        rows.append(Row(
            id=name, family="contributed", tier="A", model=Path(script).name, precision="", cluster=run.cluster, gpu="",
            ranks=len(where.members), script=beside, argv=tuple(argv), tokens=0,
            seconds=seconds, memory=parse_size(run.memory) if run.memory else None, stack=run.software,
            departures=(), device=str(where.device), factor=run.stack,
            calibration=str(path.parent / run.calibration) if run.calibration else "",
            contributor=run.contributor,
        ))  # fmt: skip
    return rows, left


def main() -> None:
    """Prints the command of each row, and the reasons of the others, counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--family", choices=FAMILIES)
    arguments = parser.parse_args()
    rows, left = ([row for row in side if arguments.family in (None, row.family)] for side in read(arguments.data))
    for row in rows:
        print(f"{row.id}  {row.seconds} s  {row.cluster}  {row.gpu} × {row.ranks}  {row.script} {' '.join(row.argv)}")
        for departure in row.departures:
            print(f"    {departure}")
    counted = Counter((row.family, row.reason) for row in left if isinstance(row, Left))
    print(f"\n{len(rows)} rows; {len(left)} others:")
    for (family, reason), number in sorted(counted.items()):
        print(f"{number:5}  {family}: {reason}")


if __name__ == "__main__":
    main()
