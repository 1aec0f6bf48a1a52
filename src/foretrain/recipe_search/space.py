"""Space of recipes: values of a script's own flags, what must hold between them, and how to make a recipe small.

    tokens = "global_batch * sequence"            # of one step, over all GPUs
    batch = "global_batch"                        # what micro-batches are proportional to, if [short] changes it
    require = ["tp * pp <= world", "global_batch % (dp * mbs) == 0", "tp <= gpus"]

    [values]                                      # the product of these
    tp = [1, 2, 4, 8]
    pp = [1, 2, 4]
    mbs = [1, 2]
    recompute = ["", "--recompute full"]          # several words, or none

    [derived]
    dp = "world // (tp * pp)"

    [flags]                                       # known from the command line, if it has them
    global_batch = "--global-batch"
    sequence = "--sequence"

    [memory]                                      # what needs more GPU memory when it grows, all else the same
    grows = ["mbs"]
    shrinks = ["pp"]

    [short]                                       # values of a smaller run whose work repeats in the whole one
    global_batch = "dp * mbs * 2 * pp"

``{name}`` in the script's arguments stands for a value. Expressions know all names, ``world`` (GPUs) and ``gpus`` (of a
server). A ``.py`` file defines the same as a dictionary ``SPACE``, whose ``require`` may hold functions of a recipe's
names as well. ``extends = "megatron"`` starts from a preset: tables are merged, conditions added to its own, arguments
in front of them, and other keys replaced.
"""

from __future__ import annotations

import ast
import math
import re
import runpy
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from os import PathLike
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import msgspec

from foretrain.errors import ConfigError, unknown
from foretrain.files import read_text

Value: TypeAlias = bool | int | float | str
"""Value of a flag, as written."""
Names: TypeAlias = Mapping[str, Value]
"""Values by name."""
Rule: TypeAlias = str | Callable[[Names], object]
"""Condition on a recipe's names: an expression, or a function."""

PRESETS = Path(__file__).parent / "presets"
"""Spaces of known frameworks, a file each."""
_NAMED = 3
"""Conditions to name at most, of those that leave no recipe."""
_GIVEN = {"world": "the job's GPUs", "gpus": "those of a server", "recipe": "a text that differs by recipe"}
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
_FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "ceil": math.ceil, "gcd": math.gcd, "abs": abs, "int": int}
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub),
    *(ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.In, ast.NotIn, ast.IfExp, ast.Call, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)


class MemoryRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names whose growth needs more memory, or less, all else the same."""

    grows: list[str] = []
    shrinks: list[str] = []


class SpaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a space.

    Attributes:
        values: of each name, one or several.
        require: conditions that a recipe must meet.
        derived: further names as expressions, in the order in which they are computed.
        flags: names whose values are read from the command line, with their flags.
        memory: what needs more memory.
        short: expressions of values of a smaller run.
        short_from: how many times as large as its smallest run a whole must be, for each of its smaller runs; below
            that, starting them costs more than they save.
        batch: the name, of those in ``short``, that the number of micro-batches is proportional to.
        tokens: expression of the tokens of a step.
        arguments: appended to a command line that names no value.
        steps: that a simulation makes.
    """

    values: dict[str, Any]
    require: list[Any] = []
    derived: dict[str, str] = {}
    flags: dict[str, str | list[str]] = {}
    memory: MemoryRule = MemoryRule()
    short: dict[str, str] = {}
    short_from: float = 16.0
    batch: str | None = None
    tokens: str | None = None
    arguments: list[str] = []
    steps: int = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """Point of a space.

    Attributes:
        number: in the space's order.
        values: of the names that vary.
        names: all names, derived ones included.
        argv: the script with its arguments.
        tokens: of a step, over all GPUs, more than 0; None where the space does not say.
    """

    number: int
    values: Names
    names: Names
    argv: tuple[str, ...]
    tokens: float | None

    @property
    def work(self) -> float:
        """Return the tokens of a step, for what is counted by the token; 1 where the space does not say them."""
        return 1.0 if self.tokens is None else self.tokens

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value if value != '' else 'none'}" for name, value in self.values.items())
        return values or "the only recipe"


