"""Recipes that a search has found: a table for a terminal, a page, the numbers for JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from foretrain.files import stdout_console, write_atomically
from foretrain.live.imbalance import COUNT, drawn_loads
from foretrain.recipe_search import SearchResult
from foretrain.recipe_search.comparison import Ratio, bound_by, front, interval, ratio, sigma, why_slower
from foretrain.recipe_search.evaluation import Account, RunResult
from foretrain.recipe_search.expert_curve import ExpertCurve
from foretrain.recipe_search.strategy import RecipeState
from foretrain.report.document import BLUE, GREY, LINE, ORANGE, Card, Figure, document
from foretrain.report.findings import imbalance_numbers
from foretrain.report.simulation_page import add_draws
from foretrain.units import SECOND, format_time

ROWS = 12
"""Recipes that the terminal shows, the user's own aside."""
_ON_PAGE = ("on fronts",)
"""Columns that only the page has; so is energy, unless it is the goal."""
_WIDE, _IF_WIDE = 120, ("95 %", "tokens/s/GPU", "MFU", "bound by")
"""Columns that a terminal has from this width on."""
_FIRST_TO_GO = ("loses by", "GiB")
"""Columns that a terminal may be too narrow for even so, the first first."""
_NO_LIMIT = 1000
"""Columns of a terminal in which each table has room."""
_RECIPE = 16
"""Least width of the column of recipes."""
_BARS = 20
"""Recipes whose steps the page draws."""
_MOST = 400
"""Recipes with a forecast, and as many of those that are out, that the page lists: thousands would make it large."""
_PARTS = {"compute": ("computation", BLUE), "exposed": ("exposed communication", ORANGE),
          "waiting": ("waiting for other ranks", GREY), "idle": ("waiting for the host", LINE)}  # fmt: skip
"""Of each account of a step its name and colour."""
_GOALS = {"step": "time", "goodput": "time with failures", "cost": "price", "energy": "energy"}
"""Quantity that each goal minimises."""
_COLUMN_OF_RATIO = {"step": "time", "goodput": "time/goodput", "cost": "price", "energy": "energy"}
"""Quantity that is minimised, in the title of a column."""
_OUT = {"beaten": "beaten for sure", "memory": "out of memory", "invalid": "refused by the script", "open": "not tried"}


def show(result: SearchResult) -> None:
    """Print the ranking, why the others are out, the winner's command line, and what the winner costs."""
    console, found = stdout_console(), result.found
    console.print(_ranking(result, console))
    if more := len(listed(result)) - len(_first(result, ROWS)):
        console.print(f"… and {_counted(more, 'recipe')} more (--html)")
    for line in search_lines(result):
        console.print(line, markup=False, soft_wrap=True)
    for warning in warnings(result):
        console.print(f"[yellow]warning[/]: {escape(warning)}")
    row = cells(result, found.winner, ())
    console.print(f"\n[bold]winner[/] {escape(str(result.best))}: {row['step']} a step (95 %: {row['95 %']})")
    console.print(shlex.join(result.command), markup=False, soft_wrap=True)
    for line in cost_lines(result):
        console.print(line, markup=False, soft_wrap=True)


def summary_lines(result: SearchResult) -> Iterator[str]:
    """Yield sentences: those of the search, and what the winner costs."""
    yield from search_lines(result)
    yield from cost_lines(result)


