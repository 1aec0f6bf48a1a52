"""ResNet (He et al., CVPR'16) with bottlenecks, v1.5 as in torchvision: the stride is in the 3×3 convolution."""

from __future__ import annotations

from foretrain.workload.models.net import Architecture, Net


def resnet50() -> Architecture:
    """25,557,032 parameters, 4.09 G multiply-accumulates."""
    return _resnet(3, 4, 6, 3)


def resnet101() -> Architecture:
    """44,549,160 parameters, 7.8 G multiply-accumulates."""
    return _resnet(3, 4, 23, 3)


def resnet152() -> Architecture:
    """60,192,808 parameters, 11.5 G multiply-accumulates."""
    return _resnet(3, 8, 36, 3)


def _resnet(*depths: int) -> Architecture:
    net = Net(3, 224, 224)
    net.conv("conv1", 64, 7, stride=2, padding=3)
    net.batch_norm("bn1")
    net.elementwise(2)
    net.pool(3, stride=2, padding=1)
    for stage, depth in enumerate(depths, 1):
        for block in range(depth):
            stride = 2 if stage > 1 and block == 0 else 1
            _bottleneck(net, f"layer{stage}.{block}", 32 * 2**stage, stride, downsample=block == 0)
    net.flatten()
    net.linear("fc", 1000)
    return net.build()


def _bottleneck(net: Net, name: str, width: int, stride: int, downsample: bool) -> None:
    entry = net.shape
    net.conv(f"{name}.conv1", width, 1)
    net.batch_norm(f"{name}.bn1")
    net.elementwise(2)
    net.conv(f"{name}.conv2", width, 3, stride=stride, padding=1)
    net.batch_norm(f"{name}.bn2")
    net.elementwise(2)
    net.conv(f"{name}.conv3", 4 * width, 1)
    net.batch_norm(f"{name}.bn3")
    if downsample:  # the other branch; torchvision runs it last, after the main one
        net.shape = entry
        net.conv(f"{name}.downsample.0", 4 * width, 1, stride=stride)
        net.batch_norm(f"{name}.downsample.1")
    net.elementwise(3)
    net.elementwise(2)
