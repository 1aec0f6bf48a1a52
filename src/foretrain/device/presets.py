"""The GPUs foretrain knows by name.

Peaks and bandwidth are the vendor's datasheets, and so is memory where no [MEM] stands. Achieved fractions are fitted
to the published single-GPU training rates named at each entry, with this package's own cost model
(`foretrain.workload.models`); where nothing was published they are taken over from the nearest relative, and the entry
says so. Sources cited below:

    [DLE]   NVIDIA DeepLearningExamples, READMEs of PyTorch ResNet-50 v1.5 (container 21.03) and BERT (20.06; its
            pre-training heads are about 14 % of its work and no part of our encoder)
    [TFB]   TensorFlow performance benchmarks, May 2017: synthetic data, fp32
    [LAM]   Lambda, RTX 2080 Ti deep learning benchmarks with TensorFlow, March 2019
    [MEM]   what CUDA has of it, less than the datasheet says: torch.cuda.get_device_properties, deviceQuery, or the
            "total capacity of 79.19 GiB" in PyTorch's out-of-memory messages; drivers differ by up to 0.2 GiB.
            A100-80GB 81,049 MiB: github.com/ekondis/mixbench/issues/47; A100-40GB 40,339 MiB:
            github.com/bottlerocket-os/bottlerocket/pull/3873; RTX 3090 24,268 MiB: Hugging Face Transformers, guide to
            DeepSpeed; V100 16,160 MiB: output of YOLOv5's notebooks; H100 79.19, H200 139.80 and B200 178.35 GiB: such
            messages in public logs
    [GEMM]  fit of a three-parameter roofline to large GEMMs: 0.79 of peak on A100, 0.81 on H100; launch 4 to 6 us

Multiprocessors, caches and compute capabilities are the vendor's; ``host_rate`` is what copies from pinned memory
commonly reach over 16 lanes of PCIe 3.0, 4.0 or 5.0 (8 of 3.0 on T4): 12, 25 and 53 GB/s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretrain import errors
from foretrain.device.gpu import Arithmetic, Device
from foretrain.units import MICROSECOND

_GIB = 2**30
_MIB = 2**20
_TERA = 1e12
_GIGA = 1e9
_LAUNCH = 5 * MICROSECOND  # [GEMM]; an eager framework launches a tiny kernel every 5 to 10 us


def preset(name: str) -> Device:
    """Return the GPU called ``name``, in any case (``"v100"``, ``"RTX 2080 Ti"``); ConfigError lists the known ones."""
    found = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if found is None:
        raise errors.unknown("device", name, preset_names())
    return found


def preset_names() -> tuple[str, ...]:
    """Return the names `preset` knows, oldest GPU first."""
    return tuple(device.name for device in _PRESETS)


def preset_of_product(product: str) -> Device | None:
    """Return the GPU that the driver calls ``product``; None if it is none of them."""
    return next((device for device in _PRESETS if device.product == product), None)


def _gpu(name: str, **fields: Any) -> Device:
    return Device(name=name, launch=_LAUNCH, **fields)


def _key(name: str) -> str:
    return "".join(name.lower().replace("rtx", "").replace("tesla", "").split()).replace("-", "").replace("_", "")


# One of the two GPUs of a board; all figures are half of the datasheet's board (8.73 TFLOP/s with boost, 480 GB/s).
# Fitted to [TFB]: ResNet-50 51.9, VGG-16 35.4, Inception-v3 30.5 images/s.
K80 = _gpu(
    "K80",
    memory=12 * _GIB,
    bandwidth=240 * _GIGA,
    local_rate=8 * _GIGA,  # estimate: PCIe 3.0 x16 through the board's switch
    fp32=Arithmetic(4.37 * _TERA, conv=0.25, winograd=0.75, gemm=0.55),
    product="Tesla K80",
    capability=(3, 7),
    sms=13,
    l2=int(1.5 * _MIB),
    host_rate=10 * _GIGA,
)

# One of the two GPUs of a board: 2048 cores at 1178 MHz, 160 GB/s (datasheet). It is the GPU of EC2's g3 instances.
# No training rate was found; the fractions are those of P100, the next generation and built alike for fp32.
M60 = _gpu(
    "M60",
    memory=8 * _GIB,
    bandwidth=160 * _GIGA,
    local_rate=8 * _GIGA,  # estimate: PCIe 3.0 x16
    fp32=Arithmetic(4.83 * _TERA, conv=0.45, winograd=1.55, gemm=0.7),
    product="Tesla M60",
    capability=(5, 2),
    sms=16,
    l2=2 * _MIB,
    host_rate=12 * _GIGA,
)

# SXM2 (datasheet: 10.6 TFLOP/s, 732 GB/s). Fitted to [TFB]: ResNet-50 219, VGG-16 154, Inception-v3 142 images/s.
P100 = _gpu(
    "P100",
    memory=16 * _GIB,
    bandwidth=732 * _GIGA,
    local_rate=35 * _GIGA,  # estimate: one of the DGX-1's NVLink 1.0 rings of 20 GB/s each way, two rings
    fp32=Arithmetic(10.6 * _TERA, conv=0.45, winograd=1.55, gemm=0.7),
    fp16=Arithmetic(21.2 * _TERA, conv=0.4, winograd=0.6, gemm=0.6),  # no tensor cores; estimate
    product="Tesla P100-SXM2-16GB",
    capability=(6, 0),
    sms=56,
    l2=4 * _MIB,
    host_rate=12 * _GIGA,
)

# SXM2 (datasheet: 15.7 and 125 TFLOP/s, 900 GB/s). Fitted to [DLE]: ResNet-50 367 (fp32) and 1200 (mixed) images/s,
# BERT-large of 128 tokens 42 and 173 sequences/s; and to [LAM]: ResNet-50 405, ResNet-152 155, Inception-v3 259.
V100 = _gpu(
    "V100",
    memory=16160 * _MIB,  # [MEM]
    bandwidth=900 * _GIGA,
    local_rate=130 * _GIGA,  # nccl-tests, all-reduce on 8 GPUs of a DGX-1V
    fp32=Arithmetic(15.7 * _TERA, conv=0.65, winograd=1.7, gemm=0.8),
    fp16=Arithmetic(125 * _TERA, conv=0.7, winograd=0.7, gemm=0.5),
    product="Tesla V100-SXM2-16GB",
    capability=(7, 0),
    sms=80,
    l2=6 * _MIB,
    host_rate=12 * _GIGA,
)

# Datasheet: 8.1 and 65 TFLOP/s, 320 GB/s, at 70 W, which holds the clock far below what the peak assumes.
# Fitted to a third of [DLE]'s ResNet-50 inference rates: 428 (fp32) and 1190 (mixed) images/s.
T4 = _gpu(
    "T4",
    memory=16 * _GIB,
    bandwidth=320 * _GIGA,
    local_rate=6 * _GIGA,  # estimate: PCIe 3.0 x8, as in EC2's g4dn.12xlarge
    fp32=Arithmetic(8.1 * _TERA, conv=0.55, winograd=1.6, gemm=0.7),
    fp16=Arithmetic(65 * _TERA, conv=0.35, winograd=0.4, gemm=0.4),
    product="Tesla T4",
    capability=(7, 5),
    sms=40,
    l2=4 * _MIB,
    host_rate=6 * _GIGA,
)

# Turing whitepaper, reference card: 13.4 TFLOP/s, 53.8 with fp32 accumulation, 616 GB/s.
# Fitted to [LAM]: ResNet-50 294 (fp32) and 467 (fp16), ResNet-152 110, Inception-v3 194 images/s.
RTX2080TI = _gpu(
    "2080Ti",
    memory=11 * _GIB,
    bandwidth=616 * _GIGA,
    local_rate=8 * _GIGA,  # estimate: PCIe 3.0 x16 through host memory, peer access is disabled on this card
    fp32=Arithmetic(13.4 * _TERA, conv=0.6, winograd=1.5, gemm=0.8),
    fp16=Arithmetic(53.8 * _TERA, conv=0.3, winograd=0.35, gemm=0.6),
    product="NVIDIA GeForce RTX 2080 Ti",
    capability=(7, 5),
    sms=68,
    l2=int(5.5 * _MIB),
    host_rate=12 * _GIGA,
)

# GA102 whitepaper: 35.6 TFLOP/s, also for TF32; 71 with fp32 accumulation; 936 GB/s.
# Fitted to Puget Systems' TensorFlow 1.15 rates, October 2020: ResNet-50 561 (TF32) and 1163 (fp16) images/s.
RTX3090 = _gpu(
    "RTX3090",
    memory=24268 * _MIB,  # [MEM]
    bandwidth=936 * _GIGA,
    local_rate=10 * _GIGA,  # estimate: PCIe 4.0 x16 through host memory, peer access is disabled on this card
    fp32=Arithmetic(35.6 * _TERA, conv=0.4, winograd=1.0, gemm=0.6),
    tf32=Arithmetic(35.6 * _TERA, conv=0.85, winograd=1.0, gemm=0.75),
    fp16=Arithmetic(71 * _TERA, conv=0.85, winograd=0.9, gemm=0.75),
    bf16=Arithmetic(71 * _TERA, conv=0.85, winograd=0.9, gemm=0.75),
    product="NVIDIA GeForce RTX 3090",
    capability=(8, 6),
    sms=82,
    l2=6 * _MIB,
    host_rate=25 * _GIGA,
)

# SXM4 80 GB (datasheet: 19.5, 156, 312 TFLOP/s, 2039 GB/s). Fitted to [DLE]: ResNet-50 938 (TF32) and 2470 (mixed)
# images/s; BERT-large of 128 tokens 234 and 415 sequences/s. GEMM fractions stay below [GEMM], which is for large ones
# alone, without the casts and copies of a framework.
A100 = _gpu(
    "A100",
    memory=81049 * _MIB,  # [MEM]
    bandwidth=2039 * _GIGA,
    local_rate=222 * _GIGA,  # measured, all-reduce of 512 MiB on 8 GPUs
    fp32=Arithmetic(19.5 * _TERA, conv=0.65, winograd=1.7, gemm=0.8),
    tf32=Arithmetic(156 * _TERA, conv=0.25, winograd=0.25, gemm=0.55),
    fp16=Arithmetic(312 * _TERA, conv=0.45, winograd=0.5, gemm=0.55),
    bf16=Arithmetic(312 * _TERA, conv=0.45, winograd=0.5, gemm=0.55),
    product="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    sms=108,
    l2=40 * _MIB,
    host_rate=25 * _GIGA,
    measured_as="A100",
)

# SXM5 (datasheet, without sparsity: 66.9, 495, 989 TFLOP/s, 3352 GB/s). Fractions of GEMM: Llama 3 8B in bf16 does
# 5,762 tokens/s per GPU with sharding and recomputation (torchtitan, 8 GPUs, December 2024), which ours leaves out;
# of convolutions: estimates, a little below A100's because memory limits more.
H100 = _gpu(
    "H100",
    memory=81090 * _MIB,  # [MEM]
    bandwidth=3352 * _GIGA,
    local_rate=427 * _GIGA,  # measured, all-reduce of 512 MiB on 8 GPUs
    fp32=Arithmetic(66.9 * _TERA, conv=0.4, winograd=1.0, gemm=0.75),
    tf32=Arithmetic(495 * _TERA, conv=0.25, winograd=0.25, gemm=0.5),
    fp16=Arithmetic(989 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    bf16=Arithmetic(989 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    product="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    sms=132,
    l2=50 * _MIB,
    host_rate=53 * _GIGA,
    measured_as="H100",
)

# SXM5: H100's chip with 141 GB of HBM3e at 4.8 TB/s (datasheet). Fractions are H100's.
H200 = replace(
    H100, name="H200", memory=143156 * _MIB, bandwidth=4800 * _GIGA, product="NVIDIA H200", measured_as="H200"
)  # memory: [MEM]

# In a DGX B200 (datasheet of the system over 8, without sparsity: 75, 1100, 2250 TFLOP/s, 180 GB at 8 TB/s). Fractions
# are H100's; no training rate was fitted.
B200 = _gpu(
    "B200",
    memory=182631 * _MIB,  # [MEM]
    bandwidth=8000 * _GIGA,
    local_rate=830 * _GIGA,  # estimate: H100's part of 900 GB/s, with reduction in the switch
    fp32=Arithmetic(75 * _TERA, conv=0.4, winograd=1.0, gemm=0.75),
    tf32=Arithmetic(1100 * _TERA, conv=0.25, winograd=0.25, gemm=0.5),
    fp16=Arithmetic(2250 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    bf16=Arithmetic(2250 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    product="NVIDIA B200",
    capability=(10, 0),
    sms=148,
    l2=126 * _MIB,
    host_rate=53 * _GIGA,
    measured_as="B200",
)

# The first A100: the same chip with HBM2 at 1555 GB/s (datasheet); memory [MEM].
A100_40GB = replace(
    A100, name="A100-40GB", memory=40339 * _MIB, bandwidth=1555 * _GIGA, product="NVIDIA A100-SXM4-40GB"
)

# H100's chip with HBM2e at 2.4 TB/s and 500 W, which torchtitan's published runs used; memory is what they report.
H100_HBM2E = replace(H100, name="H100-HBM2e", memory=int(95.04 * _GIB), bandwidth=2400 * _GIGA, product="NVIDIA H100")

# Datasheet, without sparsity: 91.6, 183, 362 TFLOP/s, 864 GB/s. Fractions are A100's; of the memory the driver shows
# 46,068 MiB.
L40S = _gpu(
    "L40S",
    memory=46068 * _MIB,
    bandwidth=864 * _GIGA,
    local_rate=20 * _GIGA,  # estimate: PCIe 4.0 x16
    fp32=Arithmetic(91.6 * _TERA, conv=0.4, winograd=1.0, gemm=0.6),
    tf32=Arithmetic(183 * _TERA, conv=0.25, winograd=0.25, gemm=0.5),
    fp16=Arithmetic(362 * _TERA, conv=0.35, winograd=0.35, gemm=0.5),
    bf16=Arithmetic(362 * _TERA, conv=0.35, winograd=0.35, gemm=0.5),
    product="NVIDIA L40S",
    capability=(8, 9),
    sms=142,
    l2=96 * _MIB,
    host_rate=25 * _GIGA,
    measured_as="L40S",
)

# In a GB200 NVL72 (datasheet over 72, without sparsity: 80, 1250, 2500 TFLOP/s, 8 TB/s); of the memory the driver shows
# 189,471 MiB. Fractions are H100's.
GB200 = replace(
    B200,
    name="GB200",
    memory=189471 * _MIB,
    fp32=Arithmetic(80 * _TERA, conv=0.4, winograd=1.0, gemm=0.75),
    tf32=Arithmetic(1250 * _TERA, conv=0.25, winograd=0.25, gemm=0.5),
    fp16=Arithmetic(2500 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    bf16=Arithmetic(2500 * _TERA, conv=0.4, winograd=0.4, gemm=0.5),
    product="NVIDIA GB200",
    sms=152,
    host_rate=350 * _GIGA,  # estimate: NVLink-C2C of 450 GB/s a direction
    measured_as="GB200",
)

# Blackwell Ultra: GB200 and B200 with 288 GB; the driver shows 284,208 MiB. FP64 is nearly gone.
GB300 = replace(
    GB200, name="GB300", memory=284208 * _MIB, product="NVIDIA GB300", capability=(10, 3), measured_as="GB300"
)
B300 = replace(
    B200, name="B300", memory=270 * 10**9, product="NVIDIA B300 SXM6 AC", capability=(10, 3), measured_as="GB300"
)

_PRESETS = (
    K80, M60, P100, V100, T4, RTX2080TI, RTX3090, A100_40GB, A100, L40S, H100, H100_HBM2E, H200, B200, GB200, B300,
    GB300,
)  # fmt: skip
_BY_KEY = {_key(device.name): device for device in _PRESETS}