def search_lines(result: SearchResult) -> Iterator[str]:
    """Yield sentences: what was searched, which recipes cannot be told apart, why others are out."""
    found = result.found
    counts = Counter(candidate.status for candidate in found.candidates)
    extended = counts["estimated"]
    parts = [f"{counts['whole']} simulated whole", f"{extended} extended from smaller runs (within {found.error:.1%})"]
    parts += [f"{counts[status]} {words}" for status, words in _OUT.items() if counts[status]]
    unlisted = sum(one.recipe.number >= len(found.space.recipes) for one in found.candidates)
    recipes, yours = _counted(len(found.candidates) - unlisted, "recipe"), " and yours" if unlisted else ""
    yield (
        f"{recipes} of {_counted(found.space.points, 'point')}{yours} on {where(result)}, "
        f"for the least {_GOALS[result.goal]}: "
        f"{', '.join(part for part in parts if not part.startswith('0 '))}; {_counted(found.runs, 'simulation')}"
    )
    if not found.finished:
        yield "the budget was over before all was simulated: a better recipe may be among those not simulated whole"
    tied = indistinguishable(result)
    if tied:
        more = f"; and {len(tied) - ROWS:,} more" if len(tied) > ROWS else ""
        yield f"cannot be told from the winner: {'; '.join(str(candidate.recipe) for candidate in tied[:ROWS])}{more}"
    for status in ("memory", "invalid"):
        out = [candidate for candidate in found.candidates if candidate.status == status]
        for reason, count in Counter(candidate.reason for candidate in out).most_common(2):
            yield f"{_OUT[status]}, {_counted(count, 'recipe')}: {reason}"
    own = result.compared
    if own is not None:
        if own.account is None or own.status in ("memory", "invalid"):
            why = f": {own.reason}" if own.reason else ""
            yield f"yours, {own.recipe}: {_OUT.get(own.status, own.status)}{why}"
        else:
            why = _loses_by(result, own) or ("as good" if own in tied else "")
            ratio_text = f"{objective_ratio(result, own)} times the winner's {_GOALS[result.goal]}"
            told = "is the winner" if own is found.winner else f"{ratio_text}{f' ({why})' if why else ''}"
            yield f"yours, {own.recipe}: {told}"


def where(result: SearchResult) -> str:
    """Return the cluster as it was given, and what else was given of it that forecasts depend on."""
    device = [] if result.device is None else [f"device {result.device}"]
    faults = [f"fault {fault}" for fault in result.faults]
    factor = [] if result.factor in ("1", "1.0") else [f"factor {result.factor}"]
    experts = [] if result.experts == "balanced" else [f"experts {result.experts}"]
    return ", ".join([result.cluster, *device, *faults, *factor, *experts])


def _counted(count: int, noun: str) -> str:
    """Return how many there are: ``"1 recipe"``, ``"1,024 recipes"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def warnings(result: SearchResult) -> Iterator[str]:
    """Yield what the user should know: of the search, and of curves that the budget cut short."""
    yield from result.found.warnings
    outcomes = [outcome for one in result.found.candidates for outcome in (one.outcome, *one.pieces.values())]
    done = [one for one in outcomes if one is not None and one.account is not None]
    if result.experts != "balanced" and all(one.busiest_expert is None for one in done):
        yield "the loads of --experts changed nothing: no counted choices of a router's topk or argmax were seen"
    made, wanted = sum(len(one.points) for one in result.curves), COUNT * len(result.curves)
    if made < wanted:
        yield f"the budget left {made} of {wanted} simulations of the curves of experts' loads"


def cost_lines(result: SearchResult) -> Iterator[str]:
    """Yield sentences: what the winner takes of money and energy, with failures and uneven loads of experts."""
    winner = result.found.winner
    if result.bill is not None:
        yield from result.bill.lines(account_of(winner), winner.recipe.tokens)
    for curve in result.curves:
        if sentence := _imbalance_cost(curve):
            yield sentence


def _imbalance_cost(curve: ExpertCurve) -> str:
    """Return what uneven loads of experts add to a recipe's step; empty where too little was simulated."""
    times: dict[float, list[float]] = {}
    for point in curve.points:
        if point.time is not None:
            times.setdefault(point.sigma, []).append(point.time)
    if 0.0 not in times or len(times) < 2:
        return ""
    balanced = times.pop(0.0)[0]
    costs = [f"{fmean(drawn) / balanced - 1:+.1%} with lognormal({sigma})" for sigma, drawn in times.items()]
    return f"uneven loads of experts, {curve.recipe}: {', '.join(costs)}, over balanced ones, in the mean of draws"


def indistinguishable(result: SearchResult) -> list[RecipeState]:
    """Return the recipes that cannot be told from the winner, the best first.

    Extended forecasts have their error, too.
    """
    winner, found = result.found.winner, []
    for candidate in listed(result):
        if candidate is winner:
            continue
        one = objective_ratio(result, candidate)
        extended = result.found.error * one.value if candidate.status == "estimated" else 0.0
        if one.value <= 1 or Ratio(one.value, one.error + extended).open:
            found.append(candidate)
    return found


