"""Losses that a script's backward passes begin with, for the guard of an automatic tolerance.

    loss.backward() ──▶ the loss, if that is one number on the CPU ──▶ step(): the mean of its passes ──▶ `Ledger`

Reading a number on the CPU waits for nothing. A backward pass that begins with several tensors, with one that has many
elements, or with one on a GPU, has no loss here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from foretrain.comm.bounded.ledger import Ledger
from foretrain.plugins.torch import access_guards


class BackwardLosses:
    """Losses of one model's backward passes, until its optimizer steps; the model's hooks call it."""

    def __init__(self) -> None:
        self._begun: float | None = None
        """Of the present pass, which may be another model's."""
        self._of_step: list[float] = []

    def watch(self) -> Callable[[], None]:
        """Hear of all backward passes from now on; return what undoes it."""
        access_guards.pass_begins.append(self._begin)
        return lambda: access_guards.pass_begins.remove(self._begin)

    def _begin(self, roots: Sequence[torch.Tensor]) -> None:
        self._begun = loss_of(roots)

    def gradient(self) -> None:
        """Note that the present pass is one of this model's: it has a gradient."""
        if self._begun is not None:
            self._of_step.append(self._begun)
            self._begun = None

    def step(self, ledger: Ledger | None) -> None:
        """Show ``ledger`` the step's loss: the mean of its backward passes, the micro-batches that it accumulates."""
        if ledger is not None and self._of_step:
            ledger.watch_loss(fmean(self._of_step))
        self._of_step.clear()


def loss_of(roots: Sequence[torch.Tensor]) -> float | None:
    """Return the loss of a backward pass that begins with ``roots``; None where that is not one number on the CPU.

    The factor of a last multiplication by a constant, such as a GradScaler's that changes with time, is left out.
    """
    if len(roots) != 1 or roots[0].numel() != 1 or roots[0].device.type != "cpu":
        return None
    root, node = roots[0].item(), roots[0].grad_fn
    factor = getattr(node, "_saved_other", None) if node is not None and node.name() == "MulBackward0" else None
    if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.requires_grad and factor.item() > 0:
        return root / factor.item()
    return root
