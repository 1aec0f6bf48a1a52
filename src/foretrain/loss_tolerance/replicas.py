"""Data-parallel ranks in one process, whose exchange loses packets: one round of training.

Three kinds, by what may differ between ranks:

    Alike      gradients are lost on their way to where they are summed; the sum reaches all ranks whole: one model
    Apart      an all-reduce loses on both ways, so ranks apply different sums: a model and an optimizer for each
    Serving    servers hold the model; workers compute with what they have pulled, stale where a pull lost something
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foretrain.comm.bounded.plans import of_hop
from foretrain.comm.options import BoundedLoss
from foretrain.errors import ConfigError, RecordError, unknown
from foretrain.loss_tolerance.execution import Gap, Lossy, Tally, plan_of, reduced
from foretrain.loss_tolerance.layout import PAYLOAD, Tensor, TensorLayout
from foretrain.loss_tolerance.losses import LossPattern, Way
from foretrain.loss_tolerance.tagging import Tagging
from foretrain.loss_tolerance.trial import Trial, shards

Delivery: TypeAlias = Literal["lossy", "reliable"]
"""Whether some of what is sent may be lost."""
_USUAL = BoundedLoss()
"""Bounded loss with its defaults."""


@dataclass(frozen=True, slots=True)
class LossyExchange:
    """Exchange of gradients between ranks over a lossy network: by default DLCP's.

    Attributes:
        way: transpose, ring, halving_doubling or parameter_server (one server, which does not train).
        ranks: that train, at least 2.
        back: whether the second half, all-gather or pull, loses packets too.
        small: whether what `BoundedLoss` never loses by default may be lost, too: biases, norms, tensors of few bytes,
            and anything in the first rounds.
        gap: what stands where a rank did not get a sum, of an all-reduce only; a pull keeps the previous parameter.
        tagging: which packets may be dropped.
        payload: bytes of a packet.
    """

    way: Way = "parameter_server"
    ranks: int = 4
    back: Delivery = "lossy"
    small: Delivery = "lossy"
    gap: Gap = "zero"
    tagging: Tagging = field(default_factory=Tagging)
    payload: int = PAYLOAD

    def __post_init__(self) -> None:
        for name, value, known in (
            ("exchange", self.way, get_args(Way)),
            ("back", self.back, get_args(Delivery)),
            ("small", self.small, get_args(Delivery)),
            ("gap", self.gap, get_args(Gap)),
        ):
            if value not in known:
                raise unknown(name, value, known)
        if self.ranks < 2:
            raise ConfigError("workers", self.ranks, "exchange nothing", "write at least 2")

    def apply(self, trial: Trial) -> Replicas:
        """Return ranks that begin with the trial's model; ConfigError where nothing of it may be lost."""
        if self.back == "reliable":
            made = SharedModel(trial, self)
        else:
            made = Serving(trial, self) if self.way == "parameter_server" else PerRankModel(trial, self)
        if made.lossy == 0:
            problem = f"leaves nothing to lose: tensors have one dimension, or at most {_USUAL.reliable_bytes:,} bytes"
            raise ConfigError("small", self.small, problem, "write lossy")
        return made

    def of_hop(self, p: float, number: int) -> float:
        """Return the share that one hop loses in round ``number``, where the sum of a round may lose ``p``."""
        if self.small == "reliable" and number < _USUAL.reliable_steps:
            return 0.0
        return of_hop("ps" if self.way == "parameter_server" else self.way, p, self.ranks)


class Replicas(Protocol):
    """Ranks that train together."""

    @property
    def model(self) -> nn.Module:
        """Return the model to evaluate: the servers', or rank 0's."""
        ...

    @property
    def tallies(self) -> Sequence[Tally]:
        """Return the tallies of every collective."""
        ...

    @property
    def lossy(self) -> float:
        """Return the share of bytes that may be lost."""
        ...

    @property
    def droppable(self) -> float:
        """The share of these that switches may drop."""
        ...

    def step(self, batch: Any, losses: Sequence[LossPattern]) -> float:
        """Train one round; return the mean loss of all shards. ``losses``: of both halves, or of an all-reduce."""
        ...

    def drift(self) -> float:
        """Return how far the ranks' parameters are from the mean of all, in the norm of that: 0 where they are
        alike.
        """
        ...