def objective_ratio(result: SearchResult, mine: RecipeState) -> Ratio:
    """Return what was minimised of a recipe over that of the winner: as uncertain as the ratio of their times."""
    winner = result.found.winner
    times = ratio(account_of(mine), account_of(winner), outcome_of(winner).stack_range)
    objective = result.found.objective
    value = objective(account_of(mine), mine.recipe) / objective(account_of(winner), winner.recipe)
    return Ratio(value, times.error / times.value * value)


def outcome_of(candidate: RecipeState) -> RunResult:
    """Return the outcome of a simulated recipe's whole run, or of a smaller one."""
    return candidate.outcome or next(iter(candidate.pieces.values()))


def _loses_by(result: SearchResult, loser: RecipeState) -> str:
    """Return what a recipe takes longer by than the winner, for the same tokens where these are known."""
    winner = result.found.winner
    scale = (winner.recipe.tokens or 1.0) / (loser.recipe.tokens or 1.0)
    return why_slower(account_of(loser), account_of(winner), scale)


def account_of(candidate: RecipeState) -> Account:
    """Return the account of a candidate that has one."""
    assert candidate.account is not None
    return candidate.account


def listed(result: SearchResult) -> list[RecipeState]:
    """Return the recipes with an account, the best first: whole ones, and extended ones among them."""
    known = [one for one in result.found.candidates if one.account and one.status in ("whole", "estimated")]
    return sorted(known, key=lambda one: result.found.objective(account_of(one), one.recipe))


@dataclass(frozen=True, slots=True)
class RecipeFront:
    """Recipes that no other beats in both time for the same tokens and one other quantity.

    Attributes:
        name: of the other quantity.
        title: of its axis, with the unit.
        values: of `listed` recipes, in their order.
        members: indexes of those on the front, the fastest first.
    """

    name: str
    title: str
    values: tuple[float, ...]
    members: tuple[int, ...]


def pareto_fronts(result: SearchResult) -> list[RecipeFront]:
    """Return the fronts of time and memory, and of time and price, energy and goodput where these are known.

    Price has one only with failures: without, it is proportional to time.
    """
    shown, bill = listed(result), result.bill
    accounts = [account_of(one) for one in shown]
    scales, times, unit = _per_tokens(shown)
    values = {"memory": ("memory of a GPU at its peak (GiB)", [one.reserved / 2**30 for one in accounts])}
    if bill is not None and bill.price is not None and bill.failures is not None:  # else as time
        money = [(bill.money(one) or 0.0) * scale for one, scale in zip(accounts, scales, strict=True)]
        values["price"] = f"{bill.currency or 'price'} for {unit}", money
    if bill is not None and bill.watts is not None:
        energy = [(bill.joules(one) or 0.0) / 3.6e6 * scale for one, scale in zip(accounts, scales, strict=True)]
        values["energy"] = f"kWh for {unit}", energy
    if bill is not None and bill.failures is not None:
        values["goodput"] = "goodput (%)", [100 * bill.useful(one) for one in accounts]
    fronts = []
    for name, (title, numbers_) in values.items():
        sign = -1 if name == "goodput" else 1  # of goodput more is better
        members = front([(time, sign * value) for time, value in zip(times, numbers_, strict=True)])
        fronts.append(RecipeFront(name, title, tuple(numbers_), tuple(members)))
    return fronts


def fronts_by_recipe(result: SearchResult) -> dict[int, list[str]]:
    """Return the names of the fronts that a recipe is on, by the recipe's number."""
    shown = listed(result)
    names: dict[int, list[str]] = {one.recipe.number: [] for one in shown}
    for each in pareto_fronts(result):
        for index in each.members:
            names[shown[index].recipe.number].append(each.name)
    return names


def ratio_column(result: SearchResult) -> str:
    """Return the title of the column that compares what was minimised with the winner's."""
    return f"{_COLUMN_OF_RATIO[result.goal]} × winner"


def energy_column(tokens: float | None) -> str:
    """Return the title of the column of energy: of a million tokens, or of a step where its tokens are not known."""
    return f"kWh/{'Mtoken' if tokens else 'step'}"


