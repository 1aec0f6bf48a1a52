"""Every error foretrain raises on purpose.

    ForetrainError
    ├── ConfigError      an input is wrong: names the field, the value and the remedy (also a ValueError)
    ├── ScheduleError    a schedule or policy breaks a rule: bytes moved twice, never, or before they exist
    ├── StallError       nothing more can happen and the work is not done: lists who waits for what
    ├── RecordError      a script cannot be recorded, or trained: says what was seen and what is needed
    ├── PeerLost         a rank of the job was killed, stopped, left or lost its link: names it and what was under way
    ├── Disagreement     ranks that must agree do not: on the model, the order or the settings
    ├── MissingExtra     an optional package is not installed: names the command that installs it (also an ImportError)
    │
    │   and where they are raised:
    ├── PlanError        a collective does not do what it promises (`foretrain.collective.verification`)
    ├── NoRecipe         no recipe of a search works (`foretrain.recipe_search.strategy`)
    ├── BuildError       the simulated GPU does not compile (`foretrain.live.device.native_build`)
    ├── RankLost         a PeerLost: a simulated rank ended before its script did (`foretrain.live.executor`)
    ├── ScriptFailed     a PeerLost: a simulated rank's script failed (`foretrain.live.rank_processes`)
    ├── OutOfMemory      a simulated GPU has too little memory (`foretrain.live.rank_processes`)
    ├── LinkError        a connection between ranks fails or has ended (`foretrain.comm.coordinator.link`)
    ├── Malformed        a message to a parameter server is invalid (`foretrain.comm.ps.frames`)
    │   └── WorkerRefused  a server does not admit a worker (`foretrain.comm.ps.server.job`)
    ├── Damaged          a server's snapshot cannot be used (`foretrain.comm.ps.server.snapshots`)
    └── LabError         a lab cannot be built, found or used (`foretrain.lab`)
        └── LaunchError  a rank in a lab failed, or the ranks took too long (`foretrain.lab`)

A message says what was wrong, the value, and what to do. `ConfigError.at` adds the outer part of a field's path on
the way out, so that ``rate`` becomes ``cluster.toml: links.rate``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

_ABSENT = ("is missing", "is not set")
"""Beginnings of problems that say themselves that there is no value."""


class ForetrainError(Exception):
    """Root of all errors that foretrain raises on purpose."""


class ConfigError(ForetrainError, ValueError):
    """Error of an input. ``field`` is its path, ``value`` the wrong value, ``remedy`` what to write instead."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        super().__init__(field, value, problem, remedy)

    def __str__(self) -> str:
        nothing = self.value is None or (isinstance(self.value, str) and not self.value)  # an array has no truth
        absent = nothing and self.problem.startswith(_ABSENT)
        subject = self.field if absent else f"{self.field}: {self.value!r}"
        return f"{subject} {self.problem}; {self.remedy}"

    def at(self, outer: str) -> ConfigError:
        """Return the error with ``field`` before its own."""
        separator = "" if self.field.startswith("[") else ": " if outer.endswith(".toml") else "."
        return ConfigError(f"{outer}{separator}{self.field}", self.value, self.problem, self.remedy)


class ScheduleError(ForetrainError):
    """Error of a schedule or policy that breaks a rule of the vocabulary in `foretrain.tasks`."""


class StallError(ForetrainError):
    """Deadlock: no event is left and the work is not done. ``waits`` lists who waits for what, one line each."""

    def __init__(self, what: str, waits: Iterable[str]) -> None:
        self.waits = tuple(waits)
        shown = [f"  - {line}" for line in self.waits[:12]]
        if len(self.waits) > 12:
            shown.append(f"  (and {len(self.waits) - 12} more)")
        super().__init__("\n".join([what, *shown]))


class RecordError(ForetrainError):
    """Error of a training step that cannot be recorded, or of a script whose result cannot be trained."""


class PeerLost(ForetrainError):
    """Loss of another rank; names it, since when, and what was under way."""


class Disagreement(ForetrainError):
    """Disagreement between ranks; names the subject and the rank that differs."""


class MissingExtra(ForetrainError, ImportError):
    """Error of an optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}'; install it with: pip install 'foretrain[{extra}]'")


_LISTED = 12
"""Names that are always listed."""
_SUGGESTED = 3
"""Names that are suggested at most."""
_PART = 3
"""Characters of the shortest part of a name that suggests the name."""


def unknown(field: str, value: object, choices: Iterable[str], examples: Iterable[str] | None = None) -> ConfigError:
    """Return the error for a name that is none of ``choices``; it suggests what may be meant, and then lists all.

    Where these are many, ``examples`` are listed in place of all. Where no name is near, those that contain ``value``
    are suggested, and those that it begins with.
    """
    names = sorted(choices)
    near = nearest(str(value), names)
    if not near and len(asked := _folded(str(value))) >= _PART:
        keys = {name: _folded(name) for name in names}
        near = [name for name, key in keys.items() if asked in key or (len(key) >= _PART and asked.startswith(key))]
    remedy = f"did you mean {' or '.join(repr(name) for name in near[:_SUGGESTED])}? " if near else ""
    shown = ", ".join(names) if examples is None or len(names) <= _LISTED else f"e.g. {', '.join(examples)}"
    return ConfigError(field, value, "is unknown", f"{remedy}known: {shown}".strip())


def nearest(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that ``wanted`` may be a slip of; where several are as near, all of these.

    One edit is near, or one for every three characters of a longer name, but no more than three. An edit adds, drops
    or replaces a character, or swaps two neighbours. Of names as many edits away, one with the same letters is nearer,
    and then one that begins alike. Case, hyphens and the dashes of options do not count.
    """
    asked = _folded(wanted)
    ranks: dict[str, tuple[int, bool, int]] = {}
    for name in names:
        key = _folded(name)
        allowed = min(3, max(1, max(len(asked), len(key)) // 3))
        if asked and abs(len(asked) - len(key)) <= allowed and (edits := _edits(asked, key)) <= allowed:
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, key, strict=False)))
            ranks[name] = edits, sorted(asked) != sorted(key), -alike
    least = min(ranks.values(), default=None)
    return [name for name, rank in ranks.items() if rank == least]


def _folded(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _edits(one: str, other: str) -> int:
    """Return the least number of edits between two texts (optimal string alignment)."""
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, above, row = above, row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
    return row[-1]
