"""Where scheduling can help: the optimum T* against a step with a barrier, over the rate of the links."""

import foretrain as ft

RATES = ("1Gbps", "2Gbps", "5Gbps", "10Gbps", "20Gbps", "50Gbps", "100Gbps")


def main() -> None:
    for model in ("resnet50", "vgg16", "gpt2"):
        workload = ft.workload.zoo(model, device="V100")
        print(f"{model}: {workload.size / 1e6:.0f} MB of gradients, {workload.compute / 1e9:.0f} ms of computation")
        for rate in RATES:
            bound = ft.bound(workload, f"4x1xV100@{rate}")
            ratio = bound.link / bound.compute
            # WFBP sends gradients as they appear and waits for all: what DDP does with buckets of no size.
            gain = bound.wfbp / bound.time
            print(
                f"  {rate:>8}  communication/computation {ratio:6.2f}  at best {gain:.2f}× WFBP's speed  {bound.kind}"
            )


if __name__ == "__main__":
    main()
