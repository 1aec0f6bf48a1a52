"""A small transformer that predicts the next character of this repository's own pages; how much loss does it tolerate?

foretrain tolerance examples/tolerance/characters.py:build --rounds 400 --seeds 3
"""

from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)  # more threads only wait for each other in a network this small
LENGTH, WIDTH, HEADS, DEPTH, BATCH = 48, 48, 4, 2, 16
PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
TEXT = "".join(c if c.isascii() else "?" for c in TEXT)
ALPHABET = sorted(set(TEXT))
TOKENS = torch.tensor([ALPHABET.index(c) for c in TEXT])
HELD_OUT = len(TOKENS) // 10  # the end is for evaluation


class Transformer(nn.Module):
    """Tokens (batch, length) to logits (batch, length, alphabet)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, tokens):
        later = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        return self.head(self.norm(x))


class Windows:
    """Batches (BATCH, LENGTH + 1) from random places of the text, without end; the same for the same seed."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            yield windows(torch.randint(len(TOKENS) - HELD_OUT - LENGTH, (BATCH,), generator=draw))


def windows(places):
    return TOKENS[places[:, None] + torch.arange(LENGTH + 1)]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def evaluate(model):
    """The share of characters that are predicted right, in the text held out."""
    batch = windows(torch.arange(len(TOKENS) - HELD_OUT, len(TOKENS) - LENGTH - 1, LENGTH))
    return (model(batch[:, :-1]).argmax(-1) == batch[:, 1:]).float().mean().item()


def build(seed):
    """One training from its beginning; PyTorch's generator has been seeded."""
    model = Transformer()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "batches": Windows(seed),
        "loss": loss,
        "evaluate": evaluate,
    }