def cells(result: SearchResult, candidate: RecipeState, fronts: Sequence[str] = ()) -> dict[str, str]:
    """Return a recipe's row, by the column's name; ``fronts`` are the names of those that it is on."""
    account, winner = account_of(candidate), result.found.winner
    outcome = outcome_of(candidate)
    low, high = interval(account, outcome.stack_range)
    row = {
        "recipe": str(candidate.recipe),
        "step": format_time(account.time * SECOND),
        "95 %": f"{format_time(low * SECOND)} to {format_time(high * SECOND)}",
        ratio_column(result): "1" if candidate is winner else str(objective_ratio(result, candidate)),
    }
    if candidate.recipe.tokens:
        row["tokens/s/GPU"] = f"{candidate.recipe.tokens / account.time / result.world:,.0f}"
    row["MFU"] = f"{account.flops / account.time / outcome.peak:.1%}" if outcome.peak else ""
    row["GiB"] = f"{account.reserved / 2**30:.1f}"
    if result.bill is not None and result.bill.failures is not None:
        row["goodput"] = f"{result.bill.useful(account):.1%}"
    if result.bill is not None:
        tokens = candidate.recipe.tokens
        many, what = (1e6 / tokens, "Mtoken") if tokens else (1.0, "step")
        if (money := result.bill.money(account)) is not None:
            row[f"{result.bill.currency or 'price'}/{what}"] = f"{money * many:.3g}"
        if (joules := result.bill.joules(account)) is not None:
            row[energy_column(tokens)] = f"{joules * many / 3.6e6:.3g}"
    row["bound by"] = bound_by(account)
    row["loses by"] = "" if candidate is winner else _loses_by(result, candidate)
    row["on fronts"] = ", ".join(fronts)
    notes = ["yours"] if _is_yours(result, candidate) else []
    notes += ["extended"] if candidate.status != "whole" else []
    row[""] = ", ".join(notes)
    return row


def _is_yours(result: SearchResult, candidate: RecipeState) -> bool:
    """Return whether a candidate is the user's own recipe."""
    return result.compared is not None and candidate.recipe.number == result.compared.recipe.number


def _first(result: SearchResult, most: int) -> list[RecipeState]:
    """Return the ``most`` best recipes, and the user's own where that is known."""
    every = listed(result)
    return [*every[:most], *(one for one in every[most:] if _is_yours(result, one))]


def _ranking(result: SearchResult, console: Console) -> Table:
    """Return the table for a terminal; what does not fit is on the page."""
    left_out = _ON_PAGE if console.width >= _WIDE else (*_ON_PAGE, *_IF_WIDE)
    if result.goal != "energy":
        left_out = (*left_out, energy_column(result.found.winner.recipe.tokens))
    rows = [cells(result, candidate) for candidate in _first(result, ROWS)]
    gone, room = 0, console.options.update(width=_NO_LIMIT)
    while True:
        table = _table(rows, {*left_out, *_FIRST_TO_GO[:gone]}, console.width)
        least = Measurement.get(console, room, table).minimum
        if least <= console.width or gone == len(_FIRST_TO_GO):  # else rich would cut letters
            return table
        gone += 1


def _table(every: Sequence[dict[str, str]], left_out: Set[str], width: int) -> Table:
    """Return rows without the columns that are left out."""
    rows = [{name: cell for name, cell in row.items() if name not in left_out} for row in every]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in rows[0]:
        left = name in ("recipe", "bound by", "loses by", "")
        least = min(_RECIPE, max(len(row["recipe"]) for row in rows)) if name == "recipe" else None
        title = name if width >= _WIDE else name.replace(" × ", "\n× ")  # on two lines, where room is scarce
        table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=not left, min_width=least)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row.values()))
    return table


