"""Layers: convolutions (channels_last, benchmark), SyncBatchNorm, LSTM, embedding bags, sparse gradients, others."""

import argparse

import torch
from gpt import start
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

KINDS = ("conv", "syncbn", "lstm", "gru", "bag", "sparse", "conv3d", "transposed", "norms", "ctc", "upsample", "losses")
parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=KINDS)
kind = parser.parse_args().kind
device = start()
torch.backends.cudnn.benchmark = True
images = torch.randn(16, 3, 128, 128, device=device)
series = torch.randn(32, 100, 256, device=device)


def conv(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    layers = [nn.Conv2d(3, 64, 7, 2), norm(64), nn.ReLU(True), nn.MaxPool2d(3), nn.Conv2d(64, 64, 3, groups=4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)).to(device)


class Last(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[0]


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, f = self.linear(x), nn.functional
        z = f.mse_loss(y, x) + f.l1_loss(y, x) + f.smooth_l1_loss(y, x) + f.huber_loss(y, x)
        z = z + f.binary_cross_entropy_with_logits(y, x.sigmoid()) + f.kl_div(y.log_softmax(-1), x.softmax(-1))
        z = z + f.cosine_similarity(y, x).mean() + f.triplet_margin_loss(y, x, -x)
        return z + f.cross_entropy(y, x.argmax(-1), label_smoothing=0.1)


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        targets = torch.randint(1, 32, (x.shape[1], 20), device=x.device)
        lengths = [torch.full((x.shape[1],), n, dtype=torch.long) for n in (x.shape[0], 20)]
        return nn.functional.ctc_loss(self.linear(x).log_softmax(-1), targets, *lengths)


BUILT = {
    "conv": (lambda: conv().to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)),
    "syncbn": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(conv()), images),
    "lstm": (lambda: Last(nn.LSTM(256, 512, 2, batch_first=True, dropout=0.1)), series),
    "gru": (lambda: Last(nn.GRU(256, 512, batch_first=True)), series),
    "bag": (lambda: nn.EmbeddingBag(100_000, 64, mode="sum"), torch.randint(100_000, (4096, 20), device=device)),
    "sparse": (lambda: nn.Embedding(100_000, 64, sparse=True), torch.randint(100_000, (4096, 20), device=device)),
    "conv3d": (lambda: nn.Conv3d(3, 16, 3), torch.randn(4, 3, 16, 64, 64, device=device)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 16, 4, 2), images),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.InstanceNorm2d(3), nn.RMSNorm(128), nn.PReLU()), images),
    "ctc": (Ctc, torch.randn(100, 16, 64, device=device)),
    "upsample": (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.Upsample(None, 2), nn.PixelUnshuffle(2)), images),
    "losses": (Losses, torch.randn(512, 256, device=device)),
}  # fmt: skip
made, x = BUILT[kind]
model = made().to(device)
if kind != "sparse":
    model = DistributedDataParallel(model, device_ids=[device.index])
optimizer = (optim.SparseAdam if kind == "sparse" else optim.AdamW)(list(model.parameters()), lr=1e-3)
for _ in range(4):
    model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