@dataclass(frozen=True)
class ShortRun:
    """Smaller run of a recipe, and the weight that it has in the whole one's forecast.

    Attributes:
        argv: the script with its arguments.
        weight: see Note [Short runs] in `foretrain.recipe_search.strategy`.
        fewest: whether no smaller run has fewer micro-batches; the runs that have the fewest come first.
    """

    argv: tuple[str, ...]
    weight: float
    fewest: bool


@dataclass(frozen=True)
class RecipeSpace:
    """Recipes of one script on one cluster.

    Attributes:
        recipes: that meet all conditions.
        points: how many there are with those that do not.
        excluded: how many points fail each condition; a point may fail several.
        varying: names with several values among the recipes; of a single recipe, those that it is chosen by.
        file: what it was declared as.
        script: with its arguments, in which ``{name}`` stands for a value.
        given: values of names that the command line fixes, ``world`` and ``gpus``.
    """

    recipes: tuple[Recipe, ...]
    points: int
    excluded: Mapping[str, int]
    varying: tuple[str, ...]
    file: SpaceFile
    script: tuple[str, ...]
    given: Names

    def short_runs(self, recipe: Recipe) -> tuple[ShortRun, ...]:
        """Return the smaller runs of a recipe, the smallest first; none where it is about as small itself."""
        sizes: list[tuple[str, int, int, int]] = []
        for name in sorted(self.file.short, key=lambda name: name != self.file.batch):
            low, full = self.short_size(recipe, name), _whole(name, _of(recipe, name))
            if _is_shortened(low, full):
                sizes.append((name, low, 2 * low, full))
        size = math.prod(full / low for _, low, _, full in sizes)
        if not sizes or size < self.file.short_from * 2 ** len(sizes):
            return ()
        runs = []
        for corner in product((0, 1), repeat=len(sizes)):
            weight, values = 1.0, {}
            for chosen, (name, low, high, full) in zip(corner, sizes, strict=True):
                share = (full - low) / (high - low)
                weight *= share if chosen else 1 - share
                values[name] = high if chosen else low
            names = _names(self.file, {**recipe.names, **values}, frozenset(values))
            more = bool(corner[0]) and sizes[0][0] == self.file.batch
            runs.append(ShortRun(_argv(self.script, names), weight, not more))
        return tuple(runs)

    def batches(self, recipe: Recipe) -> float:
        """Return how many micro-batches the whole has for each one of the smallest runs; 1 where that is not known."""
        name = self.file.batch
        if name is None or name not in self.file.short:
            return 1.0
        low, full = self.short_size(recipe, name), _of(recipe, name)
        return float(full) / low if _is_shortened(low, full) else 1.0

    def short_size(self, recipe: Recipe, name: str) -> int:
        """Return the value of ``name`` in the smallest run of a recipe."""
        return _whole(name, evaluate(self.file.short[name], recipe.names, f"short.{name}"))

    def find(self, recipe: str | Names) -> tuple[Recipe, ...]:
        """Return the recipes that ``"tp=8,pp=2"``, or a dictionary, fits: all that differ in names which it leaves out.

        Derived names may be given as well. Where none of the space fits, values that it does not list are taken if they
        meet its conditions. Raises ConfigError that says what excludes them.
        """
        known, wanted = self.recipes[0].names, _recipe_values(recipe) if isinstance(recipe, str) else recipe
        for name in wanted:
            if name not in known:
                raise unknown("compare_with", name, known)
        return tuple(one for one in self.recipes if _fits(one.names, wanted)) or self._unlisted(wanted)

    def _unlisted(self, wanted: Names) -> tuple[Recipe, ...]:
        """Return recipes with ``wanted`` values that are not listed. Raises ConfigError."""
        for name, value in wanted.items():
            if name in self.given and not _is(self.given[name], value):
                problem = f"is not what the command line or the cluster says: {name}={value_text(self.given[name])}"
                given = f"{name}={value_text(value)}"
                raise ConfigError("compare_with", given, problem, "change that, or leave it out")
        axes = {
            name: (_given_value(wanted[name]),) if name in wanted else listed(value)
            for name, value in self.file.values.items()
            if name not in self.given
        }
        fitting: list[Names] = []
        excluded: Counter[tuple[str, ...]] = Counter()
        for names, violated in _points(self.file, axes, self.given):
            others = [f"{name} == {value_text(wanted[name])}" for name in wanted if not _is(names[name], wanted[name])]
            if broken := (*violated, *others):
                excluded[broken] += 1
            else:
                fitting.append(names)
        if not fitting:
            broken = min(excluded, key=lambda each: (len(each), -excluded[each]))
            problem = f"is no recipe: it does not meet {' and '.join(map(repr, broken))}"
            text = ",".join(f"{name}={value_text(value)}" for name, value in wanted.items())
            raise ConfigError("compare_with", text, problem, "change it, or the conditions of the space")
        shown = dict.fromkeys((*self.varying, *(name for name in wanted if name in axes)))
        first = len(self.recipes)
        return tuple(_recipe(first + at, self.file, self.script, names, shown) for at, names in enumerate(fitting))


