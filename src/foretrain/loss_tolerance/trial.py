"""Trial of a user's training: a model, an optimizer, batches, a loss and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.errors import ConfigError, RecordError

CONTRACT = (
    "return an object or a dict with model (a torch.nn.Module), optimizer (of its parameters), batches (an iterable), "
    "loss (of a model and a batch, a scalar) and evaluate (of a model, a number; higher is better)"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Ingredients of one training.

    Attributes:
        model: with float32 parameters.
        optimizer: of its parameters, any of torch.optim.
        batches: one batch of all ranks together for each round, iterated again when it ends. A batch is a tensor, or a
            tuple, list or dict of tensors, with samples along the first dimension of each.
        loss: takes the model and a batch, returns the batch's mean loss.
        evaluate: takes the model, returns its accuracy on data of its own; higher is better, and it changes nothing.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], float]


def build_trial(build: Callable[[int], object], seed: int, name: str = "build") -> Trial:
    """Return the checked result of ``build(seed)``. PyTorch's global generator is seeded before and after.

    Raises:
        RecordError: it is not what `CONTRACT` says.
    """
    torch.manual_seed(seed)
    try:
        returned = build(seed)
    except TypeError as error:
        if "positional argument" in str(error) and error.__traceback__ and error.__traceback__.tb_next is None:
            raise RecordError(f"{name}() must take one argument, the seed: {error}") from error
        raise
    made = _checked(returned, name)
    # So that what draws from it later, to shuffle or to drop out, does not depend on what building took.
    torch.manual_seed(seed)
    return made


def _checked(returned: object, name: str) -> Trial:
    get = returned.get if isinstance(returned, Mapping) else lambda key: getattr(returned, key, None)
    found: dict[str, Any] = {one.name: get(one.name) for one in fields(Trial)}
    if missing := [key for key, value in found.items() if value is None]:
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise RecordError(f"{name}() returned {what} without {', '.join(missing)}; it must {CONTRACT}")
    for key, ok, wanted in (
        ("model", isinstance(found["model"], nn.Module), "a torch.nn.Module"),
        ("optimizer", isinstance(found["optimizer"], torch.optim.Optimizer), "a torch.optim.Optimizer"),
        ("batches", isinstance(found["batches"], Iterable), "an iterable of batches"),
        ("loss", callable(found["loss"]), "a function of a model and a batch"),
        ("evaluate", callable(found["evaluate"]), "a function of a model"),
    ):
        if not ok:
            raise RecordError(f"{name}() gave a {type(found[key]).__name__} as its {key}, not {wanted}; {CONTRACT}")
    trial = Trial(**found)
    _check_parameters(trial, name)
    return trial


def _check_parameters(trial: Trial, name: str) -> None:
    own = [(key, value) for key, value in trial.model.named_parameters() if value.requires_grad]
    if not own:
        raise RecordError(f"{name}() gave a model without parameters to train")
    for key, value in own:
        if value.dtype != torch.float32 or value.device.type != "cpu":
            raise RecordError(f"{name}(): {key} is {value.dtype} on {value.device}; use float32 on the CPU")
    ours = {id(value) for _, value in own}
    held = {id(one) for group in trial.optimizer.param_groups for one in group["params"]}
    if not held <= {id(value) for value in trial.model.parameters()} or not held & ours:
        raise RecordError(f"{name}() gave an optimizer of other parameters than its model's; make it after the model")


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches, from the beginning again when they end. RecordError when there are none any more."""
    while True:
        some = False
        for batch in batches:
            some = True
            yield batch
        if not some:
            raise RecordError(
                "batches have ended and cannot be iterated again; return a list, a DataLoader or the like"
            )


def shards(batch: Any, ranks: int) -> list[Any]:
    """Equal parts of a batch, as even as can be. RecordError for what is no batch, ConfigError for too small a one."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) < ranks:
            size = len(batch) if batch.dim() else "a scalar"
            raise ConfigError("workers", ranks, f"are more than the samples of a batch, {size}", "take larger batches")
        return list(torch.tensor_split(batch, ranks))
    if isinstance(batch, Mapping):
        parts = {key: shards(value, ranks) for key, value in batch.items()}
        return [{key: part[rank] for key, part in parts.items()} for rank in range(ranks)]
    if isinstance(batch, (tuple, list)) and batch:
        return list(zip(*(shards(value, ranks) for value in batch), strict=True))
    raise RecordError(f"a batch is a {type(batch).__name__}; give a tensor, or a tuple, list or dict of tensors")


def score(trial: Trial, model: nn.Module) -> float:
    """Return the trial's evaluation of ``model``, NaN included; RecordError for what is no number."""
    model.eval()
    with torch.no_grad():
        found = trial.evaluate(model)
    model.train()
    try:
        return float(found)
    except (TypeError, ValueError):
        raise RecordError(f"evaluate returned a {type(found).__name__}, not a number; {CONTRACT}") from None


def finite(value: float) -> bool:
    """Return whether a loss or an accuracy is finite."""
    return math.isfinite(value)
