"""What a sweep leaves out: ``"schedule = p3* and rate >= 50Gbps"``, ``"credit < partition"``.

    condition    comparison [and comparison ...]
    comparison   NAME OP VALUE, where OP is one of = != < <= > >=

NAME is a column of the scenario's own: ``model``, ``batch``, ``precision``, ``device``, ``cluster``, ``schedule`` (a
policy's name), ``jitter``, ``seed``, an axis of its cluster or a knob of its schedule. VALUE is a number, a quantity
with a unit, another NAME, or, with = and !=, a text in which ``*`` stands for anything. What a scenario does not have
(a knob of another schedule) meets no comparison.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from foretrain.errors import ConfigError, unknown
from foretrain.experiments.values import Value, quantity

_ORDER = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_COMPARISON = re.compile(r"\s*([\w-]+)\s*(<=|>=|!=|=|<|>)\s*(\S.*?)\s*")
_EXAMPLE = "write e.g. 'schedule = p3 and rate >= 50Gbps'"


@dataclass(frozen=True, slots=True)
class Term:
    """One of the comparisons that a condition has."""

    name: str
    relation: str
    value: str

    def holds(self, about: Mapping[str, Value]) -> bool:
        """Whether it does for a scenario with the values ``about``."""
        if (mine := about.get(self.name)) is None:
            return False
        other = about.get(self.value, self.value)
        left, right = quantity(mine), quantity(other)
        if self.relation not in _ORDER:
            if left and right:
                same = left == right
            else:
                same = fnmatchcase(str(mine).lower(), str(other).lower())
            return same == (self.relation == "=")
        if left is None or right is None:
            worst = mine if left is None else other
            raise ConfigError(str(self), worst, "is no number to compare", "use = or != with texts")
        if left.kind != right.kind:
            problem = f"compares a {left.kind} with a {right.kind}"
            raise ConfigError(str(self), f"{mine} {self.relation} {other}", problem, "write both in one unit")
        return _ORDER[self.relation](left.number, right.number)

    def __str__(self) -> str:
        return f"{self.name} {self.relation} {self.value}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparisons that must all hold."""

    comparisons: tuple[Term, ...]

    def holds(self, about: Mapping[str, Value]) -> bool:
        """Whether they all do."""
        return all(one.holds(about) for one in self.comparisons)


def condition(text: str, names: Collection[str]) -> Condition:
    """Reads a condition about ``names``. Raises ConfigError."""
    found = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise ConfigError("exclude", part, "is no comparison", _EXAMPLE)
        if match[1] not in names:
            raise unknown("exclude", match[1], names)
        found.append(Term(match[1], match[2], match[3]))
    return Condition(tuple(found))