def declared(space: str | Path | Mapping[str, Any]) -> SpaceFile:
    """Return the space that a file, the name of a preset, or a dictionary declares. Raises ConfigError."""
    if isinstance(space, Mapping):
        return _converted(_extended(dict(space)), "space")
    if not isinstance(space, str | PathLike):
        remedy = "give a dictionary, a .toml or .py file, or the name of a preset"
        raise ConfigError("space", space, "is no space", remedy)
    path = PRESETS / f"{space}.toml"
    if not path.exists():
        path = Path(space)
        if not path.suffix:
            raise unknown("space", str(space), [*_presets(), "a .toml or .py file"])
    text = read_text(path, "space", "give a .toml or .py file, or the name of a preset")
    if path.suffix == ".py":
        try:
            table = runpy.run_path(str(path)).get("SPACE")
        except Exception as error:
            raise ConfigError("space", str(path), f"fails: {error!r}", "correct it") from error
        if not isinstance(table, dict):
            raise ConfigError("space", str(path), "defines no SPACE", "assign a dictionary to SPACE")
        return _converted(_extended(table), str(path))
    try:
        return _converted(_extended(tomllib.loads(text)), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("space", str(path), f"does not parse ({error})", "correct that line") from None


def _presets() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _extended(table: dict[str, Any]) -> dict[str, Any]:
    """Return ``table`` over its preset: tables are merged, conditions and arguments added, other keys replaced."""
    if "extends" not in table:
        return table
    name = table["extends"]
    if name not in _presets():
        raise unknown("extends", name, _presets())
    preset = tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))
    merged = preset | {key: value for key, value in table.items() if key != "extends"}
    for key, known in preset.items():
        mine = table.get(key)
        if isinstance(known, dict) and isinstance(mine, Mapping):
            merged[key] = known | dict(mine)
        elif key == "require" and isinstance(mine, list | tuple):
            merged[key] = [*known, *mine]
        elif key == "arguments" and isinstance(mine, list | tuple):
            merged[key] = [*mine, *known]  # torchtitan's end in a subcommand, which no option may follow
    return merged


def _converted(table: dict[str, Any], where: str) -> SpaceFile:
    values = table.get("values")
    if isinstance(values, Mapping):
        table = {**table, "values": {name: _plain(value) for name, value in values.items()}}
    try:
        file = msgspec.convert(table, SpaceFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "space", where, f"does not suit: {error}", "docs/recipe-search.md says what a space may have"
        ) from None
    for table_name, names in (("values", file.values), ("derived", file.derived), ("flags", file.flags)):
        for name in names:
            if not name.isidentifier():
                remedy = "names have letters, digits and _ alone"
                raise ConfigError(table_name, name, "is no name", remedy)
            if name in _GIVEN:
                raise ConfigError(table_name, name, f"already names {_GIVEN[name]}", "take another name")
    for name, values in file.values.items():
        several = values if isinstance(values, list | tuple | range) else (values,)
        if not several or not all(isinstance(one, bool | int | float | str) for one in several):
            raise ConfigError(f"values.{name}", values, "is no list of values", f"write e.g. {name} = [1, 2, 4]")
    for rule in file.require:
        if not (isinstance(rule, str) or callable(rule)):
            raise ConfigError("require", rule, "is no condition", "write an expression, e.g. 'tp * pp <= world'")
    for table_name, names in (("memory.grows", file.memory.grows), ("memory.shrinks", file.memory.shrinks)):
        for name in names:
            if name not in file.values:
                raise unknown(table_name, name, file.values)
    if file.batch is not None and file.batch not in file.short:
        raise unknown("batch", file.batch, file.short)
    if file.steps < 2:
        raise ConfigError("steps", file.steps, "is too few", "the first step is not like the others: write 2 or more")
    return file


