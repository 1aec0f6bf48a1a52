"""VGG (Simonyan and Zisserman, ICLR'15) without batch norm, as torchvision defines it."""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net


def vgg16() -> Architecture:
    """138,357,544 parameters, 15.5 G multiply-accumulates."""
    return _vgg(2, 2, 3, 3, 3)


def vgg19() -> Architecture:
    """143,667,240 parameters, 19.6 G multiply-accumulates."""
    return _vgg(2, 2, 4, 4, 4)


def _vgg(*depths: int) -> Architecture:
    net = Net(3, 224, 224)
    index = 0
    for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            net.conv(f"features.{index}", width, 3, padding=1, bias=True)
            net.elementwise(2)
            index += 2  # the ReLU counts in nn.Sequential
        net.pool(2, stride=2)
        index += 1  # and so does the pooling
    net.flatten(7, 7)
    for index, out in ((0, 4096), (3, 4096), (6, 1000)):
        net.linear(f"classifier.{index}", out)
        net.elementwise(2)
    return net.build()