class SharedModel:
    """Replicas with losses on the way to the sums alone: all ranks share one model."""

    def __init__(self, trial: Trial, exchange: LossyExchange) -> None:
        self._rank = Replica(trial, trial.model, trial.optimizer)
        self._ranks = exchange.ranks
        self._push = _collective(exchange, "reduce_scatter", self._rank)
        self.model, self.tallies = trial.model, (self._push.tally,)
        self.lossy, self.droppable = self._push.lossy, self._push.droppable

    def step(self, batch: Any, losses: Sequence[LossPattern]) -> float:
        """See `Replicas`."""
        found = [self._rank.gradient(shard) for shard in shards(batch, self._ranks)]
        self._rank.apply(_summed(self._push, found, losses[0]) / np.float32(self._ranks))
        return _mean(found)

    def drift(self) -> float:
        """See `Replicas`."""
        return 0.0


class PerRankModel:
    """Replicas over an all-reduce that loses on both ways: each rank has its own model."""

    def __init__(self, trial: Trial, exchange: LossyExchange) -> None:
        pairs = [(trial.model, trial.optimizer)]
        # Copied as a pair, so that each optimizer's parameters are its model's.
        pairs += [copy.deepcopy(pairs[0]) for _ in range(exchange.ranks - 1)]
        self._all = [Replica(trial, model, optimizer) for model, optimizer in pairs]
        self._reduce = _collective(exchange, "all_reduce", self._all[0])
        self.model, self.tallies = trial.model, (self._reduce.tally,)
        self.lossy, self.droppable = self._reduce.lossy, self._reduce.droppable

    def step(self, batch: Any, losses: Sequence[LossPattern]) -> float:
        """See `Replicas`."""
        parts = shards(batch, len(self._all))
        found = [rank.gradient(shard) for rank, shard in zip(self._all, parts, strict=True)]
        holds = _packed(self._reduce, [gradient for gradient, _ in found])
        self._reduce.run(holds, losses[0])
        sums = self._reduce.layout.unpack(holds[: len(self._all)])
        for rank, gradient in zip(self._all, sums, strict=True):
            rank.apply(gradient / np.float32(len(self._all)))
        return _mean(found)

    def drift(self) -> float:
        """See `Replicas`."""
        return _spread(np.stack([rank.parameters() for rank in self._all]))


class Serving:
    """Replicas over a server that sums and updates; workers keep the previous value of a parameter whose pull is lost.

    Buffers, such as batch norm's statistics, are the workers' together.
    """

    def __init__(self, trial: Trial, exchange: LossyExchange) -> None:
        self._rank, self._ranks = Replica(trial, trial.model, trial.optimizer), exchange.ranks
        self._push = _collective(exchange, "reduce_scatter", self._rank)
        self._pull = _collective(exchange, "all_gather", self._rank, gap="held")
        self._master = self._rank.parameters()
        self._workers = np.tile(self._master, (self._ranks, 1))
        self.model, self.tallies = trial.model, (self._push.tally, self._pull.tally)
        self.lossy, self.droppable = self._push.lossy, self._push.droppable

    def step(self, batch: Any, losses: Sequence[LossPattern]) -> float:
        """See `Replicas`."""
        found = []
        for parameters, shard in zip(self._workers, shards(batch, self._ranks), strict=True):
            self._rank.load(parameters)
            found.append(self._rank.gradient(shard))
        self._rank.load(self._master)
        self._rank.apply(_summed(self._push, found, losses[0]) / np.float32(self._ranks))
        self._master = self._rank.parameters()
        holds = self._pull.layout.pack(np.concatenate([self._workers, self._master[None]]))
        self._pull.run(holds, losses[1])
        self._workers = self._pull.layout.unpack(holds[: self._ranks])
        return _mean(found)

    def drift(self) -> float:
        """See `Replicas`."""
        return _spread(self._workers)


