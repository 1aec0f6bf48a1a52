"""The algorithms by name, and which operations each offers; all-to-all, whose plans are short.

In an all-to-all every rank has another block for every rank. Block s·N + t goes from rank s to rank t.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from foretrain.collective.aggregators import in_network, parameter_server
from foretrain.collective.circulant import Nearness, circulant, halving_doubling
from foretrain.collective.composition import hierarchical
from foretrain.collective.hdrm import hdrm
from foretrain.collective.plan import Operation, Plan, assembled
from foretrain.collective.ring import ring
from foretrain.collective.trees import binomial, double_tree, flat
from foretrain.errors import ConfigError, unknown


def direct(operation: Operation, ranks: int) -> Plan:
    """Send everything at once: N(N − 1) transfers that wait for nothing."""
    source = np.repeat(np.arange(ranks), ranks - 1)
    target = (source + np.tile(np.arange(1, ranks), ranks)) % ranks
    everyone = np.arange(ranks)
    return assembled(
        "direct",
        operation,
        ranks,
        ranks**2,
        source,
        target,
        source * ranks + target,
        owner=np.repeat(everyone, ranks),
        receiver=np.tile(everyone, ranks),
    )


def pairwise(operation: Operation, ranks: int) -> Plan:
    """Exchange in N − 1 rounds: in round k rank r sends to r + k and receives from r − k, or r XOR k for a power of
    two.

    A rank begins a round when it has sent and received in the one before. The data does not need that; the rounds keep
    every rank to one message in each direction at a time (Thakur et al. 2005).
    """
    everyone, rounds = np.arange(ranks), np.arange(1, ranks)[:, None]
    paired = ranks & (ranks - 1) == 0
    target = everyone ^ rounds if paired else (everyone + rounds) % ranks
    origin = target if paired else (everyone - rounds) % ranks
    index = np.arange(rounds.size * ranks).reshape(-1, ranks)
    past = index[:-1]
    received = np.take_along_axis(past, origin[:-1], axis=1)
    return assembled(
        "pairwise",
        operation,
        ranks,
        ranks**2,
        np.tile(everyone, len(rounds)),
        target.reshape(-1),
        (everyone * ranks + target).reshape(-1),
        waiter=np.tile(index[1:].reshape(-1), 2),
        after=np.concatenate([past.reshape(-1), received.reshape(-1)]),
        owner=np.repeat(everyone, ranks),
        receiver=np.tile(everyone, ranks),
    )


@dataclass(frozen=True, slots=True)
class Offer:
    """Entry of `ALGORITHMS`: an algorithm and its operations.

    Attributes:
        make: called with the operation, the ranks and options by name.
        operations: what it can do.
    """

    make: Callable[..., Plan]
    operations: tuple[Operation, ...]


_HALVES: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")

ALGORITHMS: dict[str, Offer] = {
    "ring": Offer(ring, (*_HALVES, "broadcast")),
    "halving_doubling": Offer(halving_doubling, _HALVES),
    "circulant": Offer(circulant, _HALVES),
    "hdrm": Offer(hdrm, _HALVES),
    "hierarchical": Offer(hierarchical, _HALVES),
    "in_network": Offer(in_network, _HALVES),
    "parameter_server": Offer(parameter_server, _HALVES),
    "double_tree": Offer(double_tree, ("all_reduce", "broadcast")),
    "flat": Offer(flat, ("broadcast",)),
    "binomial": Offer(binomial, ("broadcast",)),
    "direct": Offer(direct, ("all_to_all",)),
    "pairwise": Offer(pairwise, ("all_to_all",)),
}
"""Options are the keyword arguments of ``make``."""

_LEAST = {"root": 0, "chunks": 1, "channels": 1, "servers": 1, "radix": 2, "local": 2, "switches": 2, "hosts": 1}


def build(name: str, operation: Operation, ranks: int, **options: Any) -> Plan:
    """Build the plan of one algorithm, by name.

    >>> build("ring", "all_reduce", 4, channels=2).transfers
    8

    Args:
        name: of `ALGORITHMS`.
        operation: one that the algorithm offers.
        ranks: N, at least 2.
        options: the algorithm's own; ``inner`` and ``outer`` of ``hierarchical`` may be names.

    Raises:
        ConfigError: a name is unknown, the algorithm does not offer the operation, or a number is impossible.
    """
    offer = _offer("algorithm", name)
    if operation not in get_args(Operation):
        raise unknown("operation", operation, get_args(Operation))
    if operation not in offer.operations:
        able = ", ".join(other for other, one in ALGORITHMS.items() if operation in one.operations)
        raise ConfigError("algorithm", name, f"does not offer {operation}", f"use one of: {able}")
    _check_number("ranks", ranks, 2)
    known = inspect.signature(offer.make).parameters.values()
    names = [one.name for one in known if one.kind is inspect.Parameter.KEYWORD_ONLY]
    for key, value in options.items():
        if key not in names:
            raise unknown(f"{name}.options", key, names)
        if key in _LEAST and not (key == "radix" and value is None):
            _check_number(key, value, _LEAST[key])
    for one in known:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is inspect.Parameter.empty:
            _require(name, one.name, options)
    _check_fitting(ranks, options)
    return offer.make(operation, ranks, **_resolved(operation, options))


def _offer(field: str, name: str) -> Offer:
    if name not in ALGORITHMS:
        raise unknown(field, name, ALGORITHMS)
    return ALGORITHMS[name]


def _require(name: str, option: str, options: dict[str, Any]) -> None:
    if option not in options:
        raise ConfigError(f"{name}.options", sorted(options), f"lack '{option}'", f"give {option}=…")


def _check_number(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(field, value, f"is not a whole number of at least {least}", f"write e.g. {max(least, 4)}")


def _check_fitting(ranks: int, options: dict[str, Any]) -> None:
    if options.get("root", 0) >= ranks:
        raise ConfigError("root", options["root"], "is no rank", f"ranks are 0 to {ranks - 1}")
    if options.get("colocated") and options.get("servers", 1) > ranks:
        raise ConfigError("servers", options["servers"], f"do not fit on {ranks} ranks", f"write at most {ranks}")
    if options.get("first", "near") not in get_args(Nearness):
        raise unknown("first", options["first"], get_args(Nearness))


def _resolved(operation: Operation, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with names of stages replaced by their functions."""
    made = dict(options)
    needed: dict[str, tuple[Operation, ...]] = {"inner": ("reduce_scatter", "all_gather"), "outer": (operation,)}
    for stage, must in needed.items():
        if isinstance(made.get(stage), str):
            offer = _offer(stage, made[stage])
            if lacking := [one for one in must if one not in offer.operations]:
                raise ConfigError(stage, made[stage], f"does not offer {lacking[0]}", "use 'ring'")
            made[stage] = offer.make
    return made
