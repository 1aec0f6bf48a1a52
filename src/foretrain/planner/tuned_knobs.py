"""Knobs that were found are kept, and the next run of the same job begins with them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.network import Cluster
from foretrain.planner.knob_space import IterationTimes
from foretrain.schedule import Spec, spec
from foretrain.workload.step import Workload

_FORMAT = 1
_ALIKE = 1.25
"""By which factor a link's bandwidth may differ and be the same link."""


class _Kept(msgspec.Struct, frozen=True):
    """Content of a file: ``rate`` in bytes a second, ``time`` and ``error`` in seconds an iteration."""

    format: int
    schedule: str
    rate: float
    time: float
    error: float
    iterations: int


class Saved:
    """The file of ``workload`` on ``cluster`` under ``plan``, in ``folder``.

    A job is the same where tensors, their order, the number of ranks, how they exchange, the policy and the knobs that
    it sets are, and its link is within 25 % of as fast.
    """

    def __init__(self, folder: Path, workload: Workload, cluster: Cluster, plan: Spec) -> None:
        sizes = [(gradient.name, gradient.size) for gradient in workload.gradients]
        world = (cluster.workers, cluster.gpus, cluster.exchange, cluster.servers)
        what = msgspec.json.encode((_FORMAT, sizes, world, str(plan)))
        self._path = folder / f"{hashlib.sha256(what).hexdigest()[:24]}.json"
        self._rate, self._name = cluster.up, plan.name

    @property
    def path(self) -> Path:
        """Return the path of the file, existing or not."""
        return self._path

    def load(self) -> tuple[Spec, IterationTimes] | None:
        """The knobs and what an iteration took; None where there are none, or they do not read."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            found = spec(kept.schedule)
        except (OSError, msgspec.MsgspecError, RecursionError, ConfigError):
            return None
        ours = kept.format == _FORMAT and found.name == self._name and kept.time > 0 and kept.error >= 0
        if not ours or not self._rate / _ALIKE <= kept.rate <= self._rate * _ALIKE:
            return None
        return found, IterationTimes(kept.time, kept.error, kept.iterations)

    def keep(self, found: Spec, sample: IterationTimes) -> None:
        """Writes them; where that cannot be nothing happens, as it is only a convenience."""
        kept = _Kept(_FORMAT, str(Spec(found.name, found.settings)), self._rate, *sample)
        with contextlib.suppress(OSError, ConfigError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(kept))


def folder() -> Path:
    """Return the folder of results: ``foretrain/tuned`` in XDG_CACHE_HOME, or in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or os.path.join(os.path.expanduser("~"), ".cache")) / "foretrain" / "tuned"
