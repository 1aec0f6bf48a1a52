"""GPU generations as NCCL sees them: one curve a protocol, fitted on published measurements.

Fitted by ``benchmarks/collectives.py --fit``, which prints these lines anew; docs/network/nccl.md has the errors.
AMPERE is fitted on A100, HOPPER on H100 and H200 together, BLACKWELL on B200 and GB200 together: 2 to 8 GPUs on
NVSwitch, 512 B to 16 GiB, NCCL 2.23 to 2.27. What is not fitted says so in `Generation.source`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foretrain.errors import unknown
from foretrain.units import MICROSECOND, SECOND, Time


@dataclass(frozen=True, slots=True)
class ProtocolCurve:
    """The time of one protocol: ``launch + hops · hop + (blocks + tail) · (block / rate + ramp · √block)``.

    Attributes:
        launch: ps before the first byte moves and after the last, once per collective.
        hop: ps per step of the algorithm.
        rate: bytes/s of a rank's data, what the link carries besides (flags) not counted.
        tail: how many more blocks than are sent a rank is busy with: it copies its own, and the last one out.
        ramp: ps per √byte. Rates still grow where α–β says that they are constant, by longer copies on each channel;
            the square root is an observation.
        spread: ps that using all channels instead of one takes, in proportion to the logarithm of their number.
    """

    launch: Time
    hop: Time
    rate: float
    tail: float = 0.0
    ramp: float = 0.0
    spread: Time = 0

    def transfer(self, blocks: float, block: float, rate: float = math.inf) -> float:
        """Return the ps that ``blocks`` blocks of ``block`` bytes add, where the network allows ``rate``."""
        return (blocks + self.tail) * (block / min(self.rate, rate) * SECOND + self.ramp * math.sqrt(block))


@dataclass(frozen=True, slots=True)
class Generation:
    """Constants that all GPUs of one architecture share.

    Attributes:
        source: what it is fitted on, or that it is not.
        has_ll128: whether NCCL uses LL128: from Volta on, over NVLink, not over PCIe.
        link: bytes/s that a GPU's links carry per direction, by the datasheet. The rates of the curves belong to it.
        channels: how many channels NCCL opens at most.
        ll, ll128, simple: curves of ring and tree.
        direct: curve of sends and receives between all pairs.
        nvls: curve of the reduction in the switch, whose one block is the whole data; none without such a switch.
        nvls_ranks: with fewer NCCL prefers the ring.
        estimated_rate, estimated_ll, estimated_ll128, estimated_nvls: bytes/s on the bus that NCCL itself reckons with
            in `foretrain.collective.nccl.variants`.
    """

    source: str
    has_ll128: bool
    link: float
    channels: int
    ll: ProtocolCurve
    ll128: ProtocolCurve
    simple: ProtocolCurve
    direct: ProtocolCurve
    nvls: ProtocolCurve | None
    nvls_ranks: int
    estimated_rate: float
    estimated_ll: float
    estimated_ll128: float
    estimated_nvls: float


@dataclass(frozen=True, slots=True)
class GpuProduct:
    """GPU product of a generation.

    Attributes:
        generation: what it shares.
        link: bytes/s per direction of its links, by the datasheet; the curves' rates shrink in proportion.
        server: how many GPUs one NVLink domain or server usually has.
        fitted: whether this very product is among the measurements.
    """

    generation: Generation
    link: float
    server: int = 8
    fitted: bool = False


def _us(value: float) -> Time:
    return round(value * MICROSECOND)


AMPERE = Generation(
    source="A100-SXM4, NCCL 2.27",
    has_ll128=True,
    link=300e9,
    channels=24,
    ll=ProtocolCurve(_us(8.19), _us(0.943), 127.5e9, tail=0.5, spread=_us(3.03)),
    ll128=ProtocolCurve(_us(19.2), _us(0.75), 225.1e9, tail=0.5, ramp=1780.0),
    simple=ProtocolCurve(_us(23.5), _us(3.94), 244.7e9, tail=0.5, ramp=1780.0),
    direct=ProtocolCurve(_us(11.5), _us(0.116), 259.3e9, tail=0.58, ramp=4160.0, spread=_us(0.421)),
    nvls=None,
    nvls_ranks=0,
    estimated_rate=240e9,
    estimated_ll=87.7e9,
    estimated_ll128=480e9,
    estimated_nvls=0.0,
)

HOPPER = Generation(
    source="H100-SXM and H200-SXM, NCCL 2.26 and 2.27",
    has_ll128=True,
    link=450e9,
    channels=24,
    ll=ProtocolCurve(_us(5.41), _us(0.919), 210.9e9, tail=0.64, spread=_us(1.22)),
    ll128=ProtocolCurve(_us(15.5), _us(0.494), 365.3e9, tail=0.64, ramp=871.0),
    simple=ProtocolCurve(_us(11.6), _us(3.11), 397.1e9, tail=0.64, ramp=871.0),
    direct=ProtocolCurve(_us(6.47), _us(0.703), 389.3e9, tail=0.46, ramp=2050.0, spread=_us(0.983)),
    nvls=ProtocolCurve(_us(25), 0, 273.3e9, ramp=7260.0),
    nvls_ranks=5,
    estimated_rate=370e9,
    estimated_ll=141e9,
    estimated_ll128=587e9,
    estimated_nvls=289e9,
)

BLACKWELL = Generation(
    source="B200 and GB200, NCCL 2.23 to 2.27",
    has_ll128=True,
    link=900e9,
    channels=32,
    ll=ProtocolCurve(_us(7.53), _us(1.32), 342.7e9, tail=0.74, spread=_us(1.05)),
    ll128=ProtocolCurve(_us(18.5), _us(1.54), 679.5e9, tail=0.74, ramp=37.4),
    simple=ProtocolCurve(_us(14.9), _us(5.24), 738.5e9, tail=0.74, ramp=37.4),
    direct=ProtocolCurve(_us(10.1), _us(0.064), 694.8e9, tail=0.99, ramp=1590.0, spread=_us(0.788)),
    nvls=ProtocolCurve(_us(26.4), 0, 498.1e9, ramp=10900.0),
    nvls_ranks=6,
    estimated_rate=722e9,
    estimated_ll=282e9,
    estimated_ll128=640e9,
    estimated_nvls=531e9,
)


def _default(
    name: str, *, link: float, bus: float, channels: int, ll: float, has_ll128: bool = False, slower: float = 1.0
) -> Generation:
    """Return a generation with Ampere's latencies and NCCL's own estimate of the rates; over PCIe a hop takes
    ``slower`` times."""
    part = bus / AMPERE.simple.rate

    def like(curve: ProtocolCurve) -> ProtocolCurve:
        return replace(curve, hop=round(curve.hop * slower), rate=curve.rate * part)

    return Generation(
        source=f"not fitted: {name} takes A100's latencies and NCCL's own estimate of the rate",
        has_ll128=has_ll128,
        link=link,
        channels=channels,
        ll=like(AMPERE.ll),
        ll128=like(AMPERE.ll128),
        simple=like(AMPERE.simple),
        direct=like(AMPERE.direct),
        nvls=None,
        nvls_ranks=0,
        estimated_rate=bus,
        estimated_ll=ll,
        estimated_ll128=channels * 20e9,
        estimated_nvls=0.0,
    )


# Links by NVIDIA's datasheets; bus rates as NCCL's search finds them on a DGX-1 (6 rings of 21 GB/s, 4 of 18 GB/s) and
# on 16 lanes of PCIe 3 and 4. A hop over PCIe takes 1.67 times one over NVLink in NCCL's constants.
VOLTA = _default("Volta", link=150e9, bus=126e9, channels=12, ll=39e9, has_ll128=True)
PASCAL = _default("Pascal", link=80e9, bus=72e9, channels=8, ll=36e9)
PCIE3 = _default("PCIe 3", link=16e9, bus=12e9, channels=2, ll=6e9, slower=1.67)
PCIE4 = _default("PCIe 4", link=32e9, bus=24e9, channels=4, ll=12e9, slower=1.67)

GPUS: dict[str, GpuProduct] = {
    "A100": GpuProduct(AMPERE, 300e9, fitted=True),
    "A800": GpuProduct(AMPERE, 200e9),
    "H100": GpuProduct(HOPPER, 450e9, fitted=True),
    "H200": GpuProduct(HOPPER, 450e9, fitted=True),
    "H800": GpuProduct(HOPPER, 200e9),
    "H20": GpuProduct(HOPPER, 450e9),
    "B200": GpuProduct(BLACKWELL, 900e9, fitted=True),
    "B300": GpuProduct(BLACKWELL, 900e9),
    "GB200": GpuProduct(BLACKWELL, 900e9, server=72, fitted=True),
    "GB300": GpuProduct(BLACKWELL, 900e9, server=72),
    "V100": GpuProduct(VOLTA, 150e9),
    "P100": GpuProduct(PASCAL, 80e9),
    "V100-PCIE": GpuProduct(PCIE3, 16e9),
    "P100-PCIE": GpuProduct(PCIE3, 16e9),
    "T4": GpuProduct(PCIE3, 16e9),
    "M60": GpuProduct(PCIE3, 16e9),
    "A10G": GpuProduct(PCIE4, 32e9),
    "L4": GpuProduct(PCIE4, 32e9),
    "L40S": GpuProduct(PCIE4, 32e9),
}
"""Every GPU by its name."""


def gpu_named(name: str) -> GpuProduct:
    """Return the GPU of that name, in any case; for an unlisted variant (``"H100-HBM2e"``) the GPU it is a variant of.

    Raises:
        ConfigError: no such GPU; lists the near names.
    """
    found = None
    if isinstance(name, str):
        found = GPUS.get(name.upper()) or GPUS.get(name.upper().partition("-")[0])
    if found is None:
        raise unknown("gpu", name, GPUS)
    return found