def expand(file: SpaceFile, script: Sequence[str], world: int, gpus: int) -> RecipeSpace:
    """Return all recipes of ``script`` on ``world`` GPUs, ``gpus`` to a server.

    Raises:
        ConfigError: an expression is wrong, a name is used nowhere, or no recipe meets all conditions.
    """
    words = [*script] if any(_PLACE.search(word) for word in script) else [*script, *file.arguments]
    words, fixed = _read_flags(words, file)
    axes = {name: listed(value) for name, value in file.values.items() if name not in fixed}
    _check_used(file, axes, words)
    _check_flags(file, {*axes, *fixed}, words)
    fitting: list[dict[str, Value]] = []
    excluded: Counter[tuple[str, ...]] = Counter()  # by all conditions that a point fails
    given = {"world": world, "gpus": gpus, **fixed}
    for names, violated in _points(file, axes, given):
        if violated:
            excluded[violated] += 1
        else:
            fitting.append(names)
    points = len(fitting) + excluded.total()
    if not fitting:
        raise ConfigError(
            "space", ", ".join(axes), f"has {points:,} points, and none meets all conditions: {_nearest(excluded)}",
            "widen the values, or see whether the conditions are meant so",
        )  # fmt: skip
    several = tuple(name for name, values in axes.items() if len(values) > 1)
    varying = tuple(name for name in several if len({names[name] for names in fitting}) > 1)
    varying = varying or several or tuple(axes)  # a single recipe is named by all that it has
    recipes = tuple(_recipe(number, file, words, names, varying) for number, names in enumerate(fitting))
    by_rule: Counter[str] = Counter()
    for violated, count in excluded.items():
        by_rule.update(dict.fromkeys(violated, count))
    return RecipeSpace(recipes, points, dict(by_rule), varying, file, tuple(words), given)


def _points(
    file: SpaceFile, axes: Mapping[str, tuple[Value, ...]], given: Names
) -> Iterator[tuple[dict[str, Value], tuple[str, ...]]]:
    """Yield the names of each point of ``axes``, and the conditions that it violates."""
    for values in product(*axes.values()):
        names = _names(file, {**given, **dict(zip(axes, values, strict=True))})
        yield names, _violated(file.require, names)


def _check_flags(file: SpaceFile, known: Set[str], words: Sequence[str]) -> None:
    """Raise ConfigError where a name that an expression uses is a flag's, and the command line lacks that flag."""
    texts = {
        **{f"derived.{name}": text for name, text in file.derived.items()},
        **{f"short.{name}": text for name, text in file.short.items()},
        **({} if file.tokens is None else {"tokens": file.tokens}),
    }
    used = {*file.short, *(match for word in words for match in _PLACE.findall(word))}
    for field, text in [*texts.items(), *(("require", rule) for rule in file.require if isinstance(rule, str))]:
        used.update(_compiled(text, field)[1])
    missing = [flag for name, flag in file.flags.items() if name in used - {*known, *file.derived}]
    flags = ", ".join(flag if isinstance(flag, str) else flag[0] for flag in missing)
    if flags:
        problem = "does not have all flags that the space reads"
        raise ConfigError("script", shlex.join(words[:1]), problem, f"give {flags} among its arguments")


def _nearest(excluded: Mapping[tuple[str, ...], int]) -> str:
    """Return without which conditions most points would be recipes: as few conditions at once as possible."""
    fewest = min(map(len, excluded))
    counts = sorted(((count, rules) for rules, count in excluded.items() if len(rules) == fewest), reverse=True)
    texts = [f"{count:,} would without {' and '.join(map(repr, rules))}" for count, rules in counts[:_NAMED]]
    return ", ".join(texts)


