"""AlexNet, the single-tower variant of "One weird trick" (Krizhevsky 2014) as torchvision defines it."""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net


def alexnet() -> Architecture:
    """61,100,840 parameters, 0.71 G multiply-accumulates on 224×224 images."""
    net = Net(3, 224, 224)
    for index, out, kernel, stride, padding in (
        (0, 64, 11, 4, 2),
        (3, 192, 5, 1, 2),
        (6, 384, 3, 1, 1),
        (8, 256, 3, 1, 1),
        (10, 256, 3, 1, 1),
    ):
        net.conv(f"features.{index}", out, kernel, stride, padding, bias=True)
        net.elementwise(2)
        if index in (0, 3, 10):
            net.pool(3, stride=2)
    net.flatten(6, 6)
    for index, out in ((1, 4096), (4, 4096), (6, 1000)):
        net.linear(f"classifier.{index}", out)
        net.elementwise(2)
    return net.build()
