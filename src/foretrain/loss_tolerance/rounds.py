"""Rounds of training over a network of packets: their losses and times.

    exchange + tensors ── plans ──▶ programs of flows ──▶ Packets ──▶ Recorded losses, which `Training` takes, and times

A flow is one transfer of one tensor, a step of it a step of the plan. What a receiver did without, since enough had
come, is lost for good: zeros, or what the exchange puts there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Plan
from foretrain.errors import ConfigError
from foretrain.loss_tolerance.execution import Lossy, plan_of
from foretrain.loss_tolerance.layout import Tensor, TensorLayout
from foretrain.loss_tolerance.losses import LossPattern, RecordedLosses, Tagged, Tags
from foretrain.loss_tolerance.replicas import LossyExchange
from foretrain.network.packet import Outcome, Packets
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.program import Program, Router, joined, place
from foretrain.units import Time


@dataclass(frozen=True, slots=True)
class TimedRound:
    """Exchange of one round over the network.

    Attributes:
        losses: of an all-reduce, or of push and pull.
        time: ps from the first release to the last byte.
        lost: share of the packets that receivers did without.
    """

    losses: tuple[RecordedLosses, ...]
    time: Time
    lost: float


class NetworkRounds:
    """Rounds of an exchange over packets, simulated when they are asked for; give it to `Training` as its losses.

    Attributes:
        count: how many differ; after them they begin anew. By magnitude all do, and it means nothing.

    Args:
        exchange: what is exchanged, and how packets are tagged; its way back and small tensors have to be lossy, as
            reliable ones need another network.
        tensors: in the order of the model, e.g. `foretrain.loss_tolerance.replicas.Replica.tensors`.
        router: chooses paths; ranks are the topology's first ones, a server is on the one after them. A `Scatter`
            spreads the packets of every flow over all of its ways.
        network: of each round, from its number, so that each has a seed of its own. Its transport's payload has to be
            the exchange's. Switches need `Queues.spare` for tags to matter: what is not droppable is marked there.
        release: ps at which each tensor's gradient is there; 0 by default.
        classes: of packets; front layers go first (DLCP, section on priorities; ours is ⌊layer · classes / layers⌋).
        count: rounds to simulate.

    Pulls begin when all pushes have come. By layer a packet's tag is known before. By magnitude each round of training
    is simulated with the values that it sends: those of pushes and pulls exactly, partial sums as they would be if
    nothing were lost, since what is lost depends on the tags. Tensors so short that none of their packets may be lost
    are important in any case.
    """

    def __init__(
        self,
        exchange: LossyExchange,
        tensors: Sequence[Tensor],
        router: Router,
        network: Callable[[int], Packets],
        *,
        release: Sequence[Time] = (),
        classes: int = 8,
        count: int = 8,
    ) -> None:
        for name, value in (("back", exchange.back), ("small", exchange.small)):
            if value != "lossy":
                raise ConfigError(f"exchange.{name}", value, "is not simulated", "write 'lossy'")
        if count < 1:
            raise ConfigError("count", count, "is no number of rounds", "write at least 1")
        if not 1 <= classes <= 8:
            raise ConfigError("classes", classes, "is no number of classes", "write 1 to 8")
        if len(release) not in (0, len(tensors)):
            raise ConfigError("release", len(release), f"is not one for each of {len(tensors)} tensors", "give all")
        self.count = count
        self._exchange, self._tensors, self._router, self._network = exchange, tuple(tensors), router, network
        self._release, self._classes = [int(time) for time in release] or [0] * len(self._tensors), classes
        serving = exchange.way == "parameter_server"
        operations = ("reduce_scatter", "all_gather") if serving else ("all_reduce",)
        self._plans = [plan_of(exchange.way, each, exchange.ranks) for each in operations]
        self._programs = [self._program(half) for half in range(len(self._plans))]
        self._halves: dict[tuple[int, int], _Half] = {}

    def __call__(self, number: int) -> Sequence[LossPattern]:
        """Return the losses of round ``number``."""
        if self._by_magnitude:
            return tuple(_Foreseen(self, number, half) for half in range(len(self._plans)))
        return self.round(number).losses

    def round(self, number: int) -> TimedRound:
        """Return round ``number``, from 0 on.

        Raises:
            ConfigError: packets are tagged by magnitude, and that round has not been trained.
        """
        if not self._by_magnitude:
            number %= self.count
        for half in range(len(self._plans)):
            if (number, half) not in self._halves:
                if self._by_magnitude:
                    raise ConfigError("number", number, "has not been trained", "magnitudes are known in training only")
                self.simulate(number, half, self._static(half))
        halves = [self._halves[number, half] for half in range(len(self._plans))]
        gone, sent = sum(half.gone for half in halves), sum(half.sent for half in halves)
        return TimedRound(tuple(half.losses for half in halves), sum(half.time for half in halves), gone / sent)

    def times(self) -> list[Time]:
        """Return the times of all rounds, ps, for `foretrain.loss_tolerance.training`, once computation is added."""
        rounds = len(self._halves) // len(self._plans) if self._by_magnitude else self.count
        return [self.round(number).time for number in range(rounds)]

    def simulate(self, number: int, half: int, tags: Tags | None) -> RecordedLosses:
        """Simulate one half of round ``number`` with the tags of its packets; None: all are droppable."""
        network, plan = self._network(number), self._plans[half]
        if network.transport.payload != self._exchange.payload:
            what = f"is not the exchange's, {self._exchange.payload}"
            raise ConfigError("network.transport.payload", network.transport.payload, what, "give both the same")
        program = self._programs[half]
        outcome = network.run(program, important=self._important(plan, tags, program, network.transport))
        lost = self._lost(plan, outcome)
        gone, sent = sum(int(which.sum()) for which in lost.values()), sum(which.size for which in lost.values())
        made = _Half(RecordedLosses(lost), int(outcome.finish.max()), gone, sent)
        self._halves[number, half] = made
        return made.losses

    @property
    def _by_magnitude(self) -> bool:
        return self._exchange.tagging.by == "magnitude"

    def _layout(self, plan: Plan) -> TensorLayout:
        return TensorLayout(self._tensors, plan.blocks, self._exchange.payload)

    def _static(self, half: int) -> Tags | None:
        """Return the tags that do not depend on values."""
        if self._exchange.tagging.by == "packet":
            return None
        plan = self._plans[half]
        collective = Lossy(plan, self._layout(plan), tagging=self._exchange.tagging)
        return collective.foreseen(
            np.zeros((plan.ranks + plan.helpers, plan.blocks, collective.layout.width), np.float32)
        )

    def _program(self, half: int) -> Program:
        plan = self._plans[half]
        layout = self._layout(plan)
        helpers = self._router.topology.ranks[plan.ranks : plan.ranks + plan.helpers].tolist()
        releases = self._release if half == 0 else [0] * len(self._tensors)
        return joined(
            [
                place(
                    plan,
                    float(size),
                    self._router,
                    helpers=helpers,
                    priority=tensor.layer * self._classes // layout.layers,
                    release=when,
                )
                for tensor, size, when in zip(self._tensors, layout.padded(), releases, strict=True)
            ]
        )

    def _important(
        self, plan: Plan, tags: Tags | None, program: Program, transport: Transport
    ) -> list[NDArray[np.bool_]]:
        """Return, for each flow, the packets that switches are to keep, step by step."""
        packets = -(-program.size // transport.payload).astype(np.int64) * program.steps
        # Of a short tensor no packet may be missing: to drop it saves nothing and costs a probe.
        short = transport.tolerated * program.size < np.minimum(program.size, transport.payload)
        if tags is None:
            return [np.full(count, each) for count, each in zip(packets.tolist(), short.tolist(), strict=True)]
        chosen = self._undroppable(plan, tags)
        return [which | each for which, each in zip(chosen, short.tolist(), strict=True)]

    def _undroppable(self, plan: Plan, tags: Tags) -> list[NDArray[np.bool_]]:
        """Return, for each flow, the packets that are not tagged as droppable, step by step."""
        found: list[list[NDArray[np.bool_]]] = [[] for _ in range(len(self._tensors) * plan.transfers)]
        for (transfer, _), packets in tags.items():
            ends = np.searchsorted(packets.message, np.arange(len(self._tensors) + 1))
            for message, (first, last) in enumerate(pairwise(ends.tolist())):
                found[message * plan.transfers + transfer].append(~packets.droppable[first:last])
        return [np.concatenate(steps) for steps in found]

    def _lost(self, plan: Plan, outcome: Outcome) -> dict[tuple[int, int, int], NDArray[np.bool_]]:
        """Return which packets never arrived, by message, transfer and step."""
        return {
            (flow // plan.transfers, flow % plan.transfers, step): ~came
            for flow, steps in enumerate(outcome.came)
            for step, came in enumerate(steps)
        }


@dataclass(frozen=True, slots=True)
class _Half:
    """Half of a round (all-reduce, push or pull): its losses, time, and lost packets of those sent."""

    losses: RecordedLosses
    time: Time
    gone: int
    sent: int


class _Foreseen:
    """The losses of one half of a round, which is simulated when its packets have been tagged."""

    def __init__(self, rounds: NetworkRounds, number: int, half: int) -> None:
        self._rounds, self._number, self._half = rounds, number, half
        self._recorded = RecordedLosses({})

    def foresee(self, tags: Tags) -> None:
        """See `foretrain.loss_tolerance.losses.LookaheadLosses`."""
        self._recorded = self._rounds.simulate(self._number, self._half, tags)

    def lost(self, transfer: int, step: int, packets: Tagged) -> NDArray[np.bool_]:
        """See `foretrain.loss_tolerance.LossPattern`."""
        return self._recorded.lost(transfer, step, packets)