def numbers(result: SearchResult) -> dict[str, Any]:
    """Return the document of ``--json``."""
    found = result.found
    tied = {candidate.recipe.number for candidate in indistinguishable(result)}
    fronts = fronts_by_recipe(result)
    recipes = []
    for one in sorted(found.candidates, key=lambda one: one.recipe.number):
        row: dict[str, Any] = {"values": one.recipe.values, "status": one.status, "reason": one.reason}
        row |= {"yours": _is_yours(result, one), "command": list(result.command_of(one.recipe))}
        if one.account is not None:
            compared, outcome = objective_ratio(result, one), outcome_of(one)
            row |= {"seconds": one.account.time, "sigma": sigma(one.account), "memory": one.account.reserved}
            row["interval"] = interval(one.account, outcome.stack_range)
            row |= {"flops_per_gpu": one.account.flops / one.account.time, "tokens": one.recipe.tokens}
            row |= {"ratio": compared.value, "ratio_error": compared.error}
            row["indistinguishable"] = one.recipe.number in tied
            row |= {name: getattr(one.account, name) for name in ("compute", "exposed", "waiting", "idle")}
            if outcome.peak:
                row["mfu"] = row["flops_per_gpu"] / outcome.peak
            if result.bill is not None:
                row |= {"money": result.bill.money(one.account), "joules": result.bill.joules(one.account)}
                row["goodput"] = result.bill.useful(one.account)
            row["fronts"] = fronts.get(one.recipe.number, [])
        recipes.append(row)
    return {
        "cluster": result.cluster,
        "device": result.device,
        "faults": list(result.faults),
        "factor": result.factor,
        "goal": result.goal,
        "currency": result.bill.currency if result.bill is not None else "",
        "price_per_gpu_hour": None if result.bill is None else result.bill.price,
        "price_from": "" if result.bill is None or result.bill.price is None else result.bill.priced,
        "world": result.world,
        "winner": dict(result.best.values),
        "command": list(result.command),
        "points": found.space.points,
        "excluded": dict(found.space.excluded),
        "simulations": found.runs,
        "cpu_seconds": found.cpu,
        "extension_error": found.error,
        "finished": found.finished,
        "warnings": list(warnings(result)),
        "experts": result.experts,
        "experts_curves": [
            {"values": one.recipe.values, "points": [imbalance_numbers(point) for point in one.points]}
            for one in result.curves
        ],
        "failures": None if result.bill is None else result.bill.failure_numbers(account_of(found.winner)),
        "recipes": recipes,
    }


def page(result: SearchResult, path: Path, command: str = "") -> None:
    """Write the page of a search to ``path``; ``command`` is shown to copy. MissingExtra without Jinja2."""
    winner, fronts = cells(result, result.found.winner), fronts_by_recipe(result)
    shown = _first(result, _MOST)
    rows = [cells(result, one, fronts[one.recipe.number]) for one in shown]
    out = [one for one in result.found.candidates if one.status in _OUT]
    others = len(indistinguishable(result))
    by = "" if result.goal == "step" else f" by {_GOALS[result.goal]}"
    lines = (*summary_lines(result), *(f"warning: {warning}" for warning in warnings(result)))
    first, *more = (_sentence(line) for line in lines)
    cards = [
        Card("Step", winner["step"], f"95 %: {winner['95 %']}; {result.best}"),
        Card("Bound by", winner["bound by"], "where the step's time goes"),
        Card("Memory", f"{winner['GiB']} GiB", "of each GPU at its peak"),
        Card("Not told apart", f"{others}", "other recipes that cannot be told from the winner"),
        Card("Simulations", f"{result.found.runs:,}", f"for {_counted(len(result.found.candidates), 'recipe')}"),
    ]
    figures = {"steps": _steps(result), "fronts": _fronts(result)}
    if (loads := _imbalance(result)) is not None:
        figures["imbalance"] = loads
    text = document(
        "recipes.html",
        figures,
        title=f"{Path(result.best.argv[0]).name} on {where(result)}",
        ratio=ratio_column(result),
        good=True,
        verdict=f"{result.best} is the best recipe{by}{', but not for sure' * (others > 0)}: {winner['step']} a step "
        f"(95 %: {winner['95 %']})",
        reasons=first,
        more=more,
        cards=cards,
        columns=list(rows[0]),
        rows=rows,
        rows_left=len(listed(result)) - len(shown),
        yours=[_is_yours(result, one) for one in shown],
        experts=result.experts,
        failures=[
            f"{one.recipe}, {drawn_loads(point.sigma, point.seed)}: {point.failure}"
            for one in result.curves
            for point in one.points
            if point.failure
        ],
        out=[(str(one.recipe), ": ".join(filter(None, (_OUT[one.status], one.reason)))) for one in out[:_MOST]],
        out_left=max(len(out) - _MOST, 0),
        winner=shlex.join(result.command),
        command=command,
    )
    write_atomically(path, text)


