"""Energy, money and failures of a recipe: what a million tokens take beside time.

Watts and prices are data with sources, in bill.toml; nothing is known of a GPU that it does not name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretrain.errors import ConfigError
from foretrain.recipe_search.evaluation import Account
from foretrain.recipe_search.goodput import Failures, best_interval, goodput, simulated_goodput, young

_SIMULATED_INTERVALS = 20_000
"""Checkpoints of the simulation that stands beside the closed form."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job costs, and how it fails.

    Attributes:
        device: the GPU's name.
        world: GPUs.
        price: of a GPU's hour; None where no list is known.
        priced: where the price is from, and of which day.
        failures: of the whole job; None where nobody said.
        interval: of work between checkpoints, s; None for the best.
    """

    device: str
    world: int
    price: float | None
    priced: str
    failures: Failures | None = None
    interval: float | None = None

    @property
    def watts(self) -> float | None:
        """Return the rated power of a GPU with its part of the server, W; None where it is not known."""
        return _known()["gpus"].get(self.device, {}).get("rated")

    @property
    def useful(self) -> float:
        """Return the part of the time that trains: between failures and checkpoints; 1 where nobody said."""
        return 1.0 if self.failures is None else goodput(self.failures, self.checkpointed)

    @property
    def checkpointed(self) -> float:
        """Return the interval of work between checkpoints, s."""
        assert self.failures is not None
        return best_interval(self.failures) if self.interval is None else self.interval

    def joules(self, account: Account) -> float | None:
        """Return the energy of a step over all GPUs, J, by what their time goes to; None where it is not known."""
        if self.watts is None:
            return None
        shares = _known()["activity"]
        return self.world * self.watts * sum(share * getattr(account, name) for name, share in shares.items())

    def money(self, account: Account) -> float | None:
        """Return the price of a step over all GPUs, failures included; None where no price is known."""
        return None if self.price is None else self.world * self.price * account.time / 3600 / self.useful

    def lines(self, account: Account, tokens: float | None) -> Iterator[str]:
        """Yield sentences about a step of a recipe: money, energy, failures."""
        what, many = ("a million tokens", 1e6 / tokens) if tokens else ("a step", 1.0)
        if (money := self.money(account)) is not None:
            yield f"{what}: {money * many:.4g} at {self.price:g} for a GPU's hour ({self.priced})"
        if (joules := self.joules(account)) is not None:
            mean = joules / account.time / 1000
            yield (
                f"{what}: {joules * many / 3.6e6:.4g} kWh at {mean:.1f} kW in the mean; only computation's part of the "
                "power is calibrated"
            )
        if self.failures is not None:
            every = self.checkpointed
            simulated = simulated_goodput(self.failures, every, _SIMULATED_INTERVALS * every)
            yield (
                f"goodput {self.useful:.2%} with a checkpoint every {every / 60:.1f} min of work (closed form; "
                f"{simulated:.2%} in a simulation of failures; Young: every {young(self.failures) / 60:.1f} min), "
                f"a failure every {self.failures.mtbf / 3600:.1f} h"
            )


def bill_of(
    device: str, world: int, price: float | None, failures: Failures | None = None, interval: float | None = None
) -> Bill:
    """Return the bill of a job; ``price`` of a GPU's hour overrides the list. Raises ConfigError."""
    if price is not None and price < 0:
        raise ConfigError("price", price, "is negative", "write what a GPU costs an hour, e.g. 2.5")
    if interval is not None and interval <= 0:
        raise ConfigError("checkpoint_every", interval, "is no time", "write auto, or e.g. 30min")
    known = _known()["gpus"].get(device, {})
    listed = known.get("price") if price is None else price
    priced = f"{known['date']}: {known['source']}" if price is None and listed is not None else "as you said"
    return Bill(device, world, listed, priced, failures, interval)


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("bill.toml").read_text(encoding="utf-8"))
