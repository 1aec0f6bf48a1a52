"""AlexNet, VGG and ResNet, as torchvision defines them.

AlexNet is the single-tower variant of "One weird trick" (Krizhevsky 2014); VGG (Simonyan and Zisserman, ICLR'15) is
without batch norm; ResNet (He et al., CVPR'16) has bottlenecks, v1.5: the stride is in the 3×3 convolution.
"""

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