def _sentence(line: str) -> str:
    """Return a line of the terminal as a sentence of the page."""
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith(('.', '?', '!')) else '.'}"


def _steps(result: SearchResult) -> Figure:
    shown = listed(result)[:_BARS]
    scales, _, unit = _per_tokens(shown)
    figure = Figure(30 * len(shown) + 120, barmode="stack")
    for key, (name, color) in _PARTS.items():
        accounts = [account_of(one) for one in shown]
        figure.add_bar(
            x=[getattr(one, key) * scale for one, scale in zip(accounts, scales, strict=True)],
            y=[str(one.recipe) for one in shown],
            name=name,
            marker={"color": color},
            customdata=[f"{getattr(one, key) / one.time:.1%} of the step" for one in accounts],
            hovertemplate="<b>%{y}</b><br>" + name + ": %{customdata}",
        )
    figure.update_xaxes(title=f"seconds for {unit}")
    figure.update_yaxes(autorange="reversed")
    return figure


def _per_tokens(shown: Sequence[RecipeState]) -> tuple[list[float], list[float], str]:
    """Return factors that make steps comparable, times with them in s, and their unit.

    They are for a million tokens where the space says how many a step has, and for a step otherwise.
    """
    known = all(one.recipe.tokens for one in shown)
    scales = [1e6 / (one.recipe.tokens or 1.0) if known else 1.0 for one in shown]
    times = [account_of(one).time * scale for one, scale in zip(shown, scales, strict=True)]
    return scales, times, "a million tokens" if known else "a step"


def _fronts(result: SearchResult) -> Figure:
    """Draw a panel for each front, with recipes as points: the best ones, and all that are on it."""
    shown, fronts = listed(result), pareto_fronts(result)
    _, times, unit = _per_tokens(shown)
    names = [str(one.recipe) for one in shown]
    columns = min(len(fronts), 2)
    rows = -(-len(fronts) // columns)
    figure = Figure(380 * rows, rows=rows, columns=columns)
    for panel, one in enumerate(fronts, 1):
        for name, mode, color, chosen in (
            ("all" if len(shown) <= _MOST else f"the best {_MOST}", "markers", BLUE, range(min(len(shown), _MOST))),
            ("what no other beats in both", "lines+markers", ORANGE, one.members),
        ):
            figure.add_scatter(
                panel=panel,
                x=[one.values[index] for index in chosen],
                y=[times[index] for index in chosen],
                name=name,
                legendgroup=name,
                showlegend=panel == 1,
                mode=mode,
                line={"color": color, "width": 2},
                marker={"color": color, "size": 7},
                customdata=[names[index] for index in chosen],
                hovertemplate=f"<b>%{{customdata}}</b><br>{one.title}: %{{x:.4g}}<br>%{{y:.4g}} s",
            )
        figure.update_xaxes(panel, title=one.title)
        figure.update_yaxes(panel, title=f"seconds for {unit}")
    return figure


def _imbalance(result: SearchResult) -> Figure | None:
    """Draw the curves of expert loads; None where there are none."""
    curves = [one for one in result.curves if any(point.time is not None for point in one.points)]
    if not curves:
        return None
    known = all(one.recipe.tokens for one in curves)  # recipes may differ in the tokens of a step
    figure = Figure(340, showlegend=True)
    for one, color in zip(curves, (BLUE, ORANGE), strict=False):
        scale = 1e6 / (one.recipe.tokens or 1.0) if known else 1.0
        add_draws(figure, one.points, str(one.recipe), f"{one.recipe}, one draw", color, scale)
    figure.update_xaxes(title="load of the busiest expert over the mean")
    return figure.update_yaxes(title="ms for a million tokens" if known else "ms a step", rangemode="tozero")
