"""``foretrain tolerance script.py:function``: how much loss a model of yours tolerates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from foretrain.cli.arguments import check_writable
from foretrain.cli.script import loaded
from foretrain.errors import ConfigError, MissingExtra
from foretrain.torch_version import require_torch

if TYPE_CHECKING:
    from foretrain.loss_tolerance.tolerance import Profile

_WAYS = {"ps": "parameter_server", "ring": "ring", "halving-doubling": "halving_doubling"}


def tolerance(
    target: Annotated[str, tyro.conf.arg(metavar="SCRIPT.py:FUNCTION")],
    /,
    *,
    grid: tuple[str, ...] = ("0", "0.5%", "1%", "2%", "3.5%", "5%", "10%", "20%", "40%"),
    seeds: int = 5,
    rounds: int = 300,
    workers: int = 4,
    exchange: Literal["ps", "ring", "halving-doubling"] = "ps",
    back: Literal["lossy", "reliable"] = "lossy",
    gap: Literal["zero", "held"] = "zero",
    losses: Literal["packet", "layer", "magnitude"] = "packet",
    margin: float = 0.01,
    more: float = 2.0,
    evaluations: int = 20,
    payload: int = 1460,
    html: Path | None = None,
    json: Path | None = None,
) -> None:
    """Find how much loss a model tolerates, by training it with losses.

    FUNCTION takes a seed and returns an object or a dict with model, optimizer, batches, loss(model, batch) and
    evaluate(model), of which more is better. It is trained at every p of the grid, in data-parallel workers of this
    process whose gradients are lost packet by packet, and held against the trainings without losses.

    Args:
        target: a script and the function in it to call, e.g. train.py:build.
        grid: shares of bytes that each hop loses, rising from 0.
        seeds: trainings at each p.
        rounds: of a training, one batch each.
        workers: that train together; a batch is split among them.
        exchange: how gradients are exchanged.
        back: whether sums or parameters may be lost on their way back too.
        gap: what a rank of an all-reduce takes for a sum that it did not get: zero, or the partial sum it holds.
        losses: which packets are lost first: any, those of front layers, those of small magnitude.
        margin: the difference in accuracy that does not matter.
        more: how many times the rounds a training may take to become as accurate.
        evaluations: within the rounds.
        payload: bytes of a packet.
        html: write an interactive page.
        json: write the numbers.
    """
    from rich.console import Console

    check_writable(html=html, json=json)
    if html and not (find_spec("plotly") and find_spec("jinja2")):
        raise MissingExtra("plotly", "report", "an HTML page")
    require_torch("a tolerance profile")
    from foretrain.loss_tolerance.replicas import LossyExchange
    from foretrain.loss_tolerance.tagging import Tagging
    from foretrain.loss_tolerance.tolerance import ToleranceSettings, profile
    from foretrain.report.tolerance import summary

    way = LossyExchange(cast(Any, _WAYS[exchange]), workers, back, gap, Tagging(losses), payload)
    shares = tuple(_share(text, f"grid[{index}]") for index, text in enumerate(grid))
    settings = ToleranceSettings(way, shares, seeds, rounds, evaluations, more, margin)
    with loaded(target) as function:
        name = target.rpartition(":")[2]
        with _bar(name) as progress:
            found = profile(function, settings, name=name, progress=progress)
    console = Console(highlight=False)
    console.print(summary(found))
    for path in _write(found, html, json):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _share(text: str, field: str) -> float:
    """0.035 for ``"3.5%"`` and for ``"0.035"``."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    if match is None:
        raise ConfigError(field, text, "is no share", "write e.g. '3.5%'")
    return float(match[1]) / (100 if match[2] else 1)


def _write(found: Profile, html: Path | None, json: Path | None) -> Iterator[Path]:
    import msgspec

    from foretrain.files import write_atomically
    from foretrain.report.tolerance import page

    if html:
        page(found, html)
        yield html
    if json:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=2))
        yield json


@contextmanager
def _bar(title: str) -> Iterator[Callable[[str, float, float], None]]:
    """A bar in rounds with an ETA on stderr, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda what, done, total: bar.update(task, description=f"{title}: {what}", completed=done, total=total)