class Replica:
    """Model and optimizer of a rank, with parameters and gradients as one vector."""

    def __init__(self, trial: Trial, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._loss, self._model, self._optimizer = trial.loss, model, optimizer
        self._own = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._sizes = [one.numel() for _, one in self._own]

    def tensors(self, small: Delivery = "lossy") -> tuple[Tensor, ...]:
        """Return the parameters as messages; a layer is the module of a parameter, in the order of registration.

        ``small`` is as of `LossyExchange`.
        """
        layers: dict[str, int] = {}
        owners = [name.rpartition(".")[0] for name, _ in self._own]
        return tuple(
            Tensor(name, size, layers.setdefault(owner, len(layers)), small == "reliable" and _is_small(parameter))
            for (name, parameter), size, owner in zip(self._own, self._sizes, owners, strict=True)
        )

    def gradient(self, shard: Any) -> tuple[NDArray[np.float32], float]:
        """Return the gradient (values,) of a shard's mean loss, and that loss."""
        self._model.zero_grad(set_to_none=True)
        loss = self._loss(self._model, shard)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RecordError(f"loss returned {shown}; it must return a scalar that depends on the parameters")
        loss.backward()
        parts = [torch.zeros(one.numel()) if one.grad is None else one.grad.reshape(-1) for _, one in self._own]
        return torch.cat(parts).numpy(), loss.item()

    def apply(self, gradient: NDArray[np.float32]) -> None:
        """Make one step of the optimizer with ``gradient``."""
        for (_, one), part in zip(self._own, torch.from_numpy(gradient).split(self._sizes), strict=True):
            one.grad = part.view_as(one).clone()
        self._optimizer.step()

    def parameters(self) -> NDArray[np.float32]:
        """Return a copy of the parameters, (values,)."""
        with torch.no_grad():
            return torch.cat([one.reshape(-1) for _, one in self._own]).numpy()

    def load(self, parameters: NDArray[np.float32]) -> None:
        """Set the parameters; the reverse of `parameters`."""
        with torch.no_grad():
            for (_, one), part in zip(self._own, torch.from_numpy(parameters).split(self._sizes), strict=True):
                one.copy_(part.view_as(one))


def _collective(
    exchange: LossyExchange, operation: Literal["all_reduce", "reduce_scatter", "all_gather"], rank: Replica,
    gap: Gap | None = None,
) -> Lossy:  # fmt: skip
    plan = plan_of(exchange.way, operation, exchange.ranks)
    cut = TensorLayout(rank.tensors(exchange.small), plan.blocks, exchange.payload)
    return Lossy(plan, cut, gap=gap or exchange.gap, tagging=exchange.tagging)


def _is_small(parameter: nn.Parameter) -> bool:
    """Return whether `BoundedLoss` loses nothing of a parameter's gradient by default."""
    return parameter.dim() <= 1 or parameter.nbytes <= _USUAL.reliable_bytes


def _packed(collective: Lossy, rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return ranks' vectors and zeros for helpers, (ranks + helpers, blocks, width)."""
    packed = collective.layout.pack(np.stack(rows))
    nothing = np.zeros((collective.plan.helpers, *packed.shape[1:]), np.float32)
    return np.concatenate([packed, nothing])


def _summed(
    collective: Lossy, found: Sequence[tuple[NDArray[np.float32], float]], losses: LossPattern
) -> NDArray[np.float32]:
    holds = _packed(collective, [gradient for gradient, _ in found])
    collective.run(holds, losses)
    return collective.layout.unpack(reduced(collective.plan, holds))


def _mean(found: Sequence[tuple[NDArray[np.float32], float]]) -> float:
    return sum(loss for _, loss in found) / len(found)


def _spread(parameters: NDArray[np.float32]) -> float:
    center = parameters.mean(axis=0)
    return float(np.linalg.norm(parameters - center, axis=1).mean() / max(float(np.linalg.norm(center)), 1e-30))
