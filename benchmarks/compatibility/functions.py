"""torch.func, vmap, autograd functions of one's own, hooks, double backward; values that decide on shapes."""

import argparse

import torch
from gpt import start
from torch import nn, optim
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("func", "function", "hooks", "double", "values", "custom", "complex", "inplace"))
kind = parser.parse_args().kind
device = start()
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(device)
optimizer = optim.SGD(model.parameters(), lr=1e-3)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


@torch.library.custom_op("compatibility::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


scale.register_autograd(lambda ctx, gradient: (gradient * ctx.factor, None),
                        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]))  # fmt: skip


def func(x: torch.Tensor) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    per_sample = vmap(grad(lambda p, row: functional_call(model, p, (row,)).sum()), in_dims=(None, 0))(parameters, x)
    jvp(torch.sin, (x,), (torch.ones_like(x),))
    stacked, _ = stack_module_state([nn.Linear(256, 256, device=device) for _ in range(3)])
    assert stacked["weight"].shape[0] == 3
    assert per_sample["0.weight"].shape == (len(x), 256, 256)
    return model(x).sum()


def hooks(x: torch.Tensor) -> torch.Tensor:
    seen = []
    handles = [
        model[0].register_forward_hook(lambda *_: seen.append("forward")),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[0].weight.register_hook(lambda g: g.clamp(-1, 1)),
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated")),
    ]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    assert sorted(seen) == ["accumulated", "backward", "forward"]
    return model(x).sum()


def double(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def values(x: torch.Tensor) -> torch.Tensor:
    tokens = torch.randint(1000, (64 * 1024,), device=device)
    kept = tokens[tokens != 3]
    rows = (tokens > 500).nonzero().squeeze(1)
    distinct, inverse = tokens.unique(return_inverse=True)
    counts = torch.bincount(tokens, minlength=1000)
    best, where = torch.randn(1 << 20, device=device).topk(100)
    ordered = torch.randn(1 << 20, device=device).sort().values
    assert int(counts.sum()) == len(inverse) == tokens.numel()
    assert min(kept.numel(), rows.numel(), distinct.numel()) > 0
    assert len(best) == len(where) == 100
    assert torch.histc(ordered, 10).sum().item() == ordered.numel()
    if torch.isnan(x).any() or not torch.isfinite(x).all():
        raise AssertionError
    y = model(x)
    y[y > 1] = 0
    return y.masked_fill(y < 0, 0).sum() + torch.where(y > 0, y, 0.0).sum() + y.masked_select(y > 0).sum()


def inplace(x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y += 1
    y[:, 0].mul_(2)
    y.index_add_(0, torch.arange(len(y), device=device), torch.ones_like(y))
    y = y.scatter_add(0, torch.zeros_like(y, dtype=torch.long), y)
    return torch.einsum("ij,kj->ik", y, y).cumsum(0).clamp_min(0).sum() + y.flip(0).roll(1).tril().sum()


KINDS = {
    "func": func,
    "function": lambda x: Square.apply(model(x)).sum(),
    "hooks": hooks,
    "double": double,
    "values": values,
    "custom": lambda x: scale(model(x), 2.0).sum(),
    "complex": lambda x: torch.fft.irfft(torch.fft.rfft(model(x))).sum(),
    "inplace": inplace,
}
for _ in range(3):
    KINDS[kind](torch.randn(128, 256, device=device)).backward()
    optimizer.step()
    optimizer.zero_grad()
