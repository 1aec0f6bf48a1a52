"""The zoo's ResNet-50 against a PyTorch module on the meta device: nothing is allocated or computed."""

import pytest

from foretrain.workload import zoo
from foretrain.workload.models.convnets import resnet50

torch = pytest.importorskip("torch")
nn = torch.nn


class Bottleneck(nn.Module):
    def __init__(self, entry, width, stride, downsample):
        super().__init__()
        self.conv1 = nn.Conv2d(entry, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None
        if downsample:
            shortcut = nn.Conv2d(entry, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return (y + (self.downsample(x) if self.downsample else x)).relu()


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        entry = 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for block in range(depth):
                width, stride = 64 * 2**stage, 2 if stage and not block else 1
                blocks.append(Bottleneck(entry, width, stride, not block))
                entry = 4 * width
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def module():
    with torch.device("meta"):
        return ResNet50()


def test_parameters_are_the_modules_in_name_shape_and_order(module):
    real = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    assert [(parameter.name, parameter.shape) for parameter in resnet50().parameters] == real


def test_layers_are_the_modules_in_execution_order(module):
    ran = []
    for path, child in module.named_modules():
        if list(child.parameters(recurse=False)):
            child.register_forward_pre_hook(lambda *_, path=path: ran.append(path))
    module(torch.empty(2, 3, 224, 224, device="meta"))
    assert [layer.name for layer in zoo("resnet50").layers] == ran


def test_multiplications_are_those_that_torch_counts(module):
    from torch.utils.flop_counter import FlopCounterMode

    net = resnet50()
    with FlopCounterMode(display=False) as counter:
        out = module(torch.empty(2, 3, 224, 224, device="meta"))
    forward = counter.get_total_flops()
    assert forward == 2 * 2 * net.macs
    with counter:
        out.sum().backward()
    backward = sum(k.macs for operator in net.operators for k in operator.backward)
    assert counter.get_total_flops() in (2 * 2 * backward, 2 * 2 * backward + forward)
