"""CPU time that the messages of a parameter server take at their ends."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.errors import ConfigError
from foretrain.units import Time, moving


@dataclass(frozen=True, slots=True)
class CpuCost:
    """CPU time to send, or to receive, one message: ``message`` ps, and ``per_byte`` as of `units.per_byte`."""

    message: Time = 0
    per_byte: int = 0

    def time(self, size: int) -> Time:
        """Return the CPU time of ``size`` bytes, ps."""
        return self.message + moving(size, self.per_byte)


@dataclass(frozen=True, slots=True)
class HostCpu:
    """Cores that the messages of a parameter server queue for.

    Attributes:
        cores: of each host, or of all together.
        worker: cost of a message at a worker.
        server: cost of a message at a server, its sum included.
        together: whether all hosts share the cores, as those of a lab on one machine do.
    """

    cores: int
    worker: CpuCost
    server: CpuCost
    together: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.cores, int) or isinstance(self.cores, bool) or self.cores < 1:
            raise ConfigError("cpu.cores", self.cores, "is not a whole number of at least 1", "write e.g. 2")
        for name, cost in (("worker", self.worker), ("server", self.server)):
            if min(cost.message, cost.per_byte) < 0:
                raise ConfigError(f"cpu.{name}", cost, "is negative", "give costs of at least 0")
