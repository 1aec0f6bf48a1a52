"""Outcomes of earlier simulations, and whether the code that they depend on is still what it was.

benchmarks/data/accuracy.jsonl has one line for each row, with two digests. `command` is of what is this row's own: its
arguments, cluster, GPU, and the factors of its stack. `code` is of what is executed: the script with the files of this
folder that it imports, and the sources and data of `PACKAGES`. Python counts as its syntax tree without docstrings, so
comments and layout do not, nor does the version of Python that reads it.

A row whose `command` differs is stale. Where only `code` differs, its group (family and GPU) has a *witness*, the row
with least to simulate: it is simulated again, and if it comes out as before, to the picosecond and the byte or, where
it was read back from a picture, to 0.3 %, the group is what it was; otherwise the group is stale.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from row_outcome import STEPS, Outcome, device_of, stack_of
from rows import Row

HERE = Path(__file__).parent
KEPT = HERE.parent / "data/accuracy.jsonl"
SOURCE = HERE.parents[1] / "src/foretrain"
PACKAGES = ("collective", "device", "live", "network", "simulation")
"""Those a simulation of a plain script goes through."""
DATA = (".toml", ".txt", ".npz", ".json", ".cpp", ".hpp", ".h")
APART = ("stacks.toml",)
"""Files of `PACKAGES` that only some rows depend on; `command_digest` has their part of it."""

THREE_DIGITS = 0.003
"""Within which an outcome counts as the same that was read back from a picture."""


def _told(node: object) -> str:
    """A syntax tree as text, without docstrings and other constants that stand alone.

    Not `ast.dump`, which shows or leaves out empty fields by the version of Python.
    """
    if isinstance(node, list):
        return f"[{','.join(_told(one) for one in node if not _stands_alone(one))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    inside = ",".join(f"{name}={_told(value)}" for name, value in fields if name not in ("ctx", "kind"))
    return f"{type(node).__name__}({inside})"


def _stands_alone(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _content(path: Path) -> bytes:
    """What of a file can change a forecast."""
    if path.suffix != ".py":
        return path.read_bytes()
    return _told(ast.parse(path.read_bytes())).encode()


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


@cache
def code_digest(script: str) -> str:
    """Of what a simulation of ``script`` executes."""
    files = sorted(path for name in PACKAGES for path in (SOURCE / name).rglob("*") if path.is_file())
    chosen = [p for p in files if p.suffix in (".py", *DATA) and p.name not in APART and "__pycache__" not in p.parts]
    parts = (part for path in chosen for part in (str(path.relative_to(SOURCE)).encode(), _content(path)))
    return _digest((_script(script), *parts))


def _script(name: str) -> bytes:
    """A script of this folder with the files of this folder that it imports, directly or not."""
    waiting, seen = [name], dict[str, bytes]()
    while waiting:
        if (one := waiting.pop()) in seen:
            continue
        seen[one] = _content(HERE / one)
        for node in ast.walk(ast.parse((HERE / one).read_bytes())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else ()
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            waiting += [f"{each}.py" for each in names if (HERE / f"{each}.py").exists()]
    return _digest(part for one in sorted(seen) for part in (one.encode(), seen[one])).encode()


@cache
def command_digest(row: Row) -> str:
    """Of what is ``row``'s own; its measurement is not part of it."""
    from foretrain.device import preset
    from foretrain.device.gpu import host_launch, stack_factor

    device, stack = preset(device_of(row)), stack_of(row)
    factors = stack_factor(device, stack), host_launch(device, stack)
    factors = (*factors, Path(row.calibration).read_bytes()) if row.calibration else factors
    own = (row.script, row.argv, row.cluster, row.gpu, row.ranks, STEPS, factors, *["allocated"][: row.allocated])
    return _digest((repr(own).encode(),))


def load(path: Path = KEPT) -> dict[str, Outcome]:
    """Kept outcomes by id; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {one.id: one for one in (Outcome(**json.loads(line)) for line in lines)}


def save(outcomes: Mapping[str, Outcome], path: Path = KEPT) -> None:
    """Writes all, sorted by id, a line for each."""
    lines = [json.dumps(asdict(outcomes[name])) + "\n" for name in sorted(outcomes)]
    path.write_text("".join(lines), encoding="utf-8")


def stamped(row: Row, found: Outcome) -> Outcome:
    """``found`` with the digests of now."""
    return replace(found, command=command_digest(row), code=code_digest(row.script))


def given_to(row: Row, found: Outcome) -> Outcome:
    """The outcome of ``row``, whose command is that of ``found``: measured at another time, or of another release."""
    return replace(
        found, id=row.id, family=row.family, model=row.model, measured=row.seconds, memory_measured=row.memory
    )


def checked(found: Iterable[Outcome], rows: Mapping[str, Row]) -> int:
    """How many outcomes were simulated with today's code, or are of a group whose witness was."""
    return sum(one.code == code_digest(rows[one.id].script) for one in found)


def current(rows: Sequence[Row], kept: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The kept outcomes of ``rows`` whose commands are what they were, with measurements and names of stacks of now."""
    return {
        row.id: replace(kept[row.id], stack=stack_of(row), measured=row.seconds, memory_measured=row.memory)
        for row in rows
        if row.id in kept and kept[row.id].command == command_digest(row)
    }


def alike(one: Outcome, other: Outcome) -> bool:
    """Whether two simulations of a row came out the same."""
    if not one.exact and one.predicted and other.predicted:
        return abs(math.log(one.predicted / other.predicted)) < THREE_DIGITS
    return (one.predicted, one.memory, one.failure) == (other.predicted, other.memory, other.failure)


def check(
    rows: Sequence[Row],
    kept: Mapping[str, Outcome],
    simulate: Callable[[Sequence[Row]], Sequence[Outcome]],
    most: int | None = None,
) -> tuple[dict[str, Outcome], list[str], list[str]]:
    """The outcomes of ``rows`` that hold, after a witness of each group whose code has changed, ``most`` of them.

    Outcomes of a group that holds get the digest of now; those of a group that was not checked keep theirs. Also the
    names of groups that came out differently, whose outcomes but the witness are stale, and of those not checked.
    """
    found, known = current(rows, kept), {row.id: row for row in rows}
    groups: dict[str, list[Outcome]] = {}
    for one in found.values():
        if one.code != code_digest(known[one.id].script):
            groups.setdefault(f"{one.family}, {one.device}", []).append(one)
    witnesses = {
        group: min(ones, key=lambda one: (known[one.id].effort, one.wall, one.id)) for group, ones in groups.items()
    }
    checked = sorted(groups, key=lambda group: known[witnesses[group].id].effort)[:most]
    again = {one.id: one for one in simulate([known[witnesses[group].id] for group in checked])}
    changed, unchecked = [], [group for group in groups if group not in checked]
    for group in checked:
        witness = witnesses[group]
        if witness.id not in again:
            unchecked.append(group)
        elif alike(witness, again[witness.id]):
            code = code_digest(known[witness.id].script)
            found |= {one.id: replace(one, code=code) for one in groups[group]}
            if not witness.exact:
                found[witness.id] = again[witness.id]
        else:
            changed.append(group)
            for one in groups[group]:
                del found[one.id]
            found[witness.id] = again[witness.id]
    return found, changed, unchecked
