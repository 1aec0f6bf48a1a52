"""EFLOPS (HPCA'20): server, BiGraph with HDRM, and how ResNet-50 scales on them. Simulated; any machine will do.

Published, as far as it was to be had (abstract and secondary notes, without figures or testbed): removing contention at
NIC and PCIe gains up to 11.3×; BiGraph with HDRM up to 6.08× more; ResNet-50 scales nearly linearly.

Assumed here. Servers: k GPUs, one NIC of 100 Gb/s at the root complex in the baseline and one beside each GPU in
EFLOPS, PCIe 3.0 x16 at 14.4 GB/s payload, memory 128 GB/s, storage 3.2 GB/s (foretrain.network.servers.pcie).
GPUDirect everywhere unless said. 16 servers on a switch that does not block. Input data is copied at the pace at which
V100s train ResNet-50 if nothing holds them up (batch 64; 350 images/s in fp32, 1,172 in mixed precision; an image is
602 kB as float32, 151 kB as bytes), in the baseline too; a batch in a burst is 38.5 MB. Networks: 100 Gb/s, α per step
2 and 5 µs, gradients of ResNet-50 in fp32 (102 MB) in (a). Flows share links max-min fairly; ECMP hashes each pair of
hosts, with another hash for each seed. In (c) 8 GPUs a server, steps of 2 µs and 0.5 µs a link, 50 µs an operation, 102
MB of gradients in fp32 and 51 MB in mixed precision.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from eflops_report import network_part, scaling_part, server_part
from eflops_scaling import BIGRAPHS
from measure import finish, options

from foretrain.units import MICROSECOND


def main() -> None:
    """Prints paper, ours, ratio of every figure."""
    arguments = options(
        __doc__ or "",
        lambda parser: parser.add_argument("--plots", type=Path, metavar="DIR", help="write every figure there"),
    )
    quick = arguments.quick
    print(__doc__)
    alphas = (2 * MICROSECOND,) if quick else (2 * MICROSECOND, 5 * MICROSECOND)
    counts = (8, 64, 512, 10_000) if quick else tuple(BIGRAPHS)
    parts = {
        "server": server_part(),
        "network": network_part(alphas, seeds=3 if quick else 15),
        "scaling": scaling_part(counts, seeds=1 if quick else 5),
    }
    values = {key: value for found, _, _ in parts.values() for key, value in found.items()}
    for _, _, chart in parts.values() if arguments.plots else ():
        chart.write(arguments.plots)
    finish(arguments, "paper_eflops", values, {name: details for name, (_, details, _) in parts.items()}, seed=0)


if __name__ == "__main__":
    main()