def _recipe(number: int, file: SpaceFile, words: Sequence[str], names: Names, shown: Iterable[str]) -> Recipe:
    """Return the recipe with these ``names``, of which it is called by the values of ``shown``."""
    values = {name: names[name] for name in shown}
    return Recipe(number, values, names, _argv(words, names), _tokens(file, names, values))


def _tokens(file: SpaceFile, names: Names, values: Names) -> float | None:
    """Return the tokens of a step. Raises ConfigError, with the recipe's ``values``, where they are not positive."""
    if file.tokens is None:
        return None
    found = evaluate(file.tokens, names, "tokens")
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        recipe = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
        problem = f"gives {found!r}{f' for {recipe}' if recipe else ''}"
        raise ConfigError("tokens", file.tokens, problem, "write what is more than 0, or exclude that by require")
    return float(found)


def evaluate(text: str, names: Names, field: str) -> Any:
    """Return the value of an expression over ``names``. Raises ConfigError."""
    code, used = _compiled(text, field)
    for name in used:
        if name not in names:
            raise unknown(field, name, [*names, *_FUNCTIONS])
    try:
        return eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(names))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(field, text, f"cannot be computed ({error})", "correct it") from None


@lru_cache(maxsize=1024)
def _compiled(text: str, field: str) -> tuple[CodeType, tuple[str, ...]]:
    """Compile an expression of the allowed kinds; return it with the names that it uses."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ConfigError(field, text, f"is no expression ({error.msg})", "write e.g. tp * pp <= world") from None
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (node in called and getattr(node, "id", "") not in _FUNCTIONS):
            what = repr(ast.unparse(node)) if ast.unparse(node) else f"the operator {type(node).__name__}"
            remedy = f"use + - * / // %, comparisons, and, or, not, if-else, {', '.join(_FUNCTIONS)}"
            raise ConfigError(field, text, f"has {what}, which is not allowed in an expression", remedy)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in called}
    return compile(tree, field, "eval"), tuple(sorted(used))


def _names(file: SpaceFile, names: Names, kept: frozenset[str] = frozenset()) -> dict[str, Value]:
    """Return ``names`` with the derived ones but for ``kept``."""
    found = dict(names)
    for name, text in file.derived.items():
        if name not in kept:
            found[name] = evaluate(text, found, f"derived.{name}")
    return found


def _violated(rules: Iterable[Rule], names: Names) -> tuple[str, ...]:
    """Return the rules that ``names`` violate, in their order; raise ConfigError where one cannot be computed.

    Behind a violated rule it counts as violated instead: ``dp >= 1`` may guard what divides by ``dp``.
    """
    violated: list[str] = []
    for rule in rules:
        text = rule if isinstance(rule, str) else getattr(rule, "__name__", "a function")
        try:
            holds = evaluate(rule, names, "require") if isinstance(rule, str) else rule(names)
        except Exception as error:
            if not violated and isinstance(error, ConfigError):
                raise
            if not violated:
                raise ConfigError("require", text, f"fails: {error!r}", "correct that function") from error
            holds = False
        if not holds:
            violated.append(text)
    return tuple(violated)


def _read_flags(words: Sequence[str], file: SpaceFile) -> tuple[list[str], dict[str, Value]]:
    """Return the values of flags among ``words``, and the words, with names for the values that smaller runs change."""
    found: dict[str, Value] = {}
    replaced = [*words]
    for name, spellings in file.flags.items():
        place = name in file.short
        for index, word in enumerate(replaced):
            for flag in [spellings] if isinstance(spellings, str) else spellings:
                if word == flag and index + 1 < len(replaced) and not _PLACE.search(replaced[index + 1]):
                    found[name] = _value(replaced[index + 1])
                    replaced[index + 1] = f"{{{name}}}" if place else replaced[index + 1]
                elif word.startswith(f"{flag}=") and not _PLACE.search(word):
                    found[name] = _value(word.removeprefix(f"{flag}="))
                    replaced[index] = f"{flag}={{{name}}}" if place else word
    return replaced, found


def _check_used(file: SpaceFile, axes: Mapping[str, tuple[Value, ...]], words: Sequence[str]) -> None:
    """Raise ConfigError for a placeholder without a value, and for a value without a use."""
    places = {name for word in words for name in _PLACE.findall(word)}
    known = {*axes, *file.derived, *file.flags, *_GIVEN}
    for name in sorted(places - known):
        raise unknown("script", f"{{{name}}}", known)
    texts = {f"derived.{name}": text for name, text in file.derived.items()}
    texts |= {f"short.{name}": text for name, text in file.short.items()}
    used = places | {name for field, text in texts.items() for name in _compiled(text, field)[1]}
    for name, values in axes.items():
        if name not in used and len(values) > 1:
            remedy = f"write {{{name}}} among the script's arguments, or leave it out of the space"
            raise ConfigError(f"values.{name}", list(values), "is used nowhere in the command line", remedy)


def _argv(words: Sequence[str], names: Names) -> tuple[str, ...]:
    """Return the command line: a word that is a placeholder alone may become several words, as in a shell, or none."""

    def written() -> Iterator[str]:
        for word in words:
            match = _PLACE.fullmatch(word)
            if match and match[1] != "recipe":
                yield from _words(match[1], value_text(names[match[1]]))
            else:
                yield _PLACE.sub(lambda found: value_text(names[found[1]]), word)

    if any(word.find("{recipe}") >= 0 for word in words):
        names = {
            **names,
            "recipe": "-".join(value_text(names[n]).replace("/", "_") for n in sorted(names) if n != "recipe"),
        }
    return tuple(written())


def _words(name: str, text: str) -> list[str]:
    """Return a value as words. Raises ConfigError where it has a quotation that does not end."""
    if not text or not any(map(str.isspace, text)):
        return [text] if text else []
    try:
        return shlex.split(text)
    except ValueError as error:
        problem = f"is no text of several words ({error})"
        raise ConfigError(f"values.{name}", text, problem, "quote as in a shell") from None


def _recipe_values(text: str) -> Names:
    """Return the values that ``"tp=8,pp=2"`` names, as texts. Raises ConfigError."""
    found: dict[str, Value] = {}
    for part in text.split(","):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator:
            remedy = "write e.g. tp=8,pp=2; in Python, a value with a comma in a dictionary"
            raise ConfigError("compare_with", part, "names no value", remedy)
        if re.search(r"\s\w+=", value):
            raise ConfigError("compare_with", part, "has a blank between two values", "write a comma: tp=8,pp=2")
        if name in found:
            raise ConfigError("compare_with", text, f"says {name} twice", "give it once")
        found[name] = value
    return found


def _fits(names: Names, wanted: Names) -> bool:
    """Return whether ``names`` have the ``wanted`` values."""
    return all(_is(names[name], value) for name, value in wanted.items())


def _is(value: Value, wanted: Value) -> bool:
    """Return whether ``wanted``, which may be a text as `Recipe.__str__` writes it, is ``value``."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value_text(value) == value_text(wanted).lower()
    meant = _value(wanted) if isinstance(wanted, str) else wanted
    return wanted == value or meant == value or (value == "" and wanted == "none")


def value_text(value: Value) -> str:
    """Return a value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _given_value(value: Value) -> Value:
    """Return a value that the space does not list: of a text what it says."""
    if not isinstance(value, str):
        return value
    return {"none": "", "true": True, "false": False}.get(value.lower(), _value(value))


def _value(text: str) -> Value:
    """Return a number where ``text`` is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _plain(value: Any) -> Any:
    """Return NumPy's numbers and arrays as Python's."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def listed(value: Any) -> tuple[Value, ...]:
    """Return the values of a name, which may be one or several, each once."""
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple | range) else (value,)


def _of(recipe: Recipe, name: str) -> Value:
    if name not in recipe.names:
        raise ConfigError(f"short.{name}", name, "has no value", "give it one in values, derived or flags")
    return recipe.names[name]


def _is_shortened(low: int, full: Value) -> bool:
    """Return whether a run of size ``low``, and one of twice that, are smaller than the whole one."""
    return isinstance(full, int) and full > 2 * low > 0


def _whole(name: str, value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"short.{name}", value, "is no whole number", "write e.g. dp * micro_batch * pp")
    return value
