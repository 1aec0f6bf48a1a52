"""AlexNet, VGG, ResNet and Inception, as torchvision defines them.

AlexNet is the single-tower variant of "One weird trick" (Krizhevsky 2014); VGG (Simonyan and Zisserman, ICLR'15) is
without batch norm; ResNet (He et al., CVPR'16) has bottlenecks, v1.5: the stride is in the 3×3 convolution.
Inception-v3 (Szegedy et al., CVPR'16) sees 299×299 images; the zoo's model is the one without the auxiliary classifier,
as image-rate benchmarks use it. Its branches run in the order of torchvision's forward functions, which is also their
order of registration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from foretrain.workload.models.net import Architecture, Net

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Convolution: TypeAlias = tuple[str, int, tuple[int, int], int, tuple[int, int]]
"""Name, output channels, kernel, stride, padding."""


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


def inception_v3(aux: bool = False) -> Architecture:
    """23,834,568 parameters, 27,161,264 with ``aux``; 5.7 G multiply-accumulates without."""
    net = Net(3, 299, 299)
    _basic(net, "Conv2d_1a_3x3", 32, 3, stride=2)
    _basic(net, "Conv2d_2a_3x3", 32, 3)
    _basic(net, "Conv2d_2b_3x3", 64, 3, padding=1)
    net.pool(3, stride=2)
    _basic(net, "Conv2d_3b_1x1", 80, 1)
    _basic(net, "Conv2d_4a_3x3", 192, 3)
    net.pool(3, stride=2)
    for letter, pooled in (("b", 32), ("c", 64), ("d", 64)):
        _block_a(net, f"Mixed_5{letter}", pooled)
    _block_b(net, "Mixed_6a")
    for letter, narrow in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
        _block_c(net, f"Mixed_6{letter}", narrow)
    if aux:
        _auxiliary(net)
    _block_d(net, "Mixed_7a")
    _block_e(net, "Mixed_7b")
    _block_e(net, "Mixed_7c")
    net.flatten()
    net.linear("fc", 1000)
    return net.build()


def _basic(
    net: Net, name: str, out: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | tuple[int, int] = 0
) -> None:
    net.conv(f"{name}.conv", out, kernel, stride, padding)
    net.batch_norm(f"{name}.bn")
    net.elementwise(2)


def _square(name: str, out: int, size: int, stride: int = 1, padding: int | None = None) -> Convolution:
    pad = size // 2 if padding is None else padding
    return name, out, (size, size), stride, (pad, pad)


def _row(name: str, out: int, size: int) -> Convolution:
    return name, out, (1, size), 1, (0, size // 2)


def _column(name: str, out: int, size: int) -> Convolution:
    return name, out, (size, 1), 1, (size // 2, 0)


def _chain(net: Net, block: str, convolutions: Sequence[Convolution]) -> None:
    for name, out, kernel, stride, padding in convolutions:
        _basic(net, f"{block}.{name}", out, kernel, stride, padding)


def _concatenate(net: Net, branches: Sequence[Callable[[], None]]) -> None:
    """Run every branch on the same input and stack the outputs along the channels."""
    entry, channels = net.shape, 0
    for branch in branches:
        net.shape = entry
        branch()
        channels += net.shape[0]
    net.shape = (channels, *net.shape[1:])


def _mixed(net: Net, block: str, chains: Sequence[Sequence[Convolution]], last: Callable[[], None]) -> None:
    _concatenate(net, [*(lambda chain=chain: _chain(net, block, chain) for chain in chains), last])


def _pooled(net: Net, block: str, out: int) -> Callable[[], None]:
    def branch() -> None:
        net.pool(3, padding=1)
        _basic(net, f"{block}.branch_pool", out, 1)

    return branch


def _block_a(net: Net, block: str, pooled: int) -> None:
    chains = (
        (_square("branch1x1", 64, 1),),
        (_square("branch5x5_1", 48, 1), _square("branch5x5_2", 64, 5)),
        (_square("branch3x3dbl_1", 64, 1), _square("branch3x3dbl_2", 96, 3), _square("branch3x3dbl_3", 96, 3)),
    )
    _mixed(net, block, chains, _pooled(net, block, pooled))


def _block_b(net: Net, block: str) -> None:
    chains = (
        (_square("branch3x3", 384, 3, stride=2, padding=0),),
        (
            _square("branch3x3dbl_1", 64, 1),
            _square("branch3x3dbl_2", 96, 3),
            _square("branch3x3dbl_3", 96, 3, stride=2, padding=0),
        ),
    )
    _mixed(net, block, chains, lambda: net.pool(3, stride=2))


def _block_c(net: Net, block: str, narrow: int) -> None:
    chains = (
        (_square("branch1x1", 192, 1),),
        (_square("branch7x7_1", narrow, 1), _row("branch7x7_2", narrow, 7), _column("branch7x7_3", 192, 7)),
        (
            _square("branch7x7dbl_1", narrow, 1),
            _column("branch7x7dbl_2", narrow, 7),
            _row("branch7x7dbl_3", narrow, 7),
            _column("branch7x7dbl_4", narrow, 7),
            _row("branch7x7dbl_5", 192, 7),
        ),
    )
    _mixed(net, block, chains, _pooled(net, block, 192))


def _block_d(net: Net, block: str) -> None:
    chains = (
        (_square("branch3x3_1", 192, 1), _square("branch3x3_2", 320, 3, stride=2, padding=0)),
        (
            _square("branch7x7x3_1", 192, 1),
            _row("branch7x7x3_2", 192, 7),
            _column("branch7x7x3_3", 192, 7),
            _square("branch7x7x3_4", 192, 3, stride=2, padding=0),
        ),
    )
    _mixed(net, block, chains, lambda: net.pool(3, stride=2))


def _block_e(net: Net, block: str) -> None:
    def forked(name: str, stem: Sequence[Convolution], left: str, right: str) -> Callable[[], None]:
        def branch() -> None:
            _chain(net, block, stem)
            forks = (_row(f"{name}_{left}", 384, 3), _column(f"{name}_{right}", 384, 3))
            _concatenate(net, [lambda fork=fork: _chain(net, block, (fork,)) for fork in forks])

        return branch

    double = (_square("branch3x3dbl_1", 448, 1), _square("branch3x3dbl_2", 384, 3))
    branches = (
        lambda: _chain(net, block, (_square("branch1x1", 320, 1),)),
        forked("branch3x3", (_square("branch3x3_1", 384, 1),), "2a", "2b"),
        forked("branch3x3dbl", double, "3a", "3b"),
        _pooled(net, block, 192),
    )
    _concatenate(net, branches)


def _auxiliary(net: Net) -> None:
    entry = net.shape
    net.pool(5, stride=3)
    _basic(net, "AuxLogits.conv0", 128, 1)
    _basic(net, "AuxLogits.conv1", 768, 5)
    net.flatten()
    net.linear("AuxLogits.fc", 1000)
    net.shape = entry
